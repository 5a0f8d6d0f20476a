"""Decompositions of arXiv 2510.06214, finite-sample corrections, and a step's diagnostics.

Functions of rewards take one group, [K], and have the estimators' arguments
(stratified.advantages.group): `vmap` is the caller's. R_g, s_g are mean and standard deviation of
the group; n_k, R_k, s_k of a sample's stratum k; n counts the valid rollouts. Deviations divide by
n or n_k, as the theorems do. Closed forms (`expected_*`, `attenuation`) are float64 NumPy: they
describe a setting (stratum probabilities p_s, success rates q_s, K rollouts), not a batch.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stratified.advantages import segments


class Moments(NamedTuple):
  """By stratum, [num_strata]: valid rollouts, mean reward, deviation; all 0 for an empty one."""

  count_s: Any
  mean_s: Any
  std_s: Any


def moments(reward_k, stratum_k, *, num_strata: int, mask_k=None) -> Moments:
  """n_k, R_k and s_k of every stratum of one group."""
  g = segments.prepare(reward_k, stratum_k, mask_k, num_strata)
  within_k = g.stratum.center(g.reward)
  # Each sample's own value, averaged over equal values: a table from what the look-ups know.
  table = lambda x_k: jax.ops.segment_sum(jnp.where(g.mask, x_k, 0), stratum_k, num_strata)
  count_s = table(jnp.ones_like(g.reward))
  average = lambda x_k: table(x_k) / jnp.maximum(count_s, 1)
  return Moments(
    count_s, average(g.reward - within_k), average(segments.deviation(g.stratum, within_k, 0))
  )


def centered_parts(reward_k, stratum_k, *, num_strata: int, mask_k=None):
  """Proposition 1, R_i - R_g = (R_i - R_k) + (R_k - R_g): the two terms, [K] each, 0 where masked.

  The second is the cross-stratum bias: equal for all rollouts of a stratum, whatever they did.
  """
  g = segments.prepare(reward_k, stratum_k, mask_k, num_strata)
  return _centered_parts(g)


def _centered_parts(g: segments.Group):
  between_k = g.stratum.total(g.group.center(g.reward)) / g.stratum.count
  return g.stratum.center(g.reward), jnp.where(g.mask, between_k, 0)


def gn_parts(reward_k, stratum_k, *, num_strata: int, mask_k=None, eps=1e-6):
  """Proposition 3, GN_i = alpha_k SAN_i + Delta_k: (alpha_k, SAN_i, Delta_k), each [K].

  alpha_k = (s_k + eps) / (s_g + eps) and Delta_k = (R_k - R_g) / (s_g + eps). All are 0 where
  masked, and in a group without spread.
  """
  g = segments.prepare(reward_k, stratum_k, mask_k, num_strata)
  within_k, between_k = _centered_parts(g)
  std_k = segments.deviation(g.stratum, within_k, 0)
  std = segments.deviation(g.group, g.group.center(g.reward), 0)
  alpha_k = jnp.where(g.mask, segments.over_deviation(std_k + eps, std, eps), 0)
  return (
    alpha_k,
    segments.over_deviation(within_k, std_k, eps),
    segments.over_deviation(between_k, std, eps),
  )


def gradient_parts(reward_k, stratum_k, score, *, num_strata: int, mask_k=None, eps=1e-6):
  """Eq. 6, the two parts of GN's gradient: (1/n) sum_i w_i score_i, w_i = alpha_k SAN_i or Delta_k.

  score  pytree of arrays [K, ...], the gradient of each trajectory's log-prob; the parts have the
         trailing shapes and add up to (1/n) sum_i GN_i score_i
  """
  alpha_k, san_k, offset_k = gn_parts(
    reward_k, stratum_k, num_strata=num_strata, mask_k=mask_k, eps=eps
  )
  n = alpha_k.shape[0] if mask_k is None else jnp.maximum(jnp.sum(mask_k > 0), 1)

  def part(weight_k):
    return jax.tree.map(lambda score_k: jnp.einsum("k,k...->...", weight_k, score_k) / n, score)

  return part(alpha_k * san_k), part(offset_k)


def variance_terms(reward_k, stratum_k, *, num_strata: int, mask_k=None, eps=1e-6):
  """Theorem 2, Var[R - R_g] - Var[SAN] = Term A + Term B: the two terms, scalars.

  Term A, which is Theorem 1's difference Var[R - R_g] - Var[R - R_k]:

      (1/n) sum_k n_k (R_k - R_g)^2

  Term B, the effect of normalising:

      (1/n) sum_k n_k s_k^2 (1 - 1 / (s_k + eps)^2)
  """
  g = segments.prepare(reward_k, stratum_k, mask_k, num_strata)
  within_k, between_k = _centered_parts(g)
  return _variance_terms(g, within_k, between_k, eps)


def _variance_terms(g: segments.Group, within_k, between_k, eps):
  std_k = segments.deviation(g.stratum, within_k, 0)
  # s_k^2 / (s_k + eps)^2 is 0 for a stratum without spread, whatever eps.
  effect_k = jnp.square(std_k) - jnp.square(segments.over_deviation(std_k, std_k, eps))
  mean = lambda x_k: jnp.sum(jnp.where(g.mask, x_k, 0)) / g.group.count
  return mean(jnp.square(between_k)), mean(effect_k)


def advantage_by_stratum(advantage, stratum, weight, *, num_strata: int):
  """sum_i weight_i A_i over the samples of each stratum, [num_strata].

  This is what a loss adds up on the choice of a stratum: with weight 1 where a trajectory counts
  once, with its number of policy tokens where each token counts. Unit weights give exactly 0 for
  SAN. A loss that averages each trajectory over its own length has weights 1 / length, and the
  cancellation is lost. All arrays have one shape, any; `weight` is 0 where masked.
  """
  return jax.ops.segment_sum((advantage * weight).ravel(), stratum.ravel(), num_strata)


def attenuation(name: str, p, samples: int, q=None):
  """Share of its gradient that a stratum of probability p keeps: expected over an infinite group's.

  name  "stratified":     1 - (1 - (1 - p)^K) / (K p), since the stratum's mean contains the sample
        "stratified_loo": 1 - (1 - p)^(K - 1), since a singleton has no baseline
        "san":            E[sqrt(m (n - m))] / (K p sqrt(q (1 - q))) for rewards 0 or 1 of success
                          rate q, with n ~ Binomial(K, p) rollouts in the stratum and
                          m ~ Binomial(n, q) successes; the infinite group's is Theorem 3's
                          (eps = 0)
  p, q  probability of the stratum and success rate inside it, both in (0, 1]; samples  K

  Derived for scores of the acts inside the stratum, whose expectation within it is 0.
  """
  if name == "stratified":
    return 1 - (1 - (1 - p) ** samples) / (samples * p)
  if name == "stratified_loo":
    return 1 - (1 - p) ** (samples - 1)
  if name == "san":
    root = sum(
      binomial(samples, n, p) * binomial(n, m, q) * math.sqrt(m * (n - m))
      for n in range(samples + 1)
      for m in range(n + 1)
    )
    return root / (samples * p * math.sqrt(q * (1 - q)))
  raise ValueError(f"attenuation is known for stratified, stratified_loo and san, not for {name!r}")


def binomial(n: int, m: int, p: float) -> float:
  """P(m successes in n draws of success rate p)."""
  return math.comb(n, m) * p**m * (1 - p) ** (n - m)


def expected_zero_share(name: str, p_s, q_s, samples: int) -> float:
  """Expected share of trajectories with advantage 0: rewards 0 or 1, K = samples, no faults.

  name  "san": no rollout of the same stratum has the other reward,
               sum_s p_s [q_s (1 - p_s (1 - q_s))^(K - 1) + (1 - q_s) (1 - p_s q_s)^(K - 1)]
        "gn":  no rollout of the group has the other reward,
               Q^K + (1 - Q)^K with Q = sum_s p_s q_s
  """
  p_s, q_s = np.asarray(p_s, np.float64), np.asarray(q_s, np.float64)
  if name == "san":
    alike_s = q_s * (1 - p_s * (1 - q_s)) ** (samples - 1) + (1 - q_s) * (1 - p_s * q_s) ** (
      samples - 1
    )
    return float(p_s @ alike_s)
  if name == "gn":
    return float((p_s @ q_s) ** samples + (1 - p_s @ q_s) ** samples)
  raise ValueError(f"the expected zero share is known for san and gn, not for {name!r}")


def expected_singleton_share(p_s, samples: int) -> float:
  """Expected share of trajectories alone in their stratum, sum_s p_s (1 - p_s)^(K - 1)."""
  p_s = np.asarray(p_s, np.float64)
  return float(p_s @ (1 - p_s) ** (samples - 1))


def diagnostics(
  reward_qk, stratum_qk, valid_qk, advantage_qk, *, num_strata: int, eps=1e-6
) -> dict[str, jax.Array]:
  """Computes the scalars that each step logs; jittable, finite, 0 where nothing is valid.

  Averages over questions run over those with a valid rollout, the others over valid trajectories:

    advantage/zero_share    share of trajectories with an advantage of exactly 0
    advantage/rms           root mean square of the advantages
    advantage/within_rms, advantage/between_rms   root mean squares of R_i - R_k and R_k - R_g
    strata/count            mean number of distinct strata in a question
    strata/singleton_share  share of trajectories alone in their stratum
    strata/share_S          share of trajectories in stratum S
    theory/between_stratum_variance   mean of (1/n) sum_k n_k (R_k - R_g)^2, Theorem 1's difference
    theory/normalization_effect       mean of Theorem 2's Term B
    theory/cross_stratum_offset_rms   mean of the root mean square of Proposition 3's Delta_k
  """
  valid_qk = valid_qk > 0

  def of_question(reward_k, stratum_k, valid_k):
    g = segments.prepare(reward_k, stratum_k, valid_k, num_strata)
    within_k, between_k = _centered_parts(g)
    between, term_b = _variance_terms(g, within_k, between_k, eps)
    std = segments.deviation(g.group, g.group.center(g.reward), 0)
    return dict(
      between=between,
      term_b=term_b,
      offset_rms=segments.over_deviation(jnp.sqrt(between), std, eps),
      strata=jnp.sum(jnp.where(valid_k, 1 / g.stratum.count, 0)),
      alone=jnp.sum(valid_k & (g.stratum.count == 1)),
      within_square=jnp.sum(jnp.square(within_k)),
    )

  of_q = jax.vmap(of_question)(reward_qk, stratum_qk, valid_qk)
  asked_q = valid_qk.any(axis=1)
  questions, rollouts = jnp.maximum(asked_q.sum(), 1), jnp.maximum(valid_qk.sum(), 1)
  mean = lambda x_q: jnp.sum(jnp.where(asked_q, x_q, 0)) / questions
  share = lambda flag_qk: jnp.sum(flag_qk & valid_qk) / rollouts
  return {
    "advantage/zero_share": share(advantage_qk == 0),
    "advantage/rms": jnp.sqrt(jnp.sum(jnp.where(valid_qk, jnp.square(advantage_qk), 0)) / rollouts),
    "advantage/within_rms": jnp.sqrt(jnp.sum(of_q["within_square"]) / rollouts),
    "advantage/between_rms": jnp.sqrt(jnp.sum(of_q["between"] * valid_qk.sum(axis=1)) / rollouts),
    "strata/count": mean(of_q["strata"]),
    "strata/singleton_share": jnp.sum(of_q["alone"]) / rollouts,
    **{f"strata/share_{s}": share(stratum_qk == s) for s in range(num_strata)},
    "theory/between_stratum_variance": mean(of_q["between"]),
    "theory/normalization_effect": mean(of_q["term_b"]),
    "theory/cross_stratum_offset_rms": mean(of_q["offset_rms"]),
  }
