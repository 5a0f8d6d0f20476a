"""Compares answers: exact match and token F1 after SQuAD's normalisation (arXiv 1606.05250).

Text is normalised: lower case, ASCII punctuation removed, the articles a, an, the removed, white
space collapsed. Other punctuation and accents stay: figures then compare with published ones.
"""

import collections
from collections.abc import Sequence
import re
import string

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# a closing tag and the nearest opening before it
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def normalize_answer(text: str) -> str:
  """Lower case, no ASCII punctuation, no articles, single spaces."""
  return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
  """1.0 if the normalised prediction equals a normalised golden answer, else 0.0 (no answer too).

  A golden answer that normalises to nothing ("A", "---") is matched by its own spelling alone.
  Raises TypeError where `golden_answers` is one string: its letters would count as answers.
  """
  _check_golden(golden_answers)
  if prediction is None:
    return 0.0
  return float(any(_equal(prediction, golden) for golden in golden_answers))


def _equal(prediction: str, golden: str) -> bool:
  wanted = normalize_answer(golden)
  if wanted:
    return normalize_answer(prediction) == wanted
  # Nothing is left to compare: else an empty answer, or "the", would be right.
  return bool(prediction.strip()) and prediction.strip() == golden.strip()


def f1(prediction: str | None, golden_answers: Sequence[str]) -> float:
  """The largest token F1 over the golden answers, in [0, 1]; None (no answer) is 0.0.

  F1 = 2 c / (p + g), with c the words in common (as multisets) of p predicted and g golden words.
  Where either side normalises to nothing it is `exact_match`. Raises TypeError as that does.
  """
  _check_golden(golden_answers)
  if prediction is None:
    return 0.0
  return max((_f1(prediction, golden) for golden in golden_answers), default=0.0)


def _f1(prediction: str, answer: str) -> float:
  predicted, golden = normalize_answer(prediction).split(), normalize_answer(answer).split()
  if not predicted or not golden:
    return float(_equal(prediction, answer))
  common = sum((collections.Counter(predicted) & collections.Counter(golden)).values())
  return 2 * common / (len(predicted) + len(golden))


def _check_golden(golden_answers):
  if isinstance(golden_answers, str):
    raise TypeError(
      f"golden_answers is the single string {golden_answers!r}; give a list, [{golden_answers!r}]"
    )


def extract_answer(policy_text: str) -> str | None:
  """The content of the last complete `<answer>...</answer>`, stripped; None where there is none.

  Give it the policy's own text only: prompts and retrieved passages may hold answer tags too. A tag
  opened twice counts from its last opening.
  """
  answers = _ANSWER.findall(policy_text)
  return answers[-1].strip() if answers else None


def holds(text: str, golden_answers: Sequence[str]) -> bool:
  """Whether a golden answer stands in the text as whole words, both normalised."""
  words = f" {normalize_answer(text)} "
  return any(f" {g} " in words for g in map(normalize_answer, golden_answers) if g)
