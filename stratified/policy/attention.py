"""Causal attention in its two uses: packed rows in the update, a key-value cache in the sampler."""

import functools
import math

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
import jax.numpy as jnp

from stratified import sharding

MASKED = -1e30
SPLASH_BLOCK = 512  # tokens of a kernel's tile; smaller where it does not divide the row


def packed_mask(segment_rt, window: int = 0) -> jax.Array:
  """[R, 1, T, S]: whether t may see s: not later, in the same segment, and within the window.

  Padding (segment 0) sees itself, so no row is empty.
  """
  t = segment_rt.shape[1]
  causal = jnp.tril(jnp.ones((t, t), bool))
  if window:
    causal &= _near(t, window)
  return (causal & (segment_rt[:, :, None] == segment_rt[:, None, :]))[:, None]


def _near(t: int, window: int) -> jax.Array:
  """[T, S]: whether s is fewer than `window` tokens before t, or later."""
  return jnp.triu(jnp.ones((t, t), bool), 1 - window)


def best_for(platform: str, dtype: str, head_dim: int, row_length: int) -> str:
  """The implementation to take on "cpu", "gpu" or "tpu": the fastest whose conditions hold."""
  fast = {
    "cpu": ("folded", True),
    "gpu": ("cudnn", dtype == "bfloat16" and head_dim % 8 == 0 and head_dim <= 128),
    "tpu": ("splash", head_dim % 128 == 0 and row_length % 128 == 0),
  }
  name, holds = fast.get(platform, ("library", True))
  return name if holds else "library"


def context(segment_rt, implementation: str, window: int = 0) -> jax.Array:
  """Makes what `packed` needs of the segments, once for all layers: a mask, or the segments.

  `window` is that of all layers; 0 where only some have one.
  """
  return segment_rt if implementation == "splash" else packed_mask(segment_rt, window)


def packed(
  q_rthk,
  k_rtgk,
  v_rtgk,
  context_,
  implementation: str = "library",
  *,
  scale: float | None = None,
  window: int = 0,
  local=None,
) -> jax.Array:
  """Softmax attention of packed rows [R, T, H, K]; each device takes its own rows and heads.

  `implementation`: one of IMPLEMENTATIONS, `context_` is `context`'s result for it.
    library  jax.nn.dot_product_attention as XLA compiles it;
    cudnn    the same through cuDNN's fused kernel (GPU, bfloat16);
    splash   JAX's Pallas kernel for TPU: no [T, T] array, nothing computed above the diagonal or
             outside the window;
    folded   the same sums with a group's query heads folded into one matrix product, for CPU:
             forward and backward are 3 times as fast there (8 rows of 256 tokens, 4 heads of 32),
             since XLA's CPU backend transposes the library's layout at every product.
  scale: of the scores; None is head_dim^-0.5.
  window: how many tokens a token sees, itself included; 0 is all. local: where layers differ, a
    traced bool that says whether this one has the window; None where `context_` was made for it.
  """
  splash = implementation == "splash"
  attend = functools.partial(IMPLEMENTATIONS[implementation], scale=scale)
  choice = () if local is None else (local,)
  if splash:
    attend = functools.partial(attend, window=window)
  elif choice:
    context_, choice = context_ & (_near(q_rthk.shape[1], window) | ~local), ()
  if not sharding.meshed():
    return attend(q_rthk, k_rtgk, v_rtgk, context_, *choice)
  heads = sharding.spec("row", None, "heads", None)
  kv_heads = sharding.spec("row", None, "kv_heads", None)
  rows = sharding.spec("row", *(None,) * (context_.ndim - 1))
  # A Pallas call does not say along which mesh axes its result varies, so that check can't be made
  # for it.
  return jax.shard_map(
    attend,
    in_specs=(heads, kv_heads, kv_heads, rows, *(jax.P() for _ in choice)),
    out_specs=heads,
    check_vma=not splash,
  )(q_rthk, k_rtgk, v_rtgk, context_, *choice)


def _library(q, k, v, mask, *, scale=None):
  return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)


def _cudnn(q, k, v, mask, *, scale=None):
  return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")


