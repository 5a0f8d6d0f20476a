"""Reads questions from files of two forms, and says in which order training takes them.

FlashRAG's JSON Lines, plain or .gz, one question a line:

    {"id": "dev_0", "question": "...", "golden_answers": ["...", ...]}

verl's parquet (Search-R1's training files), one question a row:

    data_source, prompt (chat messages), reward_model.ground_truth.target (answers),
    extra_info (index, split, question)
"""

import ast
from collections.abc import Iterator, Sequence
import dataclasses
import json
import math
import os
import pathlib

import numpy as np

from stratified.retrieval.corpus import id_field, read_jsonl, string_field
from stratified.types import Question

QUESTION_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
# Hops that hold for every question of a set, by how the set was made.
_HOPS_OF_SET = {"popqa": 1, "hotpotqa": 2, "bamboogle": 2}
_HOPS_OF_2WIKI_TYPE = {"comparison": 2, "compositional": 2, "inference": 2, "bridge_comparison": 4}


def data_root() -> pathlib.Path:
  """The folder of real data that the environment variable STRATIFIED_DATA names.

  Raises FileNotFoundError where it is not set or the folder lacks `corpus.jsonl.gz` or
  `questions/`.
  """
  value = os.environ.get("STRATIFIED_DATA")
  wanted = "a folder with corpus.jsonl.gz and questions/"
  if not value:
    raise FileNotFoundError(f"STRATIFIED_DATA is not set; set it to {wanted}.")
  root = pathlib.Path(value)
  for name in ("corpus.jsonl.gz", "questions"):
    if not (root / name).exists():
      raise FileNotFoundError(
        f"STRATIFIED_DATA is {value!r}, which lacks {name}; it must name {wanted}."
      )
  return root


def read_questions(
  path: str | os.PathLike, *, split: str | None = None, source: str | None = None
) -> list[Question]:
  """Reads the questions of a file, or of a folder's .jsonl, .jsonl.gz and .parquet files by name.

  A Question's `source` is the set's name: the argument, else the record's `data_source` (without
  verl's prefix `searchR1_`), else the file's name (its folder's for train.jsonl, dev.jsonl and
  test.jsonl). `hops` is the record's own `hops` where it has one, else what `hops_of` knows. Ids
  that come again under another source get the source in front, all of them, so that an id names one
  question.

  Text of a verl row: `extra_info.question`, else `question`, else the last user message of
  `prompt`, of which only what follows the last "Question:" counts where it holds one.

  Args:
    path: the file or folder.
    split: keep only the records whose `split` (or `extra_info.split`) is this: "train", "dev", ...
    source: the name of the set, where the file does not tell.

  Raises:
    FileNotFoundError: nothing there to read.
    ValueError: a bad record (the message names file, line or row, and field), a split that no
      record has, or an id that comes twice.
  """
  questions = with_splits(path, source=source)
  if split is None:
    return [question for question, _ in questions]
  splits = {its_split for _, its_split in questions}
  if split not in splits:
    found = ", ".join(sorted(name for name in splits if name)) or "none"
    raise ValueError(
      f"{os.fspath(path)}: no record has split {split!r}; splits there: {found}. Name one of them, "
      "or leave it empty (--config.data.split= or --config.data.held_out_split=) to take every "
      "record."
    )
  return [question for question, its_split in questions if its_split == split]


def with_splits(
  path: str | os.PathLike, *, source: str | None = None
) -> list[tuple[Question, str | None]]:
  """Reads as `read_questions` does: each question with its record's split, None where it has none.

  Ids are the same whichever split is chosen later.
  """
  records = [(file, *numbered) for file in _files(pathlib.Path(path)) for numbered in rows_of(file)]
  questions = [
    _question(record, where, source or _source(record, file)) for file, where, record in records
  ]
  questions = _with_unique_ids(questions, [where for _, where, _ in records])
  return list(zip(questions, [_split(record) for _, _, record in records], strict=True))


