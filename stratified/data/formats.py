"""Reads the question sets' own files into one normal form, which readers.py reads.

    {"id", "question", "golden_answers", "data_source", "split"}
    and where the source has them: "hops", "type", "orig_id", "supporting_titles"

It reads FlashRAG's JSON Lines and verl's parquet (any set), NQ-open (JSON Lines), DPR's tables,
TriviaQA (JSON), PopQA (tsv), HotpotQA and 2WikiMultiHopQA (JSON, Hugging Face's parquet), MuSiQue
(JSON Lines) and Bamboogle (csv or JSON).
The content tells the format, never the name. Text is kept as it is but for white space around it.
"""

from collections.abc import Iterable, Iterator
import csv
import dataclasses
import gzip
import pathlib
import re
from typing import Any, NamedTuple

from stratified import files
from stratified.data import readers
from stratified.retrieval.corpus import id_field, read_jsonl, string_field

Record = dict[str, Any]


class Source(NamedTuple):
  """A set's name, and its split if the file name tells it."""

  name: str
  split: str | None


# What stands in file and folder names, the longer first: "2wiki" before "wiki", "hotpot" as in
# hotpot_train_v1.1.json.
_NAMES = {
  "2wikimultihop": "2wikimultihopqa",
  "2wiki": "2wikimultihopqa",
  "hotpot": "hotpotqa",
  "musique": "musique",
  "bamboogle": "bamboogle",
  "popqa": "popqa",
  "trivia": "triviaqa",
  "nq": "nq",
  "natural_questions": "nq",
}
_SPLITS = {"train": "train", "dev": "dev", "validation": "dev", "test": "test"}


def named(path: pathlib.Path) -> Source | None:
  """Tells set and split from a path's last two names; None where they name no set."""
  text = f"{path.parent.name}/{path.name}".lower()
  split = next((split for mark, split in _SPLITS.items() if mark in path.name.lower()), None)
  for part in (path.name.lower(), text):  # the file's own name before its folder's
    for mark, name in _NAMES.items():
      if re.search(rf"(?<![a-z0-9]){mark}", part):
        return Source(name, split)
  return None


def read(path: pathlib.Path, *, name: str | None, split: str) -> Iterator[Record]:
  """Yields the questions of a file in the normal form.

  name: the set, where neither the records nor the file's name tell it. split: "train", "dev" or
    "test", for records that do not carry their own.

  Raises ValueError, naming file, record and field, for what cannot be read, and for a set that
  nobody names.
  """
  if path.name.endswith(".parquet") and not _of_hugging_face(path):
    for question, own in readers.with_splits(path, source=name):
      made = dataclasses.asdict(question) | {"split": own}
      yield _normal(made, {"question": question.text}, question.source, split)
    return
  source = named(path)
  name = name or (source.name if source else None)
  kind = None
  for where, record in _records(path):
    kind = kind or _kind(record, where)
    made = _READERS[kind](record, where)
    if made is None:
      continue
    own = name or made.get("data_source")
    if not own:
      raise ValueError(
        f"{where}: neither the file's name nor the record says which question set this is; name it "
        "as "
        f"SET={path}"
      )
    yield _normal(made, made, own, split)


def _of_hugging_face(path: pathlib.Path) -> bool:
  """Whether a parquet file has a set's own fields (HotpotQA's), not FlashRAG's or verl's."""
  _, first = next(readers.rows_of(path), ("", {}))
  return not first.keys() & {"golden_answers", "reward_model"} and "answer" in first


def _normal(made: Record, text: Record, name: str, split: str) -> Record:
  """Orders the fields of the normal form, and leaves out what is unknown."""
  normal = {
    "id": made["id"],
    "question": text["question"].strip(),
    "golden_answers": list(dict.fromkeys(answer.strip() for answer in made["golden_answers"])),
    "data_source": name,
    "split": made.get("split") or split,
  }
  hops = made.get("hops")
  hops = readers.hops_of(name, made) if hops is None else hops
  extra = {
    "hops": hops,
    "type": made.get("type"),
    "orig_id": made.get("orig_id"),
    "supporting_titles": made.get("supporting_titles"),
  }
  return normal | {key: value for key, value in extra.items() if value not in (None, [])}


