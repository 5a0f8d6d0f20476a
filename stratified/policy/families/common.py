"""Reads what the families' config.json files share: sizes, rotary positions, windows, refusals.

`raw` is a config.json as a dict; `fields` are those of `DecoderConfig`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from stratified.policy import rotary
from stratified.policy.config import DecoderConfig

Raw = dict[str, Any]
Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
  """One family of Hugging Face models.

  read: config.json -> the fields of its DecoderConfig; ValueError for what the decoder does not
    compute.
  write: a DecoderConfig -> the keys of config.json beside those of `keys`.
  names: the weights that its checkpoints call otherwise than `weights.ROWS` does.
  served: the fields that SGLang heeds, among those that some of its models pass over
    (python/sglang/srt/models/ there): "window", "rope_scaling".
  """

  architecture: str
  model_type: str
  read: Callable[[Raw], Fields]
  write: Callable[[DecoderConfig], Raw]
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  served: tuple[str, ...] = ("rope_scaling",)


SIZES = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "intermediate_size",
)


def sizes(raw: Raw, *, head_dim: int | None = None, tied: bool = False) -> Fields:
  """Sizes, epsilon and tying; `head_dim` and `tied` are the family's where its file is silent."""
  heads = raw["num_attention_heads"]
  return dict(
    vocab_size=raw["vocab_size"],
    width=raw["hidden_size"],
    num_layers=raw["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=raw.get("num_key_value_heads") or heads,
    head_dim=raw.get("head_dim") or head_dim or raw["hidden_size"] // heads,
    mlp_width=raw["intermediate_size"],
    norm_eps=raw.get("rms_norm_eps", 1e-6),
    tied_embeddings=bool(raw.get("tie_word_embeddings", tied)),
  )


def refuse(checks: Sequence[tuple[bool, str, str]]) -> None:
  """Raises ValueError for the first (is it wrong, what the file says, what is supported)."""
  for wrong, what, instead in checks:
    if wrong:
      raise ValueError(f"{what} is not supported; what is: {instead}")


def refuse_biases(raw: Raw) -> None:
  refuse(
    [
      (
        bool(raw.get("attention_bias", False)),
        "attention_bias=true",
        "biases on q, k and v of Qwen2ForCausalLM, none elsewhere",
      ),
      (bool(raw.get("mlp_bias", False)), "mlp_bias=true", "an MLP without biases"),
    ]
  )


def refuse_other_than_silu(raw: Raw) -> None:
  act = raw.get("hidden_act", "silu")
  refuse([(act != "silu", f"hidden_act={act!r}", "silu")])


# Windows


def local_layers(raw: Raw) -> list[bool] | None:
  """Of each layer whether `layer_types` says that it has the window; None without that key."""
  kinds = raw.get("layer_types")
  if not kinds:
    return None
  unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
  refuse([(bool(unknown), f"a layer of type {', '.join(unknown)}", "full or sliding attention")])
  if len(kinds) != raw["num_hidden_layers"]:
    raise ValueError(
      f"layer_types names {len(kinds)} layers and num_hidden_layers={raw['num_hidden_layers']}; "
      "copy or download the file again"
    )
  return [kind == "sliding_attention" for kind in kinds]


def windows(local: Sequence[bool], size: int | None) -> Fields:
  """`window` and `local` for layers of which these are local."""
  if not any(local):
    return {}
  if not isinstance(size, int) or size < 1:
    raise ValueError(f"sliding_window={size!r} must be a whole number above 0 for sliding layers")
  return dict(window=size, local=() if all(local) else tuple(local))


def refuse_windows(raw: Raw) -> None:
  """Refuses windows, for a family without them."""
  local = local_layers(raw) or after_layer(raw)
  refuse(
    [
      (
        any(local),
        f"a layer of type sliding_attention (sliding_window={raw.get('sliding_window')})",
        "full attention in every layer of this architecture",
      )
    ]
  )


def after_layer(raw: Raw) -> list[bool]:
  """Qwen's older form: layers from `max_window_layers` on are local where `use_sliding_window`."""
  used = raw.get("use_sliding_window") and raw.get("sliding_window") is not None
  first = raw.get("max_window_layers", 28)
  return [bool(used) and layer >= first for layer in range(raw["num_hidden_layers"])]


def layer_types(config: DecoderConfig) -> list[str]:
  return ["sliding_attention" if local else "full_attention" for local in config.layer_is_local]


# Rotary positions

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


def rope(raw: Raw, default_theta: float = 10000.0) -> Fields:
  """`rope_theta` and `rope_scaling`, at the top level or nested (transformers 5)."""
  old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
  if any(isinstance(value, dict) for value in [*old.values(), *new.values()]):
    raise ValueError(
      f"rotary scaling {old | new} is not supported; what is: the same in every layer"
    )
  if old and new:
    both = [("rope_scaling", _named(old)), ("rope_parameters", _named(new))]
    _same(both, "rotary positions")
  settings = _named(new) | _named(old)
  _same([("rope_theta", raw), ("rope_parameters", settings)], "rotary positions", ["rope_theta"])
  theta = float(settings.get("rope_theta") or raw.get("rope_theta") or default_theta)
  partial = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
  what, instead = f"partial_rotary_factor={partial}", "1, the whole head rotated"
  refuse([(partial not in (None, 1.0), what, instead)])
  return dict(rope_theta=theta, rope_scaling=scaling(settings, raw))


def _named(settings: Raw) -> Raw:
  """With the type, where it is given, under its newer key."""
  kind = settings.get("rope_type", settings.get("type"))
  rest = {key: value for key, value in settings.items() if key not in ("type", "rope_type")}
  return rest | ({"rope_type": kind} if kind else {})


def _same(places: list[tuple[str, Raw]], what: str, keys: Sequence[str] | None = None) -> None:
  """Refuses a file that says a thing in two places, and not the same."""
  (first, a), (second, b) = places
  for key in keys or sorted(set(a) & set(b)):
    if a.get(key) is not None and b.get(key) is not None and a[key] != b[key]:
      raise ValueError(
        f"{what}: {key}={a[key]!r} in {first} and {key}={b[key]!r} in {second}; leave out the one "
        "that is wrong"
      )


def scaling(settings: Raw, raw: Raw) -> rotary.Scaling | None:
  """The scaling that a rope dict of type default, linear, llama3 or yarn describes."""
  kind = settings.get("rope_type", "default")
  if kind == "default":
    return None
  if kind not in ("linear", "llama3", "yarn"):
    raise ValueError(
      f"rotary scaling {settings} is not supported; what is: rope_type default, linear, llama3 or "
      "yarn, the same in every layer"
    )
  if kind == "linear":
    return rotary.Linear(float(settings["factor"]))
  original = settings.get("original_max_position_embeddings") or raw["max_position_embeddings"]
  if kind == "llama3":
    return rotary.Llama3(*(float(settings[key]) for key in LLAMA3), float(original))
  return _yarn(settings, float(original), raw)


def _yarn(settings: Raw, original: float, raw: Raw) -> rotary.Yarn:
  factor = float(settings.get("factor") or raw["max_position_embeddings"] / original)
  attention = settings.get("attention_factor")
  if attention is None:
    attention = rotary.yarn_attention_factor(factor)
    scales = settings.get("mscale"), settings.get("mscale_all_dim")
    if all(scales):
      over, under = (rotary.yarn_attention_factor(factor, scale) for scale in scales)
      attention = over / under
  return rotary.Yarn(
    factor,
    original,
    float(attention),
    float(settings.get("beta_fast") or 32),
    float(settings.get("beta_slow") or 1),
    bool(settings.get("truncate", True)),
  )


def rope_scaling_json(scaled: rotary.Scaling) -> Raw:
  """The content of `rope_scaling`; what is a default of the scaling is left out."""
  if isinstance(scaled, rotary.Linear):
    return {"rope_type": "linear", "factor": scaled.factor}
  original = {"original_max_position_embeddings": int(scaled.original)}
  if isinstance(scaled, rotary.Llama3):
    factors = dict(zip(LLAMA3, scaled[:3], strict=True))
    return {"rope_type": "llama3", **factors, **original}
  raw = {"rope_type": "yarn", "factor": scaled.factor, **original}
  plain = rotary.Yarn(scaled.factor, scaled.original, rotary.yarn_attention_factor(scaled.factor))
  for key in ("attention_factor", "beta_fast", "beta_slow", "truncate"):
    if getattr(scaled, key) != getattr(plain, key):
      raw[key] = getattr(scaled, key)
  return raw


def keys(config: DecoderConfig, dtype: str) -> Raw:
  """The keys of config.json that every family has, in a form that transformers 4 and 5 read."""
  scaled, longest = config.rope_scaling, 32768
  if isinstance(scaled, rotary.Yarn):
    longest = int(scaled.factor * scaled.original)
  raw = dict(
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
    max_position_embeddings=longest,
    use_cache=True,
  )
  return raw | ({"rope_scaling": rope_scaling_json(scaled)} if scaled else {})
