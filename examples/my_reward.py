"""A reward of your own: a right answer is worth more, the fewer tokens the rollout took.

    PYTHONPATH=examples python experiments/train.py --config=configs/search_r1.py:tiny \
        --config.reward.name="exact_match + 0.2*my_reward:brevity" --workdir=runs/my_reward

A reward is a function of a Trajectory that returns a finite number; rollouts that were lost to a
fault never reach it. `reward.name` is one, or a sum of several with weights, beside the project's
own (exact_match, f1, format, ...). Each is logged as reward/NAME, here reward/brevity.
"""

from stratified.rewards import exact_match
from stratified.types import Trajectory

LONG = 100  # policy tokens from which a right answer earns nothing more


def brevity(trajectory: Trajectory) -> float:
  """From 1 for a right answer at once to 0 for one after LONG tokens, or a wrong one."""
  right = exact_match(trajectory.answer, trajectory.question.golden_answers)
  return right * max(0.0, 1 - trajectory.num_policy_tokens / LONG)
