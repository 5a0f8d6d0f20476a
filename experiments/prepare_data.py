"""Brings questions and Wikipedia into the form that training and evaluation read.

    python experiments/prepare_data.py --download=all --remove_duplicates
    python experiments/prepare_data.py --train=raw/NQ-open.train.jsonl --train=raw/hotpot_train_v1.1.json \\
        --test=raw/popQA.tsv --test=triviaqa=raw/unfiltered-web-dev.json --corpus=raw/psgs_w100.tsv.gz

Writes under --out (data/), as the presets `base` and `instruct` name them: nq_hotpotqa_train/SET.jsonl,
benchmarks/SET.jsonl, wiki18.jsonl, and manifest.json with counts, SHA-256, licences, sources and duplicates. Read are
FlashRAG's JSON Lines, verl's parquet, the sets' own files, and Wikipedia as JSON Lines or DPR's tsv; a folder stands for
all files in it. Questions that stand in training and in a benchmark are reported, and left out of training with
--remove_duplicates. Downloads are checked, and resumed by the same command.
"""

import json
import pathlib
import sys

from absl import app, flags

from stratified.data import download, duplicates, formats, prepare
from stratified.progress import Progress

_OUT = flags.DEFINE_string("out", "data", "The folder to write.")
_TRAIN = flags.DEFINE_multi_string("train", [], "A file or folder of training questions; SET=PATH names its set.")
_TEST = flags.DEFINE_multi_string("test", [], "Likewise of questions to evaluate on.")
_CORPUS = flags.DEFINE_string("corpus", None, "Passages: JSON Lines, or DPR's psgs_w100.tsv; plain or .gz.")
_DOWNLOAD = flags.DEFINE_list("download", [], "From the hub: all, train, test, corpus, or question sets by name.")
_ENDPOINT = flags.DEFINE_string("endpoint", "https://huggingface.co", "The hub, or a mirror of it.")
_REVISION = flags.DEFINE_string("revision", "main", "Branch or commit of the hub's repositories.")
_RAW = flags.DEFINE_string("raw", None, "Where downloads are kept; OUT/raw by default.")
_NAME = flags.DEFINE_string("train_name", "nq_hotpotqa_train", "The folder of the training mix.")
_MIX = flags.DEFINE_list("train_sets", ["nq", "hotpotqa"], "Sets of the training mix; others in --train are left out.")
_CORPUS_NAME = flags.DEFINE_string("corpus_name", "wiki18.jsonl", "The corpus file; .gz compresses it.")
_REMOVE = flags.DEFINE_bool("remove_duplicates", False, "Leave training questions out that stand in a benchmark.")

# Repository and files on the hub. The splits are those of the papers' tables: test, or dev where test has no answers.
FLASHRAG, WIKI = "RUC-NLPIR/FlashRAG_datasets", "PeterJinGo/wiki-18-corpus"
TRAIN_FILES = {"nq": "nq/train.jsonl", "hotpotqa": "hotpotqa/train.jsonl"}
TEST_FILES = {"nq": "nq/test.jsonl", "triviaqa": "triviaqa/test.jsonl", "popqa": "popqa/test.jsonl",
              "hotpotqa": "hotpotqa/dev.jsonl", "2wikimultihopqa": "2wikimultihopqa/dev.jsonl",
              "musique": "musique/dev.jsonl", "bamboogle": "bamboogle/test.jsonl"}
CORPUS_FILE = "wiki-18.jsonl.gz"


def main(_) -> None:
  try:
    prepared = prepare_all()
  except ConnectionError as error:
    sys.exit(f"{error}. Without a network, bring the files from a machine that has one and name them: "
             "--train=PATH --test=PATH --corpus=PATH; what has come so far is kept and gone on with")
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  print(prepared)


