"""Rewards of a finished rollout: exact match, token F1, format, and sums of such parts.

`make("exact_match + 0.1*format - 0.1*no_answer")` gives a Reward: a total and its named parts.

Text is normalised as in SQuAD's evaluation (arXiv 1606.05250): lower case, ASCII punctuation
removed, the articles a, an, the removed, white space collapsed. Other punctuation and accents stay:
figures then compare with published ones.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import numbers
import re
import string

from stratified import made_up, outside
from stratified.config import setting, Settings
from stratified.types import Trajectory

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


def well_formed(trajectory: Trajectory) -> bool:
  """Whether the rollout gave an answer, not an empty one, and no turn was invalid."""
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
    raise ValueError(_lost(trajectory))
  reward = metric(trajectory.answer, trajectory.question.golden_answers)
  return max(reward, format_reward if well_formed(trajectory) else 0.0)


def _lost(trajectory: Trajectory) -> str:
  return (
    f"rollout {trajectory.sample} of question {trajectory.question.id!r} was lost to a "
    f"fault ({trajectory.fault}); mask it, it has no reward"
  )


def _of_answer(metric) -> Callable[[Trajectory], float]:
  return lambda t: metric(t.answer, t.question.golden_answers)


# What a reward may be made of: name -> a function of a trajectory that was not lost to a fault.
PARTS: dict[str, Callable[[Trajectory], float]] = {
  "exact_match": _of_answer(exact_match),
  "f1": _of_answer(f1),
  "format": lambda t: float(well_formed(t)),  # an answer, and no invalid turn
  "no_answer": lambda t: float(t.answer is None),
  "invalid": lambda t: float(t.num_invalid),  # turns that neither call nor answer
  "calls": lambda t: float(t.num_calls()),
  # the metric, or 0.1 where it is less and the format was kept (arXiv 2503.19470 with F1)
  "exact_match_or_format": lambda t: score(t, format_reward=0.1),
  "f1_or_format": lambda t: score(t, metric=f1, format_reward=0.1),
}

_TERM = re.compile(r"\s*([+-]?)\s*(?:(\d+(?:\.\d+)?|\.\d+)\s*\*\s*)?([A-Za-z_][\w.]*(?::\w+)?)\s*")
_TAKEN = ("mean", "exact_match")
LARGEST = 1e6  # size of a weight and of a part: float32 holds squares of their sums


@dataclasses.dataclass(frozen=True)
class RewardSettings(Settings):
  """What a rollout is worth."""

  SECTION = "reward"
  name: str = setting(
    "exact_match",
    "exact_match, f1, format, ..., module:function, or a weighted sum: exact_match + 0.1*format",
    affects=["training"],
  )


@dataclasses.dataclass(frozen=True)
class Score:
  """What one rollout is worth: total = sum of weight x part."""

  total: float
  parts: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Reward:
  """total = sum over terms of weight x function(trajectory); terms are (weight, part, function)."""

  terms: tuple[tuple[float, str, Callable[[Trajectory], float]], ...]

  def __call__(self, trajectory: Trajectory) -> Score:
    """Scores a rollout.

    Raises ValueError for one lost to a fault, which is masked and never scored, and for a function
    that returns no finite number, naming it and the rollout.
    """
    if trajectory.fault is not None:
      raise ValueError(_lost(trajectory))
    parts = {}
    for _, name, function in self.terms:
      parts[name] = value = function(trajectory)
      if (wrong := _no_number(value)) is not None:
        raise ValueError(
          f"the reward {name!r} of rollout {trajectory.sample} of question "
          f"{trajectory.question.id!r} is {str(value)[:80]}: {wrong}"
        )
    parts = {name: float(value) for name, value in parts.items()}
    return Score(sum(weight * parts[name] for weight, name, _ in self.terms), parts)


def make(name: str) -> Reward:
  """Makes the reward that a configuration names.

  name: one of PARTS; "module:function", a function of your own from a Trajectory to a number, in
    the working directory or on the Python path; or a sum of such with weights,
    "exact_match + 0.5*my_module:brevity - 0.1*no_answer". A part of your own is called by its
    function's name.

  Raises ValueError, one sentence, for what is none, or returns no finite number when it is tried.
  """
  terms, at = [], 0
  while at < len(name) or not terms:
    match = _TERM.match(name, at)
    if not match or (terms and not match[1]):
      raise ValueError(
        f"reward.name is {name!r}; it must be a sum of parts with weights, as in 'exact_match + "
        f"0.1*format', of {', '.join(PARTS)} or your own as module:function"
      )
    sign, weight, part = match.groups()
    if float(weight or 1) > LARGEST:
      raise ValueError(
        f"reward.name is {name[:80]!r}, which gives {part!r} the weight {float(weight):g}; it must "
        f"be at most {LARGEST:g}"
      )
    label, function = _part(part, name)
    terms.append((float(weight or 1) * (-1 if sign == "-" else 1), label, function))
    at = match.end()
  labels = [label for _, label, _ in terms]
  twice = [label for label in labels if labels.count(label) > 1]
  if twice:
    raise ValueError(f"reward.name is {name!r}, which names {twice[0]!r} twice; give it one weight")
  return Reward(tuple(terms))


def _part(part: str, name: str) -> tuple[str, Callable[[Trajectory], float]]:
  if ":" not in part:
    if part not in PARTS:
      raise ValueError(
        f"reward.name is {name!r}, and {part!r} is no reward; choose from {', '.join(PARTS)}, or "
        "your own as module:function"
      )
    return part, PARTS[part]
  function = outside.function("reward.name", part, "a Trajectory")
  for rollout in made_up.rollouts():
    outside.trial("reward.name", part, functools.partial(function, rollout), _no_number)
  label = part.partition(":")[2]
  if label in (*_TAKEN, *PARTS):
    raise ValueError(
      f"reward.name is {name!r}, and a part called {label!r} exists; call your function otherwise"
    )
  return label, function


def _no_number(value) -> str | None:
  if not isinstance(value, numbers.Real) and not hasattr(value, "dtype"):
    return "a reward is a number"
  try:
    value = float(value)
  except OverflowError:
    value = math.inf
  except (TypeError, ValueError):
    return "a reward is one number"
  if not math.isfinite(value):
    return "a reward is a finite number"
  return None if abs(value) <= LARGEST else f"a reward is at most {LARGEST:g} in size"


def parts_row(scores: Sequence[Score]) -> dict[str, float]:
  """`reward/PART` of each part: its mean over the rollouts."""
  names = list(scores[0].parts) if scores else []
  return {f"reward/{name}": sum(s.parts[name] for s in scores) / len(scores) for name in names}
