"""Log-probs and entropy of given tokens without ever holding [tokens, vocabulary].

For each position t the logits z_v = hidden_t . w_v / temperature give

    logp = z_target - log sum_v exp z_v            entropy = log sum_v exp z_v - sum_v softmax(z)_v z_v

computed in chunks of positions whose logits the backward pass makes again. Where the vocabulary is sharded, each
device reduces its own part and only the three sums travel.
"""

import functools

import jax
import jax.numpy as jnp

from stratified import sharding
from stratified.policy import decoder


def token_log_probs(config, params, hidden_rtd, token_rt, *, temperature=1.0, chunk: int | None = None):
  """Log-prob and entropy [R, T] (float32) of `token_rt` under the hidden state one position earlier.

  The first position of a row has no predecessor: both are 0 there. Entropy carries no gradient.
  chunk: positions of a row whose logits exist at once; None is all. It must divide T.
  """
  length = token_rt.shape[1]
  chunk = min(chunk or length, length)
  if length % chunk:
    raise ValueError(f"chunk={chunk} does not divide the row length {length}; choose a divisor")
  weight = decoder.output_weight(config, params).astype(config.dtype)
  target_rt = jnp.roll(sharding.constrain(token_rt, "row", None), -1, axis=1)
  if jax.sharding.get_abstract_mesh().empty:
    logp, entropy = _local(hidden_rtd, weight, target_rt, 1 / temperature, chunk=chunk, axis=None)
  else:
    weight = sharding.gathered(weight, ("vocabulary", "width"))
    rows = sharding.spec("row", None)
    logp, entropy = jax.shard_map(
        functools.partial(_local, chunk=chunk, axis="tensor"),
        in_specs=(sharding.spec("row", None, None), sharding.spec("vocabulary", None), rows, jax.P()),
        out_specs=(rows, rows))(hidden_rtd, weight, target_rt, jnp.float32(1 / temperature))
  shift = lambda x: jnp.roll(x, 1, axis=1) * (jnp.arange(length) > 0)
  return shift(logp), shift(jax.lax.stop_gradient(entropy))


def _local(hidden_rtd, weight_vd, target_rt, scale, *, chunk, axis):
  r, t, d = hidden_rtd.shape
  if chunk == t:
    return _chunk(hidden_rtd, weight_vd, target_rt, scale, axis)
  split = lambda x: jnp.moveaxis(x.reshape(r, t // chunk, chunk, *x.shape[2:]), 1, 0)
  body = jax.checkpoint(lambda _, x: (None, _chunk(x[0], weight_vd, x[1], scale, axis)))
  _, stats = jax.lax.scan(body, None, (split(hidden_rtd), split(target_rt)))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(r, t), stats)


def _chunk(hidden_rtd, weight_vd, target_rt, scale, axis):
  z = jnp.einsum("rtd,vd->rtv", hidden_rtd, weight_vd, preferred_element_type=jnp.float32) * scale
  size = weight_vd.shape[0]
  high = jax.lax.stop_gradient(z.max(-1))
  index = target_rt
  if axis:
    high = jax.lax.pmax(high, axis)
    index = target_rt - jax.lax.axis_index(axis) * size
  exp = jnp.exp(z - high[..., None])
  total = exp.sum(-1)
  weighted = jax.lax.stop_gradient((exp * z).sum(-1))
  picked = jnp.take_along_axis(z, jnp.clip(index, 0, size - 1)[..., None], axis=-1)[..., 0]
  if axis:
    picked = jnp.where((index >= 0) & (index < size), picked, 0)
    total, weighted, picked = (jax.lax.psum(x, axis) for x in (total, weighted, picked))
  log_total = jnp.log(total) + high
  return picked - log_total, log_total - weighted / total
