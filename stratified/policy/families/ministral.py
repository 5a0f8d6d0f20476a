"""Ministral: Mistral whose layers each say whether they have the window."""

from stratified.policy.families import common, mistral


def read(raw: common.Raw) -> common.Fields:
  common.refuse_biases(raw)
  common.refuse_other_than_silu(raw)
  size = raw.get("sliding_window", mistral.DEFAULT_WINDOW)
  local = common.local_layers(raw) or [size is not None] * raw["num_hidden_layers"]
  return common.sizes(raw) | common.rope(raw) | common.windows(local, size)


def write(config) -> common.Raw:
  return {"sliding_window": config.window or None, "layer_types": common.layer_types(config)}


FAMILY = common.Family("MinistralForCausalLM", "ministral", read, write)
