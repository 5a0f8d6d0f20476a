"""Damaged files: a reader gives what is whole, or says in one sentence which file it is."""

from collections.abc import Callable
import json
import pathlib
import random
import tempfile

from experiments.benchmarks.attacks.count import Count
from stratified.data import formats, readers, tokenizer
from stratified.policy import families
from stratified.reports import run_page
from stratified.retrieval.corpus import read_corpus
from stratified.runs import settings, workdir, writer

MODEL = {
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "vocab_size": 97,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 10,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e4,
  "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
  "max_position_embeddings": 256,
  "tie_word_embeddings": True,
}
ODD = (None, "", "x", -1, 0, 1.5, float("nan"), float("inf"), 10**9, 10**400, [], {}, True, [None])


def attack(count: int, seed: int = 0) -> Count:
  """Damages a file of each kind in turn: cut short, bits flipped, noise put in, odd values."""
  chance, found = random.Random(seed), Count()
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    whole = _files(folder)
    for number in range(count):
      name, read = list(READERS.items())[number % len(READERS)]
      path = folder / name
      path.write_bytes(_damaged(whole[name], chance))
      found.add(_problem(path, read))
      path.write_bytes(whole[name])
  return found


def _problem(path: pathlib.Path, read: Callable) -> str | None:
  try:
    read(path)
  except (ValueError, OSError) as error:
    text = str(error)
    if path.name not in text and f"{path.parent}" not in text:
      return f"{path.name} is not named: {text[:200]}"
    return None if len(text.splitlines()) == 1 else f"{path.name}: several lines: {text[:200]}"
  except Exception as error:
    return f"{path.name}: {type(error).__name__} {error}"[:300]
  return None


def _damaged(data: bytes, chance: random.Random) -> bytes:
  way = chance.randrange(4)
  if way == 0:
    return data[: chance.randrange(len(data))]
  if way == 1:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 9)):
      changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)
  if way == 2:
    at = chance.randrange(len(data))
    noise = chance.choice([chance.randbytes(40), b"\x00" * 99, b"[" * 9999, b"9" * 5000, b"\n" * 9])
    return data[:at] + noise + data[at:]
  try:
    value = json.loads(data.splitlines()[0] if b"\n{" in data else data)
    value[chance.choice(sorted(value))] = chance.choice(ODD)
    return json.dumps(value).encode() + b"\n"
  except (ValueError, TypeError, AttributeError):
    return b""


def _files(folder: pathlib.Path) -> dict[str, bytes]:
  """A whole file for each of READERS: {name: content}."""
  rows = [{"step": n, "stage": "reinforcement", "reward/mean": 0.5} for n in range(1, 6)]
  questions = [
    {"id": f"q{n}", "question": "who?", "golden_answers": ["Ada"], "split": "dev"} for n in range(5)
  ]
  passages = [{"id": f"{n}", "contents": f'"Town {n}"\nA town.'} for n in range(5)]
  lines = lambda values: "".join(json.dumps(value) + "\n" for value in values).encode()
  made = {
    "config.json": settings.default_config().to_json().encode(),
    "metrics.jsonl": lines(rows),
    "evaluation.json": json.dumps({"step": 5, "sets": {"held_out": {"exact_match": 0.5}}}).encode(),
    "questions.jsonl": lines(questions),
    "nq.tsv": b"question\tanswer\nwho?\tAda\nwhere?\tOslo\n",
    "corpus.jsonl": lines(passages),
    "model/config.json": json.dumps(MODEL).encode(),
  }
  (folder / "model").mkdir()
  tokenizer.from_pieces([" a"]).save(folder / "model" / "tokenizer.json")
  made["model/tokenizer.json"] = (folder / "model" / "tokenizer.json").read_bytes()
  for name, content in made.items():
    (folder / name).write_bytes(content)
  return made


def _report(path: pathlib.Path) -> None:
  """The page of a workdir is lenient: whatever is broken, it is written."""
  run_page.write(path.parent)


READERS: dict[str, Callable[[pathlib.Path], object]] = {
  "config.json": lambda path: settings.read_workdir(path.parent),
  "metrics.jsonl": lambda path: writer._cut_back(path, {"train": 9, "warm_start": 9}),
  "evaluation.json": lambda path: (_report(path), workdir.evaluation_of(path.parent)),
  "questions.jsonl": readers.read_questions,
  "nq.tsv": lambda path: list(formats.read(path, name="nq", split="dev")),
  "corpus.jsonl": lambda path: list(read_corpus(path)),
  "model/config.json": lambda path: families.load_config(path.parent),
  "model/tokenizer.json": tokenizer.Tokenizer.from_file,
}