def prepare_all() -> str:
  """Reads, compares, writes; what a person wants to know of it."""
  train, test, corpus = _inputs()
  if not (train or test or corpus):
    raise ValueError("nothing to prepare: name files with --train, --test, --corpus, or --download=all")
  out = pathlib.Path(_OUT.value)
  training = {name: found for name, found in _questions(train, "train").items() if name in _MIX.value}
  if train and (missing := [name for name in _MIX.value if name not in training]):
    raise ValueError(f"--train holds no questions of {', '.join(missing)}; add their files, or name the sets that the "
                     "mix shall have with --train_sets")
  benchmarks = _questions(test, "test")
  manifest = _manifest(out)
  compared = {name: found["records"] for name, found in benchmarks.items()} or _written_benchmarks(out)
  report = duplicates.find({name: found["records"] for name, found in training.items()}, compared)
  for name, found in training.items():
    records = report.kept[name] if _REMOVE.value else found["records"]
    _write(manifest, out, f"{_NAME.value}/{name}.jsonl", name, found, records)
  for name, found in benchmarks.items():
    _write(manifest, out, f"benchmarks/{name}.jsonl", name, found, found["records"])
  if training or benchmarks:
    manifest["duplicates"] = {"across": report.across, "within": report.within, "between_training_sets": report.between,
                              "removed": report.removed if _REMOVE.value else {}}
  if corpus:
    _write_corpus(manifest, out, corpus)
  prepare.write_lines(out / "manifest.json", [json.dumps(manifest, indent=2)])
  return _told(manifest, report, out)


def _inputs():
  """(train, test) as (set or None, path) pairs and the corpus's path, given or downloaded."""
  train, test = _pairs(_TRAIN.value, "train"), _pairs(_TEST.value, "test")
  corpus = _CORPUS.value and pathlib.Path(_CORPUS.value)
  wanted = {"train", "test", "corpus"} if "all" in _DOWNLOAD.value else set(_DOWNLOAD.value)
  unknown = wanted - {"train", "test", "corpus"} - TEST_FILES.keys()
  if unknown:
    raise ValueError(f"--download names {', '.join(sorted(unknown))}; choose from all, train, test, corpus, "
                     f"{', '.join(TEST_FILES)}")
  if "train" in wanted:
    train += [(name, _fetch(FLASHRAG, path)) for name, path in TRAIN_FILES.items() if name in _MIX.value]
  test += [(name, _fetch(FLASHRAG, path)) for name, path in TEST_FILES.items() if {"test", name} & wanted]
  if "corpus" in wanted:
    corpus = _fetch(WIKI, CORPUS_FILE)
  return train, test, corpus


def _pairs(values, split: str) -> list[tuple[str | None, pathlib.Path]]:
  pairs = []
  for value in values:
    name, equals, path = value.partition("=")
    name, path = (name, pathlib.Path(path)) if equals and "/" not in name else (None, pathlib.Path(value))
    files = _files(path, split) if path.is_dir() else [path]
    if not files:
      raise FileNotFoundError(f"{path}: no file in it is named after a question set and holds {split} questions; "
                              "name one with SET=PATH")
    pairs += [(name, file) for file in files]
  return pairs


