"""PPO with a critic on the policy's own body: a value for each token, GAE, a clipped value loss.

Search-R1's first method (arXiv 2503.09516). The reward is given at the last policy token; the
recursion steps over retrieved tokens, which enter no loss.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from stratified import advantages, losses, sharding
from stratified.algorithms.base import Algorithm, by_origin, by_rollout, Credit, Loss
from stratified.algorithms.policy_loss import policy_loss, PolicyLossSettings
from stratified.config import setting, Settings

TRAINING = ("training",)


@dataclasses.dataclass(frozen=True)
class CriticSettings(Settings):
  """The critic and what it makes of its values."""

  SECTION: ClassVar[str] = "ppo"
  gamma: float = setting(1.0, "ppo: discount of a later token", low=0, high=1, affects=TRAINING)
  lam: float = setting(1.0, "ppo: lambda of GAE", low=0, high=1, affects=TRAINING)
  whiten: bool = setting(
    True,
    "ppo: advantages to mean 0 and deviation 1 over the batch's policy tokens",
    affects=TRAINING,
  )
  value_coefficient: float = setting(
    0.5, "ppo: weight of the value loss beside the policy's", low=0, affects=TRAINING
  )
  value_clip: float = setting(
    0.5, "ppo: a new value is held to the old one +- this; 0 is no clip", low=0, affects=TRAINING
  )


@dataclasses.dataclass(frozen=True)
class Ppo(Algorithm):
  """PPO (arXiv 1707.06347) with GAE (1506.02438) over policy tokens."""

  HEADS: ClassVar[tuple[str, ...]] = ("value",)
  STREAMS: ClassVar[tuple[str, ...]] = ("policy", "value", "reward")
  SETTINGS: ClassVar[tuple[type, ...]] = (CriticSettings, PolicyLossSettings)

  critic: CriticSettings
  loss: PolicyLossSettings
  max_tokens: int

  @classmethod
  def make(cls, read, facts) -> "Ppo":
    loss = read(PolicyLossSettings)
    loss.refuse("ppo", "filter_groups")
    loss.check_overlong(facts.max_tokens)
    return cls(read(CriticSettings), loss, facts.max_tokens)

  @property
  def learns_entropy(self) -> bool:
    return self.loss.entropy_coefficient > 0

  @property
  def looks_before(self) -> bool:
    """Yes: GAE reads the values from before the step's first update."""
    return True

  def streams(self, trajectory, reward) -> dict[str, list[float]]:
    """Weights policy tokens in both losses, and puts the reward at the last of them."""
    policy = by_origin(trajectory, policy=1.0)
    given = [0.0] * len(policy)
    if 1.0 in policy:
      given[len(policy) - 1 - policy[::-1].index(1.0)] = reward + self.loss.overlong(
        trajectory, self.max_tokens
      )
    return {"policy": policy, "value": policy, "reward": given}

  def credit(self, batch, before, step) -> Credit:
    """Computes A and the critic's target A + V of each policy token, V from before the step."""
    mask, value = batch.policy_art, jnp.where(batch.policy_art > 0, before.heads["value"], 0)
    gae = lambda *x: advantages.gae(*x, gamma=self.critic.gamma, lam=self.critic.lam)
    reward, stats = batch.stream_art["reward"], {}
    if self.loss.takes_kl(before):
      penalty = self.loss.kl_penalty(before, batch)
      reward, stats["reward/kl_penalty"] = (
        reward - penalty,
        penalty.sum() / jnp.maximum(batch.valid_qk.sum(), 1),
      )
    raw, target = sharding.over_rows(gae, reward, value, batch.trajectory_art, mask)
    advantage = advantages.whiten(raw, mask) if self.critic.whiten else raw
    shape_qk = batch.reward_qk.shape
    length_qk = jnp.maximum(batch.mass_qk["policy"], 1)
    sum_qk = by_rollout(advantage * mask, batch.trajectory_art, shape_qk)
    advantage_qk = jnp.where(batch.valid_qk > 0, sum_qk / length_qk, 0)
    stats |= {"value/explained_variance": explained_variance(value, target, mask)}
    return Credit(advantage_qk, {"advantage": advantage, "target": target}, stats)

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    """The clipped surrogate, and value_coefficient x the clipped squared error of the value."""
    c = self.critic
    error = losses.clipped_value_loss(
      outputs.heads["value"], before.heads["value"], credit["target"], clip=c.value_clip
    )
    return {
      "policy": policy_loss(
        self.loss, outputs, before, credit["advantage"], micro, max_tokens=self.max_tokens
      ),
      "value": Loss(c.value_coefficient * error, {"value/loss": error}),
    }


def explained_variance(value, target, mask) -> jax.Array:
  """1 - Var(target - value) / Var(target) where the mask is 1; 0 where targets do not vary."""
  count = jnp.maximum(mask.sum(), 1)

  def variance(x):
    mean = (x * mask).sum() / count
    return (jnp.square(x - mean) * mask).sum() / count

  of_target = variance(target)
  explained = 1 - variance(target - value) / jnp.where(of_target > 0, of_target, 1)
  return jnp.where(of_target > 0, explained, 0.0)
