"""A decoder of the Llama family: Llama/SmolLM2, Qwen2.5 (QKV bias), Qwen3 (QK norm).

The weights are one flat table, `weights(config)`: shape, logical axes and initializer of each, from
which the abstract, the sharded and the initial parameters derive. Everything else is functions of
that tree:

    hidden_rtd = hidden(config, params, token_rt, position_rt, segment_rt)      # the update: packed
                                                                                rows, scanned layers
    hidden_btd, cache = extend(config, layers, token_bt, position_bt, cache)    # the sampler: a
                                                                                key-value cache
    logits_btv = logits(config, params, hidden_btd)

Shapes: r rows or b lanes, t tokens, d width, h query heads, g key-value heads, k head dimension, v
vocabulary.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from stratified import sharding
from stratified.policy import attention, layers

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and switches of a decoder; `rope_scaling` holds Llama 3's four numbers (factor, low,
  high, original length)."""

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float = 10000.0
  rope_scaling: tuple[float, float, float, float] | None = None
  norm_eps: float = 1e-6
  qkv_bias: bool = False
  qk_norm: bool = False
  tied_embeddings: bool = True
  dtype: str = "float32"
  remat: str = "none"
  attention: str = "library"
  unroll: int = 1

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
      )
    if self.remat not in REMAT:
      raise ValueError(f"remat={self.remat!r} is unknown; choose one of {sorted(REMAT)}")


class Weight(NamedTuple):
  """One weight: its shape, the logical axis of each dimension, and the standard deviation it starts
  with.

  `scale` None starts at one (norms), 0.0 at zero (biases).
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  scale: float | None


# What the backward pass recomputes: nothing; all but matrix products; a whole layer.
REMAT = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}


def weights(config: DecoderConfig) -> dict[str, Weight]:
  """Every weight of the decoder by name; those of layers are stacked along a leading `layers`
  axis."""
  c, l = config, config.num_layers
  into, out = 1 / math.sqrt(c.width), 1 / math.sqrt(2 * l)
  table = {
    "embed": Weight((c.vocab_size, c.width), ("vocabulary", "width"), into),
    "attention_norm": Weight((l, c.width), ("layers", None), None),
    "q": Weight(
      (l, c.width, c.num_heads, c.head_dim), ("layers", "width", "heads", "head_dim"), into
    ),
    "k": Weight(
      (l, c.width, c.num_kv_heads, c.head_dim), ("layers", "width", "kv_heads", "head_dim"), into
    ),
    "v": Weight(
      (l, c.width, c.num_kv_heads, c.head_dim), ("layers", "width", "kv_heads", "head_dim"), into
    ),
    "o": Weight(
      (l, c.num_heads, c.head_dim, c.width),
      ("layers", "heads", "head_dim", "width"),
      out / math.sqrt(c.num_heads * c.head_dim),
    ),
    "mlp_norm": Weight((l, c.width), ("layers", None), None),
    "gate": Weight((l, c.width, c.mlp_width), ("layers", "width", "mlp"), into),
    "up": Weight((l, c.width, c.mlp_width), ("layers", "width", "mlp"), into),
    "down": Weight(
      (l, c.mlp_width, c.width), ("layers", "mlp", "width"), out / math.sqrt(c.mlp_width)
    ),
    "final_norm": Weight((c.width,), (None,), None),
  }
  if c.qkv_bias:
    table |= {
      "q_bias": Weight((l, c.num_heads, c.head_dim), ("layers", "heads", "head_dim"), 0.0),
      "k_bias": Weight((l, c.num_kv_heads, c.head_dim), ("layers", "kv_heads", "head_dim"), 0.0),
      "v_bias": Weight((l, c.num_kv_heads, c.head_dim), ("layers", "kv_heads", "head_dim"), 0.0),
    }
  if c.qk_norm:
    table |= {
      name: Weight((l, c.head_dim), ("layers", None), None) for name in ("q_norm", "k_norm")
    }
  if not c.tied_embeddings:
    table["head"] = Weight((c.vocab_size, c.width), ("vocabulary", "width"), into)
  return table


class Decoder(nnx.Module):
  """The weights as NNX parameters, each carrying its logical axes; `params` splits them off as a
  plain dict."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    for name, weight in weights(config).items():
      setattr(self, name, nnx.Param(initial(weight, rngs.params()), logical_axes=weight.axes))

  def params(self) -> Params:
    return nnx.to_pure_dict(nnx.state(self, nnx.Param))


