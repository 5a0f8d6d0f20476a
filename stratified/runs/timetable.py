"""Says what a run consists of and how long the whole of it will still take.

The time left is the stages' own where a stage is running: its steps that are left times the seconds
that they take. A stage that has not begun is reckoned from the running one: a step costs what its
rollouts cost, each so many times a demonstration (`COST`), and so do the questions of an
evaluation. That is within a factor of two, and right as soon as the last stage runs.
"""

from collections.abc import Sequence
import dataclasses

from stratified.progress import duration
from stratified.runs.build import Run

# What a rollout of a stage costs in demonstrations: one is read and learnt from; a rollout is
# sampled and read by the reference as well; a pair is read by a teacher. An answer is only sampled.
COST = {"demonstrations": 1.0, "examples": 1.0, "rollouts": 1.5, "pairs": 2.0, "answer": 0.4}


@dataclasses.dataclass(frozen=True)
class Part:
  """A stage as the timetable sees it: a step costs `each`, its evaluations `beside` in all."""

  label: str
  steps: int
  each: float
  beside: float = 0.0


class Timetable:
  """What of a run is still to come."""

  def __init__(self, parts: Sequence[Part]):
    self._parts = tuple(parts)

  def __str__(self) -> str:
    listed = [f"{part.steps:,} {part.label}" for part in self._parts]
    return ", then ".join(listed)

  def left(self, number: int, step: int, seconds: float) -> float:
    """Seconds that the run still takes, where a step of stage `number` takes so many seconds."""
    now = self._parts[number]
    unit = seconds / now.each
    share = 1 - step / now.steps
    later = sum(part.steps * part.each + part.beside for part in self._parts[number + 1 :])
    return (now.steps - step) * seconds + unit * (now.beside * share + later)

  def say(self, number: int, step: int, seconds: float) -> str:
    """The same in words, for a progress line."""
    left = duration(self.left(number, step, seconds))
    return f"(stage {number + 1} of {len(self._parts)}, the run about {left})"


def of_run(run: Run, label_of) -> Timetable:
  """Makes the timetable of a run; label_of: a stage's parts -> what its steps are called."""
  config, parts = run.config, []
  answers = 2 * config.eval.questions  # about: a task's sets are counted once they are drawn
  for stage in run.stages:
    source = stage.stage.source
    times = 0.0
    if source != "demonstrations":
      times = stage.stage.num_steps / config.eval.every if config.eval.every else 1
      if not stage.first:  # before the first step, also made to search 0, 1, ... times
        times += 1 + config.eval.forced * (config.rollout.max_turns + 1) / 2
    beside = times * answers * COST["answer"]
    steps = stage.stage.num_steps
    parts.append(Part(label_of(stage.stage), steps, stage.rollouts * COST[source], beside))
  return Timetable(parts)