def _files(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
  """The files of a folder that are named after a set; of several splits of it the one that the tables report."""
  by_set = {}
  for path in sorted(folder.iterdir()):
    if path.is_file() and (source := formats.named(path)):
      by_set.setdefault(source.name, {}).setdefault(source.split, []).append(path)
  chosen = []
  for name, splits in by_set.items():
    if split == "train":
      order = ["train", None]
    else:
      order = [TEST_FILES[name].rpartition("/")[2].removesuffix(".jsonl"), "test", "dev", None]
    chosen += next((splits[one] for one in order if one in splits), [])
  return chosen


def _fetch(repository: str, path: str) -> pathlib.Path:
  """A file of the hub, from an earlier download where it is whole."""
  url = f"{_ENDPOINT.value.rstrip('/')}/datasets/{repository}/resolve/{_REVISION.value}/{path}"
  target = pathlib.Path(_RAW.value or pathlib.Path(_OUT.value) / "raw") / repository / path
  shown = 0
  with Progress(None, f"MB of {path}") as progress:
    def tell(done, total):
      nonlocal shown
      if done // 10**6 > shown:
        progress.update(done // 10**6 - shown, note="" if total is None else f"of {total // 10**6:,}")
        shown = done // 10**6
    download.download(url, target, progress=tell)
  return target


def _questions(pairs, split: str) -> dict[str, dict]:
  """{set: {"records", "sources"}}: all questions of the files, those of another side's split left out."""
  found = {}
  with Progress(None, f"{split} questions read") as progress:
    for name, path in pairs:
      source = formats.named(path)
      own, sets = source.split if source and source.split else split, set()
      for record in formats.read(path, name=name, split=own):
        progress.update()
        if (record["split"] == "train") == (split == "train"):
          found.setdefault(record["data_source"], {"records": [], "sources": []})["records"].append(record)
          sets.add(record["data_source"])
      if not sets:
        raise ValueError(f"{path} holds no {split} questions by its name or by its records' split; give it with "
                         f"--{'test' if split == 'train' else 'train'}, or copy it under another name")
      for one in sets:
        found[one]["sources"].append(_source(path))
  return found


def _source(path: pathlib.Path) -> dict:
  """Where a file came from: its address if it was downloaded, and its hash."""
  note = path.with_name(path.name + ".source.json")
  if note.exists():
    return {key: json.loads(note.read_text())[key] for key in ("url", "sha256", "bytes")}
  return {"file": path.name, "sha256": prepare.sha256_of(path), "bytes": path.stat().st_size}


def _write(manifest: dict, out: pathlib.Path, path: str, name: str, found: dict, records: list) -> None:
  if pathlib.PurePosixPath(name).name != name or name.startswith("."):
    raise ValueError(f"the question set {name!r} can't name a file; name it with SET=PATH")
  if not records:
    raise ValueError(f"no question of {name} is left to write to {path}: all of its training questions stand in a "
                     "benchmark")
  splits = sorted({record["split"] for record in records})
  manifest["files"][path] = prepare.write_questions(out / path, records) | {
      "set": name, "splits": splits, "licence": prepare.licence(name), "sources": found["sources"]}


def _write_corpus(manifest: dict, out: pathlib.Path, source: pathlib.Path) -> None:
  """The corpus, unless the manifest says that this file was made from this source and it is still there."""
  path, origin = _CORPUS_NAME.value, _source(source)
  known = manifest["files"].get(path, {})
  target = out / path
  if known.get("sources") == [origin] and target.exists() and target.stat().st_size == known["bytes"]:
    return
  with Progress(None, "passages") as progress:
    written = prepare.write_corpus(source, target, progress.update)
  manifest["files"][path] = written | {"set": "corpus", "licence": prepare.licence("corpus"), "sources": [origin]}


def _manifest(out: pathlib.Path) -> dict:
  """What an earlier call wrote: files that this one does not make stay in it."""
  path = out / "manifest.json"
  if not path.exists():
    return {"files": {}}
  try:
    known = json.loads(path.read_text())
    return known if isinstance(known["files"], dict) else {"files": {}}
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is no manifest ({error}); move it away") from error


def _written_benchmarks(out: pathlib.Path) -> dict[str, list]:
  """The benchmarks of an earlier call, so that training questions prepared by themselves are compared too."""
  return {path.stem: list(formats.read(path, name=path.stem, split="test"))
          for path in sorted((out / "benchmarks").glob("*.jsonl"))}


def _told(manifest: dict, report: duplicates.Report, out: pathlib.Path) -> str:
  lines = ["| file | number | MB | licence |", "|---" * 4 + "|"]
  lines += [f"| {path} | {entry['count']:,} | {entry['bytes'] / 1e6:,.1f} | {entry['licence']} |"
            for path, entry in manifest["files"].items()]
  lines += ["", f"in {out}; hashes and sources in {out / 'manifest.json'}"]
  for pair, count in report.across.items():
    left = "left out" if _REMOVE.value else "kept; --remove_duplicates leaves them out"
    number = f"{count:,} training question{'s' * (count != 1)} stand{'s' * (count == 1)}"
    lines.append(f"{pair}: {number} in the benchmark ({left})")
  lines += [f"{pair}: {count:,} in both training sets" for pair, count in report.between.items()]
  lines += [f"{name}: {count:,} repeated within the set (kept)" for name, count in report.within.items()]
  return "\n".join(lines)


if __name__ == "__main__":
  app.run(main)
