"""A method of two stages of reinforcement, for tests of the trainer."""

import dataclasses

from stratified.algorithms.base import Stage
from stratified.algorithms.grpo import Grpo


class TwoStages(Grpo):
  """GRPO with its KL, then without."""

  def stages(self, num_steps):
    free = dataclasses.replace(self, loss=dataclasses.replace(self.loss, kl_coefficient=0.0))
    half = num_steps // 2
    return (
      Stage("held", "rollouts", half, self), Stage("free", "rollouts", num_steps - half, free)
    )  # fmt: skip


class NoStage(TwoStages):
  def stages(self, num_steps):
    return ()


class Short(TwoStages):
  def stages(self, num_steps):
    return super().stages(num_steps)[:1]


class Unknown(TwoStages):
  def stages(self, num_steps):
    held, free = super().stages(num_steps)
    return held, free._replace(reference_of="first")


class OnPairs(TwoStages):
  def stages(self, num_steps):
    held, free = super().stages(num_steps)
    return held, free._replace(source="pairs")
