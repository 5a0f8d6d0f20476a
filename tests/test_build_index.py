"""experiments/build_index.py: one command from a corpus and an encoder to indexes that answer."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import build_index
from stratified.retrieval import embeddings as shards
from stratified.retrieval import manifest as manifests
from stratified.retrieval import memory
from stratified.retrieval.dense import open_dense

pytest.importorskip("torch", reason="needs torch, which makes the small encoder")

from tests import small_encoders  # noqa: E402

ROOT = pathlib.Path(__file__).parents[1]
TEXTS = [
  f"the {word} of {other} {number}"
  for number, (word, other) in enumerate(
    (word, other) for word in small_encoders.WORDS for other in small_encoders.WORDS
  )
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """(folder, the arguments of its command): an E5 by name, a corpus of 676 passages, three
  indexes."""
  folder = tmp_path_factory.mktemp("made")
  small_encoders.save(folder / "tiny-e5")
  (folder / "corpus.jsonl").write_text(
    "".join(
      json.dumps({"id": str(row), "contents": f'"T{row}"\n{text}'}) + "\n"
      for row, text in enumerate(TEXTS)
    )
  )
  arguments = [
    f"--corpus={folder / 'corpus.jsonl'}",
    f"--encoder={folder / 'tiny-e5'}",
    f"--output={folder / 'out'}",
    "--index",
    "flat",
    "hnsw",
    "ivf_sq",
    "--shard-size=200",
    "--probes=4",
  ]
  build_index.main(arguments)
  return folder, arguments


def encoder_of(folder, **options):
  from stratified.encoder.text_encoder import Encoder

  return Encoder.load(folder / "tiny-e5", max_length=64, **options)


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf_sq"])
def test_a_passage_is_found_by_its_own_words(made, kind):
  from stratified.encoder.text_encoder import Encoder

  folder, _ = made
  built = manifests.read(folder / "out" / kind / "manifest.json")
  # The same words with a passage's prefix are the passage's own vector.
  encoder = Encoder.matching(built["encoder"])
  assert encoder.manifest == built["encoder"] and encoder.prefixes["query"] == "query: "
  retriever = open_dense(folder / "out" / kind, encoder, probes=18 if kind == "ivf_sq" else None)
  encoder.prefixes["query"] = "passage: "
  rows = [0, 100, 675]
  hits = retriever.search([f'"T{row}"\n{TEXTS[row]}' for row in rows], topk=1)
  assert [hit.id for (hit,) in hits] == [str(row) for row in rows]
  assert all(hit.score > 0.999 for (hit,) in hits)


def test_the_manifest_says_what_the_index_was_made_from(made):
  folder, _ = made
  manifest = manifests.read(folder / "out/ivf_sq/manifest.json")
  assert (
    manifest["count"] == 676
    and manifest["dimension"] == 32
    and manifest["metric"] == "inner_product"
  )
  assert (
    manifest["encoder"]["name"] == "tiny-e5"
    and manifest["encoder"]["prefixes"]["passage"] == "passage: "
  )
  assert (
    manifest["corpus"]["path"] == str(folder / "corpus.jsonl")
    and len(manifest["corpus"]["sha256"]) == 64
  )
  assert manifest["index"]["probes"] == 4 and manifest["index"]["kind"] == "ivf_sq"


def test_run_again_it_does_nothing(made, monkeypatch, capsys):
  _, arguments = made
  monkeypatch.setattr(shards, "_save_shard", None)
  monkeypatch.setattr("stratified.retrieval.indexes.make", None)
  build_index.main(arguments)
  assert "flat: " in capsys.readouterr().out


def test_killed_while_encoding_it_goes_on(made, tmp_path):
  folder, _ = made
  command = [
    sys.executable,
    "experiments/build_index.py",
    f"--corpus={folder / 'corpus.jsonl'}",
    f"--encoder={folder / 'tiny-e5'}",
    f"--output={tmp_path}",
    "--shard-size=1",
    "--index",
    "flat",
  ]
  running = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  deadline = time.monotonic() + 60
  while not (tmp_path / "embeddings/shard_00020.npy").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  running.send_signal(signal.SIGTERM)
  _, said = running.communicate(timeout=60)
  assert running.returncode == 1 and "stopped; the same command goes on from here" in said
  before = len(list((tmp_path / "embeddings").glob("shard_*.npy")))
  assert 20 < before < 676 and not (tmp_path / "flat").exists()
  build_index.main(command[2:])
  retriever = open_dense(tmp_path / "flat", encoder_of(folder))
  assert len(retriever.search(["king"], 800)[0]) == 676


def test_parts_are_encoded_apart_and_indexed_together(made, tmp_path, capsys):
  folder, arguments = made
  base = [*arguments[:2], f"--output={tmp_path}", "--shard-size=300", "--index", "flat"]
  build_index.main([*base, "--part=1/2"])
  assert "part 1/2 is encoded" in capsys.readouterr().out and not (tmp_path / "flat").exists()
  assert [path.name for path in (tmp_path / "embeddings").glob("shard_*")] == ["shard_00001.npy"]
  build_index.main([*base, "--part=0/2"])
  build_index.main(base)
  assert (tmp_path / "flat/manifest.json").exists()


def refused(capsys, *arguments) -> str:
  with pytest.raises(SystemExit) as stop:
    build_index.main([str(argument) for argument in arguments])
  capsys.readouterr()
  return str(stop.value.code)


def test_what_does_not_fit_is_refused_before_any_passage_is_encoded(
  made, tmp_path, capsys, monkeypatch
):
  folder, arguments = made
  to_here = [*arguments[:2], f"--output={tmp_path / 'out'}"]
  monkeypatch.setattr(memory, "free_bytes", lambda: 1_000)
  assert "building a flat index of 676 vectors of 32 takes" in refused(capsys, *to_here)
  monkeypatch.undo()
  monkeypatch.setattr(
    build_index.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_000})()
  )
  assert "name an --output on another disk" in refused(capsys, *to_here)
  monkeypatch.undo()
  assert "ivf_pq needs at least 9,984 vectors" in refused(capsys, *to_here, "--index", "ivf_pq")
  assert not (tmp_path / "out/embeddings").exists()


def test_another_encoder_or_corpus_in_the_same_folder_is_refused(made, capsys):
  folder, arguments = made
  assert "prefixes {'query': 'query: '" in refused(
    capsys, *arguments, "--query-prefix=", "--passage-prefix="
  )
  assert "max_length 66" in refused(capsys, *arguments, "--max-length=20")
  other = folder / "other.jsonl"
  other.write_text('{"id": "1", "contents": "text"}\n')
  assert "but the corpus here is" in refused(capsys, f"--corpus={other}", *arguments[1:])


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--output=x"], "--corpus, --encoder must be given"),
    (["--part=2/2"], "--part=2/2 must be i/n"),
    (["--part=x"], "--part=x must be i/n"),
    (["--shard-size=0"], "--shard-size=0 must be at least 1"),
    (["--links=1"], "links=1 must be at least 2"),
    (["--query-prefix=a"], "must be given together"),
    (["--corpus=/nowhere.jsonl"], "the corpus /nowhere.jsonl does not exist"),
    (["--encoder=/nowhere"], "/nowhere/config.json does not exist"),
  ],
)
def test_arguments_that_make_no_sense_are_refused(made, tmp_path, capsys, arguments, message):
  base = made[1][:2] + [f"--output={tmp_path}"] if arguments != ["--output=x"] else []
  assert message in refused(capsys, *base, *arguments)


def test_the_prediction_names_every_kind(capsys):
  build_index.main(["--predict", "--count=21015324", "--dimension=768"])
  table = capsys.readouterr().out
  assert "flat, float32        64.6 GB" in table and all(kind in table for kind in memory.KINDS)
