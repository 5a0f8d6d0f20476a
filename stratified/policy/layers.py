"""Parts of a decoder's layers as functions of arrays: products on a mesh, norms, embeddings.

Letters: r rows, t tokens, d width, h heads, k head dimension, v vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from stratified import sharding


def apply(w, name: str, x, axes: tuple[str | None, ...], inputs: int):
  """x W, plus (x A) B where the layer has an adapter: thin products, A B is never made.

  w: a layer's weights by name. axes: logical axes of W, the first `inputs` of them its inputs.
  """
  y = linear(x, w[name], axes)
  if f"{name}_a" not in w:
    return y
  low_rtz = linear(x, w[f"{name}_a"], (*axes[:inputs], None))
  return y + linear(low_rtz, w[f"{name}_b"], (None, *axes[inputs:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x, w, axes: tuple[str | None, ...]):
  """x W of activations [R, T, inputs ...] and a master weight [inputs ..., outputs ...] on a mesh.

  The weight is cast to x's dtype first, then gathered along `fsdp`. Its gradient is summed in the
  master's own dtype, over the tokens and over the devices, and each device keeps its part.

  The gradient is written as x^T g. Differentiation would write (g^T x)^T, for which XLA's CPU
  backend computes g, the whole derivative of the gated unit, a second time into a transposed copy
  against the order of memory: an MLP's forward and backward pass takes 1.8 times as long then (8
  rows of 192 tokens, width 128, MLP width 384).
  """
  ins, outs = _letters(x, w)
  return jnp.einsum(
    f"rt{ins},{ins}{outs}->rt{outs}",
    x,
    _for_product(x, w, axes),
    out_sharding=_of_activation(axes[len(ins) :]),
  )


def _linear_forward(x, w, axes):
  return linear(x, w, axes), (x, w)


def _linear_backward(axes, saved, g):
  x, w = saved
  ins, outs = _letters(x, w)
  meshed = sharding.meshed()
  like = lambda value: jax.typeof(value).sharding if meshed else None
  return (
    jnp.einsum(f"rt{outs},{ins}{outs}->rt{ins}", g, _for_product(x, w, axes), out_sharding=like(x)),
    jnp.einsum(
      f"rt{ins},rt{outs}->{ins}{outs}", x, g, preferred_element_type=w.dtype, out_sharding=like(w)
    ),
  )


linear.defvjp(_linear_forward, _linear_backward)


def _letters(x, w):
  inputs = x.ndim - 2
  return "ab"[:inputs], "yz"[: w.ndim - inputs]


def _for_product(x, w, axes):
  return sharding.gathered(w.astype(x.dtype), axes)


def _of_activation(axes):
  """The sharding of an activation with these axes after rows and tokens; its width is whole."""
  if not sharding.meshed():
    return None
  return sharding.spec("row", None, *(None if axis == "width" else axis for axis in axes))


def norm(x, scale, eps):
  """RMSNorm in float32 over the scale's axes: x / sqrt(mean(x^2) + eps) * scale."""
  y, axes = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
  y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=axes, keepdims=True) + eps)
  return (y * scale).astype(x.dtype)


def lookup(embed_vd, token_rt, dtype):
  """Looks up rows of the embedding in `dtype`, [R, T, D].

  Each device looks up all tokens of its `fsdp` group in the part of the table that it holds, and
  they exchange rows for columns: what travels is the activations, never the table or its gradient.
  """
  if not sharding.meshed():
    return embed_vd[token_rt].astype(dtype)

  @functools.partial(
    jax.shard_map,
    in_specs=(sharding.spec("vocabulary", "width"), sharding.spec("row", None)),
    out_specs=sharding.spec("row", None, None),
  )
  def local(embed, token):
    index = (
      jax.lax.all_gather(token, "fsdp", tiled=True) - jax.lax.axis_index("tensor") * embed.shape[0]
    )
    here = (index >= 0) & (index < embed.shape[0])
    columns = jnp.where(here[..., None], embed[jnp.clip(index, 0, embed.shape[0] - 1)], 0).astype(
      dtype
    )
    return jax.lax.all_to_all(
      jax.lax.psum(columns, "tensor"), "fsdp", split_axis=0, concat_axis=2, tiled=True
    )

  return local(embed_vd, token_rt)
