"""A decoder of the Llama family: Llama/SmolLM2, Qwen2.5 (QKV bias), Qwen3 (QK norm).

The weights are one flat table, `weights(config)`: shape, logical axes and initializer of each, from which the
abstract, the sharded and the initial parameters derive. Everything else is functions of that tree:

    hidden_rtd = hidden(config, params, token_rt, position_rt, segment_rt)      # the update: packed rows, scanned layers
    hidden_btd, cache = extend(config, layers, token_bt, position_bt, cache)    # the sampler: a key-value cache
    logits_btv = logits(config, params, hidden_btd)

Shapes: r rows or b lanes, t tokens, d width, h query heads, g key-value heads, k head dimension, v vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from stratified import sharding
from stratified.policy import attention

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and switches of a decoder; `rope_scaling` holds Llama 3's four numbers (factor, low, high, original length)."""

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
      raise ValueError(f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}")
    if self.remat not in REMAT:
      raise ValueError(f"remat={self.remat!r} is unknown; choose one of {sorted(REMAT)}")


class Weight(NamedTuple):
  """One weight: its shape, the logical axis of each dimension, and the standard deviation it starts with.

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
  """Every weight of the decoder by name; those of layers are stacked along a leading `layers` axis."""
  c, l = config, config.num_layers
  into, out = 1 / math.sqrt(c.width), 1 / math.sqrt(2 * l)
  table = {
      "embed": Weight((c.vocab_size, c.width), ("vocabulary", "width"), into),
      "attention_norm": Weight((l, c.width), ("layers", None), None),
      "q": Weight((l, c.width, c.num_heads, c.head_dim), ("layers", "width", "heads", "head_dim"), into),
      "k": Weight((l, c.width, c.num_kv_heads, c.head_dim), ("layers", "width", "kv_heads", "head_dim"), into),
      "v": Weight((l, c.width, c.num_kv_heads, c.head_dim), ("layers", "width", "kv_heads", "head_dim"), into),
      "o": Weight((l, c.num_heads, c.head_dim, c.width), ("layers", "heads", "head_dim", "width"),
                  out / math.sqrt(c.num_heads * c.head_dim)),
      "mlp_norm": Weight((l, c.width), ("layers", None), None),
      "gate": Weight((l, c.width, c.mlp_width), ("layers", "width", "mlp"), into),
      "up": Weight((l, c.width, c.mlp_width), ("layers", "width", "mlp"), into),
      "down": Weight((l, c.mlp_width, c.width), ("layers", "mlp", "width"), out / math.sqrt(c.mlp_width)),
      "final_norm": Weight((c.width,), (None,), None),
  }
  if c.qkv_bias:
    table |= {
        "q_bias": Weight((l, c.num_heads, c.head_dim), ("layers", "heads", "head_dim"), 0.0),
        "k_bias": Weight((l, c.num_kv_heads, c.head_dim), ("layers", "kv_heads", "head_dim"), 0.0),
        "v_bias": Weight((l, c.num_kv_heads, c.head_dim), ("layers", "kv_heads", "head_dim"), 0.0),
    }
  if c.qk_norm:
    table |= {name: Weight((l, c.head_dim), ("layers", None), None) for name in ("q_norm", "k_norm")}
  if not c.tied_embeddings:
    table["head"] = Weight((c.vocab_size, c.width), ("vocabulary", "width"), into)
  return table


class Decoder(nnx.Module):
  """The weights as NNX parameters, each carrying its logical axes; `params` splits them off as a plain dict."""

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


# The linear layers, and how many dimensions after `layers` their input takes.
LINEAR = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


def adapter_weights(config: DecoderConfig, target: str, rank: int) -> dict[str, Weight]:
  """The two low-rank factors of a linear layer's adapter: A [layers, inputs ..., rank], B [layers, rank, outputs ...].

  Each keeps the axes of the layer that it shares; the rank is whole everywhere. A starts at random, B at zero.
  """
  weight, inputs = weights(config)[target], 1 + LINEAR[target]
  shape, axes = weight.shape, weight.axes
  return {
      f"{target}_a": Weight((*shape[:inputs], rank), (*axes[:inputs], None), 1 / math.sqrt(math.prod(shape[1:inputs]))),
      f"{target}_b": Weight((shape[0], rank, *shape[inputs:]), (axes[0], None, *axes[inputs:]), 0.0),
  }


def _layer_axes(config, params) -> dict[str, tuple[str | None, ...]]:
  """Logical axes of every stacked weight in `params`, adapters among them."""
  axes = logical_axes(config)
  for target in LINEAR:
    if f"{target}_a" in params:
      axes |= {name: weight.axes for name, weight in adapter_weights(config, target, 1).items()}
  return {name: of for name, of in axes.items() if of[0] == "layers"}


def hidden(config: DecoderConfig, params: Params, token_rt, position_rt, segment_rt) -> jax.Array:
  """Final normed hidden states [R, T, D] of packed rows; a token attends to earlier tokens of its own segment.

  Segment 0 is padding: what comes out there means nothing. `params` may hold adapters beside the weights (`lora.join`).
  """
  axes = _layer_axes(config, params)
  token_rt, position_rt, segment_rt = (sharding.constrain(x, "row", None) for x in (token_rt, position_rt, segment_rt))
  sin, cos = rotary(config, position_rt)
  context = attention.context(segment_rt, config.attention)

  def layer(x, w):
    q, k, v = project(config, w, x, sin, cos)
    x = x + finish(w, attention.packed(q, k, v, context, config.attention))
    return sharding.constrain(x + mlp(config, w, x), "row", None, None), None

  if REMAT[config.remat]:
    layer = jax.checkpoint(layer, policy=REMAT[config.remat])
  x = lookup(params["embed"], token_rt, config.dtype)
  x, _ = jax.lax.scan(layer, x, {name: params[name] for name in axes}, unroll=config.unroll)
  return norm(x, params["final_norm"], config.norm_eps)


class Cache(NamedTuple):
  """Keys [B, G, K, S] and values [B, G, S, K] of each layer: each the second operand of its product as it lies."""

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]


def empty_cache(config: DecoderConfig, lanes: int, length: int) -> Cache:
  make = lambda *shape: tuple(jnp.zeros((lanes, config.num_kv_heads, *shape), config.dtype) for _ in range(config.num_layers))
  return Cache(make(config.head_dim, length), make(length, config.head_dim))


def seen_dtype(config: DecoderConfig, name: str) -> str:
  """The dtype that a forward pass reads a weight in: norms and biases are few and stay float32."""
  return "float32" if name.endswith(("_norm", "_bias")) else config.dtype


def unstack(config: DecoderConfig, params: Params) -> Params:
  """Parameters for `extend`: the dtypes of a forward pass, layers as a tuple of trees, since unrolled layers decode faster."""
  names = _layer_axes(config, params)
  cast = {name: value.astype(seen_dtype(config, name)) for name, value in params.items()}
  layers = tuple({name: cast[name][i] for name in names} for i in range(config.num_layers))
  return {name: value for name, value in cast.items() if name not in names} | {"layers": layers}


def extend(config: DecoderConfig, params: Params, token_bt, position_bt, cache: Cache, lane_b=None):
  """Runs new tokens after what `cache` holds; returns final hidden states [B, T, D] and the cache with them in it.

  position_bt: where each token stands in its lane; a token at or past the cache's end is padding, written nowhere.
  lane_b: the lanes of the cache that the rows of token_bt belong to; None is all of them in order.
  `params` comes from `unstack`.
  """
  sin, cos = rotary(config, position_bt)
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
  return norm(x, params["final_norm"], config.norm_eps), Cache(tuple(keys), tuple(values))


def project(config: DecoderConfig, w, x, sin, cos):
  """Queries [., T, H, K], keys and values [., T, G, K] of a layer's input, positions rotated in."""
  y = norm(x, w["attention_norm"], config.norm_eps)
  q, k, v = (apply(w, name, y) for name in ("q", "k", "v"))
  if config.qkv_bias:
    # In the bias's own dtype, so that its gradient is summed in it.
    q, k, v = ((z + w[f"{name}_bias"]).astype(z.dtype) for z, name in ((q, "q"), (k, "k"), (v, "v")))
  if config.qk_norm:
    q, k = norm(q, w["q_norm"], config.norm_eps), norm(k, w["k_norm"], config.norm_eps)
  return rotate(q, sin, cos), rotate(k, sin, cos), v


