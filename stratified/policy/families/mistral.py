"""Mistral: Llama with a sliding window in every layer, where its file does not switch it off."""

from stratified.policy.families import common

DEFAULT_WINDOW = 4096  # where the file says nothing; null is no window


def read(raw: common.Raw) -> common.Fields:
  common.refuse_biases(raw)
  common.refuse_other_than_silu(raw)
  size = raw.get("sliding_window", DEFAULT_WINDOW)
  local = [size is not None] * raw["num_hidden_layers"]
  common.refuse(
    [
      (
        (common.local_layers(raw) or local) != local,
        f"layer_types other than sliding_window={size} in every layer",
        "architecture MinistralForCausalLM for layers that differ",
      )
    ]
  )
  return common.sizes(raw) | common.rope(raw) | common.windows(local, size)


def write(config) -> common.Raw:
  return {"sliding_window": config.window or None}


FAMILY = common.Family("MistralForCausalLM", "mistral", read, write)
