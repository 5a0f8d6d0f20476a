"""Published methods, each with its protocol, reward and loss; configs/baselines.py brings them.

    python experiments/train.py --config=configs/baselines.py:autorefine --workdir=runs/autorefine

A function gives the fields in which the method differs from a preset of configs/search_r1.py; on
`base` and `instruct` these are also its paper's batch, lengths and schedule. Its docstring names
the row of the papers' tables that it stands for: exact match x 100 of Qwen2.5-3B on NQ TriviaQA
PopQA HotpotQA 2Wiki MuSiQue Bamboogle | average. docs/methods.md says what differs from their
codes.
"""

from configs import search_r1

WORDING = {"tiny": "_short", "smollm2": "_few_shot"}  # of a protocol; else its instruction
LARGE = ("base", "instruct")
# What several updates a rollout batch need: mini-batches of whole questions.
SEVERAL = {"tiny": {"update.mini_batches": 4}, "smollm2": {"update.mini_batches": 2}}
# Search-R1's lineage, arXiv 2503.09516: 5 rollouts of 512 questions, 8 updates where its code has
# 10, warm-up over the first 28.5 % of 500 steps, an entropy bonus that its yaml hides.
LINEAGE = {
  "num_steps": 500,
  "data.questions_per_step": 512,
  "rollout.samples_per_question": 5,
  "update.mini_batches": 8,
  "optimizer.warmup_steps": 142,
  "loss.entropy_coefficient": 0.001,
}


def r1(preset):
  """R1 (arXiv 2501.12948) without search: the recipe of GRPO, no tool.

  base 22.6 45.5 17.3 20.1 26.8 5.5 22.4 | 22.9; instruct 21.0 44.9 17.1 20.8 27.5 6.0 19.2 | 22.4.
  """
  alone = {"rollout.max_turns": 0, "warm_start.mixture": (1.0,), "eval.forced": False}
  return (
    {"rollout.protocol": "r1" + WORDING.get(preset, ""), "advantage.name": "gn"}
    | (alone if preset == "tiny" else {})
    | (LINEAGE if preset in LARGE else {})
  )


def search_r1_grpo(preset):
  """Search-R1 with GRPO (2503.09516).

  base 42.1 58.3 41.3 29.7 27.4 6.6 12.8 | 31.2; instruct 39.7 56.5 39.1 33.1 31.0 12.4 23.2 | 33.6.
  """
  return {"advantage.name": "gn"} | (LINEAGE if preset in LARGE else SEVERAL[preset])


def research(preset):
  """ReSearch (2503.19470), the row of AutoRefine's re-run under Search-R1's retrieval.

  base 42.7 59.7 43.0 30.5 27.2 7.4 12.8 | 31.9; instruct 36.5 57.1 39.5 35.1 27.2 9.5 26.6 | 33.1.
  """
  fields = {
    "rollout.protocol": "research" + WORDING.get(preset, ""),
    "reward.name": "research",
    "advantage.name": "gn",
  }
  if preset == "tiny":
    fields |= tiny_lengths(224)
  return fields | ({"rollout.samples_per_question": 5} if preset in LARGE else {})


def autorefine(preset):
  """AutoRefine (2505.11277): base 46.7 62.0 45.0 40.5 39.3 15.7 34.4 | 40.5."""
  fields = {
    "rollout.protocol": "autorefine" + WORDING.get(preset, ""),
    "reward.name": "autorefine",
    "advantage.name": "gn",
  }
  if preset == "tiny":
    fields |= tiny_lengths(224)
  if preset in LARGE:
    fields |= {
      "num_steps": 300,
      "rollout.samples_per_question": 5,
      "rollout.max_turns": 5,
      "rollout.max_turn_tokens": 512,
      "rollout.max_observation_tokens": 512,
      "rollout.max_tokens": 6656,
      "packing.row_length": 6656,
      "update.mini_batches": 4,
      "optimizer.warmup_steps": 0,
      "loss.entropy_coefficient": 0.001,
    }
  return fields


