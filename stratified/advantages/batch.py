"""Batch estimators: kernels over all questions, [Q, K], whose statistics cross questions.

They have the signature of `group`'s kernels, with [Q, K] arrays. Every group kernel is a batch
kernel too when called with over="batch"; these two have names of their own. With questions sharded
over devices each statistic costs one small all-reduce.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from stratified.advantages import group, segments


@functools.partial(jax.jit, static_argnames="num_strata")
def reinforce_batch(reward_qk, stratum_qk, *, num_strata, mask_k=None, eps=1e-6, ddof=0):
  """(R - mean) / (std + eps), mean and standard deviation over all valid rollouts of the batch.

  `mask_k` is [Q, K]. Source: REINFORCE++, arXiv 2501.03262 (normalisation over the global batch).
  """
  return group.gn(
    reward_qk, stratum_qk, num_strata=num_strata, mask_k=mask_k, eps=eps, ddof=ddof, over="batch"
  )


@functools.partial(jax.jit, static_argnames="num_strata")
def gn_batch(reward_qk, stratum_qk, *, num_strata, mask_k=None, eps=1e-6, ddof=0):
  """(R - R_g) / (s + eps): R_g is the question's mean, s the batch's deviation of R - R_g.

  `mask_k` is [Q, K]. Source: REINFORCE++ with a group baseline, arXiv 2501.03262.
  """
  g = segments.prepare(reward_qk, stratum_qk, mask_k, num_strata, "batch")
  per_question = lambda r_k, s_k, m_k: group.centered(r_k, s_k, num_strata=num_strata, mask_k=m_k)
  centered_qk = jax.vmap(per_question)(g.reward, stratum_qk, g.mask)
  return segments.over_deviation(centered_qk, segments.deviation(g.group, centered_qk, ddof), eps)


@jax.jit
def gdpo(reward_qkp, mask_qk, *, weight_p=None, eps=1e-6, ddof=0):
  """Sums w_p (R_p - mean) / (std + eps) in the question over parts p, then whitens over the batch.

  reward_qkp: [Q, K, P], the parts of each rollout's reward. A plain sum of parts lets the one that
  varies most hide the others. weight_p: [P] the weight of each part, 1 unless given; it counts
  after the division. mask_qk is [Q, K]; masked entries get 0. Source: GDPO, arXiv 2601.05242.
  """
  chex.assert_rank([reward_qkp, mask_qk], [3, 2])
  stratum_qk = jnp.zeros_like(mask_qk, dtype=jnp.int32)  # sharded as the mask is
  options = dict(num_strata=1, eps=eps, ddof=ddof)
  one = lambda r_k, s_k, m_k: group.gn(r_k, s_k, mask_k=m_k, **options)
  parts = jax.vmap(jax.vmap(one), in_axes=(2, None, None), out_axes=2)
  found_qkp = parts(reward_qkp, stratum_qk, mask_qk)
  total_qk = (found_qkp if weight_p is None else found_qkp * weight_p).sum(axis=2)
  # Its mean is 0 in every question already; none is taken off, so that zeros stay exact.
  g = segments.prepare(total_qk, stratum_qk, mask_qk, 1, "batch")
  return segments.over_deviation(g.reward, segments.deviation(g.group, g.reward, ddof), eps)
