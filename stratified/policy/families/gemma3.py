"""Gemma 3, text only.

It has norms of 1 + weight before and after each block, a scaled embedding, GELU, and local layers
with a window and a rotary base of their own between global ones.
"""

from stratified.policy.families import common

PATTERN = 6  # one layer in so many is global, where the file does not say which


def read(raw: common.Raw) -> common.Fields:
  _refuse(raw)
  pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or PATTERN
  local = common.local_layers(raw) or [
    bool((layer + 1) % pattern) for layer in range(raw["num_hidden_layers"])
  ]
  return (
    common.sizes(raw, head_dim=256, tied=True)
    | _rope(raw, any(local))
    | common.windows(local, raw.get("sliding_window", 4096))
    | dict(
      post_norms=True,
      zero_centered_norms=True,
      qk_norm=True,
      attention_scale=raw.get("query_pre_attn_scalar", 256) ** -0.5,
      embedding_scale=raw["hidden_size"] ** 0.5,
      activation="gelu_tanh",
    )
  )


def _refuse(raw: common.Raw) -> None:
  act = raw.get("hidden_activation", raw.get("hidden_act")) or "gelu_pytorch_tanh"
  caps = [key for key in ("attn_logit_softcapping", "final_logit_softcapping") if raw.get(key)]
  both_ways = bool(raw.get("use_bidirectional_attention"))
  common.refuse_biases(raw)
  common.refuse(
    [
      (act != "gelu_pytorch_tanh", f"hidden_activation={act!r}", "gelu_pytorch_tanh"),
      (bool(caps), ", ".join(f"{key}={raw.get(key)}" for key in caps), "no cap on logits"),
      (both_ways, "use_bidirectional_attention=true", "attention to earlier tokens"),
    ]
  )


def _rope(raw: common.Raw, has_local: bool) -> common.Fields:
  """Of global layers and, where there are any, of local ones."""
  nested = raw.get("rope_parameters") or {}
  flat = sorted(set(nested) - {"full_attention", "sliding_attention"})
  common.refuse([(bool(flat), f"rope_parameters of {', '.join(flat)}", "one for each layer type")])
  near = nested.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq", 10000.0)}
  far = {key: value for key, value in raw.items() if key != "rope_parameters"}
  far |= {"rope_parameters": nested.get("full_attention") or {}}
  scaled = common.rope({"rope_parameters": near})["rope_scaling"]
  common.refuse([(scaled is not None, f"rotary scaling {near} of local layers", "none there")])
  base = float(near.get("rope_theta") or 10000.0)
  return common.rope(far, 1e6) | ({"rope_theta_local": base} if has_local else {})


def write(config) -> common.Raw:
  local = config.layer_is_local
  raw = dict(
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=round((config.attention_scale or config.head_dim**-0.5) ** -2),
    sliding_window=config.window or 4096,
    layer_types=common.layer_types(config),
  )
  if config.rope_theta_local is not None:
    raw["rope_local_base_freq"] = config.rope_theta_local
  period = local.index(False) + 1 if False in local else len(local) + 1
  if all(at == bool((layer + 1) % period) for layer, at in enumerate(local)):
    raw["sliding_window_pattern"] = period
  return raw


FAMILY = common.Family(
  "Gemma3ForCausalLM",
  "gemma3_text",
  read,
  write,
  names={"mlp_norm": "model.layers.{n}.pre_feedforward_layernorm.weight"},
  served=("window",),
)