def tiny_lengths(tokens: int) -> dict:
  """Room for a box or a refinement in each turn of the small policy."""
  return {
    "rollout.max_turn_tokens": 24,
    "rollout.answer_tokens": 16,
    "rollout.max_tokens": tokens,
    "packing.row_length": tokens,
  }


def zerosearch(preset):
  """ZeroSearch (2505.04588) with a corpus for its language model: noise from 0 to a half.

  base 43.0 61.6 41.4 33.8 34.6 13.0 13.9 | 34.5; instruct 41.4 57.4 44.8 27.4 30.0 9.8 11.1 | 31.7.
  """
  fields = {"reward.name": "f1", "advantage.name": "reinforce", "retriever.noise_end": 0.5}
  if preset in LARGE:
    fields |= {
      "num_steps": 203,
      "data.questions_per_step": 64,
      "rollout.samples_per_question": 5,
      "rollout.max_turns": 5,
      "rollout.topk": 5,
      "optimizer.warmup_steps": 193,
    }
  return fields


def search_r1_plus_plus(preset):
  """Search-R1++ (2602.19526): no thinking, REINFORCE, F1 less what is left out; average 33.1."""
  return {
    "rollout.protocol": "search_r1_plus_plus" + WORDING.get(preset, ""),
    "reward.name": "f1 - 0.1*no_search - 0.1*no_answer",
    "advantage.name": "reinforce",
  } | (LINEAGE if preset in LARGE else {})


def tinker(preset):
  """The tinker cookbook's search recipe: rewards less their mean, one update, LoRA at 3B.

  Its row is of 7B: NQ 51.6, TriviaQA 67.3, HotpotQA 49.7, 2Wiki 42.8.
  """
  fields = {"advantage.name": "centered", "reward.name": "exact_match + 0.1*format"}
  if preset in LARGE:
    fields |= {
      "data.questions_per_step": 512,
      "rollout.max_turns": 5,
      "rollout.max_turn_tokens": 1024,
      "lora.rank": 32,
      "lora.alpha": 32.0,
      "optimizer.learning_rate": 4e-5,
      "loss.kl_coefficient": 0.0,
    }
  return fields


def several(preset) -> dict:
  """GRPO with several updates a rollout batch, which the losses below need in order to act."""
  return {"advantage.name": "gn"} | SEVERAL.get(preset, {"update.mini_batches": 8})


def dapo(preset):
  """DAPO (2503.14476): clip-higher, no KL, groups without signal sampled anew; no published row."""
  return several(preset) | {
    "loss.clip_ratio_high": 0.28,
    "loss.kl_coefficient": 0.0,
    "loss.filter_groups": True,
    "loss.resample_groups": 3,
    "loss.overlong_tokens": 16 if preset == "tiny" else 512 if preset in LARGE else 128,
  }


def search_r1_ppo(preset):
  """Search-R1 with PPO (2503.09516): a critic of its own at ten times the policy's rate.

  base 40.6 58.7 43.5 28.4 27.3 4.9 8.8 | 30.3; instruct 34.1 54.5 37.8 32.4 31.9 10.3 26.4 | 32.5.
  One rollout a question, and as many rollouts a step as the preset has; its own at 3B. Two updates
  a batch, the KL in the reward.
  """
  config = search_r1.get_config(preset)
  rollouts = config.data.questions_per_step * config.rollout.samples_per_question
  fields = {
    "algorithm.name": "ppo",
    "data.questions_per_step": rollouts,
    "loss.kl_in": "reward",
    "loss.kl_estimator": "k1",
    "ppo.body": "own",
    "ppo.optimizer": config.optimizer.name,
    "ppo.learning_rate": 10 * config.optimizer.learning_rate,
  }
  if preset in LARGE:
    fields |= LINEAGE | {"data.questions_per_step": 512, "ppo.warmup_steps": 8}
  return fields | {"rollout.samples_per_question": 1, "update.mini_batches": 2}


def ppo_by_calls(preset):
  """PPO (2503.09516) whose critic sees the number of calls made so far; no published row.

  Against strata of searches: is stratification a critic by another name?
  """
  return search_r1_ppo(preset) | {"ppo.by_calls": True}


