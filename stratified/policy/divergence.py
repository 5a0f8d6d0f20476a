"""Computes how far a student's next-token distribution is from a teacher's, in vocabulary chunks.

At each position, with P = softmax of the teacher's logits, Q of the student's and M = beta P +
(1 - beta) Q, a vocabulary entry v adds

    forward          P_v log(P_v / Q_v)
    reverse          Q_v log(Q_v / P_v)
    jensen_shannon   beta P_v log(P_v / M_v) + (1 - beta) Q_v log(Q_v / M_v)

and their sum is the divergence D. What is trained on is bounded by one of

    entry      sum over v of min(term_v, clip): the published form (Search-E1, arXiv 2605.22511)
    position   min(D, clip), without gradient beyond the clip
    scaled     min(D, clip), with the gradient of D times min(1, clip / D)
    none       D

`entry` can be negative, and a clipped entry's token is only lowered: with U the entries below the
clip and m their teacher mass, forward's gradient in the logits is m Q_j - P_j [j in U].

As in log_probs.py, logits exist for a chunk of positions at a time, the vocabulary is split over
the axes `tensor` and `fsdp`, and only sums travel.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stratified import sharding
from stratified.losses import DivergenceSettings
from stratified.policy import decoder, log_probs

HEAVY = 0.1  # teacher's mass from which an entry counts in `clipped_share`
NOTHING = -1e4  # a log-probability whose exponential is 0


class Divergence(NamedTuple):
  """What stands at each token, [R, T] float32; only `loss` carries a gradient.

  loss: the clipped divergence. value: the divergence without a clip.
  clipped_share: of the entries with a teacher mass above 0.1, the share that is clipped; 0 where
    there are none. `position` and `scaled` clip all entries of a position or none.
  kept_mass: the teacher's mass on entries below the clip; `scaled`: the gradient's factor.
  reversed: 1 where the teacher's likeliest token (of equal ones, any) is less likely for the
    student and descent lowers it still, else 0.
  """

  loss: Any
  value: Any
  clipped_share: Any
  kept_mass: Any
  reversed: Any


def token_divergence(
  config,
  student_params,
  teacher_params,
  student_rtd,
  teacher_rtd,
  *,
  settings: DivergenceSettings,
  chunk: int | None = None,
) -> Divergence:
  """The divergence [R, T] of the predictions for each token, from the hidden states one before.

  The first position of a row has no predecessor: all is 0 there. The gradient reaches
  `student_rtd` and the student's output weight, never the teacher's. With `top_k` the tokens
  beyond the teacher's k likeliest are one entry, with their summed mass.

  student_rtd, teacher_rtd: final hidden states [R, T, D], position by position of the same token.
  chunk: positions of a row whose logits exist at once; None is all. It must divide T.
  """
  if student_rtd.shape != teacher_rtd.shape:
    raise ValueError(
      f"hidden states of the student {student_rtd.shape} and of the teacher {teacher_rtd.shape} "
      "differ in shape; align them token by token first"
    )
  length = student_rtd.shape[1]
  chunk = min(chunk or length, length)
  if length % chunk:
    raise ValueError(f"chunk={chunk} does not divide the row length {length}; choose a divisor")
  student_vd = decoder.output_weight(config, student_params)
  teacher_vd, teacher_rtd = jax.lax.stop_gradient(
    (decoder.output_weight(config, teacher_params), teacher_rtd)
  )
  if settings.top_k >= config.vocab_size:
    settings = dataclasses.replace(settings, top_k=0)
  local = functools.partial(_local, settings=settings, chunk=chunk)
  if not sharding.meshed():
    found = local(student_rtd, teacher_rtd, student_vd, teacher_vd, parts=_Parts())
  else:
    split = lambda weight_vd: sharding.constrain(weight_vd, "vocabulary_part", None)
    rows = lambda hidden_rtd: sharding.constrain(hidden_rtd, "row", None, None)
    found = jax.shard_map(
      functools.partial(local, parts=_Parts(("tensor", "fsdp"))),
      in_specs=(sharding.spec("row", None, None),) * 2
      + (sharding.spec("vocabulary_part", None),) * 2,
      out_specs=sharding.spec("row", None),
    )(rows(student_rtd), rows(teacher_rtd), split(student_vd), split(teacher_vd))
  loss, *others = found
  return Divergence(*(log_probs.shifted(x, 1) for x in (loss, *jax.lax.stop_gradient(others))))


@dataclasses.dataclass(frozen=True)
class _Parts:
  """The parts that the vocabulary is split in, over these mesh axes; without, it is whole here."""

  axes: tuple[str, ...] = ()

  def sum(self, x):
    return jax.lax.psum(x, self.axes) if self.axes else x

  def max(self, x):
    return jax.lax.pmax(x, self.axes) if self.axes else x

  def join(self, x_rtk):
    """What all parts have along the last axis, in the vocabulary's order."""
    return jax.lax.all_gather(x_rtk, self.axes, axis=2, tiled=True) if self.axes else x_rtk

  def ids(self, size: int):
    """The vocabulary ids of this part's entries, whose number is `size`."""
    index = 0
    for axis in self.axes:
      index = index * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
    return index * size + jnp.arange(size)