def _records(path: pathlib.Path) -> Iterator[tuple[str, Record]]:
  """Yields (where, record) of JSON Lines, a JSON list or object, csv or tsv; plain or .gz."""
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
          yield f"{path}, row {number}", dict(zip(_DPR, fields))
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


_DPR = ("question", "dpr_answers")


def _is_dpr(path: pathlib.Path) -> bool:
  """Whether a table is DPR's: a question, a tab and a list of answers in each line, no header."""
  with open_text(path) as file:
    _, first = next(tsv_rows(file), (0, [""]))
  return len(first) == len(_DPR) and first[1].startswith("[") and first[1].endswith("]")


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


def _kind(record: Record, where: str) -> str:
  """Tells the format of a record; a file has one format."""
  for kind, fields in _FIELDS.items():
    if record.keys() >= fields:
      return kind
  fields = ", ".join(map(str, sorted(record, key=str)))
  raise ValueError(
    f"{where}: its fields ({fields}) are those of no known question format; known are "
    f"{', '.join(_FIELDS)}"
  )


def _flashrag(record: Record, where: str) -> Record:
  metadata = record.get("metadata") if isinstance(record.get("metadata"), dict) else {}
  titles = record.get("supporting_titles")
  if titles is None and isinstance(metadata.get("supporting_facts"), dict):
    titles = metadata["supporting_facts"].get("title")
  return {
    "id": id_field(record, "id", where),
    "question": string_field(record, "question", where),
    "golden_answers": _answers(record.get("golden_answers"), "golden_answers", where),
    "data_source": record.get("data_source")
    if isinstance(record.get("data_source"), str)
    else None,
    "type": _text(record.get("type") or metadata.get("type")),
    "hops": record.get("hops"),
    "orig_id": _text(record.get("orig_id") or metadata.get("id")),
    "split": _text(record.get("split")),
    "supporting_titles": _titles(titles),
  }


def _nq_open(record: Record, where: str) -> Record:
  # The set has no ids; its lines are numbered from 0, as FlashRAG numbers them.
  return {
    "id": f"nq_{_number(where) - 1}",
    "question": string_field(record, "question", where),
    "golden_answers": _answers(record["answer"], "answer", where),
    "data_source": "nq",
  }


def _dpr(record: Record, where: str) -> Record:
  if set(record) != set(_DPR):
    raise ValueError(f"{where}: not a question, a tab and a list of answers; get the file again")
  return {
    "id": f"row_{_number(where) - 1}",  # it has no ids
    "question": string_field(record, "question", where),
    "golden_answers": _answers(record["dpr_answers"], "answers", where),
  }


def _triviaqa(record: Record, where: str) -> Record:
  answer = record.get("Answer")
  if not isinstance(answer, dict):
    raise ValueError(
      f'{where}, field "Answer": it is missing: the answers of TriviaQA\'s test set are not '
      "published; "
      "evaluate on its dev set, as others do"
    )
  given = [answer.get("Value"), *_list(answer.get("Aliases")), *_list(answer.get("HumanAnswers"))]
  return {
    "id": id_field(record, "QuestionId", where),
    "question": string_field(record, "Question", where),
    "golden_answers": _answers(given, "Answer", where),
    "data_source": "triviaqa",
  }


def _popqa(record: Record, where: str) -> Record:
  try:
    answers = files.parse(record["possible_answers"])
  except (TypeError, ValueError) as error:
    raise ValueError(f'{where}, field "possible_answers": not a JSON list ({error})') from error
  return {
    "id": id_field(record, "id", where),
    "question": string_field(record, "question", where),
    "golden_answers": _answers(answers, "possible_answers", where),
    "data_source": "popqa",
    "type": _text(record.get("prop")),
    "supporting_titles": _titles([record.get("s_wiki_title") or record.get("subj")]),
  }


