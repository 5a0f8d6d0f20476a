"""Passages, and the JSON Lines files that hold them.

A corpus file is JSON Lines, plain or .gz, as Search-R1 and FlashRAG have it, one passage a line:

    {"id": "7", "contents": "\\"Title\\"\\ntext"}
    {"id": "7", "title": "Title", "text": "text"}

A `title` field, where there is one, says what the first line of `contents` is.
"""

import codecs
from collections.abc import Iterable, Iterator
import dataclasses
import gzip
import hashlib
import json
import os
import re
import zlib

# C0 and C1 controls and line separators; a null byte ends a text in many a server
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class RetrieverError(Exception):
  """A retriever could not answer: out of reach, out of time, or its reply makes no sense."""


# Longer than any question of a reader; every retriever searches for as much of a query.
MAX_QUERY_CHARACTERS = 2000


def searchable(query: str) -> str:
  """The query as every retriever can take it: at most MAX_QUERY_CHARACTERS, no control characters.

  What a policy writes must never decide whether its rollout is scored, so that no query may be
  refused by one retriever and searched by another. Half of a surrogate pair becomes `?`.
  """
  cut = query[:MAX_QUERY_CHARACTERS].encode("utf-8", "replace").decode()
  return _CONTROL.sub(" ", cut).strip()


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
  """A passage; `score` is the retriever's for the query that found it, no part of equality."""

  id: str
  title: str
  text: str
  score: float | None = dataclasses.field(default=None, compare=False)

  @property
  def contents(self) -> str:
    """The wire form: title in quotation marks, newline, text; without a title the text alone."""
    return f'"{self.title}"\n{self.text}' if self.title else self.text


def passage_from_contents(
  id: str, contents: str, title: str | None = None, score: float | None = None
) -> Passage:
  """Takes `contents` apart: the first line, without its quotation marks, is the title.

  Contents of a single line are all text, unless they are the given title and nothing else. A given
  title that the first line does not repeat leaves the contents whole. What `Passage.contents` made
  of a titled passage comes back as it was.
  """
  first, newline, rest = contents.partition("\n")
  unquoted = first[1:-1] if len(first) >= 2 and first[0] == first[-1] == '"' else first
  if title is not None and title not in (first, unquoted):
    return Passage(id, title, contents, score)
  if not newline and title is None:
    return Passage(id, "", contents, score)
  return Passage(id, unquoted if title is None else title, rest, score)


def read_corpus(path: str | os.PathLike) -> list[Passage]:
  """Reads a corpus file, one line at a time.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is not a JSON object, lacks `id` or `contents`, or repeats an id; the message
      names the file, the line and the field.
  """
  passages, line_of = [], {}
  for line, record in read_jsonl(path):
    where = f"{os.fspath(path)}, line {line}"
    passage = passage_from_record(record, where)
    earlier = line_of.setdefault(passage.id, line)
    if earlier != line:
      raise ValueError(
        f'{where}, field "id": {passage.id!r} is already the id of line {earlier}; ids must be '
        "unique."
      )
    passages.append(passage)
  return passages


def corpus_digest(passages: Iterable[Passage]) -> str:
  """Digests passages' ids and contents in order: 16 hexadecimal digits, wherever they came from."""
  digest = hashlib.sha256()
  for passage in passages:
    for part in (passage.id.encode(), passage.contents.encode()):
      digest.update(b"%d:" % len(part))  # the length keeps two parts from running into each other
      digest.update(part)
  return digest.hexdigest()[:16]


def passage_from_record(record: dict, where: str) -> Passage:
  """Makes a passage of a corpus line; ValueError, naming `where` and field, where it is none."""
  title = string_field(record, "title", where) if record.get("title") else None
  if record.get("contents") is None and record.get("text") is not None:
    return Passage(id_field(record, "id", where), title or "", string_field(record, "text", where))
  return passage_from_contents(
    id_field(record, "id", where), string_field(record, "contents", where), title
  )


def read_jsonl(path: str | os.PathLike) -> Iterator[tuple[int, dict]]:
  """Yields (line number from 1, object) of JSON Lines, plain or .gz; skips blank lines.

  Raises ValueError, naming file and line, where a line is no JSON object in UTF-8 or a .gz file is
  damaged.
  """
  path, line = os.fspath(path), 0
  with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
    try:
      for line, raw in enumerate(file, start=1):
        if raw.removeprefix(codecs.BOM_UTF8).strip():
          yield line, json_object(raw, f"{path}, line {line}")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
      raise ValueError(
        f"{path}: the compressed file is damaged after line {line} ({error}); get it again."
      ) from error


def json_object(raw: bytes, where: str) -> dict:
  """The JSON object that a line holds, else ValueError with `where`."""
  try:
    # a byte order mark may stand before the first line
    record = json.loads(raw.decode("utf-8-sig"))
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{where}: not UTF-8 text (byte {error.start}); save the file as UTF-8."
    ) from error
  except (ValueError, RecursionError) as error:  # a number of 5,000 digits, nested lists
    raise ValueError(f"{where}: not JSON ({error}); each line must be one JSON object.") from error
  if not isinstance(record, dict):
    raise ValueError(
      f"{where}: a JSON {type(record).__name__}, but each line must be one JSON object."
    )
  return record


def string_field(record: dict, name: str, where: str) -> str:
  """`record[name]`, a non-empty string with a UTF-8 form, or ValueError with `where` and field."""
  value = record.get(name)
  if not isinstance(value, str) or not value.strip():
    present = ", ".join(sorted(record)) or "none"
    found = f"is {value!r}" if name in record else f"is missing (fields there: {present})"
    raise ValueError(f'{where}, field "{name}": it {found}; it must be a non-empty string.')
  if not _has_utf8_form(value):
    raise ValueError(
      f'{where}, field "{name}": it holds half of a surrogate pair, which no tokenizer can encode.'
    )
  return value


def id_field(record: dict, name: str, where: str) -> str:
  """Like `string_field`, but a whole number will do and is turned into its digits."""
  value = record.get(name)
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return string_field(record, name, where)


def _has_utf8_form(text: str) -> bool:
  try:
    text.encode("utf-8")
  except UnicodeEncodeError:
    return False
  return True
