"""PPO with a critic: a value before each token, generalised advantage estimation, a value loss.

Search-R1's first method (arXiv 2503.09516). The reward is given at the last policy token; the
recursion steps over retrieved tokens, which enter no loss. The critic is a head on the policy's
body or on a body of its own, with its own optimizer.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp

from stratified import advantages, losses, sharding
from stratified.algorithms.base import Algorithm, by_origin, by_rollout, Credit, Critic, Loss
from stratified.algorithms.policy_loss import policy_loss, PolicyLossSettings
from stratified.config import setting, Settings
from stratified.types import Trajectory

option = functools.partial(setting, affects=("training",))


@dataclasses.dataclass(frozen=True)
class CriticSettings(Settings):
  """The critic, how it is trained, and what is made of its values."""

  SECTION: ClassVar[str] = "ppo"
  gamma: float = option(1.0, "ppo: discount of a later token, or turn", low=0, high=1)
  lam: float = option(1.0, "ppo: lambda of GAE", low=0, high=1)
  level: str = option(
    "token", "ppo: GAE over policy tokens, or over turns (Turn-PPO)", choices=("token", "turn")
  )
  through_observations: bool = option(
    False,
    "ppo: retrieved tokens take part in GAE, value loss and whitening, as in Search-R1's code",
  )
  whiten: bool = option(
    True, "ppo: advantages to mean 0 and deviation 1 over the batch's policy tokens"
  )
  value_coefficient: float = option(0.5, "ppo: weight of the value loss", low=0)
  value_clip: float = option(
    0.5, "ppo: a new value is held to the old one +- this; 0 is no clip", low=0
  )
  body: str = option(
    "policy",
    "ppo: what the critic's head reads: the policy's body, or one of its own, at first a copy",
    choices=("policy", "own"),
  )
  by_calls: bool = option(
    False, "ppo: the critic has a head for each number of calls made so far (structure-aware)"
  )
  optimizer: str = option("adamw", "ppo: the critic's", choices=("adamw", "muon", "sgd"))
  learning_rate: float = option(1e-5, "ppo: the critic's rate after its warm-up", above=0)
  warmup_steps: int = option(
    0, "ppo: steps over which the critic's rate rises linearly", low=0, high=100_000
  )
  clip_norm: float = option(1.0, "ppo: most that the critic's gradient norm may be", above=0)
  alone_steps: int = option(
    0, "ppo: critic warm-up: first steps, in which the policy stays as it is", low=0
  )

  def __post_init__(self):
    super().__post_init__()
    if self.level == "turn" and self.through_observations:
      raise ValueError(
        "ppo.through_observations=True has no meaning with ppo.level='turn', where a turn is one "
        "step and its observation part of the next state; set one of them back"
      )


@dataclasses.dataclass(frozen=True)
class Ppo(Algorithm):
  """PPO (arXiv 1707.06347) with GAE (1506.02438) over policy tokens, or over turns (2512.17008).

  max_turns: generations of a rollout at most; with `by_calls` the critic has as many heads, for 0
    to max_turns - 1 calls and more.
  """

  STREAMS: ClassVar[tuple[str, ...]] = ("policy", "value", "reward", "calls")
  TAKES_STEPS: ClassVar[bool] = True
  SETTINGS: ClassVar[tuple[type, ...]] = (CriticSettings, PolicyLossSettings)

  settings: CriticSettings
  loss: PolicyLossSettings
  max_tokens: int
  max_turns: int = 1

  @classmethod
  def make(cls, read, facts) -> "Ppo":
    loss = read(PolicyLossSettings)
    loss.refuse("ppo", "filter_groups", "resample_groups")
    loss.check_overlong(facts.max_tokens)
    return cls(read(CriticSettings), loss, facts.max_tokens, facts.max_turns)

  @property
  def critic(self) -> Critic:
    s = self.settings
    optimizer = {
      "name": s.optimizer,
      "learning_rate": s.learning_rate,
      "warmup_steps": s.warmup_steps,
      "clip_norm": s.clip_norm,
    }
    heads = {"value": self.max_turns if s.by_calls else 1}
    return Critic(heads, optimizer, s.body, s.alone_steps)

  @property
  def learns_entropy(self) -> bool:
    return self.loss.entropy_coefficient > 0

  @property
  def looks_before(self) -> bool:
    """Yes: GAE reads the values from before the step's first update."""
    return True

  def streams(self, trajectory, reward, steps=()) -> dict[str, list[float]]:
    """Weights tokens in both losses, puts the reward at the last policy token, counts calls.

    steps: rewards of the turns, each at its turn's last token.
    """
    policy = by_origin(trajectory, policy=1.0)
    given = [0.0] * len(policy)
    if 1.0 in policy:
      given[len(policy) - 1 - policy[::-1].index(1.0)] = reward + self.loss.overlong(
        trajectory, self.max_tokens
      )
    for end, step in zip(turn_ends(trajectory), steps):
      given[end] += step
    if self.settings.level == "turn":
      value = turn_starts(trajectory)
    else:
      through = float(self.settings.through_observations)
      value = by_origin(trajectory, policy=1.0, observation=through)
    return {"policy": policy, "value": value, "reward": given, "calls": calls_before(trajectory)}

  def credit(self, batch, before, step) -> Credit:
    """A of each policy token and the critic's target A + V, with V from before the step."""
    s, mask, counted = self.settings, batch.policy_art, batch.stream_art["value"]
    value = jnp.where(counted > 0, self._value(before, batch.stream_art["calls"]), 0)
    reward, stats = batch.stream_art["reward"], {}
    if self.loss.takes_kl(before):
      penalty = self.loss.kl_penalty(before, batch)
      reward, stats["reward/kl_penalty"] = (
        reward - penalty,
        penalty.sum() / jnp.maximum(batch.valid_qk.sum(), 1),
      )
    rows = (reward, value, batch.trajectory_art, mask if s.level == "turn" else counted)
    if s.level == "turn":
      estimate = functools.partial(advantages.turn_gae, gamma=s.gamma, lam=s.lam)
      raw, target = sharding.over_rows(lambda *x: estimate(*x), *rows, counted)
    else:
      estimate = functools.partial(advantages.gae, gamma=s.gamma, lam=s.lam)
      raw, target = sharding.over_rows(lambda *x: estimate(*x), *rows)
    advantage = raw
    if s.whiten:
      advantage = advantages.whiten(raw, counted if s.through_observations else mask)
    length_qk = jnp.maximum(batch.mass_qk["policy"], 1)
    sum_qk = by_rollout(advantage * mask, batch.trajectory_art, batch.reward_qk.shape)
    advantage_qk = jnp.where(batch.valid_qk > 0, sum_qk / length_qk, 0)
    stats |= {"value/explained_variance": explained_variance(value, target, counted)}
    return Credit(advantage_qk, {"advantage": advantage, "target": target}, stats)

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    """The clipped surrogate, and value_coefficient x the clipped squared error of the value."""
    s, calls = self.settings, micro.stream_art["calls"]
    error = losses.clipped_value_loss(
      self._value(outputs, calls), self._value(before, calls), credit["target"], clip=s.value_clip
    )
    return {
      "policy": policy_loss(
        self.loss, outputs, before, credit["advantage"], micro, max_tokens=self.max_tokens
      ),
      "value": Loss(s.value_coefficient * error, {"value/loss": error}),
    }

  def _value(self, outputs, calls):
    """The value before each token: by the head of as many calls as were made before it."""
    value = outputs.heads["value"]
    if value.ndim == calls.ndim:
      return value
    own = jnp.minimum(calls, self.max_turns - 1)[..., None] == jnp.arange(self.max_turns)
    return jnp.where(own, value, 0).sum(-1)