def questions_at(
  questions: Sequence[Question], *, seed: int, step: int, count: int
) -> list[Question]:
  """Takes the `count` questions of a training step: a pure function of its arguments.

  Steps walk through shuffled epochs, each an order of its own, so within an epoch no question comes
  twice and none is left out. With at least 3 * count questions no step holds a question twice
  either, not even one that crosses from an epoch into the next.
  """
  if not questions or count < 1 or step < 0:
    raise ValueError(
      f"questions_at got {len(questions)} questions, step {step} and count {count}; it needs at "
      "least one "
      "question, step >= 0 and count >= 1."
    )
  size, first, last = len(questions), step * count, (step + 1) * count
  chosen = []
  for epoch in range(first // size, (last - 1) // size + 1):
    start = epoch * size
    chosen.extend(
      _epoch_order(size, seed, epoch, count)[max(first - start, 0) : last - start].tolist()
    )
  return [questions[index] for index in chosen]


def hops_of(source: str, record: dict) -> int | None:
  """The number of facts that a question of a known set needs; None where nobody wrote it down.

  MuSiQue: the digit of its type or original id (`3hop1__...`). 2WikiMultiHopQA: 4 for
  bridge-comparison, 2 for its other types. HotpotQA and Bamboogle: 2, PopQA: 1, by construction. NQ
  and TriviaQA are mostly of one hop, but not annotated: None.
  """
  metadata = record.get("metadata") if isinstance(record.get("metadata"), dict) else {}
  type_ = record.get("type") or metadata.get("type")
  if source == "musique":
    marks = [
      text for text in (type_, record.get("orig_id"), record.get("id")) if isinstance(text, str)
    ]
    return next((int(text[0]) for text in marks if text[1:4] == "hop" and text[0] in "234"), None)
  return _HOPS_OF_2WIKI_TYPE.get(type_) if source == "2wikimultihopqa" else _HOPS_OF_SET.get(source)


def _epoch_order(size: int, seed: int, epoch: int, count: int) -> np.ndarray:
  order = np.random.default_rng((seed, epoch)).permutation(size)
  # so many of the epoch before share a step with the first of this one
  carried = epoch * size % count
  if carried:
    # They wait until that step is over. The last `count`, which the next epoch looks at, stay put.
    before = np.random.default_rng((seed, epoch - 1)).permutation(size)[-carried:]
    waits = np.isin(order[: 2 * count], before)
    order[: 2 * count] = np.concatenate([order[: 2 * count][~waits], order[: 2 * count][waits]])
  return order


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  if path.is_dir():
    files = [file for file in sorted(path.iterdir()) if file.name.endswith(_SUFFIXES)]
    if not files:
      raise FileNotFoundError(f"{path}: no file in it ends with {', '.join(_SUFFIXES)}.")
    return files
  if not path.exists():
    raise FileNotFoundError(f"{path}: there is no such file or folder of questions.")
  if not path.name.endswith(_SUFFIXES):
    raise ValueError(f"{path}: questions are read from files that end with {', '.join(_SUFFIXES)}.")
  return [path]


def rows_of(file: pathlib.Path) -> Iterator[tuple[str, dict]]:
  if not file.name.endswith(".parquet"):
    yield from ((f"{file}, line {line}", record) for line, record in read_jsonl(file))
    return
  import pyarrow.parquet  # only parquet files need it

  try:
    rows = (
      row for batch in pyarrow.parquet.ParquetFile(file).iter_batches() for row in batch.to_pylist()
    )
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows))
  except pyarrow.ArrowException as error:
    raise ValueError(f"{file}: not a readable parquet file ({error}); get it again.") from error


def _question(record: dict, where: str, source: str) -> Question:
  verl = record.get("reward_model") is not None
  text = _verl_text(record, where) if verl else string_field(record, "question", where)
  if not verl and "golden_answers" not in record:
    raise ValueError(
      f'{where}: it has no field "golden_answers" (its fields: {", ".join(map(str, record))}); '
      "prepare_data.py reads the question sets' own formats and writes files that can be read here."
    )
  answers, field = record.get("golden_answers"), "golden_answers"
  if verl:
    answers, field = _verl_target(record), "reward_model.ground_truth.target"
  return Question(
    _id(record, where, verl),
    text.strip(),
    answers_of(answers, field, where),
    source,
    _hops(record, where, source),
  )


def _verl_target(record: dict):
  truth = (
    record["reward_model"].get("ground_truth") if isinstance(record["reward_model"], dict) else None
  )
  return truth.get("target") if isinstance(truth, dict) else truth


