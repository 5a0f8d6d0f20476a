"""Finds out which questions a corpus can answer: whose golden answer stands in one of its passages.

A corpus that lacks the answers of a tenth of the questions moves every method's score by more than
methods differ, so scores are also reported for covered questions apart. "Stands in" is as whole
words after exact match's normalisation, title and text together; it says that an answer can be
found, not that the passage gives it. Of a golden yes or no it says nothing.

    coverage.jsonl    {"set", "id", "covered", "passage", "choice"}, a question a line
"""

from collections.abc import Iterable, Mapping, Sequence
import os
import pathlib
from typing import Any

from stratified import files
from stratified.retrieval.corpus import Passage
from stratified.rewards import normalize_answer
from stratified.rewards.methods import CHOICES
from stratified.types import Question

Row = dict[str, Any]


class Audit:
  """Looks for the golden answers of questions in one passage after the other.

  Every word of a passage is looked up once among the first words of the answers that are still
  missing, so a corpus is read in one pass whatever the number of questions.
  """

  def __init__(self, questions: Sequence[Question]):
    self._questions = list(questions)
    self._found: list[str | None] = [None] * len(self._questions)
    # first word -> the answer's words -> the questions that it answers
    self._missing: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for at, question in enumerate(self._questions):
      for answer in question.golden_answers:
        if words := tuple(normalize_answer(answer).split()):
          self._missing.setdefault(words[0], {}).setdefault(words, []).append(at)

  def read(self, passage: Passage) -> None:
    words = normalize_answer(f"{passage.title}\n{passage.text}").split()
    for at, word in enumerate(words):
      answers = self._missing.get(word)
      if answers is None:
        continue
      for answer in [a for a in answers if tuple(words[at : at + len(a)]) == a]:
        for number in answers.pop(answer):
          self._found[number] = self._found[number] or passage.id
      if not answers:
        del self._missing[word]

  def rows(self) -> list[Row]:
    """A row for each question, in their order; `passage` is the first one that holds an answer."""
    return [
      {
        "set": question.source,
        "id": question.id,
        "covered": passage is not None,
        "passage": passage,
        "choice": all(normalize_answer(a) in CHOICES for a in question.golden_answers),
      }
      for question, passage in zip(self._questions, self._found)
    ]


def table(rows: Iterable[Row], order: Sequence[str] | None = None) -> str:
  """Writes shares of covered questions by set as markdown."""
  by_set: dict[str, list[Row]] = {}
  for row in rows:
    by_set.setdefault(row["set"], []).append(row)
  lines = ["| set | questions | covered | share x 100 | yes or no |", "|---" * 5 + "|"]
  for name in order or by_set:
    covered = sum(row["covered"] for row in by_set[name])
    count = len(by_set[name])
    choices = sum(row["choice"] for row in by_set[name])
    lines.append(f"| {name} | {count} | {covered} | {100 * covered / count:.1f} | {choices} |")
  return "\n".join(lines)


def read(path: str | os.PathLike) -> dict[str, bool]:
  """Reads {question id: covered}; ValueError or FileNotFoundError, one sentence, for no such."""
  if not pathlib.Path(path).exists():
    raise FileNotFoundError(
      f"--coverage={path} does not exist; make it with python experiments/audit_corpus.py"
    )
  rows, broken = files.read_rows(path)
  if broken or not rows or not all(isinstance(row.get("covered"), bool) for row in rows):
    raise ValueError(
      f"--coverage={path} is no file of experiments/audit_corpus.py; make it again with that"
    )
  return {row["id"]: row["covered"] for row in rows}


def check(known: Mapping[str, bool], asked: Mapping[str, Sequence[Question]], path) -> None:
  """Raises ValueError where a question that will be asked was never looked up."""
  for name, questions in asked.items():
    strange = [question.id for question in questions if question.id not in known]
    if strange:
      raise ValueError(
        f"--coverage={path} knows nothing of {len(strange)} questions of {name}, the first "
        f"{strange[0]!r}; audit the same files with experiments/audit_corpus.py"
      )


def covered(
  groups: Mapping[str, Sequence[Sequence[Row]]], known: Mapping[str, bool]
) -> dict[str, list[Sequence[Row]]]:
  """The rollouts of covered questions, by set; sets without one are left out."""
  kept = {
    name: [group for group in of if group and known.get(group[0]["id"])]
    for name, of in groups.items()
  }
  return {name: of for name, of in kept.items() if of}
