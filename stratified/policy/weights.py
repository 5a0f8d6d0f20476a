"""Describes every weight of a decoder once; all that treats weights derives from it.

`ROWS` says of each weight, for every decoder, what its axes are, where it starts, what kind it is
and how a Hugging Face checkpoint names it. `weights(config)` picks the rows that a decoder has and
fills in its sizes. From them follow initial, abstract and sharded parameters, the dtype that a
forward pass reads (`seen_dtype`), which weights decay and which Muon orthogonalises (`decays`,
`linear_layers`), LoRA's targets and factors, import, export and PEFT's names, counts of parameters
and FLOPs. To add a weight, add its row, and use it in `decoder`.
"""

from collections.abc import Callable
import math
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from stratified.policy import families
from stratified.policy.config import DecoderConfig

Params = dict[str, Any]

# What is done with a weight follows from its kind:
#   matrix     a linear layer: read in the decoder's dtype, decays, Muon's, may have an adapter;
#   embedding  one row for each token: read in the decoder's dtype, decays;
#   norm, bias few numbers: read in float32, do not decay;
#   head       an extra output beside the decoder (heads.py): read in float32, decays.
Kind = Literal["matrix", "embedding", "norm", "bias", "head"]


class Weight(NamedTuple):
  """One weight of a decoder.

  shape: its size along each axis; axes: the logical axis of each (`sharding.RULES`).
  scale: the standard deviation it starts with; 0.0 starts at zero, None at one.
  inputs: how many of its axes (after `layers`) are inputs of a matrix product; None for no product.
  stored: its name in a Hugging Face checkpoint, {n} standing for the layer, each a tensor of its
    own; None where it is in none. There a product's weight is [outputs, inputs], each flattened to
    one axis, and norms and biases are flat.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  scale: float | None
  kind: Kind = "matrix"
  inputs: int | None = None
  stored: str | None = None

  @property
  def stacked(self) -> bool:
    """Whether the first axis is the layers."""
    return self.axes[0] == "layers"

  @property
  def part_shape(self) -> tuple[int, ...]:
    """The shape of one layer's part."""
    return self.shape[1:] if self.stacked else self.shape

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of each tensor in a Hugging Face checkpoint."""
    shape = self.part_shape
    if self.inputs:
      return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])
    return (math.prod(shape),) if self.kind in ("norm", "bias") else shape


class Row(NamedTuple):
  """What a weight is in every decoder that has it: `axes` name logical axes, or give a size."""

  axes: tuple[str | int, ...]
  kind: Kind
  start: Callable[[DecoderConfig, int], float | None]
  inputs: int | None = None
  stored: str | None = None
  when: Callable[[DecoderConfig], bool] = lambda config: True


def _zero(config, fan_in):
  return 0.0


def _identity(config, fan_in):
  """A norm that multiplies by one."""
  return 0.0 if config.zero_centered_norms else None


def _kept(config, fan_in):
  """Outputs as large as inputs."""
  return 1 / math.sqrt(fan_in)


def _residual(config, fan_in):
  """The same over the 2 layers that add to the stream."""
  return 1 / math.sqrt(2 * config.num_layers) / math.sqrt(fan_in)


def _by_width(config, fan_in):
  return 1 / math.sqrt(config.width)


def _linear(inputs, outputs, stored, start=_kept) -> Row:
  stored = f"model.layers.{{n}}.{stored}_proj.weight"
  return Row(("layers", *inputs, *outputs), "matrix", start, len(inputs), stored)


def _norm(axes, stored, when=lambda config: True) -> Row:
  stored = f"model.layers.{{n}}.{stored}.weight"
  return Row(("layers", *axes), "norm", _identity, stored=stored, when=when)


def _bias(axes, stored) -> Row:
  stored, when = f"model.layers.{{n}}.{stored}_proj.bias", lambda config: config.qkv_bias
  return Row(("layers", *axes), "bias", _zero, stored=stored, when=when)


_OF_HEAD = lambda config: config.qk_norm and not config.qk_norm_over_heads
_OVER_HEADS = lambda config: config.qk_norm and config.qk_norm_over_heads
_BEFORE, _AFTER = lambda config: config.pre_norms, lambda config: config.post_norms
_W, _Q, _KV = ("width",), ("heads", "head_dim"), ("kv_heads", "head_dim")

# A weight's random start depends on its place among the rows that its decoder has.
ROWS: dict[str, Row] = {
  "embed": Row(("vocabulary", "width"), "embedding", _by_width, stored="model.embed_tokens.weight"),
  "attention_norm": _norm(_W, "input_layernorm", _BEFORE),
  "q": _linear(_W, _Q, "self_attn.q"),
  "k": _linear(_W, _KV, "self_attn.k"),
  "v": _linear(_W, _KV, "self_attn.v"),
  "o": _linear(_Q, _W, "self_attn.o", _residual),
  "mlp_norm": _norm(_W, "post_attention_layernorm", _BEFORE),
  "gate": _linear(_W, ("mlp",), "mlp.gate"),
  "up": _linear(_W, ("mlp",), "mlp.up"),
  "down": _linear(("mlp",), _W, "mlp.down", _residual),
  "final_norm": Row(_W, "norm", _identity, stored="model.norm.weight"),
  "q_bias": _bias(_Q, "self_attn.q"),
  "k_bias": _bias(_KV, "self_attn.k"),
  "v_bias": _bias(_KV, "self_attn.v"),
  "q_norm": _norm(("head_dim",), "self_attn.q_norm", _OF_HEAD),
  "k_norm": _norm(("head_dim",), "self_attn.k_norm", _OF_HEAD),
  "q_norm_over_heads": _norm(_Q, "self_attn.q_norm", _OVER_HEADS),
  "k_norm_over_heads": _norm(_KV, "self_attn.k_norm", _OVER_HEADS),
  "attention_post_norm": _norm(_W, "post_attention_layernorm", _AFTER),
  "mlp_post_norm": _norm(_W, "post_feedforward_layernorm", _AFTER),
  "head": Row(
    ("vocabulary", "width"),
    "embedding",
    _by_width,
    stored="lm_head.weight",
    when=lambda config: not config.tied_embeddings,
  ),
}


def weights(config: DecoderConfig) -> dict[str, Weight]:
  """Lists the decoder's weights by name; those of layers are stacked along a leading axis."""
  c = config
  sizes = dict(layers=c.num_layers, vocabulary=c.vocab_size, width=c.width, mlp=c.mlp_width)
  sizes |= dict(heads=c.num_heads, kv_heads=c.num_kv_heads, head_dim=c.head_dim)
  names = families.names(config)
  table = {}
  for name, row in ROWS.items():
    if not row.when(config):
      continue
    shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in row.axes)
    part = shape[1:] if row.axes[0] == "layers" else shape
    scale = row.start(config, math.prod(part[: row.inputs]) if row.inputs else 1)
    axes = tuple(_logical(axis, row.kind) for axis in row.axes)
    table[name] = Weight(shape, axes, scale, row.kind, row.inputs, names.get(name, row.stored))
  return table