def turn_starts(trajectory: Trajectory) -> list[float]:
  """1 on the first token of each turn, 0 on the others."""
  return [
    float(segment.origin == "policy" and i == 0)
    for segment in trajectory.segments
    for i in range(len(segment.token_ids))
  ]


def turn_ends(trajectory: Trajectory) -> list[int]:
  """The place of each turn's last token in the rollout."""
  ends = itertools.accumulate(len(segment.token_ids) for segment in trajectory.segments)
  own = zip(ends, trajectory.segments)
  return [end - 1 for end, segment in own if segment.origin == "policy" and segment.token_ids]


def calls_before(trajectory: Trajectory) -> Sequence[float]:
  """At each token how many calls were executed before it; a turn's own count from its end on."""
  turns, made, found = iter(trajectory.turns), 0, []
  for segment in trajectory.segments:
    found += [float(made)] * len(segment.token_ids)
    if segment.origin == "policy":
      turn = next(turns, None)
      made += len(turn.calls) if turn else 0
  return found


def explained_variance(value, target, mask) -> jax.Array:
  """1 - Var(target - value) / Var(target) where the mask is 1; 0 where targets do not vary."""
  count = jnp.maximum(mask.sum(), 1)

  def variance(x):
    mean = (x * mask).sum() / count
    return (jnp.square(x - mean) * mask).sum() / count

  of_target = variance(target)
  explained = 1 - variance(target - value) / jnp.where(of_target > 0, of_target, 1)
  return jnp.where(of_target > 0, explained, 0.0)
