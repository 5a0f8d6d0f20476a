"""Reads the records of a file: JSON Lines, a JSON list or object, csv, tsv or parquet.

for where, record in read(path): ...    where: "FILE, line 3", for a sentence on what is wrong
"""

from collections.abc import Iterable, Iterator
import csv
import gzip
import pathlib
import re
from typing import Any

from stratified import files
from stratified.data import readers
from stratified.retrieval.corpus import read_jsonl

Record = dict[str, Any]


def read(path: pathlib.Path) -> Iterator[tuple[str, Record]]:
  """Yields (where, record) of a file by its ending; parquet aside, plain or .gz."""
  name = path.name.removesuffix(".gz").lower()
  if not path.exists():
    raise FileNotFoundError(f"{path}: there is no such file")
  if name.endswith((".tsv", ".csv")):
    yield from _rows(path, "\t" if name.endswith(".tsv") else ",")
  elif name.endswith(".jsonl"):
    yield from ((f"{path}, line {line}", record) for line, record in read_jsonl(path))
  elif name.endswith(".json"):
    yield from _json(path)
  elif name.endswith(".parquet"):
    yield from readers.rows_of(path)
  else:
    raise ValueError(
      f"{path}: questions are read from .jsonl, .json, .csv, .tsv (plain or .gz) and .parquet"
    )


def open_text(path: pathlib.Path):
  """Opens UTF-8 text, with or without a byte order mark, plain or .gz."""
  return (gzip.open if path.name.endswith(".gz") else open)(
    path, "rt", encoding="utf-8-sig", newline=""
  )


_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def tsv_rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
  """Yields (line number from 1, fields) of tab-separated lines, blank ones left out.

  A row is a line, whatever quotation marks it holds: one that is opened and not closed belongs to
  the text, and never joins a row with those after it. A field that is quoted as a whole loses its
  marks, and doubled ones in it become single.
  """
  for number, line in enumerate(lines, start=1):
    line = line.rstrip("\r\n")
    if line:
      yield number, [_unquoted(field) for field in _fields(line)]


def _fields(line: str) -> list[str]:
  parts, fields = line.split("\t"), []
  while parts:  # a tab within a field that is quoted as a whole
    count = next(
      (n for n in range(1, len(parts) + 1) if _QUOTED.fullmatch("\t".join(parts[:n]))), 1
    )
    fields.append("\t".join(parts[:count]))
    parts = parts[count:]
  return fields


def _unquoted(field: str) -> str:
  return field[1:-1].replace('""', '"') if _QUOTED.fullmatch(field) else field


def _tsv(path: pathlib.Path) -> Iterator[tuple[str, Record]]:
  with open_text(path) as file:
    header = None
    for number, fields in tsv_rows(file):
      header = header or fields
      if len(fields) != len(header):
        raise ValueError(
          f"{path}, row {number}: {len(fields)} fields, the header has another number "
          f"({len(header)}); a row is one line, see that its text holds no line break"
        )
      if number > 1:
        yield f"{path}, row {number}", dict(zip(header, fields))


def _rows(path: pathlib.Path, delimiter: str) -> Iterator[tuple[str, Record]]:
  try:
    if _is_dpr(path):
      with open_text(path) as file:
        for number, fields in tsv_rows(file):
          yield f"{path}, row {number}", dict(zip(DPR, fields))
      return
    if delimiter == "\t":
      yield from _tsv(path)
      return
    with open_text(path) as file:
      rows = csv.DictReader(file, strict=True)
      for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
          found = sum(value is not None for value in row.values())
          raise ValueError(
            f"{path}, row {number}: {found} fields, the header has another number; get the file "
            "again"
          )
        yield f"{path}, row {number}", row
  except (UnicodeDecodeError, csv.Error, EOFError, OSError) as error:
    raise ValueError(f"{path}: not a readable table ({error}); get it again") from error


# The fields of DPR's tables, which have no header.
DPR = ("question", "dpr_answers")


def _is_dpr(path: pathlib.Path) -> bool:
  """Whether a table is DPR's: a question, a tab and a list of answers in each line, no header."""
  with open_text(path) as file:
    _, first = next(tsv_rows(file), (0, [""]))
  return len(first) == len(DPR) and first[1].startswith("[") and first[1].endswith("]")


def _json(path: pathlib.Path) -> Iterator[tuple[str, Record]]:
  try:
    with open_text(path) as file:
      text = file.read()
  except (UnicodeDecodeError, EOFError, OSError) as error:
    raise ValueError(f"{path}: not readable text ({error}); get it again") from error
  try:
    found = files.parse(text)
  except ValueError as error:
    # JSON Lines that are called .json, as MuSiQue's mirrors are
    if text.lstrip().startswith("{") and "\n{" in text:
      yield from ((f"{path}, line {line}", record) for line, record in read_jsonl(path))
      return
    raise ValueError(f"{path}: not JSON ({error}); get it again") from error
  if isinstance(found, dict):
    found = next(
      (found[key] for key in ("Data", "data") if isinstance(found.get(key), list)), [found]
    )
  if not isinstance(found, list):
    raise ValueError(f"{path}: a JSON {type(found).__name__}, but questions come as a list")
  for number, record in enumerate(found):
    if not isinstance(record, dict):
      raise ValueError(
        f"{path}, entry {number}: a JSON {type(record).__name__}, but each question is an object"
      )
    yield f"{path}, entry {number}", record
