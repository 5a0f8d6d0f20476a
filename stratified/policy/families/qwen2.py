"""Qwen2 and Qwen2.5: biases on queries, keys and values; a window in later layers if it says so."""

from stratified.policy.families import common


def read(raw: common.Raw) -> common.Fields:
  # It has its biases whatever `attention_bias` says, and never one on the output projection.
  common.refuse_biases({key: value for key, value in raw.items() if key != "attention_bias"})
  common.refuse_other_than_silu(raw)
  return common.sizes(raw) | common.rope(raw) | read_windows(raw) | {"qkv_bias": True}


def write(config) -> common.Raw:
  return write_windows(config)


def read_windows(raw: common.Raw) -> common.Fields:
  """Windows of a Qwen: `layer_types`, or `max_window_layers`, where `use_sliding_window`."""
  local = common.local_layers(raw) or common.after_layer(raw)
  return common.windows(local, raw.get("sliding_window") if raw.get("use_sliding_window") else None)


def write_windows(config) -> common.Raw:
  if not config.window:
    return {"use_sliding_window": False}
  local = config.layer_is_local
  return dict(
    use_sliding_window=True,
    sliding_window=config.window,
    max_window_layers=local.index(True),
    layer_types=common.layer_types(config),
  )


FAMILY = common.Family("Qwen2ForCausalLM", "qwen2", read, write)