def _splash(
  q, k, v, segment_rt, local=None, *, scale=None, window: int = 0, interpret: bool = False
):
  r, t, h, d = q.shape
  g = k.shape[2]
  by_group = lambda x: x.transpose(0, 2, 1, 3)
  q = by_group(q * (scale or d**-0.5)).reshape(r, g, h // g, t, d)
  operands = q, by_group(k), by_group(v), segment_rt
  every, near = (_splash_kernel(h // g, t, size, interpret) for size in (0, window))
  if local is None:
    mixed = near(*operands)
  else:
    mixed = jax.lax.cond(local, near, every, *operands)
  return mixed.reshape(r, h, t, d).transpose(0, 2, 1, 3)


def _splash_kernel(heads: int, t: int, window: int, interpret: bool):
  """(q [R, G, H/G, T, K], k, v [R, G, T, K], segments [R, T]) -> [R, G, H/G, T, K]."""
  block = math.gcd(t, SPLASH_BLOCK)
  sizes = splash_kernel.BlockSizes(
    block_q=block,
    block_kv=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  one = (
    splash_mask.LocalMask((t, t), (window - 1, 0), 0) if window else splash_mask.CausalMask((t, t))
  )
  kernel = splash_kernel.make_splash_mqa(
    splash_mask.MultiHeadMask([one] * heads),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )
  attend = lambda q, k, v, segment: jax.vmap(kernel, (0, 0, 0, None))(
    q, k, v, splash_kernel.SegmentIds(segment, segment)
  )
  return jax.vmap(attend)


def _folded(q, k, v, mask, scale=None):
  score = jnp.einsum(
    "bxk,bsk->bxs",
    _fold(q * (scale or q.shape[3] ** -0.5), k.shape[2]),
    _fold(k, k.shape[2]),
    preferred_element_type=jnp.float32,
  )
  r, t, h, _ = q.shape
  weight = jax.nn.softmax(jnp.where(mask, score.reshape(r, h, t, t), MASKED), axis=-1)
  mixed = jnp.einsum(
    "bxs,bsk->bxk", weight.reshape(score.shape).astype(v.dtype), _fold(v, v.shape[2])
  )
  return mixed.reshape(r, h, t, -1).transpose(0, 2, 1, 3)


def _folded_again(q, k, v, mask, *, scale=None):
  """`_folded` whose backward pass makes the weights of attention again."""
  return jax.checkpoint(functools.partial(_folded, scale=scale))(q, k, v, mask)


IMPLEMENTATIONS = {"library": _library, "cudnn": _cudnn, "splash": _splash, "folded": _folded_again}


def _fold(x_rthk, groups):
  """[R, T, H, K] -> [R G, (H/G) T, K]: heads that share keys and values are rows of one product."""
  r, t, h, k = x_rthk.shape
  return x_rthk.transpose(0, 2, 1, 3).reshape(r * groups, (h // groups) * t, k)


def write(
  key_bgks, value_bgsk, k_btgk, v_btgk, position_bt, lane_b=None
) -> tuple[jax.Array, jax.Array]:
  """Writes new keys and values at their lanes and positions; drops what lies past an end."""
  lane_b = jnp.arange(key_bgks.shape[0]) if lane_b is None else lane_b
  return (
    key_bgks.at[lane_b[:, None], :, :, position_bt].set(k_btgk, mode="drop"),
    value_bgsk.at[lane_b[:, None], :, position_bt].set(v_btgk, mode="drop"),
  )


def cached(
  q_bthk, key_bgks, value_bgsk, position_bt, *, scale: float | None = None, window: int = 0
) -> jax.Array:
  """Attention of new tokens over their lane's cache up to their own position, [B, T, H, K].

  With a window it runs over the last `window` tokens, the new one included. Keys lie transposed,
  and the softmax is divided by its sum after the product with the values: on CPU the two together
  take 0.55 times as long (64 lanes of 192, 4 heads of 32, one new token each).
  """
  b, t, h, k = q_bthk.shape
  g, s = value_bgsk.shape[1:3]
  q = q_bthk.reshape(b, t, g, h // g, k).transpose(0, 2, 1, 3, 4).reshape(b, g, t * (h // g), k) * (
    scale or k**-0.5
  )
  score = jnp.einsum("bgxk,bgks->bgxs", q, key_bgks, preferred_element_type=jnp.float32)
  at = jnp.repeat(position_bt, h // g, axis=1)[:, None, :, None]
  seen = jnp.arange(s) <= at
  if window:
    seen &= jnp.arange(s) > at - window
  score = jnp.where(seen, score, MASKED)
  weight = jnp.exp(score - score.max(-1, keepdims=True))
  mixed = jnp.einsum(
    "bgxs,bgsk->bgxk",
    weight.astype(value_bgsk.dtype),
    value_bgsk,
    preferred_element_type=jnp.float32,
  )
  mixed = (mixed / weight.sum(-1, keepdims=True)).astype(value_bgsk.dtype)
  return mixed.reshape(b, g, t, h // g, k).transpose(0, 2, 1, 3, 4).reshape(b, t, h, k)
