"""Per-token losses of policy optimisation, and how they are averaged.

Pure functions of arrays of one shape, any.
"""

import dataclasses
import math

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


def gspo(logp, old_logp, advantage, mask_rt, position_rt, **clip):
  """GSPO's surrogate: one ratio and one clip for all policy tokens of a rollout.

      s = exp(mean over the rollout's policy tokens of logp - old_logp)
      loss = -min(s A, clip(s, 1 - clip_ratio, 1 + clip_ratio_high) A)    at each of them

  The value at a token is s, its gradient s x that of the token's own logp: the sum over a rollout
  is the paper's with `sequence_mean`, and advantages may differ by token (its GSPO-token). The
  paper's clip is 3e-4 below and 4e-4 above. Arrays are packed rows [R, T]; `clip` and what is
  returned are `clipped_surrogate`'s. Source: arXiv 2507.18071, Eq. 5 and 13.
  """
  mean = sequence_mean(logp - old_logp, mask_rt, position_rt)
  return clipped_surrogate(_carried(mean, logp), jnp.zeros_like(logp), advantage, **clip)


def cispo(logp, old_logp, advantage, *, clip_ratio, clip_ratio_high=None):
  """CISPO: clips the weight of a token and never drops its gradient.

      loss = -stop_gradient(clip(rho, 1 - clip_ratio, 1 + clip_ratio_high)) A logp

  clip_ratio 1 and above leaves small weights as they are, as the paper does. Returns (loss,
  clipped); clipped is 1 where the weight is held. Source: MiniMax-M1, arXiv 2506.13585, Eq. 4.
  """
  chex.assert_equal_shape([logp, old_logp, advantage])
  high = clip_ratio if clip_ratio_high is None else clip_ratio_high
  ratio = jax.lax.stop_gradient(ratio_of(logp, old_logp))
  held = jnp.clip(ratio, 1 - clip_ratio, 1 + high)
  return -held * advantage * logp, (held != ratio).astype(logp.dtype)


def sapo(logp, old_logp, advantage, *, temperature, temperature_negative):
  """SAPO's soft gate in place of a clip.

      loss = -(4 / tau) sigmoid(tau (rho - 1)) A,    tau by the sign of A

  At rho = 1 its gradient is the plain policy gradient; away from it, it fades. Returns (loss,
  faded), faded = 1 - 4 g (1 - g) with g the sigmoid: the share of the token's weight that the gate
  takes. Source: arXiv 2511.20347, Eq. 5 and 6.
  """
  chex.assert_equal_shape([logp, old_logp, advantage])
  tau = jnp.where(advantage >= 0, temperature, temperature_negative)
  gate = jax.nn.sigmoid(tau * (ratio_of(logp, old_logp) - 1))
  return -4 / tau * gate * advantage, 1 - 4 * gate * (1 - gate)


def gmpo(logp, old_logp, advantage, mask_rt, position_rt, *, clip_ratio, clip_ratio_high=None):
  """GMPO: the geometric mean of a rollout's clipped token ratios.

      h_t = min(rho_t, 1 + clip_ratio_high) where A >= 0, max(rho_t, 1 - clip_ratio) where A < 0
      loss = -(product of h_t)^(1 / n) A    at each of the n policy tokens

  The gradient of a token is 0 where its ratio is held, else the geometric mean x that of its logp;
  the sum over a rollout is the paper's with `sequence_mean`. Its clip, exp(-0.4) to exp(0.4), is
  clip_ratio 0.33, clip_ratio_high 0.49. Arrays are packed rows [R, T]. Returns (loss, clipped).
  Source: arXiv 2507.20673, Eq. 4.
  """
  chex.assert_equal_shape([logp, old_logp, advantage, mask_rt, position_rt])
  high = clip_ratio if clip_ratio_high is None else clip_ratio_high
  above = math.log1p(high)
  below = math.log1p(-clip_ratio) if clip_ratio < 1 else -LOG_RATIO_LIMIT
  x = jnp.clip(logp - old_logp, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
  held = jnp.where(advantage >= 0, jnp.minimum(x, above), jnp.maximum(x, below))
  clipped = (held != x) & (advantage != 0)
  mean = sequence_mean(held, mask_rt, position_rt)
  ratio = jnp.exp(_carried(mean, jnp.where(clipped, 0, logp)))
  return -ratio * advantage, clipped.astype(logp.dtype)


SURROGATES = ("clipped", "gspo", "cispo", "sapo", "gmpo")


def _carried(value, logp):
  """`value` with the gradient of `logp`."""
  return jax.lax.stop_gradient(value) + logp - jax.lax.stop_gradient(logp)


def lost_likelihood(logp, old_logp, mask_rt, position_rt, *, gate):
  """LLDS: what each policy token has lost of its log-prob, where its gate is open.

      Delta = old_logp - logp
      loss = max(0, Delta) where sum of Delta > 0 over the gate's tokens, else 0

  gate: "action" sums over the turn (a contiguous span of policy tokens), "response" over all of the
    rollout's, "token" has no gate. Arrays are packed rows [R, T].
  Source: arXiv 2512.04220.
  """
  chex.assert_equal_shape([logp, old_logp, mask_rt, position_rt])
  lost = jnp.where(mask_rt > 0, old_logp - logp, 0)
  if gate == "token":
    return jnp.maximum(lost, 0)
  if gate == "action":
    before = jnp.concatenate([jnp.zeros_like(mask_rt[:, :1]), mask_rt[:, :-1]], axis=1)
    position_rt = jnp.where((position_rt == 0) | (mask_rt != before), 0, 1)
  return jnp.where(segment_sum(lost, position_rt) > 0, jnp.maximum(lost, 0), 0)


GATES = ("action", "token", "response")


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
  """DAPO's soft penalty for a rollout of so many tokens, in [-1, 0].

  0 up to max_length - buffer, then falling linearly to -1 at max_length. Source: arXiv 2503.14476,
  Eq. 13.
  """
  return -min(max(length - (max_length - buffer), 0) / buffer, 1.0)


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


def sequence_mean(x_rt, mask_rt, position_rt):
  """Mean of x over the tokens with mask 1 of each token's segment of packed rows [R, T]."""
  total = segment_sum(jnp.where(mask_rt > 0, x_rt, 0), position_rt)
  return total / jnp.maximum(segment_sum(mask_rt, position_rt), 1)


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
