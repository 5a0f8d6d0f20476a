"""Brings questions and Wikipedia into the form that training and evaluation read.

    python experiments/prepare_data.py --download=all --remove_duplicates
    python experiments/prepare_data.py --train=raw/NQ-open.train.jsonl \\
        --train=raw/hotpot_train_v1.1.json --test=raw/popQA.tsv \\
        --test=triviaqa=raw/unfiltered-web-dev.json --corpus=raw/psgs_w100.tsv.gz

Writes under --out (data/), as the presets `base` and `instruct` name them:
nq_hotpotqa_train/SET.jsonl, benchmarks/SET.jsonl, wiki18.jsonl, and manifest.json with counts,
SHA-256, licences, sources and duplicates. Reads FlashRAG's JSON Lines, verl's parquet, the sets'
own files, and Wikipedia as JSON Lines or DPR's tsv; a folder stands for all files in it. Reports
questions that stand in training and in a benchmark; --remove_duplicates leaves them out of
training. It compares all that OUT then holds, so the order of calls makes no difference. Downloads
are verified; the same command resumes them.
"""

import json
import os
import pathlib
import re
import sys

from absl import flags

from stratified.data import download, duplicates, formats, prepare
from stratified.data import manifest as manifests
from stratified.progress import Progress
from stratified.runs import command_line

_OUT = flags.DEFINE_string("out", "data", "The folder to write.")
_TRAIN = flags.DEFINE_multi_string(
  "train", [], "A file or folder of training questions; SET=PATH names its set."
)
_TEST = flags.DEFINE_multi_string("test", [], "Likewise of questions to evaluate on.")
_CORPUS = flags.DEFINE_string(
  "corpus", None, "Passages: JSON Lines, or DPR's psgs_w100.tsv; plain or .gz."
)
_DOWNLOAD = flags.DEFINE_list(
  "download", [], "From the hub: all, train, test, corpus, or question sets by name."
)
_ENDPOINT = flags.DEFINE_string("endpoint", "https://huggingface.co", "The hub, or a mirror of it.")
_REVISION = flags.DEFINE_string("revision", "main", "Branch or commit of the hub's repositories.")
_RAW = flags.DEFINE_string("raw", None, "Where downloads are kept; OUT/raw by default.")
_NAME = flags.DEFINE_string("train_name", "nq_hotpotqa_train", "The folder of the training mix.")
_MIX = flags.DEFINE_list(
  "train_sets", ["nq", "hotpotqa"], "Sets of the training mix; others in --train are left out."
)
_CORPUS_NAME = flags.DEFINE_string(
  "corpus_name", "wiki18.jsonl", "The corpus file; .gz compresses it."
)
_REMOVE = flags.DEFINE_bool(
  "remove_duplicates", False, "Leave training questions out that stand in a benchmark."
)

# Repository and files on the hub. The splits are those of the papers' tables: test, or dev where
# test has no answers.
FLASHRAG, WIKI = "RUC-NLPIR/FlashRAG_datasets", "PeterJinGo/wiki-18-corpus"
TRAIN_FILES = {"nq": "nq/train.jsonl", "hotpotqa": "hotpotqa/train.jsonl"}
TEST_FILES = {
  "nq": "nq/test.jsonl",
  "triviaqa": "triviaqa/test.jsonl",
  "popqa": "popqa/test.jsonl",
  "hotpotqa": "hotpotqa/dev.jsonl",
  "2wikimultihopqa": "2wikimultihopqa/dev.jsonl",
  "musique": "musique/dev.jsonl",
  "bamboogle": "bamboogle/test.jsonl",
}
CORPUS_FILE = "wiki-18.jsonl.gz"


def main(_) -> None:
  try:
    prepared = prepare_all()
  except ConnectionError as error:
    sys.exit(
      f"{error}. Without a network, bring the files from a machine that has one and name them: "
      "--train=PATH --test=PATH --corpus=PATH; what has come so far is kept and gone on with"
    )
  except ValueError as error:
    sys.exit(f"{error}")
  except OSError as error:
    # The system's own errors bear a number and are no sentence.
    sys.exit(
      f"{error}"
      if error.errno is None
      else f"{error.filename or 'a file'}: {(error.strerror or '').lower()}; --train, --test and "
      "--corpus must name "
      "what can be read, --out and --raw folders that can be written and have room"
    )
  print(prepared)


