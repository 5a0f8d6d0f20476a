"""Describes a decoder: sizes and switches, from which its weights and its computation follow."""

import dataclasses
import functools

import jax

from stratified.policy.rotary import Scaling

# What the backward pass recomputes: nothing; all but matrix products; a whole layer.
REMAT = {
  "none": None,
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  "full": jax.checkpoint_policies.nothing_saveable,
}

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and switches of a decoder; the defaults are Llama's.

  Rotary positions: base `rope_theta`, changed by `rope_scaling` (`rotary.Scaling`).
  Window: a local layer's token sees itself and the `window` - 1 tokens before it; `local` says of
    each layer whether it is one, () that all are where `window` is not 0. Local layers turn their
    positions by the base `rope_theta_local`, without scaling, where that is given.
  Norms: before each block (`pre_norms`), after it (`post_norms`), or both; a norm multiplies by its
    weight, or by 1 + weight (`zero_centered_norms`). `qk_norm` norms each head of queries and keys,
    with `qk_norm_over_heads` all heads together.
  Scales: of attention scores (`attention_scale`, None is head_dim^-0.5) and of the embedding.
  family: name of the Hugging Face family (`families.FAMILIES`) that it came from, so that it is
    written as that one again; "" is the first family that computes the same.
  dtype, remat, attention and unroll say how a pass runs, not what the decoder is.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float = 10000.0
  rope_scaling: Scaling | None = None
  rope_theta_local: float | None = None
  window: int = 0
  local: tuple[bool, ...] = ()
  norm_eps: float = 1e-6
  pre_norms: bool = True
  post_norms: bool = False
  zero_centered_norms: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  qk_norm_over_heads: bool = False
  attention_scale: float | None = None
  embedding_scale: float = 1.0
  activation: str = "silu"
  tied_embeddings: bool = True
  family: str = ""
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
    if self.activation not in ACTIVATIONS:
      raise ValueError(
        f"activation={self.activation!r} is unknown; choose one of {sorted(ACTIVATIONS)}"
      )
    if self.window < 0 or (self.local and not (self.window and len(self.local) == self.num_layers)):
      raise ValueError(
        f"window={self.window} with local={self.local} must be at least 1 where layers are local, "
        f"and local must name all num_layers={self.num_layers}, or none where they are alike"
      )
    if not (self.pre_norms or self.post_norms):
      raise ValueError("pre_norms=False needs post_norms=True: a block has one norm at least")

  @property
  def layer_is_local(self) -> tuple[bool, ...]:
    """Of each layer, whether it sees no further than the window."""
    return self.local or (self.window > 0,) * self.num_layers

  @property
  def layers_alike(self) -> bool:
    return len(set(self.layer_is_local)) == 1
