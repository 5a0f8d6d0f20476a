"""A method of your own: REINFORCE on rollouts, while those that were right are imitated.

    python experiments/train.py --config=configs/search_r1.py:tiny --workdir=runs/mine \\
        --config.algorithm.name=examples.my_algorithm:ReinforceAndImitate

Two loss components, each with its own weight on every token: "policy" on all that the policy wrote,
"imitate" on what it wrote in rollouts that were right.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from stratified.algorithms.base import Algorithm, by_origin, Credit, Loss


@dataclasses.dataclass(frozen=True)
class ReinforceAndImitate(Algorithm):
  """-(R - mean R) log p, and IMITATION x -log p of rollouts with a reward of 1."""

  STREAMS: ClassVar[tuple[str, ...]] = ("policy", "imitate")
  IMITATION: ClassVar[float] = 0.1

  @classmethod
  def make(cls, read, facts) -> "ReinforceAndImitate":
    """read(cls) gives checked settings, facts what the run knows; neither is needed here."""
    return cls()

  def streams(self, trajectory, reward):
    """On the host: how much each token of a rollout counts in each loss."""
    policy = by_origin(trajectory, policy=1.0)
    return {"policy": policy, "imitate": policy if reward >= 1 else [0.0] * len(policy)}

  def credit(self, batch, before, step) -> Credit:
    """In the jitted step: the advantage of each rollout [Q, K], and what is logged of it."""
    count_q = jnp.maximum(batch.valid_qk.sum(1, keepdims=True), 1)
    mean_q = (batch.reward_qk * batch.valid_qk).sum(1, keepdims=True) / count_q
    advantage_qk = (batch.reward_qk - mean_q) * batch.valid_qk

    return Credit(advantage_qk, {"advantage": advantage_qk}, {})

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    """In the jitted step: each component's loss of each token, and statistics to average."""
    policy = -credit["advantage"] * outputs.logp
    imitate = -self.IMITATION * outputs.logp
    return {
      "policy": Loss(policy, {"loss/policy": policy, "policy/entropy": outputs.entropy}),
      "imitate": Loss(imitate, {"loss/imitate": imitate}),
    }