def _local(student_rtd, teacher_rtd, student_vd, teacher_vd, *, settings, chunk, parts):
  r, t, _ = student_rtd.shape
  if parts.axes:  # here, so that the weight's gradient is summed over `data` once, after all chunks
    student_vd, teacher_vd = jax.lax.pcast((student_vd, teacher_vd), "data", to="varying")
  of = functools.partial(_chunk, settings=settings, parts=parts)
  if chunk == t:
    return of(student_rtd, teacher_rtd, student_vd, teacher_vd)
  split = lambda x: jnp.moveaxis(x.reshape(r, t // chunk, chunk, -1), 1, 0)
  body = jax.checkpoint(lambda _, x: (None, of(*x, student_vd, teacher_vd)))
  _, found = jax.lax.scan(body, None, (split(student_rtd), split(teacher_rtd)))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(r, t), found)


def _chunk(student_rtd, teacher_rtd, student_vd, teacher_vd, *, settings, parts):
  """Divergence of a chunk; on a mesh of this device's rows, with its part of each weight."""
  rows = student_rtd.shape[0]
  if parts.axes:
    student_rtd, teacher_rtd = (
      jax.lax.all_gather(jax.lax.pcast(x, "tensor", to="varying"), "fsdp", tiled=True)
      for x in (student_rtd, teacher_rtd)
    )
  z_rtv = log_probs.scores(student_rtd, student_vd)
  fixed_rtv = jax.lax.stop_gradient(z_rtv)
  found, gradient_rtv = _compare(
    fixed_rtv, log_probs.scores(teacher_rtd, teacher_vd), settings, parts
  )
  # 0, and its gradient is the loss's, known in closed form: that of identical passes is exactly 0.
  pull = (gradient_rtv * (z_rtv - fixed_rtv)).sum(-1)
  if parts.axes:
    first = jax.lax.axis_index("fsdp") * rows
    found = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, rows), found)
    pull = jax.lax.psum_scatter(jax.lax.psum(pull, "tensor"), "fsdp", tiled=True)
  return found._replace(loss=found.loss + pull)


def _compare(student_rtv, teacher_rtv, settings, parts):
  """The Divergence of logits, and d loss / d student's logits for this part of the vocabulary.

  With term f_v of entry v, its derivative f'_v in log Q_v, and u_v = 1 below the clip, 0 above:
  d loss / d z_j = u_j f'_j - Q_j sum over v of u_v f'_v.
  """
  scale = 1 / settings.temperature
  (log_q, _), (log_p, top_rtv) = (_log_softmax(z, scale, parts) for z in (student_rtv, teacher_rtv))
  rest_rtv, rest_p, rest_q = _rest(teacher_rtv, log_p, log_q, settings.top_k, parts)
  # The rest as one entry is the same as a teacher who spreads its mass there as the student does.
  log_p = jnp.where(rest_rtv, log_q + (rest_p - rest_q)[..., None], log_p)
  term, slope, (sign, mass) = _terms(settings, log_p, log_q)
  kept, rest_kept = jnp.ones(term.shape, bool), jnp.ones(rest_p.shape, bool)
  if settings.clip_form == "entry":
    rest_kept = _terms(settings, rest_p, rest_q)[0] < settings.clip
    kept = jnp.where(rest_rtv, rest_kept[..., None], term < settings.clip)
  heavy, rest_heavy = jnp.exp(log_p) > HEAVY, jnp.exp(rest_p) > HEAVY
  over_entries = {
    "value": term,
    "below": kept * term,
    "slope": kept * slope,
    "kept_mass": kept * mass,
    "cut_mass": ~kept * mass,
    "kept_teacher": kept * jnp.exp(log_p),
    "cut_teacher": ~kept * jnp.exp(log_p),
    "cut": ~kept & ~rest_rtv,
    "heavy": heavy & ~rest_rtv,
    "cut_heavy": ~kept & heavy & ~rest_rtv,
  }
  sums = parts.sum({name: x.sum(-1, dtype=jnp.float32) for name, x in over_entries.items()})
  sums["cut"] += ~rest_kept
  sums["heavy"] += rest_heavy
  sums["cut_heavy"] += ~rest_kept & rest_heavy
  found, factor = _bounded(settings, sums)
  total = sums["slope"] + sign * _share_kept(sums["kept_mass"], sums["cut_mass"])
  gradient = kept * (slope + sign * mass) - jnp.exp(log_q) * total[..., None]
  gradient *= scale * factor[..., None]
  against = top_rtv & (log_q < log_p) & (gradient > 0)
  return found._replace(reversed=parts.max(against.any(-1).astype(jnp.float32))), gradient


