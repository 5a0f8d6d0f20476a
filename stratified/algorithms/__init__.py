"""Makes a method from its name; each method is a file of its own.

    algorithm = make("grpo", functools.partial(config.read, config=c), facts)

A method is a class with `SETTINGS`, the classes of settings that it reads, and
`make(read, facts) -> Algorithm`, where `read(cls)` gives a checked instance of one of them.
"""

from collections.abc import Callable
import dataclasses
import inspect
from typing import ClassVar, NamedTuple

from stratified import outside
from stratified.algorithms.base import Algorithm
from stratified.algorithms.gigpo import Gigpo
from stratified.algorithms.grpo import Grpo
from stratified.algorithms.ppo import Ppo
from stratified.algorithms.search_e1 import SearchE1
from stratified.algorithms.supervised import Sft
from stratified.config import setting, Settings

METHODS = {"grpo": Grpo, "ppo": Ppo, "gigpo": Gigpo, "search_e1": SearchE1, "sft": Sft}
# Every class of settings once, in the order of the methods.
SETTINGS = tuple(dict.fromkeys(cls for method in METHODS.values() for cls in method.SETTINGS))


@dataclasses.dataclass(frozen=True)
class AlgorithmSettings(Settings):
  """Which method a run trains with."""

  SECTION: ClassVar[str] = "algorithm"
  name: str = setting("grpo", f"the method: {', '.join(METHODS)}", affects=("training",))


class Facts(NamedTuple):
  """What a method may need to know of the rest of the run."""

  num_strata: int
  samples_per_question: int
  max_tokens: int
  max_turns: int  # generations of a rollout at most
  questions_per_step: int = 1
  part_weights: tuple[float, ...] = (1.0,)  # of the reward's parts, in their order


def make(name: str, read: Callable[[type], Settings], facts: Facts) -> Algorithm:
  """Makes the method of that name; ValueError, one sentence, where it or a setting can't be."""
  if ":" in name:
    return _from_outside(name, read, facts)
  if name not in METHODS:
    raise ValueError(
      f"algorithm.name={name!r} is unknown; choose one of {', '.join(METHODS)}, or name your own "
      "as module:name"
    )
  return METHODS[name].make(read, facts)


def _from_outside(name: str, read: Callable[[type], Settings], facts: Facts) -> Algorithm:
  """Loads `module:name`: an Algorithm's class with `make`, or a function of (read, facts)."""
  found = outside.load("algorithm.name", name)
  make = getattr(found, "make", found)
  if not callable(make):
    raise ValueError(
      f"algorithm.name is {name!r}, which is {found!r}; name a subclass of Algorithm with "
      "make(read, facts), or a function that returns an Algorithm"
    )
  try:
    signature = inspect.signature(make)
  except (TypeError, ValueError):  # some built-ins have none; the call tells
    signature = None
  try:
    if signature:
      signature.bind(read, facts)
  except TypeError as error:
    raise ValueError(
      f"algorithm.name is {name!r}, whose signature is {signature}; it is called with read, facts "
      f"({error})"
    ) from error
  try:
    made = make(read, facts)
  except ValueError:
    raise
  except (Exception, SystemExit) as error:
    said = " ".join(str(error).split())[:200]
    raise ValueError(
      f"algorithm.name is {name!r}, whose make(read, facts) failed with {type(error).__name__}: "
      f"{said}"
    ) from error
  if not isinstance(made, Algorithm):
    raise ValueError(
      f"algorithm.name is {name!r}, which made {type(made).__name__}; it must make an Algorithm"
    )
  return made