def finish(w, mixed_rthk):
  return apply(w, "o", mixed_rthk)


def mlp(config: DecoderConfig, w, x):
  y = norm(x, w["mlp_norm"], config.norm_eps)
  return apply(w, "down", jax.nn.silu(apply(w, "gate", y)) * apply(w, "up", y))


# Logical axes of each linear layer's weight, inputs first.
AXES = {"q": ("width", "heads", "head_dim"), "k": ("width", "kv_heads", "head_dim"), "v": ("width", "kv_heads", "head_dim"),
        "o": ("heads", "head_dim", "width"), "gate": ("width", "mlp"), "up": ("width", "mlp"), "down": ("mlp", "width")}


def apply(w, name: str, x):
  """x W, plus (x A) B where the layer has an adapter: two thin products, the matrix A B is never made."""
  inputs, y = LINEAR[name], linear(x, w[name], AXES[name])
  if f"{name}_a" not in w:
    return y
  low_rtz = linear(x, w[f"{name}_a"], (*AXES[name][:inputs], None))
  return y + linear(low_rtz, w[f"{name}_b"], (None, *AXES[name][inputs:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x, w, axes: tuple[str | None, ...]):
  """x W of activations x [R, T, inputs ...] and a master weight W [inputs ..., outputs ...] as it lies on the mesh.

  The weight is cast to x's dtype first and gathered along `fsdp` after that. Its gradient is summed in the master's
  own dtype, over the tokens and over the devices, and each device keeps its part. It is written as x^T g: what
  differentiation writes is (g^T x)^T, for which XLA's CPU backend computes g, the whole derivative of the gated
  unit, a second time into a transposed copy against the order of memory, and an MLP's forward and backward pass
  takes 1.8 times as long (8 rows of 192 tokens, width 128, MLP width 384).
  """
  ins, outs = _letters(x, w)
  return jnp.einsum(f"rt{ins},{ins}{outs}->rt{outs}", x, _for_product(x, w, axes),
                    out_sharding=_of_activation(axes[len(ins):]))


def _linear_forward(x, w, axes):
  return linear(x, w, axes), (x, w)


def _linear_backward(axes, saved, g):
  x, w = saved
  ins, outs = _letters(x, w)
  meshed = sharding.meshed()
  like = lambda value: jax.typeof(value).sharding if meshed else None
  return (jnp.einsum(f"rt{outs},{ins}{outs}->rt{ins}", g, _for_product(x, w, axes), out_sharding=like(x)),
          jnp.einsum(f"rt{ins},rt{outs}->{ins}{outs}", x, g, preferred_element_type=w.dtype, out_sharding=like(w)))


linear.defvjp(_linear_forward, _linear_backward)


def _letters(x, w):
  inputs = x.ndim - 2
  return "ab"[:inputs], "yz"[:w.ndim - inputs]


def _for_product(x, w, axes):
  return sharding.gathered(w.astype(x.dtype), axes)


def _of_activation(axes):
  """The sharding of an activation with these axes after rows and tokens; its width is whole."""
  if not sharding.meshed():
    return None
  return sharding.spec("row", None, *(None if axis == "width" else axis for axis in axes))


def norm(x, scale, eps):
  """RMSNorm in float32: x / sqrt(mean(x^2) + eps) * scale."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
  return (y * scale).astype(x.dtype)


def rotary(config: DecoderConfig, position_rt):
  """Sines and cosines [R, T, K/2] of the rotary embedding, in float32."""
  half = config.head_dim // 2
  frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if config.rope_scaling:
    frequency = _llama3_frequency(frequency, *config.rope_scaling)
  angle = position_rt[..., None].astype(jnp.float32) * frequency
  return jnp.sin(angle), jnp.cos(angle)


def _llama3_frequency(frequency, factor, low, high, original):
  wavelength = 2 * math.pi / frequency
  smooth = (original / wavelength - low) / (high - low)
  middle = (1 - smooth) * frequency / factor + smooth * frequency
  return jnp.where(wavelength < original / high, frequency, jnp.where(wavelength > original / low, frequency / factor, middle))


def rotate(x_rthk, sin, cos):
  """Rotates the two halves of the head dimension (Hugging Face's layout of the weights)."""
  a, b = jnp.split(x_rthk.astype(jnp.float32), 2, axis=-1)
  sin, cos = sin[:, :, None], cos[:, :, None]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_rthk.dtype)


def output_weight(config: DecoderConfig, params: Params):
  return params["embed" if config.tied_embeddings else "head"]


def logits(config: DecoderConfig, params: Params, hidden_btd) -> jax.Array:
  """float32 logits [B, T, V]."""
  weight = output_weight(config, params).astype(config.dtype)
  return jnp.einsum("btd,vd->btv", hidden_btd, weight, preferred_element_type=jnp.float32)


def lookup(embed_vd, token_rt, dtype):
  """Rows of the embedding in `dtype`, [R, T, D].

  Each device looks up all tokens of its `fsdp` group in the part of the table that it holds, and they exchange rows
  for columns: what travels is the activations, never the table or its gradient.
  """
  if not sharding.meshed():
    return embed_vd[token_rt].astype(dtype)

  @functools.partial(jax.shard_map, in_specs=(sharding.spec("vocabulary", "width"), sharding.spec("row", None)),
                     out_specs=sharding.spec("row", None, None))
  def local(embed, token):
    index = jax.lax.all_gather(token, "fsdp", tiled=True) - jax.lax.axis_index("tensor") * embed.shape[0]
    here = (index >= 0) & (index < embed.shape[0])
    columns = jnp.where(here[..., None], embed[jnp.clip(index, 0, embed.shape[0] - 1)], 0).astype(dtype)
    return jax.lax.all_to_all(jax.lax.psum(columns, "tensor"), "fsdp", split_axis=0, concat_axis=2, tiled=True)

  return local(embed_vd, token_rt)
