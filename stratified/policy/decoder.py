"""A decoder of the Llama family: Llama/SmolLM2, Qwen2.5, Qwen3, Mistral, Gemma 3, OLMo 2.

`config.DecoderConfig` says what it is, `weights.ROWS` lists its weights, `families` has the names
that Hugging Face uses. This module computes it, by functions of one flat dict of parameters:

    # the update: packed rows, scanned layers
    hidden_rtd = hidden(config, params, token_rt, position_rt, segment_rt)
    # the sampler: a key-value cache
    hidden_btd, cache = extend(config, layers, token_bt, position_bt, cache)
    logits_btv = logits(config, params, hidden_btd)

Shapes: r rows or b lanes, t tokens, d width, h query heads, g key-value heads, k head dimension, v
vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stratified import sharding
from stratified.policy import attention, layers, rotary
from stratified.policy.config import ACTIVATIONS, DecoderConfig, REMAT
from stratified.policy.weights import (
  init,
  initial,
  logical_axes,
  Params,
  seen_dtype,
  stacked_names,
  Weight,
  weights,
)

__all__ = [
  "Cache",
  "DecoderConfig",
  "Params",
  "REMAT",
  "Weight",
  "empty_cache",
  "extend",
  "hidden",
  "init",
  "initial",
  "logical_axes",
  "logits",
  "output_weight",
  "seen_dtype",
  "unstack",
  "weights",
]


def hidden(config: DecoderConfig, params: Params, token_rt, position_rt, segment_rt) -> jax.Array:
  """Computes the final normed hidden states [R, T, D] of packed rows.

  A token attends to earlier tokens of its own segment, in a local layer to those within the window.
  Segment 0 is padding: what comes out there means nothing. `params` may hold adapters beside the
  weights (`lora.join`).
  """
  token_rt, position_rt, segment_rt = (
    sharding.constrain(x, "row", None) for x in (token_rt, position_rt, segment_rt)
  )
  rotations = _rotations(config, position_rt)
  alike = config.layers_alike
  context = attention.context(segment_rt, config.attention, config.window if alike else 0)

  def layer(x, xs):
    w, local = xs
    turn = _turn(rotations, config.layer_is_local[0] if alike else local)
    q, k, v = project(config, w, x, *turn)
    mixed = attention.packed(
      q,
      k,
      v,
      context,
      config.attention,
      scale=config.attention_scale,
      window=config.window,
      local=local,
    )
    x = x + finish(config, w, mixed)
    return sharding.constrain(x + mlp(config, w, x), "row", None, None), None

  if REMAT[config.remat]:
    layer = jax.checkpoint(layer, policy=REMAT[config.remat])
  x = _scale_embedding(config, layers.lookup(params["embed"], token_rt, config.dtype))
  stacked = {name: params[name] for name in stacked_names(config, params)}
  local_l = None if alike else jnp.asarray(config.layer_is_local)
  x, _ = jax.lax.scan(layer, x, (stacked, local_l), unroll=config.unroll)
  return _norm(config, x, params["final_norm"])


class Cache(NamedTuple):
  """Keys [B, G, K, S] and values [B, G, S, K] of each layer, laid out as second operands."""

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]


def empty_cache(config: DecoderConfig, lanes: int, length: int) -> Cache:
  make = lambda *shape: tuple(
    jnp.zeros((lanes, config.num_kv_heads, *shape), config.dtype) for _ in range(config.num_layers)
  )
  return Cache(make(config.head_dim, length), make(length, config.head_dim))


def unstack(config: DecoderConfig, params: Params) -> Params:
  """Prepares parameters for `extend`: a forward pass's dtypes, layers as a tuple of trees.

  Unrolled layers decode faster.
  """
  names, table = stacked_names(config, params), weights(config)
  cast = {name: value.astype(seen_dtype(config, name)) for name, value in params.items()}
  stacked = tuple({name: cast[name][i] for name in names} for i in range(config.num_layers))
  outer = {name: cast[name] for name in table if name not in names}
  return outer | {"layers": stacked}


def extend(config: DecoderConfig, params: Params, token_bt, position_bt, cache: Cache, lane_b=None):
  """Runs new tokens after what `cache` holds: (final hidden states [B, T, D], the cache with them).

  position_bt: where each token stands in its lane; a token at or past the cache's end is padding,
  written nowhere. lane_b: the lanes of the cache that the rows of token_bt belong to; None is all
  of them in order. `params` comes from `unstack`.
  """
  rotations = _rotations(config, position_bt)
  x = _scale_embedding(config, params["embed"][token_bt])
  keys, values = [], []
  for w, local, key, value in zip(
    params["layers"], config.layer_is_local, cache.keys, cache.values
  ):
    q, k, v = project(config, w, x, *_turn(rotations, local))
    key, value = attention.write(key, value, k, v, position_bt, lane_b)
    past = (key, value) if lane_b is None else (key[lane_b], value[lane_b])
    window = config.window if local else 0
    mixed = attention.cached(q, *past, position_bt, scale=config.attention_scale, window=window)
    x = x + finish(config, w, mixed)
    x = x + mlp(config, w, x)
    keys.append(key)
    values.append(value)
  return _norm(config, x, params["final_norm"]), Cache(tuple(keys), tuple(values))


def _rotations(config: DecoderConfig, position_rt):
  """(sines, cosines) of a global layer's positions and of a local one's."""
  of = lambda *base: rotary.rotary(position_rt, config.head_dim, *base)
  everywhere = of(config.rope_theta, config.rope_scaling)
  near = everywhere if config.rope_theta_local is None else of(config.rope_theta_local)
  return everywhere, near


def _turn(rotations, local):
  """The rotation of a layer; `local` is a bool, or a traced one."""
  everywhere, near = rotations
  if everywhere is near or isinstance(local, bool):
    return near if local is True else everywhere
  return jax.tree.map(lambda a, b: jnp.where(local, a, b), near, everywhere)


def _scale_embedding(config: DecoderConfig, x):
  # Rounded to the embedding's dtype first, as the models that scale theirs were trained.
  return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)


def _norm(config: DecoderConfig, x, scale):
  return layers.norm(x, 1.0 + scale if config.zero_centered_norms else scale, config.norm_eps)


def _linear(config: DecoderConfig, w, name: str, x):
  weight = weights(config)[name]
  return layers.apply(w, name, x, weight.axes[1:], weight.inputs)


def project(config: DecoderConfig, w, x, sin, cos):
  """Queries [., T, H, K], keys and values [., T, G, K] of a layer's input, positions rotated in."""
  y = _norm(config, x, w["attention_norm"]) if config.pre_norms else x
  q, k, v = (_linear(config, w, name, y) for name in ("q", "k", "v"))
  if config.qkv_bias:
    # In the bias's own dtype, so that its gradient is summed in it.
    q, k, v = (
      (z + w[f"{name}_bias"]).astype(z.dtype) for z, name in ((q, "q"), (k, "k"), (v, "v"))
    )
  if config.qk_norm:
    over = "_over_heads" if config.qk_norm_over_heads else ""
    q, k = _norm(config, q, w[f"q_norm{over}"]), _norm(config, k, w[f"k_norm{over}"])
  return rotary.rotate(q, sin, cos), rotary.rotate(k, sin, cos), v


def finish(config: DecoderConfig, w, mixed_rthk):
  """Computes what attention adds to the stream, from the mixed values of each head."""
  y = _linear(config, w, "o", mixed_rthk)
  return _norm(config, y, w["attention_post_norm"]) if config.post_norms else y


def mlp(config: DecoderConfig, w, x):
  """Computes what the gated MLP adds to the stream."""
  y = _norm(config, x, w["mlp_norm"]) if config.pre_norms else x
  gate = ACTIVATIONS[config.activation](_linear(config, w, "gate", y))
  y = _linear(config, w, "down", gate * _linear(config, w, "up", y))
  return _norm(config, y, w["mlp_post_norm"]) if config.post_norms else y


def output_weight(config: DecoderConfig, params: Params):
  return params["embed" if config.tied_embeddings else "head"]


def logits(config: DecoderConfig, params: Params, hidden_btd) -> jax.Array:
  """float32 logits [B, T, V]."""
  weight = output_weight(config, params).astype(config.dtype)
  return jnp.einsum("btd,vd->btv", hidden_btd, weight, preferred_element_type=jnp.float32)
