"""The methods that Stratified GRPO is compared with, on any preset of configs/search_r1.py.

    python experiments/train.py --config=configs/baselines.py:grpo --workdir=runs/grpo
    python experiments/train.py --config=configs/baselines.py:san:base --workdir=runs/san_3b
    python experiments/sweep.py --config=configs/baselines.py:grpo --sweep=table --seeds=3 \\
        --workdir=runs/table

After the first colon comes the method, after a second one the preset of configs/search_r1.py that
it runs on (`tiny` if none is named). A method changes the estimator, and the loss where its paper
ties the two. Everything else is the preset's, so two methods differ in what their names say alone.
The table of arXiv 2510.06214 is `grpo`, `san`, `stratified_grpo`.

Published methods (configs/published.py) come with their protocol, reward and loss, and on `base`
and `instruct` with the settings of their papers. Supervised methods are `sft`, `sft_demonstrations`
and `rejection_sampling`; the last is made of the parts of configs/search_e1.py.

Methods that learn nothing (`direct`, `cot`, `rag`, `ircot`, `search_o1`) need a preset with
weights, `smollm2` if none is named, and are evaluated as they stand:

    python experiments/evaluate.py --config=configs/baselines.py:rag:instruct --sets=all \\
        --workdir=runs/rag_3b
"""

from configs import search_e1, search_r1
from configs.published import PUBLISHED

# Method -> the config fields in which it differs from the preset.
METHODS = {
  "grpo": {"advantage.name": "gn"},  # arXiv 2402.03300: (R - R_g) / s_g
  "san": {"advantage.name": "san"},  # arXiv 2510.06214, Definition 1
  # arXiv 2510.06214, Definition 2; alpha is the preset's
  "stratified_grpo": {"advantage.name": "blend"},
  # arXiv 2503.20783: no division by the deviation, tokens summed and divided by a constant.
  "dr_grpo": {"advantage.name": "dr_grpo", "loss.aggregation": "constant"},
  "rloo": {"advantage.name": "loo"},  # arXiv 2402.14740's baseline, under the preset's clipped loss
  "reinforce": {"advantage.name": "reinforce"},  # no baseline at all
  "reinforce_batch": {"advantage.name": "reinforce_batch"},  # arXiv 2501.03262
  "gn_batch": {"advantage.name": "gn_batch"},  # arXiv 2501.03262 with a group baseline
  "centered": {"advantage.name": "centered"},  # R - R_g
  "stratified": {"advantage.name": "stratified"},  # R - R_k
  "stratified_loo": {"advantage.name": "stratified_loo"},  # leave-one-out inside the stratum
  # stratum means drawn to the group's where strata are small
  "shrunk": {"advantage.name": "shrunk"},
  "two_term": {"advantage.name": "two_term"},  # within strata + lam x between strata
  # SAN at gn's root mean square: its direction without its smaller step
  "san_rms": {"advantage.name": "san_rms"},
  # gn for those alone in a stratum
  "san_fallback": {"advantage.name": "san", "advantage.fallback": "gn"},
  "annealed": {"advantage.name": "blend", "advantage.alpha": 1.0, "advantage.alpha_end": 0.0},
  # same sizes, no meaning: the control
  "random_strata": {"advantage.name": "blend", "strata.name": "random"},
}

# Methods that learn nothing -> likewise. A preset that shows worked examples gets the method's own
# (`rag_few_shot`).
INFERENCE = {
  "direct": {"rollout.protocol": "direct"},  # one answer, no search
  "cot": {"rollout.protocol": "cot"},  # arXiv 2201.11903: reasoning, then the answer
  "rag": {"rollout.protocol": "rag"},  # arXiv 2005.11401's task: one search with the question
  "ircot": {"rollout.protocol": "ircot"},  # arXiv 2212.10509
  "search_o1": {"rollout.protocol": "search_o1"},  # arXiv 2501.05366
}


# Supervised methods -> likewise. Their papers name no optimizer settings: those are ours.
SUPERVISED = {
  # arXiv 2503.09516's SFT: the golden answer right after the question, no retrieval
  "sft": {"algorithm.name": "sft", "sft.targets": "answers"},
  # the task's script, where its answer is right; needs a generated task
  "sft_demonstrations": {"algorithm.name": "sft", "sft.targets": "demonstrations"},
}
# What they change of presets with weights: no tool in the prompt, a usual rate, its questions.
SFT_LARGE = {
  "rollout.protocol": "direct",
  "optimizer.learning_rate": 1e-5,
  "data.questions_per_step": 64,
}


def get_config(method: str = "grpo"):
  name, _, preset = method.partition(":")
  if name == "rejection_sampling":
    return search_e1.get_config(method)
  if name in SUPERVISED:
    return _supervised(name, preset or "tiny")
  if name in INFERENCE:
    return _inference(name, preset or "smollm2")
  if name in PUBLISHED:
    return _published(name, preset or "tiny")
  if name not in METHODS:
    raise ValueError(
      f"method {name!r} is unknown; choose one of "
      f"{', '.join([*METHODS, *PUBLISHED, *SUPERVISED, 'rejection_sampling', *INFERENCE])}, "
      "as in configs/baselines.py:grpo or configs/baselines.py:grpo:instruct"
    )
  config = search_r1.get_config(preset or "tiny")
  config.update_from_flattened_dict(METHODS[name])
  if name == "annealed":
    config.advantage.alpha_steps = config.get_ref("num_steps")  # follows --config.num_steps
  return config


def _published(name: str, preset: str):
  config = search_r1.get_config(preset)
  config.loss.filter_groups = False  # a method says itself whether it drops groups
  config.update_from_flattened_dict(PUBLISHED[name](preset))
  if config.retriever.noise_end:
    config.retriever.noise_steps = config.get_ref("num_steps")  # follows --config.num_steps
  return config


def _supervised(name: str, preset: str):
  config = search_r1.get_config(preset)
  config.update_from_flattened_dict(SUPERVISED[name])
  if config.policy.checkpoint and config.sft.targets == "answers":
    config.update_from_flattened_dict(SFT_LARGE)
  return config


def _inference(name: str, preset: str):
  config = search_r1.get_config(preset)
  few_shot = config.rollout.protocol == "few_shot"
  config.update_from_flattened_dict(INFERENCE[name])
  if few_shot:
    config.rollout.protocol += "_few_shot"
  return config


def sweep_table(add):
  """Table 2 of arXiv 2510.06214."""
  for method in ("grpo", "san", "stratified_grpo"):
    add(preset=method)


def sweep_methods(add):
  """Every method of this file that learns."""
  for method in (*METHODS, *PUBLISHED, *SUPERVISED, "rejection_sampling"):
    add(preset=method)


sweep_alpha, sweep_strata, sweep_seeds = (
  search_r1.sweep_alpha,
  search_r1.sweep_strata,
  search_r1.sweep_seeds,
)
