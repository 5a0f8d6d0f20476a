"""Supervised training on examples: cross-entropy, with its own weight for what was read.

As a run's method, `algorithm.name=sft`, it imitates the golden answers right after the questions
(the SFT of Search-R1's tables, arXiv 2503.09516, which has no retrieval), or the task's script.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from stratified.algorithms.base import Algorithm, by_origin, Credit, Loss, Stage
from stratified.config import setting, Settings


@dataclasses.dataclass(frozen=True)
class Supervised(Algorithm):
  """Cross-entropy of policy tokens (weight 1) and, at `context_weight`, of what the policy read.

  The first token of a demonstration is predicted from nothing and never counts. name: what its
  metrics begin with.
  """

  STREAMS: ClassVar[tuple[str, ...]] = ("imitation",)
  context_weight: float = 0.0
  name: str = "warm_start"

  def streams(self, trajectory, reward) -> dict[str, list[float]]:
    weight = self.context_weight
    by_token = by_origin(trajectory, policy=1.0, observation=weight, prompt=weight)
    return {"imitation": [0.0, *by_token[1:]]}

  def credit(self, batch, before, step) -> Credit:
    """Gives every demonstration the same credit."""
    return Credit(jnp.ones_like(batch.reward_qk), {}, {})

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    """-log p of each token."""
    loss = -outputs.logp
    means = {f"{self.name}/loss": loss, "policy/entropy": outputs.entropy}
    return {"imitation": Loss(loss, means)}


@dataclasses.dataclass(frozen=True)
class SftSettings(Settings):
  """What supervised fine-tuning imitates."""

  SECTION: ClassVar[str] = "sft"
  targets: str = setting(
    "answers",
    "the first golden answer right after the question, or the task's scripted demonstrations",
    choices=("answers", "demonstrations"),
    affects=("training",),
  )
  correct_at: float = setting(
    1.0, "the reward from which a demonstration is kept", affects=("training",)
  )


@dataclasses.dataclass(frozen=True)
class Sft(Algorithm):
  """Supervised fine-tuning as a run's method: one stage, each step an update on its examples."""

  SETTINGS: ClassVar[tuple[type, ...]] = (SftSettings,)

  settings: SftSettings = SftSettings()

  @classmethod
  def make(cls, read, facts) -> "Sft":
    return cls(read(SftSettings))

  def stages(self, num_steps: int) -> tuple[Stage, ...]:
    return (Stage("sft", "examples", num_steps, Supervised(name="sft")),)
