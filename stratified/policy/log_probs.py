"""Computes log-probs and entropy of given tokens without ever holding [tokens, vocabulary].

For each position t the logits z_v = hidden_t . w_v / temperature give

    logp = z_target - log sum_v exp z_v
    entropy = log sum_v exp z_v - sum_v softmax(z)_v z_v

computed in chunks of positions; the backward pass makes their logits again. The vocabulary is split
over the axes `tensor` and `fsdp`: each device takes the hidden states of its `fsdp` group and
reduces its own part of their logits, and only the sums travel. So neither the output weight nor its
gradient is ever whole on a device.
"""

import functools

import jax
import jax.numpy as jnp

from stratified import sharding
from stratified.policy import decoder


def token_log_probs(
  config,
  params,
  hidden_rtd,
  token_rt,
  *,
  temperature=1.0,
  chunk: int | None = None,
  entropy_gradient: bool = False,
):
  """Log-prob and entropy [R, T], float32, of `token_rt` under the hidden state one position before.

  The first position of a row has no predecessor: both are 0 there.
  chunk: positions of a row whose logits exist at once; None is all. It must divide T.
  entropy_gradient: whether entropy carries gradient; its pass over the logits is the log-prob's.
  """
  length = token_rt.shape[1]
  chunk = min(chunk or length, length)
  if length % chunk:
    raise ValueError(f"chunk={chunk} does not divide the row length {length}; choose a divisor")
  weight = decoder.output_weight(config, params)
  target_rt = shifted(sharding.constrain(token_rt, "row", None), -1)
  if not sharding.meshed():
    logp, entropy = _local(
      hidden_rtd, weight, target_rt, 1 / temperature, chunk=chunk, meshed=False,
      entropy_gradient=entropy_gradient,
    )  # fmt: skip
  else:
    weight = sharding.constrain(weight, "vocabulary_part", None)
    rows = sharding.spec("row", None)
    logp, entropy = jax.shard_map(
      functools.partial(_local, chunk=chunk, meshed=True, entropy_gradient=entropy_gradient),
      in_specs=(
        sharding.spec("row", None, None),
        sharding.spec("vocabulary_part", None),
        rows,
        jax.P(),
      ),
      out_specs=(rows, rows),
    )(hidden_rtd, weight, target_rt, jnp.float32(1 / temperature))
  entropy = entropy if entropy_gradient else jax.lax.stop_gradient(entropy)
  return shifted(logp, 1), shifted(entropy, 1)


def shifted(x_rt, by: int):
  """Moves each row to the right by so many positions, zeros in place of what is missing."""
  return jax.lax.pad(x_rt, jnp.zeros((), x_rt.dtype), ((0, 0, 0), (by, -by, 0)))


def _local(hidden_rtd, weight_vd, target_rt, scale, *, chunk, meshed, entropy_gradient):
  r, t, d = hidden_rtd.shape
  if meshed:  # here, so that the weight's gradient is summed over `data` once, after all chunks
    weight_vd = jax.lax.pcast(weight_vd, "data", to="varying")
  of = functools.partial(_chunk_of_part if meshed else _chunk, entropy_gradient=entropy_gradient)
  if chunk == t:
    return of(hidden_rtd, weight_vd, target_rt, scale)
  split = lambda x: jnp.moveaxis(x.reshape(r, t // chunk, chunk, *x.shape[2:]), 1, 0)
  body = jax.checkpoint(lambda _, x: (None, of(x[0], weight_vd, x[1], scale)))
  _, stats = jax.lax.scan(body, None, (split(hidden_rtd), split(target_rt)))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(r, t), stats)


def _chunk(hidden_rtd, weight_vd, target_rt, scale, *, entropy_gradient):
  z = scores(hidden_rtd, weight_vd) * scale
  high = jax.lax.stop_gradient(z.max(-1))
  return _finish(high, *_sums(z, high, target_rt, entropy_gradient))


def _chunk_of_part(hidden_rtd, weight_vd, target_rt, scale, *, entropy_gradient):
  """The same on a device with its own rows, and its part of the vocabulary in `weight_vd`."""
  rows, size = hidden_rtd.shape[0], weight_vd.shape[0]
  everyone = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
  # Each operand says where it is to differ from device to device, so that its gradient is summed
  # over the rest: the weight before all chunks.
  hidden_rtd = jax.lax.pcast(hidden_rtd, "tensor", to="varying")
  z = scores(everyone(hidden_rtd), weight_vd) * scale
  part = jax.lax.axis_index("tensor") * jax.lax.axis_size("fsdp") + jax.lax.axis_index("fsdp")
  high = jax.lax.pmax(jax.lax.stop_gradient(z.max(-1)), ("tensor", "fsdp"))
  sums = _sums(z, high, everyone(target_rt) - part * size, entropy_gradient)
  mine = lambda x: jax.lax.psum_scatter(jax.lax.psum(x, "tensor"), "fsdp", tiled=True)
  high = jax.lax.dynamic_slice_in_dim(high, jax.lax.axis_index("fsdp") * rows, rows)
  return _finish(high, *map(mine, sums))


def _sums(z_rtv, high_rt, index_rt, entropy_gradient):
  """sum exp(z - high), sum exp(z - high) z, and z at the target's index (0 where outside)."""
  size = z_rtv.shape[-1]
  exp = jnp.exp(z_rtv - high_rt[..., None])
  picked = jnp.take_along_axis(z_rtv, jnp.clip(index_rt, 0, size - 1)[..., None], axis=-1)[..., 0]
  inside = (index_rt >= 0) & (index_rt < size)
  total, weighted = exp.sum(-1), (exp * z_rtv).sum(-1)
  weighted = weighted if entropy_gradient else jax.lax.stop_gradient(weighted)
  return total, weighted, jnp.where(inside, picked, 0)


def _finish(high, total, weighted, picked):
  log_total = jnp.log(total) + high
  return picked - log_total, log_total - weighted / total


@jax.custom_vjp
def scores(hidden_rtd, weight_vd):
  """float32 products [R, T, V]; casts the weight to the hidden states' dtype, its gradient back."""
  return jnp.einsum(
    "rtd,vd->rtv",
    hidden_rtd,
    weight_vd.astype(hidden_rtd.dtype),
    preferred_element_type=jnp.float32,
  )


def _scores_backward(saved, g_rtv):
  hidden_rtd, weight_vd = saved
  g_rtv = g_rtv.astype(hidden_rtd.dtype)
  return (
    jnp.einsum("rtv,vd->rtd", g_rtv, weight_vd.astype(hidden_rtd.dtype)),
    jnp.einsum("rtv,rtd->vd", g_rtv, hidden_rtd, preferred_element_type=weight_vd.dtype),
  )


scores.defvjp(
  lambda hidden_rtd, weight_vd: (scores(hidden_rtd, weight_vd), (hidden_rtd, weight_vd)),
  _scores_backward,
)
