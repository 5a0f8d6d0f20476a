"""Llama 2, Llama 3 and what is built alike (SmolLM2, TinyLlama)."""

from stratified.policy.families import common


def read(raw: common.Raw) -> common.Fields:
  common.refuse_biases(raw)
  common.refuse_windows(raw)
  common.refuse_other_than_silu(raw)
  return common.sizes(raw) | common.rope(raw)


def write(config) -> common.Raw:
  return {}


FAMILY = common.Family("LlamaForCausalLM", "llama", read, write)
