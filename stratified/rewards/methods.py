"""Computes the rewards of published methods: pure functions, and what they look at in a rollout.

    search_r1_format   exact match and the structure of the rollout (Search-R1's version 0.3)
    research           F1 of the boxed answer where the format holds (arXiv 2503.19470)
    autorefine         F1, or a little where the refined text holds the answer (2505.11277)
    stepsearch         F1, and how well the queries met reference sub-queries (2505.15107)

A rollout's own text is that of its turns, so nothing that was retrieved or prompted is ever read.
"""

from collections.abc import Sequence
import re

from stratified.rewards.matching import f1, normalize_answer
from stratified.types import Trajectory, Turn

# Answers that are right or wrong as a whole, as in the F1 of HotpotQA, which AutoRefine uses.
CHOICES = ("yes", "no", "noanswer")
_INSIDE = r"((?:(?!</?(?:think|search|information|result|answer)>).)*)"
_THOUGHT = rf"\s*<think>{_INSIDE}</think>\s*"
_CALL = re.compile(rf"{_THOUGHT}<search>{_INSIDE}</search>\s*", re.DOTALL)
_ANSWER = re.compile(rf"{_THOUGHT}<answer>{_INSIDE}</answer>\s*", re.DOTALL)


def own_text(trajectory: Trajectory) -> str:
  """All that the policy wrote, a line break between turns."""
  return "\n".join(turn.text for turn in trajectory.turns)


def written(trajectory: Trajectory, tag: str) -> str:
  """What the policy wrote between `<tag>` and `</tag>`, all of it, with spaces between."""
  # in time linear in the text, whatever a policy leaves open
  *closed, _ = own_text(trajectory).split(f"</{tag}>")
  parts = [text.partition(f"<{tag}>") for text in closed]
  return " ".join(inside for _, opened, inside in parts if opened)


###  Search-R1, version 0.3  ###


def search_r1_format(right: bool, valid: bool, answered: bool) -> float:
  """1 or 0.8 for a right answer, 0.2, 0.1 or 0 for another; the greater in a valid structure.

  right: exact match. valid: see `structured`. answered: whether there is an answer.
  """
  if right:
    return 1.0 if valid else 0.8
  return 0.2 if valid else 0.1 if answered else 0.0


def structured(turns: Sequence[Turn]) -> bool:
  """Whether the turns are think, search, think, search, ..., think, answer, and nothing else."""
  if not turns or turns[-1].action != "answer" or any(t.action != "call" for t in turns[:-1]):
    return False
  return all(_CALL.fullmatch(turn.text) for turn in turns[:-1]) and bool(
    _ANSWER.fullmatch(turns[-1].text)
  )


###  ReSearch  ###


def research(answer_f1: float, in_format: bool) -> float:
  """0 where the format is broken, else F1, or 0.1 where that is 0."""
  return (answer_f1 or 0.1) if in_format else 0.0


def in_research_format(trajectory: Trajectory) -> bool:
  """Whether thoughts are closed, searches in order, one answer given, in a box, nothing cut short.

  The protocol reads the box: an answer without one is None. Results are the environment's to write.
  """
  text, turns = own_text(trajectory), trajectory.turns
  return (
    trajectory.stop == "answer"
    and trajectory.answer is not None
    and all(turn.action == "call" for turn in turns[:-1])
    and text.count("<think>") == text.count("</think>")
    and text.count("<answer>") == text.count("</answer>") == 1
    and all(turn.text.count("<search>") == turn.text.count("</search>") == 1 for turn in turns[:-1])
    and "<search>" not in turns[-1].text
    and "<result>" not in text
    and "</result>" not in text
  )


###  AutoRefine  ###


def autorefine(answer: str | None, golden_answers: Sequence[str], refined: str) -> float:
  """F1 where it is above 0, else 0.1 where a golden answer occurs in the refined text, else 0.

  A golden yes or no has to be met exactly. No answer is worth 0, whatever was refined.
  """
  if answer is None:
    return 0.0
  return choice_f1(answer, golden_answers) or 0.1 * occurs(golden_answers, refined)


def choice_f1(answer: str | None, golden_answers: Sequence[str]) -> float:
  """F1 in which an answer that is yes or no, or such a golden answer, must be equal (HotpotQA)."""
  given = normalize_answer(answer or "")
  alike = [g for g in golden_answers if normalize_answer(g) == given]
  apart = [g for g in golden_answers if normalize_answer(g) not in CHOICES]
  return f1(answer, alike if given in CHOICES else [*alike, *apart])


def occurs(golden_answers: Sequence[str], text: str) -> bool:
  """Whether a golden answer stands in the text, both normalised, as a part of it.

  One of which nothing is left does not.
  """
  found = normalize_answer(text)
  return any(golden and golden in found for golden in map(normalize_answer, golden_answers))


###  StepSearch  ###


def stepsearch(answer_f1: float, covered: float, complete: bool, weight: float = 0.618) -> float:
  """F1 + weight x covered; -1 where there is no answer, or text follows it.

  covered: see `sub_query_f1`. complete: see `ends_with_answer`.
  """
  return answer_f1 + weight * covered if complete else -1.0


def sub_query_f1(queries: Sequence[str], groups: Sequence[Sequence[str]]) -> float:
  """(1/M) sum over M groups of the best F1 of any query with any of the group's references.

  groups: of each sub-question its reference queries; 0.0 where there are none.
  """
  best = [max((f1(query, group) for query in queries), default=0.0) for group in groups]
  return sum(best) / len(best) if best else 0.0


def ends_with_answer(trajectory: Trajectory) -> bool:
  """Whether the rollout gave an answer and wrote nothing after it."""
  rest = own_text(trajectory).rpartition("</answer>")[2]
  return trajectory.answer is not None and not rest.strip()
