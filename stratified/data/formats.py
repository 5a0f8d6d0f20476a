"""Reads the question sets' own files into one normal form, which readers.py reads.

    {"id", "question", "golden_answers", "data_source", "split"}
    and where the source has them: "hops", "type", "orig_id", "supporting_titles"

It reads FlashRAG's JSON Lines and verl's parquet (any set), NQ-open (JSON Lines), DPR's tables,
TriviaQA (JSON), PopQA (tsv), HotpotQA and 2WikiMultiHopQA (JSON, Hugging Face's parquet), MuSiQue
(JSON Lines) and Bamboogle (csv or JSON).
The content tells the format, never the name. Text is kept as it is but for white space around it.
"""

from collections.abc import Iterator
import dataclasses
import pathlib
import re
from typing import NamedTuple

from stratified import files
from stratified.data import readers, records
from stratified.data.records import Record
from stratified.retrieval.corpus import id_field, string_field


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
  for where, record in records.read(path):
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
  if set(record) != set(records.DPR):
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
  "dpr": set(records.DPR[1:]),
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
