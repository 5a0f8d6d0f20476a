"""Settings of the parts that do not declare their own fields yet."""

import dataclasses

from stratified.config import setting, Settings
from stratified.policy import attention, decoder
from stratified.rewards import RewardSettings
from stratified.strata import StrataSettings
from stratified.tasks import named

LEARNING = ("training", "warm_start")  # numbers of an update, not what a finished policy answers


@dataclasses.dataclass(frozen=True)
class PolicySettings(Settings):
  """The decoder that is trained."""

  SECTION = "policy"
  checkpoint: str = setting(
    "", "a Hugging Face directory; empty builds the small decoder of the sizes below"
  )
  dtype: str = setting(
    "float32", "what a forward pass computes in", choices=["float32", "bfloat16"]
  )
  remat: str = setting(
    "none",
    "what the backward pass computes again instead of keeping it",
    choices=sorted(decoder.REMAT),
    affects=LEARNING,
  )
  unroll: int = setting(1, "layers per iteration of the scan over layers", low=1, affects=LEARNING)
  attention: str = setting(
    "auto",
    "which kernel; auto takes the fastest for the platform",
    choices=["auto", *attention.IMPLEMENTATIONS],
    affects=LEARNING,
  )
  logit_chunk: int = setting(
    0, "positions of a row whose logits exist at once; 0 is all", low=0, affects=LEARNING
  )
  width: int = setting(128, "numbers of a token between layers", low=1)
  num_layers: int = setting(4, "layers", low=1)
  num_heads: int = setting(4, "heads of queries", low=1)
  num_kv_heads: int = setting(2, "heads of keys and values", low=1)
  mlp_width: int = setting(384, "numbers of a token inside the MLP", low=1)
  rope_theta: float = setting(100.0, "base of the rotary positions' wavelengths", above=0)


@dataclasses.dataclass(frozen=True)
class LoraSettings(Settings):
  """Adapters that are trained in place of the weights."""

  SECTION = "lora"
  rank: int = setting(
    0, "rank of the adapters; 0 trains every weight", low=0, affects=["training", "answers"]
  )
  alpha: float = setting(
    128.0, "an adapter counts alpha / rank", above=0, affects=["training", "answers"]
  )
  targets: str = setting(
    "q,k,v,o,gate,up,down",
    "the linear layers that have adapters, with commas between them",
    affects=["training", "answers"],
  )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Settings):
  """How gradients become steps."""

  SECTION = "optimizer"
  name: str = setting(
    "adamw", "the update rule", choices=["adamw", "muon", "sgd"], affects=["training"]
  )
  learning_rate: float = setting(1e-6, "the rate after the warm-up", above=0, affects=["training"])
  warmup_steps: int = setting(
    20, "steps in which the rate rises from 0", low=0, affects=["training"]
  )
  weight_decay: float = setting(0.0, "decay of matrices", low=0, affects=["training"])
  clip_norm: float = setting(
    1.0, "largest norm of a gradient, also in the warm start", above=0, affects=LEARNING
  )
  b1: float = setting(0.9, "AdamW's memory of the gradient", low=0, below=1, affects=["training"])
  b2: float = setting(0.999, "AdamW's memory of its square", low=0, below=1, affects=["training"])


@dataclasses.dataclass(frozen=True)
class WarmStartSettings(Settings):
  """Supervised training on scripted demonstrations, before reinforcement learning."""

  SECTION = "warm_start"
  num_steps: int = setting(0, "its steps; 0 has none", low=0, affects=["warm_start"])
  demonstrations_per_step: int = setting(
    20, "demonstrations of a step", low=1, affects=["warm_start"]
  )
  optimizer: str = setting(
    "muon", "the update rule", choices=["adamw", "muon", "sgd"], affects=["warm_start"]
  )
  learning_rate: float = setting(2e-3, "its highest rate", above=0, affects=["warm_start"])
  weight_decay: float = setting(0.0, "decay of matrices", low=0, affects=["warm_start"])
  context_weight: float = setting(
    0.3, "loss weight of tokens that the script did not write", low=0, affects=["warm_start"]
  )


CLASSES = (
  PolicySettings,
  LoraSettings,
  OptimizerSettings,
  StrataSettings,
  RewardSettings,
  WarmStartSettings,
  *named.SETTINGS,
)
