"""Per-token losses of policy optimisation, and how they are averaged.

Pure functions of arrays of one shape, any.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from stratified.config import setting, Settings

# Log-ratios are held to +-this before exp: e^20 is 5e8, far beyond any clip, and finite.
LOG_RATIO_LIMIT = 20.0


def ratio_of(logp, old_logp):
  """exp(logp - old_logp), the log-ratio held to +-20 so that no gap gives inf or NaN."""
  chex.assert_equal_shape([logp, old_logp])
  return jnp.exp(jnp.clip(logp - old_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_surrogate(logp, old_logp, advantage, *, clip_ratio, clip_ratio_high=None, dual_clip=0):
  """PPO's clipped surrogate as a loss, and where a clip holds the gradient back.

      rho = exp(logp - old_logp)
      loss = -min(rho A, clip(rho, 1 - clip_ratio, 1 + clip_ratio_high) A)

  clip_ratio_high: None takes clip_ratio (arXiv 1707.06347, Eq. 7); a larger one is DAPO's
  clip-higher (arXiv 2503.14476). dual_clip: a number c above 1 bounds the loss of a negative
  advantage by -c A (arXiv 1912.09729, Eq. 5); 0 is off.

  Returns (loss, clipped), both of logp's shape; clipped is 1 where a clip holds and the gradient
  is 0.
  """
  chex.assert_equal_shape([logp, old_logp, advantage])
  high = clip_ratio if clip_ratio_high is None else clip_ratio_high
  ratio = ratio_of(logp, old_logp)
  free, held = ratio * advantage, jnp.clip(ratio, 1 - clip_ratio, 1 + high) * advantage
  objective, clipped = jnp.minimum(free, held), held < free
  if dual_clip:
    floor = dual_clip * advantage
    below = (advantage < 0) & (objective < floor)
    objective, clipped = jnp.where(below, floor, objective), clipped | below
  return -objective, clipped.astype(logp.dtype)


def clipped_value_loss(value, old_value, target, *, clip):
  """max((V - G)^2, (V_clip - G)^2) / 2 with V_clip = V held to old_value +- clip; clip 0 is none.

  PPO's value loss (arXiv 2005.12729, section 3.1).
  """
  chex.assert_equal_shape([value, old_value, target])
  loss = jnp.square(value - target)
  if clip:
    held = jnp.clip(value, old_value - clip, old_value + clip)
    loss = jnp.maximum(loss, jnp.square(held - target))
  return loss / 2


def kl_estimate(logp, reference_logp, *, estimator):
  """Estimates KL(policy || reference) at sampled tokens.

  With x = reference_logp - logp: k1 = -x; k2 = x^2 / 2; k3 = exp(x) - 1 - x, which is unbiased like
  k1 and never negative. x is held to +-20, so that a token which the policy has all but ruled out
  can't overflow k3. Source: Schulman, "Approximating KL divergence", 2020.
  """
  chex.assert_equal_shape([logp, reference_logp])
  x = jnp.clip(reference_logp - logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  return KL_ESTIMATORS[estimator](x)


KL_ESTIMATORS = {
  "k1": lambda x: -x,
  "k2": lambda x: jnp.square(x) / 2,
  "k3": lambda x: jnp.expm1(x) - x,
}


def importance_weight(logp, sampler_logp, *, cap, position_rt=None):
  """Truncated importance weight of tokens that another program sampled, min(ratio, cap).

  ratio = exp(logp - sampler_logp), its logarithm held to +-20 so that no gap overflows.
  position_rt: None takes each token's own ratio. Given (each token's place in its rollout, of
    packed rows [R, T]), the ratio is the whole rollout's, the product of its tokens' ratios, the
    same at each of them.
  """
  chex.assert_equal_shape([logp, sampler_logp])
  log_ratio = logp - sampler_logp
  if position_rt is not None:
    log_ratio = segment_sum(log_ratio, position_rt)
  return jnp.minimum(ratio_of(log_ratio, jnp.zeros_like(log_ratio)), cap)


def segment_sum(x_rt, position_rt):
  """Sums over each token's segment of packed rows [R, T]; positions count from 0 in a segment."""
  chex.assert_rank(x_rt, 2)
  chex.assert_equal_shape([x_rt, position_rt])

  def running(x, starts):
    join = lambda a, b: (a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1]))
    return jax.lax.associative_scan(join, (starts, x), axis=1)[1]

  starts = position_rt == 0
  ends = jnp.concatenate([starts[:, 1:], jnp.ones_like(starts[:, :1])], axis=1)
  return running(x_rt, starts) + running(x_rt[:, ::-1], ends[:, ::-1])[:, ::-1] - x_rt


def token_weights(stream, valid, mass, *, aggregation, tokens, trajectories, max_tokens):
  """Weights of tokens such that the loss is a plain sum of weight x loss, over any split of them.

      token_mean      stream / tokens
      sequence_mean   stream / (trajectories x mass)
      constant        stream / (trajectories x max_tokens)        (Dr. GRPO, arXiv 2503.20783)

  stream: how much each token counts: 1 on policy tokens for a policy gradient, 0 outside a loss.
  valid, mass: whether the token's trajectory counts, and the sum of the stream over it. All three
    are of one shape.
  tokens, trajectories: scalars over all that is averaged: the sum of the streams, and the number of
    trajectories that count.
  """
  chex.assert_equal_shape([stream, valid, mass])
  divisor = {
    "token_mean": tokens,
    "sequence_mean": jnp.maximum(mass, 1) * trajectories,
    "constant": trajectories * max_tokens,
  }[aggregation]
  return stream * valid / jnp.maximum(divisor, 1)


AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@dataclasses.dataclass(frozen=True)
class DivergenceSettings(Settings):
  """Which divergence from a teacher is minimised, and how it is bounded (policy/divergence.py)."""

  SECTION = "distillation"
  divergence: str = setting(
    "forward",
    "forward is KL(teacher || student), reverse KL(student || teacher), or jensen_shannon",
    choices=("forward", "reverse", "jensen_shannon"),
    affects=["training"],
  )
  jensen_shannon_beta: float = setting(
    0.5,
    "the teacher's weight in jensen_shannon's mixture",
    low=0.01,
    high=0.99,
    affects=["training"],
  )
  top_k: int = setting(
    0,
    "the teacher's likeliest tokens that count one by one, the rest as one; 0 is the vocabulary",
    low=0,
    affects=["training"],
  )
  clip_form: str = setting(
    "entry",
    "what the clip bounds: each entry's term, the position's sum, or its gradient (scaled)",
    choices=("entry", "position", "scaled", "none"),
    affects=["training"],
  )
  clip: float = setting(
    0.05, "the bound, in nats; see distillation.clip_form", above=0, affects=["training"]
  )
  temperature: float = setting(
    1.0, "divides the logits of teacher and student", above=0, affects=["training"]
  )
