"""Rewards of a finished rollout: exact match, token F1, and an option for keeping the format.

Text is normalised as in SQuAD's evaluation (arXiv 1606.05250): lower case, ASCII punctuation
removed, the articles a, an, the removed, white space collapsed. Other punctuation and accents stay:
figures then compare with published ones.
"""

import collections
from collections.abc import Callable, Sequence
import re
import string

from stratified.types import Trajectory

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# a closing tag and the nearest opening before it
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def normalize_answer(text: str) -> str:
  """Lower case, no ASCII punctuation, no articles, single spaces."""
  return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
  """1.0 if the normalised prediction equals any normalised golden answer, else 0.0; None (no
  answer) is 0.0.

  Raises TypeError where `golden_answers` is one string: its letters would count as answers.
  """
  _check_golden(golden_answers)
  if prediction is None:
    return 0.0
  normalized = normalize_answer(prediction)
  return float(any(normalized == normalize_answer(golden) for golden in golden_answers))


def f1(prediction: str | None, golden_answers: Sequence[str]) -> float:
  """The largest token F1 over the golden answers, in [0, 1]; None (no answer) is 0.0.

  F1 = 2 c / (p + g), with c the words in common (as multisets) of p predicted and g golden words.
  Where either side normalises to nothing it is 1.0 if both do, else 0.0. Raises TypeError as
  `exact_match` does.
  """
  _check_golden(golden_answers)
  if prediction is None:
    return 0.0
  predicted = normalize_answer(prediction).split()
  return max(
    (_f1(predicted, normalize_answer(golden).split()) for golden in golden_answers), default=0.0
  )


def _f1(predicted: list[str], golden: list[str]) -> float:
  if not predicted or not golden:
    return float(predicted == golden)
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


def well_formed(trajectory: Trajectory) -> bool:
  """Whether the rollout ended with an answer that is not empty and every turn was a search or an
  answer."""
  return trajectory.stop == "answer" and bool(trajectory.answer) and trajectory.num_invalid == 0


def score(
  trajectory: Trajectory,
  *,
  metric: Callable[[str | None, Sequence[str]], float] = exact_match,
  format_reward: float = 0.0,
) -> float:
  """The reward of a rollout: max(metric, format_reward if well formed else 0).

  metric: `exact_match` or `f1`. format_reward: what a wrong answer in the right format earns
  (ReSearch, arXiv 2503.19470, uses 0.1 with F1); 0 rewards the answer alone. Raises ValueError for
  a rollout lost to a fault: it is masked, never scored.
  """
  if trajectory.fault is not None:
    raise ValueError(
      f"rollout {trajectory.sample} of question {trajectory.question.id!r} was lost to a "
      f"fault ({trajectory.fault}); mask it, it has no reward"
    )
  reward = metric(trajectory.answer, trajectory.question.golden_answers)
  return max(reward, format_reward if well_formed(trajectory) else 0.0)
