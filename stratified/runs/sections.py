"""Settings of the parts that do not declare their own fields yet."""

import dataclasses

from stratified import losses
from stratified.config import setting, Settings
from stratified.policy import attention, decoder
from stratified.tasks import worlds

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
class DataSettings(Settings):
  """What is asked, and what the answers are in."""

  SECTION = "data"
  name: str = setting(
    "files", "a generated encyclopedia, or files", choices=["encyclopedia", "files"]
  )
  questions: str = setting("", "files: file or folder (FlashRAG JSONL, verl parquet)")
  corpus: str = setting("", "files: passages, JSONL, plain or .gz")
  split: str = setting("train", "files: the split that is trained on", affects=LEARNING)
  held_out_split: str = setting("dev", "files: the split that is evaluated on")
  evaluation: str = setting(
    "",
    "files: what is evaluated on; empty takes held_out_split of data.questions",
    affects=["scores"],
  )
  questions_per_step: int = setting(256, "questions of a step", low=1, affects=["training"])
  entities: int = setting(2400, "encyclopedia: entities, each with a page")
  near_duplicates: float = setting(
    0.2, "encyclopedia: share of entities whose name takes a word of another's"
  )
  distractors: float = setting(
    0.1, "encyclopedia: pages under an entity's name that are not its own, as a share"
  )
  paraphrases: int = setting(2, "encyclopedia: ways of saying each fact")
  common_facts: int = setting(48, "encyclopedia: facts that no page holds")
  hop_shares: tuple[float, ...] = setting(
    (0.2, 0.3, 0.3, 0.2), "encyclopedia: shares of questions of 0, 1, 2, 3 hops"
  )


@dataclasses.dataclass(frozen=True)
class LimitSettings(Settings):
  """What a rollout may use, and how it speaks."""

  SECTION = "rollout"
  max_turns: int = setting(4, "turns that may search; one final generation follows", low=0)
  max_turn_tokens: int = setting(500, "sampled tokens of one turn", low=1)
  max_observation_tokens: int = setting(500, "tokens of one observation with its tags", low=1)
  max_tokens: int = setting(4096, "tokens of a rollout, prompt and observations included", low=2)
  answer_tokens: int = setting(
    32, "room that an observation is shortened to leave for an answer", low=1
  )
  topk: int = setting(3, "passages of a search", low=1)
  protocol: str = setting("search_r1", "how the policy searches", choices=worlds.PROTOCOLS)
  chat_template: bool = setting(
    False, "the prompt as a user message in the model's own chat template"
  )


@dataclasses.dataclass(frozen=True)
class AdvantageSettings(Settings):
  """The estimator, and the options of single estimators; one not given is the estimator's own."""

  SECTION = "advantage"
  name: str = setting("blend", "the estimator", affects=["training"])
  alpha: float = setting(
    0.6,
    "blend: from GRPO's (0) to the stratified estimator (1)",
    low=0,
    high=1,
    affects=["training"],
  )
  eps: float = setting(1e-6, "added to standard deviations", low=0, affects=["training"])
  ddof: int = setting(0, "standard deviations divide by n - ddof", low=0, affects=["training"])
  alpha_end: float | None = setting(
    None, "blend: alpha moves to this", low=0, high=1, affects=["training"]
  )
  alpha_steps: int | None = setting(
    None, "blend: the steps in which alpha moves", low=1, affects=["training"]
  )
  kappa: float | None = setting(
    None, "blend, shrunk, san: a stratum counts n / (n + kappa)", low=0, affects=["training"]
  )
  lam: float | None = setting(
    None, "two_term: weight of the part between strata", affects=["training"]
  )
  over: str | None = setting(
    None, "what statistics are over", choices=["question", "batch"], affects=["training"]
  )
  fallback: str | None = setting(
    None, "san: what single rollouts get", choices=["zero", "gn", "shrink"], affects=["training"]
  )
  fallback_on: str | None = setting(
    None, "san: where it falls back", choices=["singleton", "constant"], affects=["training"]
  )
  match_rms: str | None = setting(
    None,
    "scale advantages to GN's root mean square",
    choices=["question", "batch"],
    affects=["training"],
  )


@dataclasses.dataclass(frozen=True)
class StrataSettings(Settings):
  """What sorts the rollouts of a question."""

  SECTION = "strata"
  name: str = setting("searches", "the partition", affects=["training"])
  cap: int = setting(4, "counts above it share the last stratum", low=1, affects=["training"])


@dataclasses.dataclass(frozen=True)
class LossSettings(Settings):
  """The clipped policy gradient and its KL."""

  SECTION = "loss"
  clip_ratio: float = setting(0.2, "how far the ratio may leave 1", low=0, affects=["training"])
  kl_coefficient: float = setting(
    0.001, "weight of the KL to the first policy", low=0, affects=["training"]
  )
  kl_estimator: str = setting(
    "k3", "how the KL is estimated", choices=losses.KL_ESTIMATORS, affects=["training"]
  )
  aggregation: str = setting(
    "token_mean",
    "what tokens' losses are divided by",
    choices=losses.AGGREGATIONS,
    affects=["training"],
  )
  old_log_probs: str = setting(
    "trainer",
    "whose log-probs the ratio starts from",
    choices=["trainer", "sampler"],
    affects=["training"],
  )
  importance: str = setting(
    "token",
    "whose ratio importance_cap truncates",
    choices=["token", "sequence"],
    affects=["training"],
  )
  importance_cap: float = setting(
    0.0, "truncated importance sampling of the sampler's gap; 0 is off", low=0, affects=["training"]
  )


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
  wrong_query: float = setting(
    0.02, "searches whose query misses a part of the name, as a share", affects=["warm_start"]
  )
  wrong_relation: float = setting(
    0.02, "searches after which another fact is read off, as a share", affects=["warm_start"]
  )
  invalid: float = setting(
    0.005, "turns that neither search nor answer, as a share", affects=["warm_start"]
  )
  encyclopedias: int = setting(
    24, "practice worlds, so that none is learnt by heart", low=1, affects=["warm_start"]
  )
  mixture: tuple[float, ...] = setting(
    (0.15, 0.2, 0.25, 0.4),
    "shares of demonstrations that search 0, 1, 2, 3 times",
    affects=["warm_start"],
  )


CLASSES = (
  PolicySettings,
  LoraSettings,
  OptimizerSettings,
  DataSettings,
  LimitSettings,
  AdvantageSettings,
  StrataSettings,
  LossSettings,
  WarmStartSettings,
)
