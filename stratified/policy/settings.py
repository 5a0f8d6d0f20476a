"""The settings of a policy, and the decoder that they describe."""

import dataclasses

from stratified.config import setting, Settings
from stratified.policy import attention, families
from stratified.policy.config import DecoderConfig, REMAT

# How a pass is computed changes an update's rounding, and not which answers are evaluated.
_LEARNING = ("training", "warm_start")


@dataclasses.dataclass(frozen=True)
class PolicySettings(Settings):
  """The section `policy`: a model directory, or the sizes of a decoder that is built here."""

  SECTION = "policy"

  checkpoint: str = setting(
    "", "Hugging Face model directory; empty builds a decoder of the sizes below"
  )
  dtype: str = setting(
    "float32",
    "dtype that a forward pass computes in; trained weights are float32",
    choices=("float32", "bfloat16"),
  )
  remat: str = setting(
    "none",
    "what a backward pass computes again: none, dots (all but matrix products), full (a layer)",
    choices=tuple(REMAT),
    affects=_LEARNING,
  )
  unroll: int = setting(
    1, "layers in one iteration of the scan over layers", low=1, affects=_LEARNING
  )
  attention: str = setting(
    "auto",
    "implementation of attention in an update; auto takes the fastest for the platform",
    choices=("auto", *attention.IMPLEMENTATIONS),
    affects=_LEARNING,
  )
  logit_chunk: int = setting(
    0, "positions of a row whose logits exist at once; 0 is all", low=0, affects=_LEARNING
  )
  width: int = setting(128, "without a checkpoint: size of a hidden state", low=1, high=65536)
  num_layers: int = setting(4, "without a checkpoint: layers", low=1, high=1000)
  num_heads: int = setting(4, "without a checkpoint: heads of queries", low=1, high=1024)
  num_kv_heads: int = setting(2, "without a checkpoint: heads of keys and values", low=1, high=1024)
  mlp_width: int = setting(384, "without a checkpoint: inner size of the MLP", low=1, high=2**20)
  rope_theta: float = setting(100.0, "without a checkpoint: base of rotary positions", low=1)
  look_back: tuple[int, ...] = setting(
    (), "without a checkpoint: how many tokens back the first layer's heads look at the start"
  )

  def __post_init__(self):
    super().__post_init__()
    if self.checkpoint:
      return
    if self.width % self.num_heads or (self.width // self.num_heads) % 2:
      raise ValueError(
        f"policy.width={self.width} must be an even multiple of policy.num_heads={self.num_heads}: "
        "each head takes an equal part, of which rotary positions turn pairs"
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"policy.num_heads={self.num_heads} must be a multiple of "
        f"policy.num_kv_heads={self.num_kv_heads}: each of these serves equally many queries"
      )
    if not all(isinstance(offset, int) and offset >= 0 for offset in self.look_back):
      raise ValueError(f"policy.look_back={self.look_back} must be whole numbers of at least 0")


def decoder_config(
  settings: PolicySettings, *, vocab_size: int, platform: str, row_length: int
) -> DecoderConfig:
  """Describes the decoder of a run.

  vocab_size: the tokenizer's, for a decoder that is built here.
  platform ("cpu", "gpu" or "tpu"), row_length (packed tokens of a row): they pick the attention
    where that is left open.
  """
  p = settings
  run = dict(dtype=p.dtype, remat=p.remat, unroll=p.unroll)
  if p.checkpoint:
    model = families.load_config(p.checkpoint, **run)
  else:
    model = DecoderConfig(
      vocab_size=vocab_size,
      width=p.width,
      num_layers=p.num_layers,
      num_heads=p.num_heads,
      num_kv_heads=p.num_kv_heads,
      head_dim=p.width // p.num_heads,
      mlp_width=p.mlp_width,
      rope_theta=p.rope_theta,
      **run,
    )
  return with_attention(settings, model, platform=platform, row_length=row_length)


def with_attention(
  settings: PolicySettings, model: DecoderConfig, *, platform: str, row_length: int
) -> DecoderConfig:
  """The decoder with the attention that the settings name, or the fastest on `platform`."""
  best = attention.best_for(platform, model.dtype, model.head_dim, row_length)
  chosen = best if settings.attention == "auto" else settings.attention
  return dataclasses.replace(model, attention=chosen)


def check_platform(settings: PolicySettings, platform: str) -> None:
  """Refuses an attention that does not run on `platform`, what jax.default_backend() says."""
  only = {"cudnn": "gpu", "splash": "tpu"}.get(settings.attention, platform)
  if only != platform:
    raise ValueError(
      f"policy.attention={settings.attention!r} runs on a {only.upper()} alone, and jax has a "
      f"{platform.upper()} here; leave it at auto"
    )
