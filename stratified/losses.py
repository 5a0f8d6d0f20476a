"""Per-token losses of policy optimisation and how they are averaged. Pure functions of arrays of
any one shape."""

import chex
import jax
import jax.numpy as jnp


def clipped_surrogate(logp, old_logp, advantage, *, clip_ratio):
  """PPO's clipped surrogate (arXiv 1707.06347, Eq. 7), as a loss, and where the clip holds the
  gradient back.

  loss = -min(rho A, clip(rho, 1 - c, 1 + c) A) with rho = exp(logp - old_logp). Returns (loss,
  clipped), both of logp's shape; clipped is 1 where the second term is the smaller and differs.
  """
  chex.assert_equal_shape([logp, old_logp, advantage])
  ratio = jnp.exp(logp - old_logp)
  free, held = ratio * advantage, jnp.clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * advantage
  return -jnp.minimum(free, held), (held < free).astype(logp.dtype)


def kl_estimate(logp, reference_logp, *, estimator):
  """Estimate of KL(policy || reference) at sampled tokens (Schulman, "Approximating KL divergence",
  2020).

  With x = reference_logp - logp: k1 = -x; k2 = x^2 / 2; k3 = exp(x) - 1 - x (never negative, as k1
  unbiased). x is held to +-20, so that a token which the policy has all but ruled out can't
  overflow k3.
  """
  chex.assert_equal_shape([logp, reference_logp])
  x = jnp.clip(reference_logp - logp, -20.0, 20.0)
  return KL_ESTIMATORS[estimator](x)


KL_ESTIMATORS = {
  "k1": lambda x: -x,
  "k2": lambda x: jnp.square(x) / 2,
  "k3": lambda x: jnp.expm1(x) - x,
}


def importance_weight(logp, sampler_logp, *, cap, position_rt=None):
  """Truncated importance sampling: min(exp(logp - sampler_logp), cap), for tokens that another
  program sampled.

  position_rt: each token's place in its rollout, of packed rows [R, T]: the ratio is then that of
  the whole rollout, the product of its tokens' ratios, the same at each of them; None takes each
  token's own. The log-ratio is held to +-20, so that no gap overflows.
  """
  chex.assert_equal_shape([logp, sampler_logp])
  ratio = logp - sampler_logp
  if position_rt is not None:
    ratio = segment_sum(ratio, position_rt)
  return jnp.minimum(jnp.exp(jnp.clip(ratio, -20.0, 20.0)), cap)


def segment_sum(x_rt, position_rt):
  """At each token of packed rows [R, T] the sum over its segment: positions count from 0 in
  each."""
  chex.assert_rank(x_rt, 2)
  chex.assert_equal_shape([x_rt, position_rt])

  def running(x, starts):
    join = lambda a, b: (a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1]))
    return jax.lax.associative_scan(join, (starts, x), axis=1)[1]

  starts = position_rt == 0
  ends = jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], axis=1)
  return running(x_rt, starts) + running(x_rt[:, ::-1], ends[:, ::-1])[:, ::-1] - x_rt


def token_weights(loss_mask, valid, length, *, aggregation, tokens, trajectories, max_tokens):
  """What each token's loss counts for, so that the loss is a plain sum of weight x loss over any
  split of the batch.

  token_mean: 1 / tokens. sequence_mean: 1 / (trajectories x own length). constant: 1 /
  (trajectories x max_tokens) (Dr. GRPO, arXiv 2503.20783).

  loss_mask: 1 on policy tokens; valid, length: whether the token's trajectory counts and its number
  of policy tokens; all of one shape. tokens, trajectories: scalars, the totals over what counts in
  the whole batch.
  """
  chex.assert_equal_shape([loss_mask, valid, length])
  divisor = {
    "token_mean": tokens,
    "sequence_mean": jnp.maximum(length, 1) * trajectories,
    "constant": trajectories * max_tokens,
  }[aggregation]
  return loss_mask * valid / jnp.maximum(divisor, 1)


AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
