"""Sizes of well-known checkpoints, for planning a run before its weights are there."""

from stratified.policy.decoder import DecoderConfig

_QWEN25 = dict(vocab_size=151936, head_dim=128, rope_theta=1e6, qkv_bias=True)
_QWEN3 = dict(vocab_size=151936, head_dim=128, rope_theta=1e6, qk_norm=True)

SIZES = {
  "SmolLM2-135M": dict(
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    rope_theta=1e5,
    norm_eps=1e-5,
  ),
  "Qwen2.5-0.5B": _QWEN25
  | dict(width=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64, mlp_width=4864),
  "Qwen2.5-1.5B": _QWEN25
  | dict(width=1536, num_layers=28, num_heads=12, num_kv_heads=2, mlp_width=8960),
  "Qwen2.5-3B": _QWEN25
  | dict(width=2048, num_layers=36, num_heads=16, num_kv_heads=2, mlp_width=11008),
  "Qwen2.5-7B": _QWEN25
  | dict(
    vocab_size=152064,
    width=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    mlp_width=18944,
    tied_embeddings=False,
  ),
  "Qwen3-1.7B": _QWEN3
  | dict(width=2048, num_layers=28, num_heads=16, num_kv_heads=8, mlp_width=6144),
  "Qwen3-4B": _QWEN3
  | dict(width=2560, num_layers=36, num_heads=32, num_kv_heads=8, mlp_width=9728),
}


def decoder_of(name: str, **run) -> DecoderConfig:
  """Describes the decoder of a checkpoint by its name in SIZES; `run` adds dtype and the like.

  `-Instruct` and letter case make no difference.

  Raises ValueError where no size is known by that name.
  """
  plain = (
    name.removesuffix("/")
    .rsplit("/", 1)[-1]
    .lower()
    .removesuffix("-instruct")
    .removesuffix("-base")
  )
  known = {key.lower(): sizes for key, sizes in SIZES.items()}
  if plain not in known:
    raise ValueError(
      f"policy.checkpoint={name!r} is not here and no size is known by that name; give a directory "
      "with "
      f"a config.json, or one of {', '.join(SIZES)}"
    )
  return DecoderConfig(**known[plain], **run)
