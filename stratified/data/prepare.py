"""Turns raw files into those that training and evaluation read, written whole or not at all."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import gzip
import hashlib
import json
import os
import pathlib
from typing import Any
import zlib

from stratified import files
from stratified.data import records
from stratified.retrieval.corpus import id_field, read_jsonl, string_field

# Of the sets themselves, whoever passes the file on; "unclear" where their makers do not say.
LICENCES = {
  "nq": "CC BY-SA 3.0",
  "hotpotqa": "CC BY-SA 4.0",
  "2wikimultihopqa": "Apache-2.0",
  "musique": "CC BY 4.0",
  "triviaqa": "Apache-2.0 for code and data; its questions are of third-party trivia sites",
  "popqa": "MIT",
  "bamboogle": "MIT",
  "corpus": "CC BY-SA 3.0 (Wikipedia of 2018; attribution by title)",
}
# Columns of DPR's psgs_w100.tsv (arXiv 2004.04906).
_TSV_COLUMNS = ["id", "text", "title"]


def licence(name: str) -> str:
  return LICENCES.get(name, "unclear: ask whom the file is from")


def sha256_of(path: str | os.PathLike) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def write_lines(target: str | os.PathLike, lines: Iterable[str]) -> dict[str, Any]:
  """Writes lines (gzip for .gz) aside, then renames; returns {"count", "bytes", "sha256"}.

  Raises ValueError where there is no line: an empty file never takes the place of a good one.
  """
  target = pathlib.Path(target)
  target.parent.mkdir(parents=True, exist_ok=True)
  part, count = target.with_name(target.name + ".part"), 0
  try:
    with part.open("wb") as raw:
      # no time and no name in the gzip header: the same lines give the same bytes
      file = gzip.GzipFile("", "wb", 6, raw, mtime=0) if target.name.endswith(".gz") else raw
      for line in lines:
        file.write(line.encode() + b"\n")
        count += 1
      if not count:
        raise ValueError(
          f"there is nothing to write to {target}: what it is made from holds nothing"
        )
      if file is not raw:
        file.close()
    found = {"count": count, "bytes": part.stat().st_size, "sha256": sha256_of(part)}
    files.settle(part, target)
  finally:
    part.unlink(missing_ok=True)
  return found


def write_questions(
  target: str | os.PathLike, records: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
  """Writes a set's questions in the normal form; ValueError for a repeated id or no question."""
  records = list(records)
  check_ids(records, pathlib.Path(target).name)
  return write_lines(target, (json.dumps(record, ensure_ascii=False) for record in records))


def check_ids(records: Iterable[Mapping[str, Any]], name: str):
  """Raises ValueError, naming the file `name`, where an id names two questions."""
  seen = {}
  for record in records:
    earlier = seen.setdefault(record["id"], record["question"])
    if earlier is not record["question"]:
      raise ValueError(
        f"{name}: the id {record['id']!r} names two questions, {earlier[:60]!r} and "
        f"{record['question'][:60]!r}; ids must be unique within a set"
      )


def write_corpus(
  source: str | os.PathLike,
  target: str | os.PathLike,
  progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
  """Writes a passage corpus in the form that retrieval/corpus.py reads: {"id", "contents"}.

  source: JSON Lines with `contents` (Search-R1, FlashRAG), or with `title` and `text` (DPR's in
    JSON), or DPR's tsv (id, text, title); plain or .gz.
  progress: called with the number of passages since the last call.

  Raises ValueError, naming line and field, for a line that is no passage, and for an id that comes
    twice; and, naming the file, where it holds no passage. What stood at `target` then stays.
  """
  source = pathlib.Path(source)
  return write_lines(target, _counted(_passages(source), source, progress))


def _counted(
  pairs: Iterator[tuple[str, str, str]], source: pathlib.Path, progress
) -> Iterator[str]:
  new_id, number = _NewIds(), 0
  for number, (where, id_, contents) in enumerate(pairs, start=1):
    new_id.check(id_, where)
    if progress and number % 10_000 == 0:
      progress(10_000)
    yield json.dumps({"id": id_, "contents": contents}, ensure_ascii=False)
  if not number:
    raise ValueError(
      f"{source} holds no passage, but a corpus must hold at least one; see that it is whole"
    )


class _NewIds:
  """Sees that no id comes twice; a whole number, as Wikipedia's ids are, takes a bit of memory."""

  MOST = 2**28  # numbers from here on are kept as text

  def __init__(self):
    self._numbers, self._others = bytearray(), set()

  def check(self, id_: str, where: str):
    counted = id_.isdecimal() and id_.isascii() and (id_ == "0" or id_[0] != "0")
    if not self._add_number(int(id_)) if counted and len(id_) < 11 else not self._add_other(id_):
      raise ValueError(f"{where}: the id {id_!r} has come before; ids must be unique")

  def _add_number(self, number: int) -> bool:
    if number >= self.MOST:
      return self._add_other(str(number))
    at, bit = number >> 3, 1 << (number & 7)
    if at >= len(self._numbers):
      self._numbers.extend(bytes(at + 1 - len(self._numbers)))
    new = not self._numbers[at] & bit
    self._numbers[at] |= bit
    return new

  def _add_other(self, id_: str) -> bool:
    new = id_ not in self._others
    self._others.add(id_)
    return new


def _passages(source: pathlib.Path) -> Iterator[tuple[str, str, str]]:
  """(where, id, contents)."""
  if source.name.removesuffix(".gz").endswith(".tsv"):
    yield from _tsv_passages(source)
    return
  for line, record in read_jsonl(source):
    where = f"{source}, line {line}"
    if record.get("contents") is not None:
      contents = string_field(record, "contents", where)
    else:
      title = string_field(record, "title", where) if record.get("title") else ""
      contents = (
        f'"{title}"\n{string_field(record, "text", where)}'
        if title
        else string_field(record, "text", where)
      )
    yield where, id_field(record, "id", where), contents


def _tsv_passages(source: pathlib.Path) -> Iterator[tuple[str, str, str]]:
  try:
    with records.open_text(source) as file:
      rows = records.tsv_rows(file)
      _, header = next(rows, (0, None))
      if header is None:
        return
      if header != _TSV_COLUMNS:
        raise ValueError(
          f"{source}: its first row is {header!r}, but passages come with the columns "
          f"{', '.join(_TSV_COLUMNS)}"
        )
      for line, row in rows:
        where = f"{source}, line {line}"
        if len(row) != 3:
          raise ValueError(
            f"{where}: {len(row)} fields where there must be 3 (id, text, title), all on one line"
          )
        passage = dict(zip(_TSV_COLUMNS, row))
        # a title in quotation marks, as in the JSON form; within the tsv they are doubled
        title, text = passage["title"].strip(), string_field(passage, "text", where)
        yield where, id_field(passage, "id", where), f'"{title}"\n{text}' if title else text
  except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise ValueError(f"{source}: not a readable table ({error}); get it again") from error
