"""Counts what an update and a generation cost, from sizes alone, and how long that takes at least.

A compiler's own count is no help: it counts the body of a scan over layers once. FLOPs are those of
matrix products and attention (2 a multiply-add), for which a device's peak is stated.
"""

import dataclasses
import math

from stratified.policy import decoder


@dataclasses.dataclass(frozen=True)
class Device:
  """One accelerator: bytes of memory, bfloat16 FLOP/s, bytes/s of memory and over its links."""

  name: str
  capacity: float
  flops: float
  bandwidth: float
  link: float


# Google Cloud's and NVIDIA's public figures a chip; links are the sum over all of a chip's, one
# direction.
DEVICES = {
  "v5e": Device("TPU v5e", 16e9, 197e12, 819e9, 200e9),
  "v5p": Device("TPU v5p", 95e9, 459e12, 2765e9, 600e9),
  "v6e": Device("TPU v6e", 32e9, 918e12, 1640e9, 448e9),
  "h100": Device("NVIDIA H100 SXM", 80e9, 989e12, 3350e9, 450e9),
  "h200": Device("NVIDIA H200 SXM", 141e9, 989e12, 4800e9, 450e9),
}


def num_parameters(config: decoder.DecoderConfig) -> int:
  return sum(math.prod(weight.shape) for weight in decoder.weights(config).values())


def forward_flops(
  config: decoder.DecoderConfig, tokens: float, seen: float, *, logits: bool = True
) -> float:
  """FLOPs of one forward pass over `tokens` tokens that attend to `seen` tokens each on average.

  2 tokens (weights of all linear layers + width x vocabulary)
  + 4 tokens seen heads head_dim layers,
  where a local layer sees no more than its window
  """
  table = decoder.weights(config)
  linear = sum(math.prod(weight.shape) for weight in table.values() if weight.inputs)
  head = config.vocab_size * config.width if logits else 0
  attended = sum(min(seen, config.window) if local else seen for local in config.layer_is_local)
  return 2 * tokens * (linear + head) + 4 * tokens * attended * config.num_heads * config.head_dim


def update_flops(
  config: decoder.DecoderConfig, tokens: float, seen: float, *, reference: bool, chunked: bool
) -> float:
  """FLOPs of an update's gradients, recomputation and reference pass: what the device really runs.

  A backward pass costs two forward ones; rematerialised layers run forward once more, so do logits
  in chunks.
  """
  layers = forward_flops(config, tokens, seen, logits=False)
  head = 2 * tokens * config.vocab_size * config.width
  again = {"none": 0, "dots": 0, "full": 1}[config.remat]
  return layers * (3 + again + reference) + head * (3 + chunked + reference)


def model_flops(config: decoder.DecoderConfig, tokens: float, seen: float) -> float:
  """FLOPs that an update needs, three forward passes: utilisation is stated against them."""
  return 3 * forward_flops(config, tokens, seen)


def forward_bytes(config: decoder.DecoderConfig, tokens: float, micro: float) -> float:
  """Least bytes of a forward pass alone over `tokens` tokens of a device in `micro` parts."""
  wide = {"bfloat16": 2, "float32": 4}[config.dtype]
  return wide * (micro * num_parameters(config) + tokens * activations(config))


def activations(config: decoder.DecoderConfig) -> int:
  """Numbers of a token that are written and read between products, over all layers."""
  return config.num_layers * (
    8 * config.width + 3 * config.mlp_width + 4 * config.num_heads * config.head_dim
  )


def update_bytes(
  config: decoder.DecoderConfig, tokens: float, micro: float, shards: int, *, reference: bool
) -> float:
  """Least bytes between a device and its memory in an update of `tokens` tokens of its own.

  Per micro-batch each weight is read in bfloat16 forward, again, and backward, and its float32
  gradient is added to; per token and layer the activations between products are written and read;
  the optimizer reads and writes its float32 states once.
  """
  p, wide = num_parameters(config), {"bfloat16": 2, "float32": 4}[config.dtype]
  passes = 3 + (config.remat == "full") + reference
  return (
    micro * passes * p * wide
    + micro * 3 * p * 4 / shards
    + tokens * passes * activations(config) * wide
    + 7 * p * 4 / shards
  )


def decode_bytes(config: decoder.DecoderConfig, lanes: int, length: float) -> float:
  """Bytes read for a token of each lane: all weights once, each lane's keys and values."""
  wide = {"bfloat16": 2, "float32": 4}[config.dtype]
  return wide * (num_parameters(config) + cache_size(config, lanes, length))


def cache_size(config: decoder.DecoderConfig, lanes: int, length: float) -> float:
  """Numbers in the keys and values of `lanes` lanes of `length` tokens."""
  return 2 * lanes * length * config.num_layers * config.num_kv_heads * config.head_dim


def roofline(device: Device, *, flops: float, moved: float, sent: float = 0.0) -> tuple[float, str]:
  """(least seconds, what binds): the longest of computing, moving and sending, all overlapped."""
  times = {
    "compute": flops / device.flops,
    "memory": moved / device.bandwidth,
    "links": sent / device.link,
  }
  bound = max(times, key=times.get)
  return times[bound], bound
