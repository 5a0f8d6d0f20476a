"""Compares two evaluations on the questions that both answered."""

from collections.abc import Iterable, Mapping, Sequence

from stratified.evaluation import answers, intervals, tables
from stratified.evaluation import score as scoring
from stratified.evaluation.answers import Row
from stratified.types import Question


def check_shared(
  asked: Mapping[str, Sequence[Question]], others: Mapping[str, Mapping[str, answers.Rows]]
) -> None:
  """Refuses, before any work, to compare with an evaluation of other questions.

  asked: {set: questions}. others: {folder: {set: rollouts}}.
  """
  ours = {(name, question.id) for name, questions in asked.items() for question in questions}
  for folder, theirs in others.items():
    if not ours & {(name, id) for name, rows in theirs.items() for id, _ in rows}:
      raise ValueError(
        f"--compare={folder} holds no answer to any of these questions; evaluate the same --sets "
        "there"
      )


def differences(
  ours: Mapping[str, Sequence[Sequence[Row]]], theirs: Mapping[str, answers.Rows]
) -> dict[str, dict]:
  """Tests exact match paired by question: {set: test}, and "average" over these sets.

  Raises ValueError where the two share no question, or one id names two questions.
  """
  first, second = {}, {}
  for name in ours.keys() & theirs.keys():
    other = _by_id(theirs[name].values())
    mine = _by_id(row for group in ours[name] for row in group)
    shared = [id for id in mine if id in other]
    for id in shared:
      if mine[id][0]["question"] != other[id][0]["question"]:
        raise ValueError(
          f"question {id!r} of {name} is not the same in both evaluations: they can't be compared"
        )
    if shared:
      first[name] = scoring.by_question([mine[id] for id in shared], "exact_match")
      second[name] = scoring.by_question([other[id] for id in shared], "exact_match")
  if not first:
    raise ValueError(
      "the two evaluations have no answered question in common: there is nothing to compare"
    )
  found = {
    name: intervals.paired_difference({name: first[name]}, {name: second[name]})
    | {"count": len(first[name])}
    for name in tables.ordered(list(first))
  }
  if len(found) > 1:
    found["average"] = intervals.paired_difference(first, second) | {
      "count": sum(map(len, first.values()))
    }
  return found


def _by_id(rows: Iterable[Row]) -> dict[str, list[Row]]:
  """The rollouts that were not lost, by question."""
  grouped = {}
  for one in rows:
    if one["fault"] is None:
      grouped.setdefault(one["id"], []).append(one)
  return grouped