def prepare_all() -> str:
  """Reads, compares and writes; returns what a person wants to know of it."""
  _check_places()
  out = pathlib.Path(_OUT.value)
  manifest = manifests.load(out / "manifest.json")
  train, test, corpus = _inputs()
  if not (train or test or corpus):
    raise ValueError(
      "nothing to prepare: name files with --train, --test, --corpus, or --download=all"
    )
  training = {
    name: found for name, found in _questions(train, "train").items() if name in _MIX.value
  }
  if train and (missing := [name for name in _MIX.value if name not in training]):
    raise ValueError(
      f"--train holds no questions of {', '.join(missing)}; add their files, or name the sets that "
      "the "
      "mix shall have with --train_sets"
    )
  benchmarks = _questions(test, "test")
  report = (
    _prepare_questions(manifest, out, training, benchmarks) if training or benchmarks else None
  )
  if corpus:
    _write_corpus(manifest, out, corpus)
    _save(manifest, out)
  return _told(manifest, report, out)


def _check_places() -> None:
  """Refuses flags that name no place to write, before anything is fetched or read."""
  for flag, value in (("train_name", _NAME.value), ("corpus_name", _CORPUS_NAME.value)):
    if not manifests.is_plain_name(value) or value in ("benchmarks", "raw", "manifest.json"):
      raise ValueError(
        f"--{flag}={value} must be a plain name within --out, without separators and .., other "
        "than "
        "benchmarks, raw and manifest.json"
      )
  if _NAME.value == _CORPUS_NAME.value:
    raise ValueError(
      f"--train_name={_NAME.value} is --corpus_name too; a folder and a file need two names"
    )
  folders = [("out", pathlib.Path(_OUT.value or "."), _OUT.value)]
  folders += [("raw", pathlib.Path(_RAW.value), _RAW.value)] if _RAW.value else []
  for flag, path, value in folders:
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not value or not there.is_dir() or not os.access(there, os.W_OK):
      raise ValueError(
        f"--{flag}={value} must name a folder that can be written, there already or new"
        + (f"; {there} is none" if value else "")
      )
  for name in (_NAME.value, "benchmarks"):
    if (pathlib.Path(_OUT.value) / name).exists() and not (
      pathlib.Path(_OUT.value) / name
    ).is_dir():
      raise ValueError(
        f"{name} in --out={_OUT.value} must be a folder, but is a file; move it away"
      )
  for name in (_CORPUS_NAME.value, "manifest.json"):
    if (pathlib.Path(_OUT.value) / name).is_dir():
      raise ValueError(
        f"{name} in --out={_OUT.value} must be a file, but is a folder; move it away"
      )


def _prepare_questions(
  manifest: dict, out: pathlib.Path, training: dict, benchmarks: dict
) -> duplicates.Report:
  """Checks all, then writes what was read, and earlier training files that lose questions."""
  for name in (*training, *benchmarks):
    if not manifests.is_plain_name(name):
      raise ValueError(f"the question set {name!r} can't name a file; name it with SET=PATH")
  earlier = _written(out / _NAME.value, "train", (".jsonl",), training)
  compared = _written(out / "benchmarks", "test", (".jsonl", ".jsonl.gz", ".parquet"), benchmarks)
  compared |= {name: found["records"] for name, found in benchmarks.items()}
  report = duplicates.find(
    {name: found["records"] for name, found in training.items()} | earlier, compared
  )
  writes = {}  # path -> (its records, the rest of its entry)
  for name in report.kept:
    path = f"{_NAME.value}/{name}.jsonl"
    if name in training:
      records = report.kept[name] if _REMOVE.value else training[name]["records"]
      writes[path] = records, _entry(name, records, training[name]["sources"])
    elif _REMOVE.value and report.removed[name]:
      known = manifest["files"].get(path) or _entry(
        name, earlier[name], [manifests.source_of(out / path)]
      )
      writes[path] = report.kept[name], known
    elif path in manifest["files"]:
      # a call that broke off between a file and the manifest
      manifest["files"][path] |= {"count": len(earlier[name])} | manifests.hashes_of(out / path)
  for name, found in benchmarks.items():
    writes[f"benchmarks/{name}.jsonl"] = (
      found["records"],
      _entry(name, found["records"], found["sources"]),
    )
  for path, (records, _) in writes.items():
    if not records:
      name = path.partition("/")[2].removesuffix(".jsonl")
      raise ValueError(
        f"no question of {name} is left to write to {path}: all of its training questions stand in "
        "a "
        "benchmark; name another training file, or another --train_name"
      )
    prepare.check_ids(records, path.partition("/")[2])
  entries = manifest["files"] | {path: entry for path, (_, entry) in writes.items()}
  entries = {name: entries.get(f"{_NAME.value}/{name}.jsonl", {}) for name in report.removed}
  manifest["duplicates"] = manifests.duplicates_of(report, entries, compared, _REMOVE.value)
  for path, (records, entry) in writes.items():
    manifest["files"][path] = entry | prepare.write_questions(out / path, records)
    _save(manifest, out)
  return report


