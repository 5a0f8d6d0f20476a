"""GRPO and its family: one advantage a rollout from the rewards of its group, a clipped surrogate.

The estimator (`advantage.name`: gn, san, blend, loo, dr_grpo, reinforce, ...) makes the family:
Stratified GRPO (arXiv 2510.06214) is `blend` or `san`, GRPO (2402.03300) `gn`, RLOO (2402.14740)
`loo`, Dr. GRPO (2503.20783) `dr_grpo` with `loss.aggregation=constant`. `loss.surrogate` makes
GSPO, CISPO, SAPO, GMPO of it; `likelihood.coefficient` adds LLDS.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from stratified import advantages
from stratified.algorithms import likelihood
from stratified.algorithms.base import Algorithm, by_origin, by_rollout, Credit, Loss
from stratified.algorithms.policy_loss import policy_loss, PolicyLossSettings, trainer_and_sampler


@dataclasses.dataclass(frozen=True)
class Grpo(Algorithm):
  """The group family: estimate the advantage of each rollout, then a policy gradient.

  looks_before where the KL is in the reward. It is given also where the batch is used several
  times: the ratio is then to what the trainer said before the first update.
  """

  SETTINGS: ClassVar[tuple[type, ...]] = (
    advantages.AdvantageSettings,
    PolicyLossSettings,
    likelihood.LikelihoodSettings,
  )

  advantage: advantages.AdvantageSettings
  loss: PolicyLossSettings
  num_strata: int
  max_tokens: int
  preserve: likelihood.LikelihoodSettings = likelihood.LikelihoodSettings()
  part_weights: tuple[float, ...] = (1.0,)

  @classmethod
  def make(cls, read, facts) -> "Grpo":
    """Raises ValueError for options that undo each other, and where groups are too small."""
    advantage, loss = read(advantages.AdvantageSettings), read(PolicyLossSettings)
    advantage.check_samples(facts.samples_per_question)
    loss.check_overlong(facts.max_tokens)
    if loss.resample_groups and advantage.crosses_questions:
      raise ValueError(
        f"loss.resample_groups={loss.resample_groups} asks of each question whether its advantages "
        f"are 0, but advantage.name={advantage.name!r} compares it with the batch's others; set it "
        "to 0, or choose an estimator over the question's own rollouts"
      )
    if advantage.wants_parts and loss.kl_in == "reward":
      raise ValueError(
        f"loss.kl_in='reward' with advantage.name={advantage.name!r}, which divides each part of "
        "the reward by its own deviation: the KL is none; leave it in the loss"
      )
    preserve, weights = read(likelihood.LikelihoodSettings), facts.part_weights
    return cls(advantage, loss, facts.num_strata, facts.max_tokens, preserve, weights)

  @property
  def STREAMS(self) -> tuple[str, ...]:
    if not self.preserve.coefficient:
      return ("policy",)
    return ("policy", "likelihood", "answer")

  @property
  def looks_before(self) -> bool:
    return self.loss.kl_in == "reward"

  @property
  def learns_entropy(self) -> bool:
    return self.loss.entropy_coefficient > 0

  @property
  def num_parts(self) -> int:
    return len(self.part_weights) if self.advantage.wants_parts else 0

  def streams(self, trajectory, reward) -> dict[str, list[float]]:
    """1 on policy tokens in both losses, and which of them answer."""
    policy = by_origin(trajectory, policy=1.0)
    if not self.preserve.coefficient:
      return {"policy": policy}
    return {"policy": policy, "likelihood": policy, "answer": likelihood.answering(trajectory)}

  def arrays(self, groups, rewards) -> dict[str, np.ndarray]:
    """What a rollout's length costs, and its calls, [Q, K]; each only where it is asked for."""
    each = lambda of: np.float32([[of(trajectory) for trajectory in group] for group in groups])
    found = {}
    if self.loss.overlong_tokens:
      found["overlong"] = each(lambda t: self.loss.overlong(t, self.max_tokens))
    if self.preserve.coefficient:
      found["calls"] = each(lambda t: 0 if t.fault is not None else t.num_calls())
    return found

  def has_signal(self, groups, rewards, strata, step, parts=None) -> list[bool]:
    """Likewise, before any KL in the reward; group by group, so that one shape is compiled."""
    found = []
    for q, group in enumerate(groups):
      lost = [t.fault is not None for t in group]
      array_qk = {name: x for name, x in self.arrays([group], rewards[q : q + 1]).items()}
      if self.num_parts:
        array_qk["reward_parts"] = np.float32(parts[q : q + 1])
      advantage_qk = _advantage(
        self,
        np.float32(rewards[q : q + 1]) + array_qk.get("overlong", np.float32(0)),
        np.int32(strata[q : q + 1]),
        1 - np.float32([lost]),
        np.float32(step),
        np.float32([[t.num_policy_tokens for t in group]]),
        array_qk,
      )
      found.append(bool((np.asarray(advantage_qk) != 0).any()))
    return found

  def estimate(self, reward_qk, stratum_qk, valid_qk, step, length_qk, array_qk):
    """The advantages of rewards; of their parts, the length's penalty one of them, by gdpo."""
    estimate, more = advantages.estimator(self.advantage, num_strata=self.num_strata), {}
    if self.num_parts:
      parts_qkp, weight_p = array_qk["reward_parts"], self.part_weights
      if "overlong" in array_qk:
        parts_qkp = jnp.concatenate([parts_qkp, array_qk["overlong"][..., None]], axis=-1)
        weight_p += (1.0,)
      more = {"parts_qkp": parts_qkp, "weight_p": jnp.float32(weight_p)}
    return estimate(reward_qk, stratum_qk, valid_qk, step, length_qk, **more)

  def idle(self, reward_qk, valid_qk) -> np.ndarray:
    """Marks questions whose rollouts are all worth the same, where `loss.filter_groups` drops them.

    Equal rewards are equal advantages of 0 where a rollout is compared with its group alone, unless
    length or KL still takes something off a reward. Groups without advantage for another reason are
    dropped in the step itself.
    """
    own = self.loss.overlong_tokens or self.loss.kl_in == "reward" or self.preserve.coefficient
    if not self.loss.filter_groups or own or not self.advantage.zero_where_equal:
      return super().idle(reward_qk, valid_qk)
    largest = np.where(valid_qk > 0, reward_qk, -np.inf).max(1, keepdims=True)
    least = np.where(valid_qk > 0, reward_qk, np.inf).min(1, keepdims=True)
    return np.broadcast_to(largest <= least, reward_qk.shape)

  def credit(self, batch, before, step) -> Credit:
    """A = estimator(R, strata), for every token of a rollout alike.

    R is the reward less what the rollout's length and its KL cost.
    """
    reward_qk, stats = batch.reward_qk, {}
    if self.loss.overlong_tokens:
      reward_qk += batch.array_qk["overlong"]
      stats["reward/overlong"] = mean_of(batch.array_qk["overlong"], batch.valid_qk)
    if self.loss.takes_kl(before):
      penalty = self.loss.kl_penalty(before, batch)
      penalty_qk = by_rollout(penalty, batch.trajectory_art, reward_qk.shape)
      reward_qk -= penalty_qk
      stats["reward/kl_penalty"] = mean_of(penalty_qk, batch.valid_qk)
    advantage_qk = self.estimate(
      reward_qk, batch.stratum_qk, batch.valid_qk, step, batch.mass_qk["policy"], batch.array_qk
    )
    token, valid = {"advantage": advantage_qk}, {}
    if self.loss.filter_groups:
      signal_q1 = (advantage_qk != 0).any(axis=1, keepdims=True)
      valid["policy"] = batch.valid_qk * signal_q1
      stats["advantage/filtered_share"] = 1 - mean_of(signal_q1, batch.valid_qk)
    if self.preserve.coefficient:
      kept_qk = valid.get("policy", batch.valid_qk)
      preserved_qk = (advantage_qk >= 0) * kept_qk
      alike = self.preserve.normalizer == "preserved"
      valid["likelihood"] = preserved_qk if alike else kept_qk
      weight = likelihood.answer_weight(self.preserve, batch.array_qk["calls"], batch.valid_qk)
      token |= {"preserved": preserved_qk, "answer_weight": weight * jnp.ones_like(preserved_qk)}
    return Credit(advantage_qk, token, stats, valid)

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    """The policy's loss by token, and LLDS where it has a coefficient."""
    found = {
      "policy": policy_loss(
        self.loss, outputs, before, credit["advantage"], micro, max_tokens=self.max_tokens
      )
    }
    if self.preserve.coefficient:
      trainer_logp, sampler_logp = trainer_and_sampler(outputs, before, micro)
      old_logp = sampler_logp if self.loss.old_log_probs == "sampler" else trainer_logp
      found["likelihood"] = likelihood.likelihood_loss(
        self.preserve, outputs.logp, old_logp, credit, micro
      )
    return found


_advantage = functools.partial(jax.jit, static_argnums=0)(Grpo.estimate)


def mean_of(x_qk, valid_qk):
  """Mean over the rollouts that were not lost."""
  return (x_qk * valid_qk).sum() / jnp.maximum(valid_qk.sum(), 1)
