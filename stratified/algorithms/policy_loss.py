"""The policy's loss that the methods share: a surrogate, its KL and entropy, its corrections."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from stratified import losses
from stratified.algorithms.base import Loss
from stratified.config import setting, Settings
from stratified.types import Batch, Trajectory

TRAINING = ("training",)


@dataclasses.dataclass(frozen=True)
class PolicyLossSettings(Settings):
  """The clipped surrogate, its KL penalty and its corrections for what another program sampled."""

  SECTION: ClassVar[str] = "loss"
  surrogate: str = setting(
    "clipped",
    "the policy gradient's form: PPO's clip, gspo, cispo, sapo or gmpo (docs/methods.md)",
    choices=losses.SURROGATES,
    affects=TRAINING,
  )
  clip_ratio: float = setting(
    0.2, "the ratio to the old policy is held to 1 - this .. 1 + this", low=0, affects=TRAINING
  )
  clip_ratio_high: float | None = setting(
    None, "another bound above (DAPO's clip-higher); none takes clip_ratio", low=0, affects=TRAINING
  )
  dual_clip: float = setting(
    0.0,
    "bound c above 1 on the loss of a negative advantage, -c A; 0 is off",
    low=0,
    affects=TRAINING,
  )
  sapo_temperature: float = setting(
    1.0, "sapo: tau of its gate for advantages of 0 and above", above=0, affects=TRAINING
  )
  sapo_temperature_negative: float = setting(
    1.05, "sapo: tau of its gate for negative advantages", above=0, affects=TRAINING
  )
  kl_coefficient: float = setting(
    0.001, "weight of the KL to the reference", low=0, affects=TRAINING
  )
  kl_in: str = setting(
    "loss",
    "where the KL counts: in the loss, or taken from the reward before the step's first update",
    choices=("loss", "reward"),
    affects=TRAINING,
  )
  entropy_coefficient: float = setting(
    0.0, "weight of the entropy bonus, - this x entropy in the loss", low=0, affects=TRAINING
  )
  overlong_tokens: int = setting(
    0,
    "the last of rollout.max_tokens, over which a reward falls by overlong_penalty; 0 is off",
    low=0,
    affects=TRAINING,
  )
  overlong_penalty: float = setting(
    1.0, "what a rollout of rollout.max_tokens loses of its reward", above=0, affects=TRAINING
  )
  filter_groups: bool = setting(
    False, "grpo: groups without advantage count in no loss and no divisor (DAPO)", affects=TRAINING
  )
  resample_groups: int = setting(
    0,
    "grpo: how often a question without advantage gives way to another before the update (DAPO)",
    low=0,
    high=100,
    affects=TRAINING,
  )
  reject_below: float | None = setting(
    None,
    "a rollout whose geometric mean ratio of trainer to sampler is less is left out of the loss",
    above=0,
    high=1,
    affects=TRAINING,
  )
  reject_above: float | None = setting(
    None,
    "a rollout whose geometric mean ratio of trainer to sampler is more is left out of the loss",
    low=1,
    affects=TRAINING,
  )
  kl_estimator: str = setting(
    "k3",
    "how the KL is estimated at sampled tokens",
    choices=losses.KL_ESTIMATORS,
    affects=TRAINING,
  )
  aggregation: str = setting(
    "token_mean",
    "what the sum over tokens is divided by",
    choices=losses.AGGREGATIONS,
    affects=TRAINING,
  )
  old_log_probs: str = setting(
    "trainer",
    "the ratio is to the log-probs of: the trainer before the step's first update, or the sampler",
    choices=("trainer", "sampler"),
    affects=TRAINING,
  )
  importance: str = setting(
    "token",
    "whose ratio importance_cap truncates: each token's or the whole rollout's",
    choices=("token", "sequence"),
    affects=TRAINING,
  )
  importance_cap: float = setting(
    0.0,
    "cap of truncated importance sampling of the trainer-sampler gap; 0 is off",
    low=0,
    affects=TRAINING,
  )

  def __post_init__(self):
    super().__post_init__()
    if 0 < self.dual_clip <= 1:
      raise ValueError(
        f"loss.dual_clip={self.dual_clip} must be above 1, or 0 for none: at 1 and below it bounds "
        "the loss of tokens that have not moved"
      )
    if self.old_log_probs == "sampler" and self.importance_cap:
      raise ValueError(
        f"loss.importance_cap={self.importance_cap} with loss.old_log_probs='sampler' corrects for "
        "the sampler twice: the ratio is to the sampler already. Set importance_cap to 0, or "
        "old_log_probs to trainer"
      )
    if self.importance == "sequence" and not self.importance_cap:
      raise ValueError(
        "loss.importance='sequence' does nothing without a cap; set "
        "--config.loss.importance_cap=2, or leave importance at token"
      )

    if self.dual_clip and self.surrogate not in ("clipped", "gspo"):
      raise ValueError(
        f"loss.dual_clip={self.dual_clip} does nothing with loss.surrogate={self.surrogate!r}; set "
        "it to 0, or the surrogate to clipped or gspo"
      )
    if self.clip_ratio_high is not None and self.surrogate == "sapo":
      raise ValueError(
        f"loss.clip_ratio_high={self.clip_ratio_high} does nothing with loss.surrogate='sapo', "
        "which has a soft gate and no clip; leave it out, or choose another surrogate"
      )

  def refuse(self, method: str, *names: str) -> None:
    """Raises ValueError where one of these fields is set, which the method does not have."""
    for name in names:
      given, plain = getattr(self, name), type(self).__dataclass_fields__[name].default
      if given != plain:
        raise ValueError(
          f"loss.{name}={given!r}, but algorithm.name={method!r} has no such option; leave it at "
          f"{plain!r}, or set --config.algorithm.name=grpo"
        )

  def check_overlong(self, max_tokens: int) -> None:
    """Raises ValueError where the penalty would begin before the first token."""
    if self.overlong_tokens > max_tokens:
      raise ValueError(
        f"loss.overlong_tokens={self.overlong_tokens} is more than rollout.max_tokens="
        f"{max_tokens}, of which it is the last part; lower it"
      )

  def overlong(self, trajectory: Trajectory, max_tokens: int) -> float:
    """What the rollout's reward loses for its length: 0 or less, 0 for one lost to a fault.

    All its tokens count, for `rollout.max_tokens` bounds them together.
    """
    if not self.overlong_tokens or trajectory.fault is not None:
      return 0.0
    return self.overlong_penalty * losses.overlong_penalty(
      len(trajectory.token_ids), max_length=max_tokens, buffer=self.overlong_tokens
    )

  def kl_penalty(self, before, batch: Batch):
    """kl_coefficient x KL at each policy token [A, R, T]: what `kl_in` takes from the reward."""
    kl = losses.kl_estimate(before.logp, before.reference_logp, estimator=self.kl_estimator)
    return jnp.where(batch.policy_art > 0, self.kl_coefficient * kl, 0)

  def takes_kl(self, before) -> bool:
    """Whether the KL is taken from the reward: by `kl_in`, and where there is a reference."""
    return self.kl_in == "reward" and before is not None and before.reference_logp is not None


def policy_loss(
  loss: PolicyLossSettings, outputs, before, advantage, micro, *, max_tokens: int
) -> Loss:
  """The surrogate with KL, entropy bonus and corrections for the sampler, and their statistics.

  A rollout outside `reject_below` and `reject_above` keeps its place in the divisors and in its
  group's statistics: it is given the importance weight 0.
  """
  logp = outputs.logp
  trainer_logp, sampler_logp = trainer_and_sampler(outputs, before, micro)
  old_logp = sampler_logp if loss.old_log_probs == "sampler" else trainer_logp
  surrogate, clipped = surrogate_of(loss, logp, old_logp, advantage, micro)
  if loss.importance_cap:
    surrogate *= losses.importance_weight(
      trainer_logp,
      sampler_logp,
      cap=loss.importance_cap,
      position_rt=micro.position_art if loss.importance == "sequence" else None,
    )
  total, means = surrogate, {"loss/policy": surrogate}
  if outputs.reference_logp is not None:
    kl = losses.kl_estimate(logp, outputs.reference_logp, estimator=loss.kl_estimator)
    means |= {"loss/kl": kl}
    if loss.kl_in == "loss":
      total += loss.kl_coefficient * kl
  if loss.entropy_coefficient:
    total -= loss.entropy_coefficient * outputs.entropy
  if loss.reject_below is not None or loss.reject_above is not None:
    rejected = outside_bounds(loss, trainer_logp, sampler_logp, micro)
    total = jnp.where(rejected, 0, total)
    means |= {"policy/rejected_share": rejected.astype(logp.dtype)}
  gap = jnp.abs(sampler_logp - trainer_logp)
  means |= {
    "policy/entropy": outputs.entropy,
    "policy/clip_share": clipped,
    "policy/logp_gap_mean": gap,
  }
  return Loss(total, means, {"policy/logp_gap_max": gap}, loss.aggregation, max_tokens)


def trainer_and_sampler(outputs, before, micro):
  """(trainer's log-probs from before the step's first update, sampler's), without gradient.

  Where there is one update alone the trainer's are this update's own: the ratio is 1 and its
  gradient the plain policy gradient. Off the policy's tokens both are the trainer's.
  """
  trainer_logp = jax.lax.stop_gradient(outputs.logp) if before is None else before.logp
  return trainer_logp, jnp.where(micro.policy_art > 0, micro.sampler_logp_art, trainer_logp)


def surrogate_of(loss: PolicyLossSettings, logp, old_logp, advantage, micro):
  """(loss, how much is held back) of each token by `loss.surrogate`."""
  low, high = loss.clip_ratio, loss.clip_ratio_high
  clip = {"clip_ratio": low, "clip_ratio_high": high}
  tau = {
    "temperature": loss.sapo_temperature, "temperature_negative": loss.sapo_temperature_negative
  }  # fmt: skip
  ratios, rows = (logp, old_logp, advantage), (micro.policy_art, micro.position_art)
  return {
    "clipped": lambda: losses.clipped_surrogate(*ratios, **clip, dual_clip=loss.dual_clip),
    "gspo": lambda: losses.gspo(*ratios, *rows, **clip, dual_clip=loss.dual_clip),
    "cispo": lambda: losses.cispo(*ratios, **clip),
    "sapo": lambda: losses.sapo(*ratios, **tau),
    "gmpo": lambda: losses.gmpo(*ratios, *rows, **clip),
  }[loss.surrogate]()


def outside_bounds(loss: PolicyLossSettings, trainer_logp, sampler_logp, micro):
  """[R, T] whether exp(mean log-ratio) of the token's rollout lies outside the bounds of `loss`."""
  mean = losses.sequence_mean(trainer_logp - sampler_logp, micro.policy_art, micro.position_art)
  ratio = losses.ratio_of(mean, jnp.zeros_like(mean))
  below = 0.0 if loss.reject_below is None else loss.reject_below
  above = jnp.inf if loss.reject_above is None else loss.reject_above
  return (ratio < below) | (ratio > above)
