"""Refuses values of config.json that no model has, before anything is made of them."""

from collections.abc import Mapping
from typing import Any

from stratified.policy.families.common import SIZES

# The most of each: beyond it a file is damaged, and lists of layers alone would fill the memory.
MOST = {"num_hidden_layers": 10_000, "vocab_size": 2**26}
_SIZES = {key: (1, MOST.get(key, 2**22)) for key in (*SIZES, "num_key_value_heads", "head_dim")}
_COUNTS = {
  "sliding_window": (0, 2**40),
  "max_window_layers": (0, 2**40),
  "max_position_embeddings": (1, 2**40),
  "original_max_position_embeddings": (1, 2**40),
  "sliding_window_pattern": (1, 10_000),
  "_sliding_window_pattern": (1, 10_000),
}
# (above, at most)
_NUMBERS = {
  "rms_norm_eps": (0, 0.1),
  "rope_theta": (0, 1e15),
  "rope_local_base_freq": (0, 1e15),
  "query_pre_attn_scalar": (0, 1e6),
  "partial_rotary_factor": (0, 1),
}
_OF_ROPE = {
  "factor": (0, 1e6),
  "low_freq_factor": (0, 1e6),
  "high_freq_factor": (0, 1e6),
  "attention_factor": (0, 1e6),
  "beta_fast": (0, 1e6),
  "beta_slow": (0, 1e6),
  "mscale": (-1e6, 1e6),
  "mscale_all_dim": (-1e6, 1e6),
}
_SWITCHES = (
  "tie_word_embeddings",
  "attention_bias",
  "mlp_bias",
  "use_sliding_window",
  "use_bidirectional_attention",
  "truncate",
)
_TEXTS = ("model_type", "hidden_act", "hidden_activation", "rope_type", "type")
_LISTS = ("architectures", "layer_types")
_AGAIN = "copy or download the file again"


def check(raw: Any) -> dict[str, Any]:
  """Returns what config.json holds; ValueError, naming the key, for a value out of place.

  A key that is null counts as left out.
  """
  if not isinstance(raw, dict):
    raise ValueError(f"holds a {type(raw).__name__}, not an object of settings; {_AGAIN}")
  for key in SIZES:
    if raw[key] is None:
      raise KeyError(key)
  _check_keys(raw, _NUMBERS)
  for key in ("rope_scaling", "rope_parameters"):
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
      raise ValueError(f"{key}={value!r} must be an object or null; {_AGAIN}")
    for settings in [value or {}, *(value or {}).values()]:
      if isinstance(settings, dict):
        _check_keys(settings, _NUMBERS | _OF_ROPE, f"{key}.")
  return {key: value for key, value in raw.items() if value is not None or key not in _COUNTS}


def _check_keys(raw: Mapping[str, Any], numbers: Mapping, where: str = "") -> None:
  for key, value in raw.items():
    rule = None if value is None else _broken(key, value, numbers)
    if rule:
      raise ValueError(f"{where}{key}={_short(value)} must be {rule}; {_AGAIN}")


def _broken(key: str, value: Any, numbers: Mapping) -> str | None:
  """The rule that a value breaks."""
  whole = _SIZES | _COUNTS
  if key in whole:
    low, high = whole[key]
    fine = isinstance(value, int) and not isinstance(value, bool)
    if fine and low <= value <= high:
      return None
    above = "a whole number above 0" if low else "a whole number from 0"
    return above if not fine or value < low else f"{above}, at most {high}"
  if key in numbers:
    low, high = numbers[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and low < value <= high:  # NaN is neither
      return None
    return f"a number above {low:g}, at most {high:g}"
  if key in _SWITCHES:
    return None if isinstance(value, bool) else "true or false"
  if key in _TEXTS:
    return None if isinstance(value, str) else "a text"
  if key in _LISTS:
    fine = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return None if fine and (value or key != "architectures") else "a list of texts"
  return None


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + "..."