def _written(folder: pathlib.Path, split: str, suffixes: tuple[str, ...], but) -> dict[str, list]:
  """Reads {set: records} of a folder's files, without the sets `but`, which this call replaces.

  A file that is no .jsonl goes by its whole name: beside it there may be a .jsonl of its set.
  """
  found = {}
  for path in sorted(folder.iterdir() if folder.is_dir() else ()):
    suffix = next((one for one in suffixes if path.name.endswith(one)), None)
    name = path.name.removesuffix(suffix or "")
    if suffix and path.is_file() and not (suffix == ".jsonl" and name in but):
      label = name if suffix == ".jsonl" else path.name
      found[label] = list(formats.read(path, name=name, split=split))
  return found


def _inputs():
  """Finds (train, test) as (set or None, path) pairs, and the corpus, given or downloaded."""
  train, test = _pairs(_TRAIN.value, "train"), _pairs(_TEST.value, "test")
  corpus = _CORPUS.value and pathlib.Path(_CORPUS.value)
  wanted = {"train", "test", "corpus"} if "all" in _DOWNLOAD.value else set(_DOWNLOAD.value)
  unknown = wanted - {"train", "test", "corpus"} - TEST_FILES.keys()
  if unknown:
    raise ValueError(
      f"--download names {', '.join(sorted(unknown))}; choose from all, train, test, corpus, "
      f"{', '.join(TEST_FILES)}"
    )
  if "train" in wanted:
    train += [
      (name, _fetch(FLASHRAG, path)) for name, path in TRAIN_FILES.items() if name in _MIX.value
    ]
  test += [
    (name, _fetch(FLASHRAG, path)) for name, path in TEST_FILES.items() if {"test", name} & wanted
  ]
  if corpus and not corpus.is_file():
    raise ValueError(
      f"--corpus={corpus} must name one file of passages (.jsonl or .tsv, plain or .gz), but "
      f"{'that is a folder' if corpus.is_dir() else 'there is no such file'}"
    )
  if "corpus" in wanted:
    corpus = _fetch(WIKI, CORPUS_FILE)
  return train, test, corpus


def _pairs(values, split: str) -> list[tuple[str | None, pathlib.Path]]:
  pairs = []
  for value in values:
    name, equals, path = value.partition("=")
    if not value or equals and "/" not in name and not (name and path):
      raise ValueError(f"--{split}={value} must be PATH or SET=PATH; what stands there is empty")
    name, path = (
      (name, pathlib.Path(path)) if equals and "/" not in name else (None, pathlib.Path(value))
    )
    files = _files(path, split) if path.is_dir() else [path]
    if not files:
      raise FileNotFoundError(
        f"{path}: no file in it is named after a question set and holds {split} questions; "
        "name one with SET=PATH"
      )
    pairs += [(name, file) for file in files]
  return pairs