def _logical(axis: str | int, kind: Kind) -> str | None:
  """The logical axis; the width of norms and biases is whole on each device, as activations' is."""
  if isinstance(axis, int) or (axis == "width" and kind in ("norm", "bias")):
    return None
  return axis


def initial(weight: Weight, key) -> jax.Array:
  """A weight at its start, in float32 (see `Weight`)."""
  if weight.scale is None:
    return jnp.ones(weight.shape, jnp.float32)
  return weight.scale * jax.random.truncated_normal(key, -2, 2, weight.shape, jnp.float32) / 0.8796


class Decoder(nnx.Module):
  """The table's weights as NNX parameters at their start, each carrying its logical axes.

  `params` splits them off as the plain dict that every function of the decoder takes.
  """

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    for name, weight in weights(config).items():
      setattr(self, name, nnx.Param(initial(weight, rngs.params()), logical_axes=weight.axes))

  def params(self) -> Params:
    return nnx.to_pure_dict(nnx.state(self, nnx.Param))


def init(config: DecoderConfig, key: jax.Array) -> Params:
  """Random float32 parameters: truncated normal, residual outputs scaled by 1/sqrt(2 layers)."""
  return Decoder(config, nnx.Rngs(params=key)).params()


def logical_axes(config: DecoderConfig) -> dict[str, tuple[str | None, ...]]:
  return {name: weight.axes for name, weight in weights(config).items()}


def kind(name: str) -> Kind | None:
  """The kind of a weight by its name alone; None for what is no decoder's (an adapter's factor)."""
  return ROWS[name].kind if name in ROWS else None


def decays(name: str) -> bool:
  """Whether weight decay applies; an adapter's factors and a head's weight decay, its bias not."""
  return kind(name) not in ("norm", "bias") and not name.endswith("_bias")


def seen_dtype(config: DecoderConfig, name: str) -> str:
  """The dtype in which a forward pass reads a weight: norms and biases stay float32."""
  return "float32" if kind(name) in ("norm", "bias") else config.dtype


def linear_layers() -> dict[str, int]:
  """Lists the linear layers that a decoder may have, with the number of their input axes.

  They are what Muon orthogonalises, and what an adapter may stand beside.
  """
  return {name: row.inputs for name, row in ROWS.items() if row.kind == "matrix"}


def adapter_weights(config: DecoderConfig, target: str, rank: int) -> dict[str, Weight]:
  """Describes an adapter's factors: A [layers, inputs ..., rank], B [layers, rank, outputs ...].

  Each keeps the axes of the layer that it shares; the rank is whole everywhere. A starts at random,
  B at zero.
  """
  weight = weights(config)[target]
  shape, axes, at = weight.shape, weight.axes, 1 + weight.inputs
  return {
    f"{target}_a": Weight(
      (*shape[:at], rank), (*axes[:at], None), 1 / math.sqrt(math.prod(shape[1:at])), inputs=at - 1
    ),
    f"{target}_b": Weight(
      (shape[0], rank, *shape[at:]), (axes[0], None, *axes[at:]), 0.0, inputs=1
    ),
  }


def stacked_names(config: DecoderConfig, params: Params) -> list[str]:
  """The weights among `params` that have one part for each layer, adapters among them."""
  table = weights(config)
  layer = [name for name, weight in table.items() if weight.stacked]
  factors = [
    f"{name}_{part}" for name in layer if table[name].kind == "matrix" for part in ("a", "b")
  ]
  return layer + [name for name in factors if name in params]
