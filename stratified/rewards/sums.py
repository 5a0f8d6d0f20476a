"""Makes the reward that a config names: a part, or a sum of parts with weights.

`make("exact_match + 0.1*format - 0.1*no_answer")` gives a Reward: a total and its named parts.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import difflib
import functools
import math
import numbers
import re

from stratified import files, made_up, outside
from stratified.config import setting, Settings
from stratified.rewards import methods
from stratified.rewards.matching import exact_match, f1
from stratified.types import Trajectory


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
  "no_search": lambda t: float(t.num_searches == 0),
  # the metric, or 0.1 where it is less and the format was kept (arXiv 2503.19470 with F1)
  "exact_match_or_format": lambda t: score(t, format_reward=0.1),
  "f1_or_format": lambda t: score(t, metric=f1, format_reward=0.1),
  "search_r1_format": lambda t: methods.search_r1_format(
    bool(exact_match(t.answer, t.question.golden_answers)),
    methods.structured(t.turns),
    t.answer is not None,
  ),
  "research": lambda t: methods.research(
    f1(t.answer, t.question.golden_answers), methods.in_research_format(t)
  ),
  "autorefine": lambda t: methods.autorefine(
    t.answer, t.question.golden_answers, methods.written(t, "refine")
  ),
}

# Reference queries of a question's sub-questions, M groups of them: {question id: groups}.
SubQueries = Mapping[str, Sequence[Sequence[str]]]


def _stepsearch(sub_queries: SubQueries) -> Callable[[Trajectory], float]:
  return lambda t: methods.stepsearch(
    f1(t.answer, t.question.golden_answers),
    methods.sub_query_f1(
      [call.argument for call in t.calls if call.tool == "search"],
      sub_queries.get(t.question.id, ()),
    ),
    methods.ends_with_answer(t),
  )


# Those that also need the file of `reward.sub_queries`: name -> a function of what it holds.
OF_FILE: dict[str, Callable[[SubQueries], Callable[[Trajectory], float]]] = {
  "stepsearch": _stepsearch
}
NAMES = (*PARTS, *OF_FILE)

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
  sub_queries: str = setting(
    "",
    "stepsearch: a JSONL file, a question's id and its sub_queries, lists of like queries, a line",
    affects=["training"],
  )


def of(settings: RewardSettings) -> "Reward":
  """Makes the reward of the settings.

  Raises ValueError or OSError, one sentence, for what is none, or a file that can't be read.
  """
  path = settings.sub_queries
  return make(settings.name, read_sub_queries(path) if path else None)


def read_sub_queries(path: str) -> dict[str, list[list[str]]]:
  """Reads {question id: groups of reference queries} from lines of {"id", "sub_queries"}.

  Raises ValueError, naming the number of bad lines, where one is none.
  """
  rows, broken = files.read_rows(path)
  broken += sum(not _is_group_row(row) for row in rows)
  if broken or not rows:
    held = f"holds {broken} bad lines" if rows or broken else "holds no line"
    raise ValueError(
      f"reward.sub_queries={path!r} {held}; each must be a question, "
      '{"id": "...", "sub_queries": [["a query", "the same in other words"], ...]}'
    )
  return {row["id"]: row["sub_queries"] for row in rows}


def _is_group_row(row: Mapping) -> bool:
  groups = row.get("sub_queries")
  return (
    isinstance(row.get("id"), str)
    and isinstance(groups, list)
    and all(isinstance(g, list) and g and all(isinstance(q, str) for q in g) for g in groups)
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


def make(name: str, sub_queries: SubQueries | None = None) -> Reward:
  """Makes the reward that a configuration names.

  name: one of NAMES; "module:function", a function of your own from a Trajectory to a number, in
    the working directory or on the Python path; or a sum of such with weights,
    "exact_match + 0.5*my_module:brevity - 0.1*no_answer". A part of your own is called by its
    function's name.
  sub_queries: what those of OF_FILE need.

  Raises ValueError, one sentence, for what is none, or returns no finite number when it is tried.
  """
  terms, at = [], 0
  while at < len(name) or not terms:
    match = _TERM.match(name, at)
    if not match or (terms and not match[1]):
      raise ValueError(
        f"reward.name is {name!r}; it must be a sum of parts with weights, as in 'exact_match + "
        f"0.1*format', of {', '.join(NAMES)} or your own as module:function"
      )
    sign, weight, part = match.groups()
    if float(weight or 1) > LARGEST:
      raise ValueError(
        f"reward.name is {name[:80]!r}, which gives {part!r} the weight {float(weight):g}; it must "
        f"be at most {LARGEST:g}"
      )
    label, function = _part(part, name, sub_queries)
    terms.append((float(weight or 1) * (-1 if sign == "-" else 1), label, function))
    at = match.end()
  labels = [label for _, label, _ in terms]
  twice = [label for label in labels if labels.count(label) > 1]
  if twice:
    raise ValueError(f"reward.name is {name!r}, which names {twice[0]!r} twice; give it one weight")
  return Reward(tuple(terms))


def _part(
  part: str, name: str, sub_queries: SubQueries | None
) -> tuple[str, Callable[[Trajectory], float]]:
  if ":" not in part:
    return part, _own_part(part, name, sub_queries)
  function = outside.function("reward.name", part, "a Trajectory")
  for rollout in made_up.rollouts():
    outside.trial("reward.name", part, functools.partial(function, rollout), _no_number)
  label = part.partition(":")[2]
  if label in (*_TAKEN, *NAMES):
    raise ValueError(
      f"reward.name is {name!r}, and a part called {label!r} exists; call your function otherwise"
    )
  return label, function


def _own_part(part: str, name: str, sub_queries: SubQueries | None):
  if part in PARTS:
    return PARTS[part]
  if part not in OF_FILE:
    near = difflib.get_close_matches(part, NAMES, 1)
    raise ValueError(
      f"reward.name is {name!r}, and {part!r} is no reward; choose from {', '.join(NAMES)}, or "
      "your own as module:function" + (f"; did you mean {near[0]}?" if near else "")
    )
  if sub_queries is None:
    raise ValueError(
      f"reward.name is {name!r}, and {part!r} needs reference queries; name their file with "
      "--config.reward.sub_queries=PATH, or take f1"
    )
  return OF_FILE[part](sub_queries)


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
