"""The methods by name, each in a file of its own.

    algorithm = make("grpo", functools.partial(config.read, config=c), facts)

A method is a class with `SETTINGS`, the classes of settings that it reads, and
`make(read, facts) -> Algorithm`, where `read(cls)` gives a checked instance of one of them.
"""

from collections.abc import Callable
import dataclasses
from typing import ClassVar, NamedTuple

from stratified.algorithms.base import Algorithm
from stratified.algorithms.grpo import Grpo
from stratified.config import setting, Settings

METHODS = {"grpo": Grpo}
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


def make(name: str, read: Callable[[type], Settings], facts: Facts) -> Algorithm:
  """The method of that name; raises ValueError, one sentence, where it or its settings can't be."""
  if name not in METHODS:
    raise ValueError(f"algorithm.name={name!r} is unknown; choose one of {', '.join(METHODS)}")
  return METHODS[name].make(read, facts)