def _bounded(settings, sums):
  """The Divergence of sums over a position's entries, and what its clip multiplies gradients by."""
  value, clip, one = sums["value"], settings.clip, jnp.ones_like(sums["value"])
  factor = {
    "entry": one,
    "position": (value < clip).astype(jnp.float32),
    "scaled": clip / jnp.maximum(value, clip),
    "none": one,
  }[settings.clip_form]
  if settings.clip_form == "entry":
    loss = sums["below"] + clip * sums["cut"]
    kept_mass = _share_kept(sums["kept_teacher"], sums["cut_teacher"])
    share = sums["cut_heavy"] / jnp.maximum(sums["heavy"], 1)
  else:
    loss = value if settings.clip_form == "none" else jnp.minimum(value, clip)
    kept_mass, share = factor, (factor < 1) & (sums["heavy"] > 0)
  return Divergence(loss, value, share.astype(jnp.float32), kept_mass, None), factor


def _share_kept(kept, cut):
  """The part of a distribution that is kept: exactly 1 where nothing is cut, precise near 0."""
  return jnp.where(cut < 0.5, 1 - cut, kept)


def _terms(settings, log_p, log_q):
  """Each entry's term, and its derivative in log Q as a slope and sign x a distribution."""
  p, q, gap = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
  if settings.divergence == "forward":
    return -p * gap, jnp.zeros_like(p), (-1.0, p)
  if settings.divergence == "reverse":
    return q * gap, q * gap, (1.0, q)
  beta = settings.jensen_shannon_beta
  # log(P / M) and log(Q / M), each from the exponential that can't overflow; both 0 where P = Q.
  of_p = -jnp.log1p((1 - beta) * jnp.expm1(jnp.minimum(gap, 0)))
  of_q = -jnp.log1p(beta * jnp.expm1(-jnp.maximum(gap, 0)))
  of_p, of_q = jnp.where(gap < 0, of_p, of_q - gap), jnp.where(gap < 0, of_p + gap, of_q)
  slope = (1 - beta) * q * of_q
  return beta * p * of_p + slope, slope, (0.0, q)


def _rest(teacher_rtv, log_p, log_q, top_k: int, parts):
  """Which entries are not among the teacher's k largest, and the log of their mass for each.

  Equal logits count in the order of their ids. k = 0: none is left out, and exp(log mass) is 0.
  """
  if not top_k:
    nothing = jnp.full(log_p.shape[:-1], NOTHING, jnp.float32)
    return jnp.zeros(log_p.shape, bool), nothing, nothing
  size = teacher_rtv.shape[-1]
  value, index = jax.lax.top_k(teacher_rtv, min(top_k, size))
  value, id_ = parts.join(value), parts.join(parts.ids(size)[index])
  value, order = jax.lax.top_k(value, top_k)
  last, last_id = value[..., -1:], jnp.take_along_axis(id_, order, -1)[..., -1:]
  rest = (teacher_rtv < last) | ((teacher_rtv == last) & (parts.ids(size) > last_id))
  of_rest = (_log_sum(jnp.where(rest, x, -jnp.inf), parts) for x in (log_p, log_q))
  return rest, *of_rest


def _log_sum(x_rtv, parts):
  high = parts.max(x_rtv.max(-1))
  return jnp.log(parts.sum(jnp.exp(x_rtv - high[..., None]).sum(-1))) + high


def _log_softmax(z_rtv, scale: float, parts):
  """log softmax of scale x z, and whether an entry is the largest."""
  high = parts.max(z_rtv.max(-1))[..., None]
  below = (z_rtv - high) * scale
  total = parts.sum(jnp.exp(below).sum(-1))[..., None]
  return below - jnp.log(total), z_rtv == high
