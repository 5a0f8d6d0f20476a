"""Small random checkpoints of every family, made by transformers and written where a test says.

Sizes and numbers are chosen so that a mistake shows: heads, key-value heads and widths all differ,
norms are not one, biases not zero, the norm's epsilon and the rotary base are unusual, scores
spread over a few units.
"""

import functools
import pathlib
import tempfile

import numpy as np
import pytest
import transformers

torch = pytest.importorskip("torch", reason="needs torch, which the decoder is compared with")

SIZES = dict(
  vocab_size=97,
  hidden_size=24,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  rms_norm_eps=1e-3,
  max_position_embeddings=128,
)
LLAMA3 = dict(
  rope_type="llama3",
  rope_theta=50.0,
  factor=4.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=32,
)
ROPE = dict(rope_type="default", rope_theta=50.0)
YARN = dict(
  rope_type="yarn", rope_theta=50.0, factor=4.0, original_max_position_embeddings=64
)  # all three parts of its ramp lie within five pairs
YARN_IN_FULL = YARN | dict(attention_factor=1.3, beta_fast=8.0, beta_slow=2.0, truncate=False)
LINEAR = dict(rope_type="linear", rope_theta=50.0, factor=2.5)
# Of three layers two see no further than six tokens.
LOCAL, GLOBAL = "sliding_attention", "full_attention"
MIXED = SIZES | dict(num_hidden_layers=3, sliding_window=6)

FAMILIES = {
  "llama-tied": lambda: transformers.LlamaConfig(
    **SIZES, rope_parameters=ROPE, tie_word_embeddings=True
  ),
  "llama3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, head_dim=16),
  "qwen2": lambda: transformers.Qwen2Config(**SIZES, rope_parameters=ROPE),
  "qwen2-tied": lambda: transformers.Qwen2Config(
    **SIZES | dict(num_key_value_heads=1), rope_parameters=ROPE, tie_word_embeddings=True
  ),
  "qwen3": lambda: transformers.Qwen3Config(**SIZES, rope_parameters=ROPE, head_dim=10),
  "qwen3-tied": lambda: transformers.Qwen3Config(
    **SIZES | dict(num_key_value_heads=4),
    rope_parameters=ROPE,
    head_dim=10,
    tie_word_embeddings=True,
  ),
  "llama-linear": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
  "llama-yarn": lambda: transformers.LlamaConfig(
    **SIZES, rope_parameters=YARN_IN_FULL, head_dim=16
  ),
  "qwen3-yarn": lambda: transformers.Qwen3Config(**SIZES, rope_parameters=YARN, head_dim=10),
  "qwen2-window": lambda: transformers.Qwen2Config(
    **MIXED, rope_parameters=ROPE, use_sliding_window=True, max_window_layers=1
  ),
  "mistral": lambda: transformers.MistralConfig(
    **SIZES, rope_parameters=ROPE, head_dim=10, sliding_window=6
  ),
  "mistral-open": lambda: transformers.MistralConfig(
    **SIZES, rope_parameters=ROPE, sliding_window=None
  ),
  "ministral": lambda: transformers.MinistralConfig(
    **MIXED, rope_parameters=YARN, head_dim=10, layer_types=[LOCAL, GLOBAL, LOCAL]
  ),
  "gemma3": lambda: transformers.Gemma3TextConfig(
    **MIXED,
    head_dim=10,
    query_pre_attn_scalar=7,
    layer_types=[LOCAL, GLOBAL, LOCAL],
    rope_parameters={GLOBAL: LINEAR, LOCAL: dict(rope_type="default", rope_theta=20.0)},
  ),
  "olmo2": lambda: transformers.Olmo2Config(**SIZES, rope_parameters=ROPE),
}


@functools.cache
def model(family: str):
  """transformers' model in float32 with every parameter drawn at random."""
  config = FAMILIES[family]()
  config._attn_implementation = "eager"
  torch.manual_seed(sorted(FAMILIES).index(family))
  net = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for name, value in net.named_parameters():
      noise = torch.randn_like(value)
      if "norm" in name:
        value.copy_(1 + 0.3 * noise)
      elif value.ndim == 1:
        value.copy_(0.5 * noise)
      else:
        value.copy_(1.5 * noise / value.shape[1] ** 0.5)
  return net


@functools.cache
def directory(family: str) -> pathlib.Path:
  """The family's checkpoint, written once a session by transformers."""
  path = pathlib.Path(_session().name) / family
  model(family).save_pretrained(path)
  return path


@functools.cache
def _session():
  return tempfile.TemporaryDirectory(prefix="small-models-")


def logits(net, tokens) -> np.ndarray:
  """transformers' logits [T, V] of one sequence alone."""
  with torch.no_grad():
    return net(torch.tensor([list(tokens)])).logits[0].float().numpy()
