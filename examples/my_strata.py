"""A partition of your own: rollouts that asked one query twice are compared with each other alone.

    PYTHONPATH=examples python experiments/train.py --config=configs/search_r1.py:tiny \
        --config.strata.name="my_strata:repeats*searches" --workdir=runs/my_strata

A partition is a function of a Trajectory that returns a whole number from 0 on; numbers above
strata.cap share the last stratum. By * it is crossed with another, here the number of searches.
"""

from stratified.types import Trajectory


def repeats(trajectory: Trajectory) -> int:
  """How many calls said what an earlier call of the same tool had said."""
  said = [(call.tool, call.argument) for call in trajectory.calls]
  return len(said) - len(set(said))
