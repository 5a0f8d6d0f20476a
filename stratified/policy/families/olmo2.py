"""OLMo 2: norms after each block alone, and one over all heads of queries, and of keys."""

from stratified.policy.families import common


def read(raw: common.Raw) -> common.Fields:
  common.refuse_biases(raw)
  common.refuse_windows(raw)
  common.refuse_other_than_silu(raw)
  fields = common.sizes({"rms_norm_eps": 1e-5} | raw) | common.rope(raw)
  return fields | dict(pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over_heads=True)


def write(config) -> common.Raw:
  return {}


FAMILY = common.Family("Olmo2ForCausalLM", "olmo2", read, write)