def initial(weight: Weight, key) -> jax.Array:
  """A weight at its start, in float32 (see `Weight`)."""
  if weight.scale is None:
    return jnp.ones(weight.shape, jnp.float32)
  return weight.scale * jax.random.truncated_normal(key, -2, 2, weight.shape, jnp.float32) / 0.8796


def init(config: DecoderConfig, key: jax.Array) -> Params:
  """Random float32 parameters: truncated normal, residual outputs scaled by 1/sqrt(2 layers)."""
  return Decoder(config, nnx.Rngs(params=key)).params()


def logical_axes(config: DecoderConfig) -> dict[str, tuple[str | None, ...]]:
  return {name: weight.axes for name, weight in weights(config).items()}


def adapter_weights(config: DecoderConfig, target: str, rank: int) -> dict[str, Weight]:
  """The two low-rank factors of a linear layer's adapter: A [layers, inputs ..., rank], B [layers,
  rank, outputs ...].

  Each keeps the axes of the layer that it shares; the rank is whole everywhere. A starts at random,
  B at zero.
  """
  weight, inputs = weights(config)[target], 1 + layers.LINEAR[target]
  shape, axes = weight.shape, weight.axes
  return {
    f"{target}_a": Weight(
      (*shape[:inputs], rank), (*axes[:inputs], None), 1 / math.sqrt(math.prod(shape[1:inputs]))
    ),
    f"{target}_b": Weight((shape[0], rank, *shape[inputs:]), (axes[0], None, *axes[inputs:]), 0.0),
  }


def _layer_axes(config, params) -> dict[str, tuple[str | None, ...]]:
  """Logical axes of every stacked weight in `params`, adapters among them."""
  axes = logical_axes(config)
  for target in layers.LINEAR:
    if f"{target}_a" in params:
      axes |= {name: weight.axes for name, weight in adapter_weights(config, target, 1).items()}
  return {name: of for name, of in axes.items() if of[0] == "layers"}


def hidden(config: DecoderConfig, params: Params, token_rt, position_rt, segment_rt) -> jax.Array:
  """Final normed hidden states [R, T, D] of packed rows; a token attends to earlier tokens of its
  own segment.

  Segment 0 is padding: what comes out there means nothing. `params` may hold adapters beside the
  weights (`lora.join`).
  """
  axes = _layer_axes(config, params)
  token_rt, position_rt, segment_rt = (
    sharding.constrain(x, "row", None) for x in (token_rt, position_rt, segment_rt)
  )
  sin, cos = _rotary(config, position_rt)
  context = attention.context(segment_rt, config.attention)

  def layer(x, w):
    q, k, v = project(config, w, x, sin, cos)
    x = x + finish(w, attention.packed(q, k, v, context, config.attention))
    return sharding.constrain(x + mlp(config, w, x), "row", None, None), None

  if REMAT[config.remat]:
    layer = jax.checkpoint(layer, policy=REMAT[config.remat])
  x = layers.lookup(params["embed"], token_rt, config.dtype)
  x, _ = jax.lax.scan(layer, x, {name: params[name] for name in axes}, unroll=config.unroll)
  return layers.norm(x, params["final_norm"], config.norm_eps)


class Cache(NamedTuple):
  """Keys [B, G, K, S] and values [B, G, S, K] of each layer: each the second operand of its product
  as it lies."""

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]