def _hotpotqa(record: Record, where: str) -> Record:
  """Reads a record of HotpotQA, or of 2WikiMultiHopQA, which took over its form."""
  if "answer" not in record:
    raise ValueError(
      f'{where}, field "answer": it is missing: the answers of this test set are not published; '
      "evaluate on the dev set, as others do"
    )
  facts = record.get("supporting_facts")
  if isinstance(facts, dict) and isinstance(facts.get("title"), list):  # as parquet has them
    facts = [[title] for title in facts["title"]]
  titles = (
    [fact[0] for fact in facts if isinstance(fact, list) and fact]
    if isinstance(facts, list)
    else None
  )
  wiki = "evidences" in record or record.get("type") in (
    "compositional",
    "inference",
    "bridge_comparison",
  )
  return {
    "id": id_field(record, "_id" if "_id" in record else "id", where),
    "question": string_field(record, "question", where),
    "data_source": "2wikimultihopqa" if wiki else "hotpotqa",
    "golden_answers": _answers(
      [record["answer"], *_list(record.get("answer_aliases"))], "answer", where
    ),
    "type": _text(record.get("type")),
    "supporting_titles": _titles(titles),
  }


def _musique(record: Record, where: str) -> Record | None:
  if record.get("answerable") is False:
    return None  # MuSiQue-Full pairs each question with one that its paragraphs do not answer
  paragraphs = [
    p for p in _list(record.get("paragraphs")) if isinstance(p, dict) and p.get("is_supporting")
  ]
  return {
    "id": id_field(record, "id", where),
    "question": string_field(record, "question", where),
    "golden_answers": _answers(
      [record.get("answer"), *_list(record.get("answer_aliases"))], "answer", where
    ),
    "data_source": "musique",
    "supporting_titles": _titles([p.get("title") for p in paragraphs]),
  }


def _bamboogle(record: Record, where: str) -> Record:
  first = 2 if ", row" in where else 1 if ", line" in where else 0
  return {
    "id": f"bamboogle_{_number(where) - first}",
    "question": string_field(record, "Question", where),
    "golden_answers": _answers(record["Answer"], "Answer", where),
    "data_source": "bamboogle",
  }


# Format -> the fields that tell it; the first that fits counts.
_FIELDS = {
  "flashrag": {"question", "golden_answers"},
  "triviaqa": {"Question", "QuestionId"},
  "popqa": {"question", "possible_answers"},
  "musique": {"question", "paragraphs", "question_decomposition"},
  "hotpotqa": {"question", "supporting_facts"},
  "hotpotqa_test": {"_id", "question", "context"},
  "bamboogle": {"Question", "Answer"},
  "nq_open": {"question", "answer"},
  "dpr": set(_DPR[1:]),
}
_READERS = {
  "flashrag": _flashrag,
  "triviaqa": _triviaqa,
  "popqa": _popqa,
  "musique": _musique,
  "hotpotqa": _hotpotqa,
  "hotpotqa_test": _hotpotqa,
  "bamboogle": _bamboogle,
  "nq_open": _nq_open,
  "dpr": _dpr,
}


def _answers(value, field: str, where: str) -> list[str]:
  return list(readers.answers_of(value, field, where))


def _titles(value) -> list[str] | None:
  return (
    list(dict.fromkeys(title for title in _list(value) if isinstance(title, str) and title)) or None
  )


def _number(where: str) -> int:
  """The line, row or entry that ends `where`."""
  return int(re.search(r"\d+$", where)[0])


def _text(value) -> str | None:
  return value if isinstance(value, str) and value else None


def _list(value) -> list:
  return value if isinstance(value, list) else []
