"""config.json of a Hugging Face model directory, read into a DecoderConfig and written from one."""

import json
import os
import pathlib
from typing import Any

from stratified.policy import decoder

# Architecture -> its model_type and what it switches on in the decoder.
FAMILIES = {
  "LlamaForCausalLM": ("llama", {}),
  "Qwen2ForCausalLM": ("qwen2", {"qkv_bias": True}),
  "Qwen3ForCausalLM": ("qwen3", {"qk_norm": True}),
}

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


def load_config(directory: str | os.PathLike, **overrides) -> decoder.DecoderConfig:
  """The decoder that `directory`/config.json describes; `overrides` replace fields (dtype, remat,
  attention).

  Raises FileNotFoundError without a config.json, and ValueError naming the value that the decoder
  does not implement: another architecture, a sliding window in use, rotary scaling other than Llama
  3's, biases in other places than Qwen2's, quantised weights.
  """
  path = pathlib.Path(directory) / "config.json"
  if not path.is_file():
    raise FileNotFoundError(
      f"{path} does not exist; name a Hugging Face model directory, which holds "
      "config.json and *.safetensors"
    )
  try:
    raw = json.loads(path.read_text(encoding="utf-8"))
    fields = _fields(raw)
  except KeyError as error:
    raise ValueError(f"{path} has no {error}, which the decoder's size depends on") from error
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  return decoder.DecoderConfig(**fields | overrides)


SIZES = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "intermediate_size",
)


def _fields(raw: dict) -> dict[str, Any]:
  if not isinstance(raw, dict):
    raise ValueError(
      f"holds a {type(raw).__name__}, not an object of settings; copy or download it again"
    )
  given = {key: raw[key] for key in SIZES} | {
    key: raw[key] for key in ("num_key_value_heads", "head_dim") if raw.get(key) is not None
  }
  for key, value in given.items():
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise ValueError(
        f"{key}={value!r} must be a whole number above 0; copy or download the file again"
      )
  switches = FAMILIES[_check_supported(raw)][1]
  theta, scaling = _rope(raw)
  heads = raw["num_attention_heads"]
  return dict(
    vocab_size=raw["vocab_size"],
    width=raw["hidden_size"],
    num_layers=raw["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=raw.get("num_key_value_heads") or heads,
    head_dim=_head_dim(raw),
    mlp_width=raw["intermediate_size"],
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=raw.get("rms_norm_eps", 1e-6),
    tied_embeddings=bool(raw.get("tie_word_embeddings")),
    **switches,
  )


def _head_dim(raw):
  # transformers' Qwen3 has 128 for its default, the older families derive theirs.
  derived = (
    128 if raw.get("model_type") == "qwen3" else raw["hidden_size"] // raw["num_attention_heads"]
  )
  return raw.get("head_dim") or derived


def _check_supported(raw: dict) -> str:
  """Returns the architecture, or refuses what the decoder would compute wrongly."""
  types = {model_type: name for name, (model_type, _) in FAMILIES.items()}
  architecture = (
    raw.get("architectures") or [types.get(raw.get("model_type"), raw.get("model_type"))]
  )[0]
  # Qwen2 has its biases whatever the key says, and never one on the output projection.
  bias = architecture != "Qwen2ForCausalLM" and raw.get("attention_bias", False)
  kinds = ", ".join(sorted(_layer_types(raw) - {"full_attention"}))
  window = raw.get("sliding_window")
  checks = [
    (architecture in FAMILIES, f"architecture {architecture!r}", ", ".join(FAMILIES)),
    (not bias, "attention_bias=true", "biases on q, k and v of Qwen2ForCausalLM, none elsewhere"),
    (not raw.get("mlp_bias", False), "mlp_bias=true", "an MLP without biases"),
    (
      not kinds,
      f"a layer of type {kinds} (sliding_window={window})",
      "full attention in every layer",
    ),
    (raw.get("hidden_act", "silu") == "silu", f"hidden_act={raw.get('hidden_act')!r}", "silu"),
    (
      not raw.get("quantization_config"),
      "quantization_config",
      "weights in float32, bfloat16 or float16",
    ),
  ]
  for supported, what, instead in checks:
    if not supported:
      raise ValueError(f"{what} is not supported; what is: {instead}")
  return architecture


def _layer_types(raw) -> set[str]:
  if raw.get("layer_types"):
    return set(raw["layer_types"])
  windowed = raw.get("use_sliding_window") and raw.get("sliding_window") is not None
  first = raw.get("max_window_layers", 28)
  return {"sliding_attention"} if windowed and first < raw["num_hidden_layers"] else set()


def _rope(raw: dict) -> tuple[float, tuple | None]:
  """Base and Llama 3 scaling of the rotary embedding, at the top level or nested (transformers
  5)."""
  rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ("default", "llama3") or any(isinstance(value, dict) for value in rope.values()):
    raise ValueError(
      f"rotary scaling {rope} is not supported; what is: rope_type default or llama3, the "
      "same in every layer"
    )
  partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
  if partial not in (None, 1.0):
    raise ValueError(
      f"partial_rotary_factor={partial} is not supported; what is: 1, the whole head rotated"
    )
  theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
  if kind == "default":
    return theta, None
  original = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
  return theta, (*(float(rope[key]) for key in LLAMA3), float(original))


def config_json(config: decoder.DecoderConfig, dtype: str) -> dict[str, Any]:
  """The content of config.json: keys that transformers 4 and 5 both read."""
  switches = {name: True for name in ("qkv_bias", "qk_norm") if getattr(config, name)}
  family = [name for name, (_, on) in FAMILIES.items() if on == switches]
  if not family:
    raise ValueError(
      "qkv_bias and qk_norm together belong to no Hugging Face architecture; switch one off"
    )
  raw = dict(
    architectures=family,
    model_type=FAMILIES[family[0]][0],
    torch_dtype=dtype,
    vocab_size=config.vocab_size,
    hidden_size=config.width,
    intermediate_size=config.mlp_width,
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    hidden_act="silu",
    rms_norm_eps=config.norm_eps,
    rope_theta=config.rope_theta,
    tie_word_embeddings=config.tied_embeddings,
    max_position_embeddings=32768,
    use_cache=True,
  )
  if config.rope_scaling:
    *factors, original = config.rope_scaling
    raw["rope_scaling"] = {
      "rope_type": "llama3",
      **dict(zip(LLAMA3, factors, strict=True)),
      "original_max_position_embeddings": int(original),
    }
  return raw
