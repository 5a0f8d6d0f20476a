"""Qwen3: each head of queries and keys is normed; windows as in Qwen2."""

from stratified.policy.families import common, qwen2


def read(raw: common.Raw) -> common.Fields:
  common.refuse_biases(raw)
  common.refuse_other_than_silu(raw)
  fields = common.sizes(raw, head_dim=128) | common.rope(raw)
  return fields | qwen2.read_windows(raw) | {"qk_norm": True}


def write(config) -> common.Raw:
  return qwen2.write_windows(config)


FAMILY = common.Family("Qwen3ForCausalLM", "qwen3", read, write)
