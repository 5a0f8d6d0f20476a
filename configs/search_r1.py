"""Search-R1's task and the settings of Stratified GRPO (arXiv 2510.06214).

    python experiments/train.py --config=configs/search_r1.py:tiny --workdir=runs/tiny

Presets, after the colon: `tiny` (none means this; two CPU cores, minutes), `smoke` (the same path
in under two minutes, too short to learn anything), `smollm2` (real weights, real questions), `base`
and `instruct` (Qwen2.5-3B as in the paper). Any field can be
given on the command line: `--config.advantage.alpha=0.4`.
"""

from stratified.runs import settings

# Preset -> the fields in which it differs from the defaults, which are the paper's; a field's
# meaning and range stand where it is declared, and --explain prints them all.

# About a million parameters, built here, on the generated encyclopedia.
SMALL = {
  "policy.unroll": 4,
  "data.name": "encyclopedia",
  "data.questions_per_step": 32,
  "rollout.max_turns": 3,
  "rollout.max_turn_tokens": 20,
  "rollout.max_observation_tokens": 64,
  "rollout.max_tokens": 192,
  "rollout.answer_tokens": 10,
  "rollout.topk": 1,
  "rollout.protocol": "short",
  "sampler.block": 4,
  "strata.cap": 3,
  "optimizer.b2": 0.99,
  "packing.row_length": 192,
  "mesh.fsdp": 1,
  "eval.forced": True,
}

# A long warm start from nothing but the script, then many small steps.
LONG = SMALL | {
  "num_steps": 300,
  "optimizer.name": "muon",
  "optimizer.learning_rate": 3e-4,
  "optimizer.warmup_steps": 10,
  "packing.rows": 8,
  "warm_start.num_steps": 2400,
  "eval.every": 50,
}

# Learns in a quarter of LONG's tokens. Look back: copying off a page needs heads that look at the
# token before. Right calls: a quarter of the demonstrations search as often as needed, so that
# reward finds something to prefer. More deep questions in training: with fewer, all questions drift
# to fewer searches at first. Temperature: rollouts fail by their searches, seldom by a slip of a
# name. Filter groups: rollouts without advantage are no rows. Adam: Muon makes the noise of few
# rollouts as large as their signal. GN: how often to search is what is to be learnt here, and lies
# between strata.
TINY = SMALL | {
  "num_steps": 80,
  "policy.look_back": (1, 2, 3, 1),
  "data.training_hop_shares": (0.17, 0.24, 0.28, 0.31),
  "rollout.temperature": 0.7,
  "advantage.name": "gn",
  "loss.filter_groups": True,
  "optimizer.learning_rate": 3e-4,
  "optimizer.embedding_rate": 0.2,
  "optimizer.warmup_steps": 5,
  "optimizer.decay_steps": 75,
  "packing.rows": 4,
  "warm_start.num_steps": 600,
  "warm_start.demonstrations_per_step": 22,
  "warm_start.learning_rate": 4e-3,
  "warm_start.mixture": (0.2, 0.2, 0.2, 0.4),
  "warm_start.right_calls": 0.25,
  "eval.every": 20,
}

# The whole path of `tiny` in under two minutes: warm start, steps, evaluations, report. It shows
# that everything works; it is too short to learn to read a page, so its scores say nothing.
SMOKE = TINY | {
  "num_steps": 6,
  "data.entities": 400,
  "data.questions_per_step": 8,
  "optimizer.warmup_steps": 2,
  "warm_start.num_steps": 60,
  "warm_start.encyclopedias": 4,
  "eval.every": 3,
  "eval.questions": 40,
}

# SmolLM2-135M-Instruct on real questions; `python third_party/smollm2/fetch.py` brings the weights.
SMOLLM2 = {
  "num_steps": 3,
  "policy.checkpoint": ".cache/models/smollm2-135m-instruct",
  "policy.logit_chunk": 128,
  "policy.remat": "full",
  "data.questions": "$STRATIFIED_DATA/questions",
  "data.corpus": "$STRATIFIED_DATA/corpus.jsonl.gz",
  "data.questions_per_step": 2,
  "rollout.samples_per_question": 4,
  "rollout.max_turns": 2,
  "rollout.max_turn_tokens": 64,
  "rollout.max_observation_tokens": 256,
  "rollout.max_tokens": 1024,
  "rollout.topk": 1,
  "rollout.temperature": 0.6,
  "rollout.protocol": "few_shot",
  "sampler.lanes": 8,
  "sampler.rows": 4,
  "strata.cap": 2,
  "packing.row_length": 1024,
  "packing.rows": 1,
  "mesh.fsdp": 1,
  "eval.questions": 8,
  "checkpoint.every": 1,
}

# Qwen2.5-3B with the paper's settings: 8 GPUs or a TPU slice. The paper's retriever, E5 over
# Wikipedia 2018, is a server that all processes share: third_party/wiki18/README.md builds and
# starts it.
BASE = {
  "policy.checkpoint": "checkpoints/Qwen2.5-3B",
  "policy.dtype": "bfloat16",
  "policy.remat": "full",
  "policy.logit_chunk": 512,
  "sampler.devices": 0,
  "sampler.lanes": 16,
  "sampler.prefill_tokens": 2048,
  "sampler.release": True,
  "data.questions": "data/nq_hotpotqa_train",
  "data.corpus": "data/wiki18.jsonl",
  "data.evaluation": "data/benchmarks",
  "retriever.name": "http",
}

# Qwen2.5-3B-Instruct: alpha 0.8.
INSTRUCT = BASE | {
  "policy.checkpoint": "checkpoints/Qwen2.5-3B-Instruct",
  "rollout.chat_template": True,
  "advantage.alpha": 0.8,
}

PRESETS = {"tiny": TINY, "smoke": SMOKE, "smollm2": SMOLLM2, "base": BASE, "instruct": INSTRUCT}


def get_config(preset: str = "tiny"):
  return settings.of_preset(PRESETS, preset, "configs/search_r1.py")


def sweep_alpha(add):
  """From GRPO's estimator (0) to SAN (1)."""
  for alpha in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
    add(**{"advantage.name": "blend", "advantage.alpha": alpha})


def sweep_estimators(add):
  for name in (
    "gn",
    "san",
    "blend",
    "stratified",
    "centered",
    "loo",
    "stratified_loo",
    "shrunk",
    "two_term",
    "dr_grpo",
    "san_rms",
  ):
    add(**{"advantage.name": name})


def sweep_strata(add):
  """`random` has the sizes of `searches` and no meaning: the control."""
  for name in ("searches", "random", "first_search", "outcome", "searches*outcome", "answered"):
    add(**{"advantage.name": "blend", "strata.name": name})


def sweep_seeds(add):
  for seed in range(5):
    add(seed=seed)
