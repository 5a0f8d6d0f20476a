"""Partition functions: one question's trajectories in, one stratum id each out. Plain Python, no
arrays.

`make` turns the name in a configuration into a `Partition`. A trajectory's own partitions
(searches, first_search, outcome, answered) look at one trajectory; `product` crosses two; `random`
shuffles another's ids within the group, so that its strata have the same sizes and no meaning: the
control for "any partition would have helped".
"""

from collections.abc import Callable, Sequence
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from typing import NamedTuple

from stratified.types import Trajectory


class Partition(NamedTuple):
  """`assign(group, step=None)` gives one id in [0, num_strata) for each trajectory of the group.

  step is the training step (only `random` reads it), None for the step whose parameters sampled the
  group.
  """

  assign: Callable[..., list[int]]
  num_strata: int


def searches(trajectory: Trajectory) -> int:
  """The number of executed queries, refused and empty ones too: the partition of arXiv
  2510.06214."""
  return trajectory.num_searches


def first_search(trajectory: Trajectory) -> int:
  """1 + the index of the first turn that executed a search, 0 if none did."""
  return next((index for index, turn in enumerate(trajectory.turns, 1) if turn.searches), 0)


def outcome(trajectory: Trajectory) -> int:
  """The best that the searches brought: 0 no search, 1 only errors, 2 nothing found, 3 at least one
  hit."""
  rank = {"error": 1, "empty": 2, "hit": 3}
  return max((rank[search.outcome] for search in trajectory.searches), default=0)


def answered(trajectory: Trajectory) -> int:
  """1 if the trajectory gave an answer, else 0."""
  return int(trajectory.answer is not None)


def by_trajectory(function: Callable[[Trajectory], int], num_strata: int) -> Partition:
  """The partition by a function of one trajectory; larger ids share the last stratum.

  Raises ValueError at the first id that is no whole number or is negative.
  """

  def assign(group: Sequence[Trajectory], step: int | None = None) -> list[int]:
    return [min(_checked(function(trajectory), function), num_strata - 1) for trajectory in group]

  return Partition(assign, num_strata)


def _checked(identity, function) -> int:
  name = getattr(function, "__qualname__", repr(function))
  if isinstance(identity, bool):
    identity = int(identity)
  if not hasattr(identity, "__index__") or (identity := identity.__index__()) < 0:
    raise ValueError(
      f"the partition function {name} returned {identity!r}; a stratum is a whole number, 0 or more"
    )
  return identity


def product(left: Partition, right: Partition) -> Partition:
  """The common refinement: two trajectories share a stratum iff they share one in both
  partitions."""

  def assign(group: Sequence[Trajectory], step: int | None = None) -> list[int]:
    return [
      a * right.num_strata + b for a, b in zip(left.assign(group, step), right.assign(group, step))
    ]

  return Partition(assign, left.num_strata * right.num_strata)


def shuffled(base: Partition, seed: int = 0) -> Partition:
  """`base`'s ids in an order drawn from (seed, step, question id): the same sizes, no meaning.

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


# Each with the number of strata at a cap: counts above the cap share its stratum.
_BY_TRAJECTORY = {
  "searches": (searches, lambda cap: cap + 1),
  "first_search": (first_search, lambda cap: cap + 1),
  "outcome": (outcome, lambda cap: 4),
  "answered": (answered, lambda cap: 2),
}


def make(name: str, *, cap: int = 4, seed: int = 0, base: str = "searches") -> Partition:
  """The partition that a configuration names.

  name  searches, first_search, outcome, answered; two or more crossed, as in "searches*outcome";
        "random",
        the ids of `base` shuffled within each group; or "module:function", a function of your own
        from a Trajectory to a whole number, found on the Python path or in the working directory
  cap   counts from 0 to cap get a stratum each, larger ones share the last (also for
        "module:function")
  seed  of "random"

  Raises ValueError, one sentence, for an unknown name or a cap below 1.
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
    return shuffled(make(base, cap=cap, seed=seed), seed)
  return functools.reduce(product, [_one(part.strip(), name, cap) for part in str(name).split("*")])


def _one(part: str, name: str, cap: int) -> Partition:
  if ":" in part:
    return by_trajectory(load_function(part), cap + 1)
  if part not in _BY_TRAJECTORY:
    raise ValueError(
      f"strata.name is {name!r}, and {part!r} is no partition; choose from "
      f"{', '.join(_BY_TRAJECTORY)}, random, two of them crossed as in 'searches*outcome', or "
      "your own as 'module:function'"
    )
  function, num_strata = _BY_TRAJECTORY[part]
  return by_trajectory(function, num_strata(cap))


def load_function(spec: str) -> Callable[[Trajectory], int]:
  """Imports "module:function". The working directory is searched after the Python path.

  Raises ValueError where module or function do not exist; an error inside the module is left as it
  is.
  """
  module_name, _, function_name = spec.partition(":")
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    if error.name != module_name and not module_name.startswith(f"{error.name}."):
      raise
    raise ValueError(
      f"strata.name is {spec!r}, but there is no module {error.name!r} on the Python path or "
      f"in {os.getcwd()}; add its folder to PYTHONPATH"
    ) from error
  function = getattr(module, function_name, None)
  if not callable(function):
    raise ValueError(
      f"strata.name is {spec!r}, but {module.__file__} has no function {function_name!r}; "
      "define it there: it takes a Trajectory and returns a whole number"
    )
  return function
