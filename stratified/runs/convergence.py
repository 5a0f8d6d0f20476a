"""Ends a stage of reinforcement at a plateau of its held-out score, and names its best step.

A stage's scores lie in each of its checkpoints, so that a run that resumes decides as one that
nothing interrupted.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
from typing import Any

from stratified.config import read, setting, Settings
from stratified.evaluation import score as scoring

Score = tuple[int, float]  # a step of the stage, and its held-out score


@dataclasses.dataclass(frozen=True)
class ConvergenceSettings(Settings):
  """When a stage of reinforcement has converged, and which of its policies goes on."""

  SECTION = "convergence"
  patience: int = setting(
    0,
    "evaluations without a gain that end a stage of reinforcement; 0 trains all its steps",
    low=0,
    affects=["training"],
  )
  min_gain: float = setting(
    0.0,
    "a score is a gain where it is above the best before by more than this",
    low=0,
    high=1,
    affects=["training"],
  )
  metric: str = setting(
    "exact_match",
    "the held-out score that says what is best",
    choices=("exact_match", "f1"),
    affects=["training"],
  )
  goes_on: str = setting(
    "last",
    "the policy that a stage of reinforcement hands to the next: its last, or its best",
    choices=("last", "best"),
    affects=["training"],
  )


def best(scores: Sequence[Score]) -> int | None:
  """The step of the highest score, the first of equal ones; None without any."""
  return max(scores, key=lambda one: one[1], default=(None, 0.0))[0]


def ended(scores: Sequence[Score], patience: int, min_gain: float) -> bool:
  """Whether none of the last `patience` scores is more than `min_gain` above the best before."""
  if not patience or len(scores) <= patience:
    return False
  highest = lambda part: max(score for _, score in part)
  return highest(scores[-patience:]) <= highest(scores[:-patience]) + min_gain


@dataclasses.dataclass
class StageScores:
  """The held-out scores of a stage so far, and what follows from them.

  first: the run's step at which the stage begins. last: whether the run ends with it.
  """

  settings: ConvergenceSettings = ConvergenceSettings()
  first: int = 0
  last: bool = False
  scores: list[Score] = dataclasses.field(default_factory=list)

  @classmethod
  def of(cls, config, parts, last: bool) -> "StageScores":
    """Those of a stage before its first evaluation; only reinforcement may end early."""
    found = ConvergenceSettings() if parts.supervised else read(ConvergenceSettings, config)
    if parts.stage.source != "rollouts":
      found = dataclasses.replace(found, patience=0, goes_on="last")
    return cls(found, parts.first, last)

  @property
  def ended(self) -> bool:
    return ended(self.scores, self.settings.patience, self.settings.min_gain)

  def best(self, steps: Collection[int]) -> int | None:
    """The best of those steps of the stage, such as of those that have a checkpoint."""
    return best([one for one in self.scores if one[0] in steps])

  def add(self, step: int, scores: Mapping[str, Any]) -> dict[str, int]:
    """Takes the scores by set of a step of the run; returns what its row says of convergence."""
    s = self.settings
    self.scores.append((step - self.first, scores[scoring.HELD_OUT][s.metric]))
    if not s.patience and s.goes_on == "last":
      return {}
    row = {"convergence/best_step": self.first + best(self.scores)}
    if self.ended:
      row["convergence/ended"] = 1
    return row | ({"run/ended": 1} if self.ended and self.last else {})


def check(config) -> None:
  """Refuses a rule that has nothing to go by; ValueError, one sentence."""
  c = read(ConvergenceSettings, config)
  if c.patience and not config.eval.every:
    raise ValueError(
      f"convergence.patience={c.patience} counts evaluations, and eval.every=0 makes none on the "
      "way; set --config.eval.every=20, or leave the patience at 0"
    )
  if c.goes_on == "best" and not config.checkpoint.keep_best:
    raise ValueError(
      "convergence.goes_on='best' with checkpoint.keep_best=False: the best policy would be gone; "
      "set --config.checkpoint.keep_best=True"
    )


def check_kept(config, stages) -> None:
  """Refuses pairs of a stage's last rollouts where nobody knows which those will be."""
  c = read(ConvergenceSettings, config)
  if any(stage.keeps for stage in stages) and (c.patience or c.goes_on == "best"):
    raise ValueError(
      "pairs.source='last_steps' needs reinforcement that ends where it says, with its last "
      "policy: set --config.pairs.source=fresh, or convergence.patience=0 and "
      "convergence.goes_on=last"
    )
