"""GRPO and its family: one advantage a rollout from the rewards of its group, a clipped surrogate.

The estimator (`advantage.name`: gn, san, blend, loo, dr_grpo, reinforce, ...) makes the family:
Stratified GRPO (arXiv 2510.06214) is `blend` or `san`, GRPO (2402.03300) `gn`, RLOO (2402.14740)
`loo`, Dr. GRPO (2503.20783) `dr_grpo` with `loss.aggregation=constant`.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from stratified import advantages, losses
from stratified.algorithms.base import Algorithm, Credit, Loss
from stratified.config import setting, Settings

TRAINING = ("training",)


@dataclasses.dataclass(frozen=True)
class PolicyLossSettings(Settings):
  """The clipped surrogate, its KL penalty and its corrections for what another program sampled."""

  SECTION: ClassVar[str] = "loss"
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
  kl_coefficient: float = setting(
    0.001, "weight of the KL to the reference, in the loss", low=0, affects=TRAINING
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


@dataclasses.dataclass(frozen=True)
class Grpo(Algorithm):
  """The group family: estimate the advantage of each rollout, then a clipped policy gradient.

  looks_before also where the batch is used several times: the ratio is then to what the trainer
  said before the first update (`update.make_update` gives it in either case).
  """

  SETTINGS: ClassVar[tuple[type, ...]] = (advantages.AdvantageSettings, PolicyLossSettings)

  advantage: advantages.AdvantageSettings
  loss: PolicyLossSettings
  num_strata: int
  max_tokens: int

  @classmethod
  def make(cls, read, facts) -> "Grpo":
    """Raises ValueError where the estimator has nothing to work on in groups of this size."""
    advantage = read(advantages.AdvantageSettings)
    advantage.check_samples(facts.samples_per_question)
    return cls(advantage, read(PolicyLossSettings), facts.num_strata, facts.max_tokens)

  def credit(self, batch, before, step) -> Credit:
    """A = estimator(R, strata), for every token of a rollout alike."""
    estimate = advantages.estimator(self.advantage, num_strata=self.num_strata)
    advantage_qk = estimate(batch.reward_qk, batch.stratum_qk, batch.valid_qk, step)
    return Credit(advantage_qk, {"advantage": advantage_qk}, {})

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    """-min(rho A, clip(rho) A) + kl_coefficient x KL(policy || reference), by token."""
    return {
      "policy": policy_loss(
        self.loss, outputs, before, credit["advantage"], micro, max_tokens=self.max_tokens
      )
    }


def policy_loss(
  loss: PolicyLossSettings, outputs, before, advantage, micro, *, max_tokens: int
) -> Loss:
  """The clipped surrogate with its KL and importance weight, and the statistics of both.

  The old log-probs are the trainer's of before the step's first update (this update's own where
  there is one alone: the ratio is 1 and its gradient the plain policy gradient), or the sampler's.
  """
  logp = outputs.logp
  trainer_logp = jax.lax.stop_gradient(logp) if before is None else before.logp
  sampler_logp = jnp.where(micro.policy_art > 0, micro.sampler_logp_art, trainer_logp)
  old_logp = sampler_logp if loss.old_log_probs == "sampler" else trainer_logp
  surrogate, clipped = losses.clipped_surrogate(
    logp,
    old_logp,
    advantage,
    clip_ratio=loss.clip_ratio,
    clip_ratio_high=loss.clip_ratio_high,
    dual_clip=loss.dual_clip,
  )
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
    total, means = total + loss.kl_coefficient * kl, means | {"loss/kl": kl}
  gap = jnp.abs(sampler_logp - trainer_logp)
  means |= {
    "policy/entropy": outputs.entropy,
    "policy/clip_share": clipped,
    "policy/logp_gap_mean": gap,
  }
  return Loss(total, means, {"policy/logp_gap_max": gap}, loss.aggregation, max_tokens)