def answers_of(value, field: str, where: str) -> tuple[str, ...]:
  """The answers that a record's field holds, at least one: the one rule of every reader.

  value: a text, a number, or a list of them; also the text of such a list, as in `["a", "b"]` or
    `['a', 'b']`. A number counts as its digits. None and blank texts in a list are no answers.

  Raises ValueError, naming `where` and field, for anything else, and where no answer is left.
  """
  listed = _listed(value) if isinstance(value, str) else value
  given = listed if isinstance(listed, list | tuple) else [listed]
  answers = []
  for answer in given:
    if isinstance(answer, float) and answer.is_integer():
      answer = int(answer)  # tables turn whole numbers with gaps into floats
    whole = isinstance(answer, int) and not isinstance(answer, bool)  # of any size
    if whole or isinstance(answer, float) and math.isfinite(answer):
      answer = str(answer)
    if answer is None or isinstance(answer, str) and not answer.strip():
      continue
    if not isinstance(answer, str):
      raise ValueError(
        f'{where}, field "{field}": it holds {str(answer)[:60]!r}; an answer must be text or a '
        "number"
      )
    answers.append(string_field({field: answer}, field, where))
  if not answers:
    raise ValueError(
      f'{where}, field "{field}": it is {value!r}; it must be a list of at least one answer.'
    )
  return tuple(answers)


def _listed(text: str):
  """The list that a text spells, in JSON or in Python; the text itself where it spells none."""
  stripped = text.strip()
  if not (stripped.startswith("[") and stripped.endswith("]")):
    return text
  for read in (json.loads, ast.literal_eval):
    try:
      found = read(stripped)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
      continue
    if isinstance(found, list):
      return found
  return text


def _verl_text(record: dict, where: str) -> str:
  extra = _extra_info(record)
  if extra.get("question") is not None:
    return string_field(extra, "question", f"{where}, extra_info")
  if record.get("question") is not None:
    return string_field(record, "question", where)
  message = _last_user_message(record.get("prompt"))
  return string_field({"prompt": message and message.rpartition("Question:")[2]}, "prompt", where)


def _last_user_message(prompt) -> str | None:
  if isinstance(prompt, str) and prompt.lstrip().startswith("["):
    try:
      prompt = json.loads(prompt)
    except (ValueError, RecursionError):
      return prompt  # plain text that happens to begin with a bracket
  if not isinstance(prompt, list):
    return prompt if isinstance(prompt, str) else None
  messages = [
    message for message in prompt if isinstance(message, dict) and message.get("role") == "user"
  ]
  content = messages[-1].get("content") if messages else None
  return content if isinstance(content, str) else None


def _id(record: dict, where: str, verl: bool) -> str:
  if not verl or record.get("id") is not None:
    return id_field(record, "id", where)
  extra = _extra_info(record)
  # Search-R1 and verl number the questions of a split.
  return f"{extra.get('split') or 'row'}_{id_field(extra, 'index', f'{where}, extra_info')}"


def _hops(record: dict, where: str, source: str) -> int | None:
  value = record.get("hops")
  if value is None:
    return hops_of(source, record)
  if not isinstance(value, int) or isinstance(value, bool) or value < 0:
    raise ValueError(
      f'{where}, field "hops": it is {value!r}; it must be a whole number of at least 0.'
    )
  return value


def _extra_info(record: dict) -> dict:
  return record["extra_info"] if isinstance(record.get("extra_info"), dict) else {}


def _split(record: dict) -> str | None:
  return record.get("split") or _extra_info(record).get("split")


def _source(record: dict, file: pathlib.Path) -> str:
  if isinstance(record.get("data_source"), str):
    return record["data_source"].removeprefix("searchR1_")
  stem = file.name.split(".")[0]
  return file.absolute().parent.name if stem in ("train", "dev", "test") else stem


def _with_unique_ids(questions: list[Question], places: list[str]) -> list[Question]:
  if len({question.id for question in questions}) == len(questions):
    return questions
  if len({question.source for question in questions}) > 1:
    questions = [
      dataclasses.replace(question, id=f"{question.source}/{question.id}") for question in questions
    ]
  place_of = {}
  for question, place in zip(questions, places, strict=True):
    if place_of.setdefault(question.id, place) != place:
      raise ValueError(
        f'{place}, field "id": {question.id!r} is already the id of {place_of[question.id]}; '
        "ids must be unique, they say which rollouts belong together."
      )
  return questions