def empty_cache(config: DecoderConfig, lanes: int, length: int) -> Cache:
  make = lambda *shape: tuple(
    jnp.zeros((lanes, config.num_kv_heads, *shape), config.dtype) for _ in range(config.num_layers)
  )
  return Cache(make(config.head_dim, length), make(length, config.head_dim))


def seen_dtype(config: DecoderConfig, name: str) -> str:
  """The dtype that a forward pass reads a weight in: norms and biases are few and stay float32."""
  return "float32" if name.endswith(("_norm", "_bias")) else config.dtype


def unstack(config: DecoderConfig, params: Params) -> Params:
  """Parameters for `extend`: the dtypes of a forward pass, layers as a tuple of trees, since
  unrolled layers decode faster."""
  names = _layer_axes(config, params)
  cast = {name: value.astype(seen_dtype(config, name)) for name, value in params.items()}
  stacked = tuple({name: cast[name][i] for name in names} for i in range(config.num_layers))
  return {name: value for name, value in cast.items() if name not in names} | {"layers": stacked}


def extend(config: DecoderConfig, params: Params, token_bt, position_bt, cache: Cache, lane_b=None):
  """Runs new tokens after what `cache` holds; returns final hidden states [B, T, D] and the cache
  with them in it.

  position_bt: where each token stands in its lane; a token at or past the cache's end is padding,
  written nowhere. lane_b: the lanes of the cache that the rows of token_bt belong to; None is all
  of them in order. `params` comes from `unstack`.
  """
  sin, cos = _rotary(config, position_bt)
  x = params["embed"][token_bt]
  keys, values = [], []
  for w, key, value in zip(params["layers"], cache.keys, cache.values):
    q, k, v = project(config, w, x, sin, cos)
    key, value = attention.write(key, value, k, v, position_bt, lane_b)
    past = (key, value) if lane_b is None else (key[lane_b], value[lane_b])
    x = x + finish(w, attention.cached(q, *past, position_bt))
    x = x + mlp(config, w, x)
    keys.append(key)
    values.append(value)
  return layers.norm(x, params["final_norm"], config.norm_eps), Cache(tuple(keys), tuple(values))


def _rotary(config: DecoderConfig, position_rt):
  return layers.rotary(position_rt, config.head_dim, config.rope_theta, config.rope_scaling)


def project(config: DecoderConfig, w, x, sin, cos):
  """Queries [., T, H, K], keys and values [., T, G, K] of a layer's input, positions rotated in."""
  y = layers.norm(x, w["attention_norm"], config.norm_eps)
  q, k, v = (layers.apply(w, name, y) for name in ("q", "k", "v"))
  if config.qkv_bias:
    # In the bias's own dtype, so that its gradient is summed in it.
    q, k, v = (
      (z + w[f"{name}_bias"]).astype(z.dtype) for z, name in ((q, "q"), (k, "k"), (v, "v"))
    )
  if config.qk_norm:
    q, k = (
      layers.norm(q, w["q_norm"], config.norm_eps),
      layers.norm(k, w["k_norm"], config.norm_eps),
    )
  return layers.rotate(q, sin, cos), layers.rotate(k, sin, cos), v


def finish(w, mixed_rthk):
  return layers.apply(w, "o", mixed_rthk)


def mlp(config: DecoderConfig, w, x):
  y = layers.norm(x, w["mlp_norm"], config.norm_eps)
  return layers.apply(w, "down", jax.nn.silu(layers.apply(w, "gate", y)) * layers.apply(w, "up", y))


def output_weight(config: DecoderConfig, params: Params):
  return params["embed" if config.tied_embeddings else "head"]


def logits(config: DecoderConfig, params: Params, hidden_btd) -> jax.Array:
  """float32 logits [B, T, V]."""
  weight = output_weight(config, params).astype(config.dtype)
  return jnp.einsum("btd,vd->btv", hidden_btd, weight, preferred_element_type=jnp.float32)
