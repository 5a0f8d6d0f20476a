"""Search-E1 (arXiv 2605.22511): cycles of reinforcement and self-distillation.

    python experiments/train.py --config=configs/search_e1.py:tiny --workdir=runs/search_e1

Presets, after the colon: `tiny` (none means this; two CPU cores), `smollm2` (real weights, real
questions), `base` and `instruct` (Qwen2.5-3B). Each is the preset of that name in
configs/search_r1.py with the paper's method; docs/search_e1.md lists what the paper leaves open.

A neighbour's name before the preset makes the method another one of the same parts:

    python experiments/train.py --config=configs/search_e1.py:ssopd:tiny --workdir=runs/ssopd

Neighbours: `sft_on_reference`, `rejection_sampling`, `ssopd`, `rlcsd`.
"""

from configs import search_r1
from stratified.runs import settings

# The paper's reinforcement: GRPO, 5 rollouts of a question, 4 searches at most.
METHOD = {"algorithm.name": "search_e1", "advantage.name": "gn"}

# A small policy has never read an example in its prompt: a part of its warm start teaches it to.
TINY = (
  search_r1.LONG
  | METHOD
  | {
    "num_steps": 300,
    "search_e1.distillation_steps": 50,
    "guide.before": " [ ",
    "guide.after": " ] ",
    "guide.share": 0.3,
    "packing.row_length": 384,
    "packing.rows": 4,
    "distillation.rank": 0,
    "distillation.optimizer": "muon",
    "distillation.learning_rate": 1e-4,
    "distillation.clip_norm": 1.0,
    "distillation.row_length": 448,
    "pairs.num_questions": 256,
  }
)

SMOLLM2 = (
  search_r1.SMOLLM2
  | METHOD
  | {
    "num_steps": 2,
    "search_e1.cycles": 1,
    "search_e1.distillation_steps": 1,
    "pairs.num_questions": 8,
    "distillation.pairs_per_step": 2,
  }
)

LARGE = {"num_steps": 600, "rollout.samples_per_question": 5, "rollout.max_turns": 4}

BASE = search_r1.BASE | METHOD | LARGE
INSTRUCT = search_r1.INSTRUCT | METHOD | LARGE | {"advantage.name": "gn"}

PRESETS = {"tiny": TINY, "smollm2": SMOLLM2, "base": BASE, "instruct": INSTRUCT}


# Neighbour -> the fields in which it differs from Search-E1, which is the first.
NEIGHBOURS = {
  "search_e1": {},
  # The same pairs and steps, without a teacher.
  "sft_on_reference": {"distillation.loss": "imitation"},
  # arXiv 2503.09516's baseline: every right one of 5 rollouts a question, imitated. No
  # reinforcement: `get_config` makes all steps imitation.
  "rejection_sampling": {
    "search_e1.cycles": 1,
    "distillation.loss": "imitation",
    "pairs.reference": "every_correct",
    "pairs.max_invalid_share": 1.0,  # of the other rollout, which nobody imitates
    "pairs.samples_per_question": 5,
  },
  # arXiv 2605.17497: the shortest right rollout teaches the beginning of the longest wrong one,
  # most where a question has both. There as a part of GRPO's loss, here in turns with it.
  "ssopd": {
    "pairs.reference": "shortest_correct",
    "pairs.student": "longest_wrong",
    "distillation.prefix": 0.5,
    "distillation.weight": "mixed",
  },
  # arXiv 2606.11709: what a wrong hint changes too is style, and is taken off.
  "rlcsd": {"pairs.contrast": 1.0},
}


def get_config(preset: str = "tiny"):
  name, _, rest = preset.partition(":")
  if name not in NEIGHBOURS:
    return settings.of_preset(PRESETS, preset, "configs/search_e1.py")
  config = settings.of_preset(PRESETS, rest or "tiny", f"configs/search_e1.py:{name}")
  config.update_from_flattened_dict(NEIGHBOURS[name])
  if name == "rejection_sampling":
    config.search_e1.distillation_steps = config.get_ref("num_steps")  # follows --config.num_steps
  return config


def sweep_clip(add):
  """The published clip turns some gradients round; the others do not."""
  for form in ("entry", "position", "scaled", "none"):
    add(**{"distillation.clip_form": form})


def sweep_reference(add):
  """Does a reference of few searches teach not to search? `random_wrong` is a control of style."""
  for rule in (
    "fewest_searches",
    "fewest_searches_some",
    "stratified",
    "random_correct",
    "random_wrong",
  ):
    add(**{"pairs.reference": rule})


def sweep_shown(add):
  """What of the reference the teacher needs. `no_documents` still has the answer."""
  for part in ("full", "no_answer", "no_documents", "queries_only"):
    add(**{"guide.shown": part})


def sweep_span(add):
  """Which of the student's tokens count."""
  for span in ("all", "think_search", "search"):
    add(**{"distillation.span": span})


def sweep_neighbours(add):
  """Search-E1 beside the other methods of its parts; `search_e1:smollm2` sweeps that preset."""
  for method in NEIGHBOURS:
    add(preset=method)


def sweep_loss(add):
  """Is a teacher needed, and which divergence from it? The last is reinforcement alone."""
  for divergence in ("forward", "reverse", "jensen_shannon"):
    add(**{"distillation.divergence": divergence})
  add(**{"distillation.loss": "imitation"})
  add(**{"search_e1.distillation_steps": 0})
