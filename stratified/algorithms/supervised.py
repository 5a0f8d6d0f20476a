"""Supervised training on demonstrations: cross-entropy, with its own weight for what was read."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from stratified.algorithms.base import Algorithm, by_origin, Credit, Loss


@dataclasses.dataclass(frozen=True)
class Supervised(Algorithm):
  """Cross-entropy of policy tokens (weight 1) and, at `context_weight`, of what the policy read.

  The first token of a demonstration is predicted from nothing and never counts.
  """

  STREAMS: ClassVar[tuple[str, ...]] = ("imitation",)
  context_weight: float = 0.0

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
    means = {"warm_start/loss": loss, "policy/entropy": outputs.entropy}
    return {"imitation": Loss(loss, means)}