def turn_ppo(preset):
  """Turn-PPO (2512.17008): a turn is one action, its value that of its start; no row here."""
  return search_r1_ppo(preset) | {"ppo.level": "turn", "ppo.gamma": 0.99, "ppo.lam": 0.9}


def gigpo(preset):
  """GiGPO (2505.10978): instruct 42.0 59.5 42.4 36.9 37.0 12.6 64.1 | 42.1, in another protocol."""
  return {"algorithm.name": "gigpo"}


def gdpo(preset):
  """GDPO (2601.05242): each part of the reward by its own deviation; no row here."""
  return {"advantage.name": "gdpo", "reward.name": "exact_match + format"}


def hrpo(preset):
  """HRPO (2601.07055): questions of as many hops are one group of the batch; no row here."""
  return {"advantage.name": "san", "advantage.over": "batch", "strata.name": "hops"}


def gspo(preset):
  """GSPO (2507.18071): instruct 37.6 56.1 37.4 33.2 32.9 9.8 25.0 | 33.1."""
  return several(preset) | {
    "loss.surrogate": "gspo",
    "loss.clip_ratio": 3e-4,
    "loss.clip_ratio_high": 4e-4,
    "loss.aggregation": "sequence_mean",
  }


def cispo(preset):
  """CISPO (2506.13585): clipped weights, every token's gradient; no published row here."""
  return several(preset) | {"loss.surrogate": "cispo", "loss.clip_ratio": 1.0}


def sapo(preset):
  """SAPO (2511.20347): a soft gate in place of the clip; no published row here."""
  return several(preset) | {"loss.surrogate": "sapo"}


def gmpo(preset):
  """GMPO (2507.20673): the geometric mean of ratios; no published row here."""
  return several(preset) | {
    "loss.surrogate": "gmpo",
    "loss.clip_ratio": 0.33,
    "loss.clip_ratio_high": 0.49,
    "loss.aggregation": "sequence_mean",
  }


def opo(preset):
  """OPO (2505.23585): the baseline is the rewards' mean weighted by length; no row here."""
  return {"advantage.name": "opo"}


def grpo_llds(preset):
  """GRPO stabilised by LLDS (2512.04220).

  base 47.9 62.7 45.3 34.5 32.3 8.2 21.0 | 36.0; instruct 46.2 62.7 46.8 44.3 44.7 19.7 44.4 | 44.1.
  """
  return (
    several(preset)
    | {"likelihood.coefficient": 0.2}
    | (LINEAGE | {"rollout.max_turns": 3} if preset in LARGE else {})
  )


def grpo_llds_ma(preset):
  """LLDS with the answer's tokens weighted by the searches made.

  base 48.3 63.3 47.4 45.2 44.3 19.7 39.5 | 44.0.
  """
  return grpo_llds(preset) | {"likelihood.answer_weight": "paper"}


def gspo_llds(preset):
  """GSPO with LLDS: instruct 48.9 64.0 48.3 46.6 45.6 21.5 40.3 | 45.0, the highest at 3B."""
  return grpo_llds(preset) | gspo(preset)


def stratified_llds(preset):
  """Stratified GRPO on a stabilised loss: does stratification add to LLDS? No published row."""
  return grpo_llds(preset) | {"advantage.name": "blend"}


def stratified_gspo(preset):
  """Stratified GRPO on GSPO's ratio. No published row."""
  return gspo(preset) | {"advantage.name": "blend"}


PUBLISHED = {
  method.__name__: method
  for method in (
    r1,
    search_r1_grpo,
    search_r1_ppo,
    ppo_by_calls,
    turn_ppo,
    gigpo,
    research,
    autorefine,
    zerosearch,
    search_r1_plus_plus,
    tinker,
    dapo,
    gspo,
    cispo,
    sapo,
    gmpo,
    opo,
    gdpo,
    hrpo,
    grpo_llds,
    grpo_llds_ma,
    gspo_llds,
    stratified_llds,
    stratified_gspo,
  )
}
