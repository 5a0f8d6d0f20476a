"""Partitions: one question's trajectories in, one stratum id for each out; plain Python, no arrays.

`make` turns the name in a configuration into a `Partition`. Most (searches, calls, tools, outcome,
...) look at one trajectory alone; `product` crosses two. `random` shuffles another's ids within the
group: same sizes, no meaning. It is the control for "any partition would have helped".
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
from typing import NamedTuple

from stratified import made_up, outside
from stratified.config import setting, Settings
from stratified.types import Trajectory


class Partition(NamedTuple):
  """`assign(group, step=None)` gives one id in [0, num_strata) for each trajectory of the group.

  step: the training step, which only `random` reads; None is the one whose parameters sampled the
    group.
  """

  assign: Callable[..., list[int]]
  num_strata: int


def searches(trajectory: Trajectory) -> int:
  """The number of executed queries, refused and empty ones too: the one of arXiv 2510.06214."""
  return trajectory.num_searches


def calls(trajectory: Trajectory) -> int:
  """The number of executed calls of all tools."""
  return trajectory.num_calls()


def first_search(trajectory: Trajectory) -> int:
  """1 + the index of the first turn that executed a search, 0 if none did."""
  searched = (any(call.tool == "search" for call in turn.calls) for turn in trajectory.turns)
  return next((index for index, found in enumerate(searched, 1) if found), 0)


def first_call(trajectory: Trajectory) -> int:
  """1 + the index of the first turn that executed a call of any tool, 0 if none did."""
  return next((index for index, turn in enumerate(trajectory.turns, 1) if turn.calls), 0)


def outcome(trajectory: Trajectory) -> int:
  """The best that the calls brought: 0 no call, 1 only errors, 2 nothing found, 3 a hit."""
  rank = {"error": 1, "empty": 2, "hit": 3}
  return max((rank[call.outcome] for call in trajectory.calls), default=0)


def hops(trajectory: Trajectory) -> int:
  """The number of facts that its question chains, 0 where nobody knows.

  The same for all of a question: for estimators with advantage.over=batch, as HRPO (arXiv
  2601.07055).
  """
  return trajectory.question.hops or 0


def answered(trajectory: Trajectory) -> int:
  """1 if the trajectory gave an answer, else 0."""
  return int(trajectory.answer is not None)


def tools_used(trajectory: Trajectory, tools: Sequence[str]) -> int:
  """Which tools were called: the sum of 2^i over the tools i that were, so 0 is none."""
  called = {call.tool for call in trajectory.calls}
  return sum(2**i for i, tool in enumerate(tools) if tool in called)


def by_trajectory(function: Callable[[Trajectory], int], num_strata: int) -> Partition:
  """The partition by a function of one trajectory; larger ids share the last stratum.

  Raises ValueError at the first id that is no whole number or is negative.
  """

  def assign(group: Sequence[Trajectory], step: int | None = None) -> list[int]:
    return [min(_checked(function(trajectory), function), num_strata - 1) for trajectory in group]

  return Partition(assign, num_strata)


def _checked(identity, function) -> int:
  if (wrong := _no_stratum(identity)) is not None:
    name = getattr(function, "__qualname__", repr(function))
    raise ValueError(f"the partition function {name} returned {identity!r}; {wrong}")
  return identity.__index__()


def _no_stratum(identity) -> str | None:
  """What is wrong with a stratum, None where nothing is."""
  try:
    good = identity.__index__() >= 0
  except (AttributeError, TypeError):
    good = False
  return None if good else "a stratum is a whole number, 0 or more"


def product(left: Partition, right: Partition) -> Partition:
  """Crosses two partitions: trajectories share a stratum iff they share one in both."""

  def assign(group: Sequence[Trajectory], step: int | None = None) -> list[int]:
    return [
      a * right.num_strata + b for a, b in zip(left.assign(group, step), right.assign(group, step))
    ]

  return Partition(assign, left.num_strata * right.num_strata)


def shuffled(base: Partition, seed: int = 0) -> Partition:
  """Shuffles `base`'s ids by (seed, step, question id): the same sizes, no meaning.

  Rollouts lost to a fault keep their own id, so the sizes agree among those that count.
  """

  def assign(group: Sequence[Trajectory], step: int | None = None) -> list[int]:
    ids = base.assign(group, step)
    valid = [k for k, trajectory in enumerate(group) if trajectory.fault is None]
    step = group[0].weight_version if step is None and group else step

    def draw(k: int) -> bytes:
      # A hash and not a generator: the order must never change with a library's version.
      return hashlib.sha256(f"{seed}/{step}/{group[k].question.id}/{k}".encode()).digest()

    shuffled_ids = list(ids)
    for k, source in zip(valid, sorted(valid, key=draw)):
      shuffled_ids[k] = ids[source]
    return shuffled_ids

  return Partition(assign, base.num_strata)


@dataclasses.dataclass(frozen=True)
class StrataSettings(Settings):
  """How a group is split."""

  SECTION = "strata"
  name: str = setting(
    "searches",
    "the partition: searches, calls, tools, outcome, ... (strata.py), A*B, random, module:function",
    affects=("training",),
  )
  cap: int = setting(
    4, "counts from 0 to here get a stratum each", low=1, high=1000, affects=("training",)
  )


MOST = 4096  # strata of a partition; each has a key in every row of metrics.jsonl

# Each with the number of strata at a cap: counts above the cap share its stratum.
_BY_TRAJECTORY = {
  "searches": (searches, lambda cap: cap + 1),
  "calls": (calls, lambda cap: cap + 1),
  "first_call": (first_call, lambda cap: cap + 1),
  "first_search": (first_search, lambda cap: cap + 1),
  "outcome": (outcome, lambda cap: 4),
  "answered": (answered, lambda cap: 2),
  "hops": (hops, lambda cap: cap + 1),
}


def make(
  name: str,
  *,
  cap: int = 4,
  seed: int = 0,
  base: str | None = None,
  tools: Sequence[str] | None = ("search",),
) -> Partition:
  """Makes the partition that a configuration names.

  name   searches, calls (of any tool), calls_TOOL, tools (which were called), first_search,
         first_call, outcome, answered, hops (of the question); two or more crossed, as in
         "searches*outcome"; "random", the ids of `base` shuffled within each group; or
         "module:function", a function of your own from a Trajectory to a whole number, found on the
         Python path or in the working directory
  cap    counts from 0 to cap get a stratum each, larger ones share the last (also for
         "module:function")
  seed   of "random"; its base is searches, or calls in a task that searches nothing
  tools  the task's tools; None where they are not known, for a partition that splits nothing

  Raises ValueError, one sentence, for an unknown name, a cap below 1, and more than MOST strata.
  """
  if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
    raise ValueError(
      f"strata.cap is {cap!r}; it must be a whole number of 1 or more, since with one stratum "
      "every stratified estimator is its group one (for that, choose advantage.name = gn)"
    )
  if name == "random":
    if base == "random":
      raise ValueError(
        "strata.base is 'random'; it names the partition whose sizes are kept, for example "
        "'searches'"
      )
    base = base or ("searches" if "search" in (tools or ("search",)) else "calls")
    return shuffled(make(base, cap=cap, seed=seed, tools=tools), seed)
  check(name, tools)
  made = functools.reduce(product, [_one(part, cap, tools or ()) for part in parts_of(name)])
  if made.num_strata > MOST:
    raise ValueError(
      f"strata.name={name!r} with strata.cap={cap} has {made.num_strata} strata; it must have at "
      f"most {MOST}: lower the cap, or cross fewer"
    )
  return made


def check(name: str, tools: Sequence[str] | None = None) -> None:
  """Raises ValueError, one sentence, for a name that is no partition.

  tools: the task's; None where they are not known yet, so that any may be named.
  """
  if name == "random":
    return
  for part in parts_of(name):
    tool = part.removeprefix("calls_")
    if ":" in part:
      function = outside.function("strata.name", part, "a Trajectory")
      for rollout in made_up.rollouts():
        outside.trial("strata.name", part, functools.partial(function, rollout), _no_stratum)
    elif part not in (*_BY_TRAJECTORY, "tools") and (
      tool == part or tools is not None and tool not in tools
    ):
      names = [*_BY_TRAJECTORY, "tools", *(f"calls_{tool}" for tool in tools or ()), "random"]
      raise ValueError(
        f"strata.name is {name!r}, and {part!r} is no partition; choose from {', '.join(names)}, "
        "two of them crossed as in 'searches*outcome', or your own as 'module:function'"
      )


def parts_of(name: str) -> list[str]:
  """Splits `searches*outcome` into its parts."""
  return [part.strip() for part in str(name).split("*")]


def _one(part: str, cap: int, tools: Sequence[str]) -> Partition:
  """Makes a part whose name was checked."""
  if ":" in part:
    return by_trajectory(outside.load("strata.name", part), cap + 1)
  if part in _BY_TRAJECTORY:
    function, num_strata = _BY_TRAJECTORY[part]
    return by_trajectory(function, num_strata(cap))
  if part == "tools":
    return by_trajectory(functools.partial(tools_used, tools=tools), 2 ** len(tools))
  tool = part.removeprefix("calls_")
  return by_trajectory(lambda trajectory: trajectory.num_calls(tool), cap + 1)