def _files(folder: pathlib.Path, split: str) -> list[pathlib.Path]:
  """Finds a folder's files named after a set, of several splits the one that tables report."""
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
  """Fetches a file of the hub, unless an earlier download is whole."""
  url = f"{_ENDPOINT.value.rstrip('/')}/datasets/{repository}/resolve/{_REVISION.value}/{path}"
  target = pathlib.Path(_RAW.value or pathlib.Path(_OUT.value) / "raw") / repository / path
  shown = 0
  with Progress(None, f"MB of {path}") as progress:

    def tell(done, total):
      nonlocal shown
      if done // 10**6 > shown:
        progress.update(
          done // 10**6 - shown, note="" if total is None else f"of {total // 10**6:,}"
        )
        shown = done // 10**6

    download.download(url, target, progress=tell)
  return target


def _questions(pairs, split: str) -> dict[str, dict]:
  """Reads all questions of files but those of another split: {set: {"records", "sources"}}."""
  found = {}
  with Progress(None, f"{split} questions read") as progress:
    for name, path in pairs:
      source = formats.named(path)
      own, sets, record = source.split if source and source.split else split, set(), None
      for record in formats.read(path, name=name, split=own):
        progress.update()
        if (record["split"] == "train") == (split == "train"):
          found.setdefault(record["data_source"], {"records": [], "sources": []})["records"].append(
            record
          )
          sets.add(record["data_source"])
      if record is None:
        raise ValueError(
          f"{path} holds no question, but each file of --{split} must hold at least one; see that "
          "it is "
          "whole"
        )
      if not sets:
        raise ValueError(
          f"{path} holds no {split} questions by its name or by its records' split; give it with "
          f"--{'test' if split == 'train' else 'train'}, or copy it under another name"
        )
      for one in sets:
        found[one]["sources"].append(manifests.source_of(path))
  return found


def _entry(name: str, records: list, sources: list) -> dict:
  return {
    "set": name,
    "splits": sorted({record["split"] for record in records}),
    "licence": prepare.licence(name),
    "sources": sources,
  }


def _save(manifest: dict, out: pathlib.Path) -> None:
  prepare.write_lines(out / "manifest.json", [json.dumps(manifest, indent=2)])


def _write_corpus(manifest: dict, out: pathlib.Path, source: pathlib.Path) -> None:
  """Writes the corpus, unless the manifest says that this file is there, made from this source."""
  path, origin = _CORPUS_NAME.value, manifests.source_of(source)
  known = manifest["files"].get(path, {})
  target = out / path
  if (
    known.get("sources") == [origin] and target.exists() and target.stat().st_size == known["bytes"]
  ):
    return
  if target.exists():
    print(f"{target} is replaced: it was made from another corpus", flush=True)
  with Progress(None, "passages") as progress:
    written = prepare.write_corpus(source, target, progress.update)
  manifest["files"][path] = written | {
    "set": "corpus",
    "licence": prepare.licence(
      "corpus" if re.search(r"wiki-?18|psgs_w100", source.name) else "own corpus"
    ),
    "sources": [origin],
  }


def _told(manifest: dict, report: duplicates.Report | None, out: pathlib.Path) -> str:
  lines = ["| file | number | MB | licence |", "|---" * 4 + "|"]
  lines += [
    f"| {path} | {entry['count']:,} | {entry['bytes'] / 1e6:,.1f} | {entry['licence']} |"
    for path, entry in manifest["files"].items()
  ]
  lines += ["", f"in {out}; hashes and sources in {out / 'manifest.json'}"]
  if report is None:
    return "\n".join(lines)
  for pair, count in report.across.items():
    left = "left out" if _REMOVE.value else "kept; --remove_duplicates leaves them out"
    number = f"{count:,} training question{'s' * (count != 1)} stand{'s' * (count == 1)}"
    lines.append(f"{pair}: {number} in the benchmark ({left})")
  lines += [f"{pair}: {count:,} in both training sets" for pair, count in report.between.items()]
  lines += [
    f"{name}: {count:,} repeated within the set (kept)" for name, count in report.within.items()
  ]
  others = [
    path
    for path, entry in manifest["files"].items()
    if entry.get("splits") == ["train"] and not path.startswith(f"{_NAME.value}/")
  ]
  others += [
    f"{_NAME.value}/{path.name}"
    for path in sorted((out / _NAME.value).glob("*"))
    if path.name.endswith((".jsonl.gz", ".parquet"))
  ]
  if others:
    lines.append(
      f"not compared, as they are of another --train_name or no .jsonl: {', '.join(others)}"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  command_line.run(main)
