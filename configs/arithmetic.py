"""Tasks with a calculator, for the same small policy as configs/search_r1.py:tiny.

    python experiments/train.py --config=configs/arithmetic.py:tiny --workdir=runs/arithmetic
    python experiments/train.py --config=configs/arithmetic.py:two_tools --workdir=runs/ages

Presets, after the colon: `tiny` (none means this; word problems of 0 to 3 operations) and
`two_tools` (search and calculator: "how much older is A than B").
"""

from configs import search_r1
from stratified.runs import settings

# Word problems of 0 to 3 operations; as many calls of the calculator are right.
TINY = search_r1.LONG | {
  "task.name": "arithmetic",
  "strata.name": "calls",
  "rollout.max_observation_tokens": 32,
  "rollout.max_tokens": 128,
  "packing.row_length": 128,
  "warm_start.num_steps": 800,
  "num_steps": 200,
  "eval.questions": 200,
  "eval.every": 25,
}

# Ages of the people of an encyclopedia: which tools a rollout calls makes its stratum.
TWO_TOOLS = TINY | {
  "task.name": "ages",
  "strata.name": "tools",
  "data.entities": 1200,
  "rollout.max_observation_tokens": 64,
  "rollout.max_tokens": 160,
  "packing.row_length": 160,
}

PRESETS = {"tiny": TINY, "two_tools": TWO_TOOLS}


def get_config(preset: str = "tiny"):
  return settings.of_preset(PRESETS, preset, "configs/arithmetic.py")
