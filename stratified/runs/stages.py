"""Gives a stage its batches, from demonstrations, rollouts or pairs, and writes its rows.

A source serves `trainer.run_stage`:

    source.start(state)                     before step 1; says whether that is worth a checkpoint
    batch, row = source.take(step, state)   the step's batch, and what is known of it already
    note = source.finish(step, state, stats, batch, row)    writes the step's row, and more
"""

from collections.abc import Callable
import functools
import time

import numpy as np

from stratified.algorithms import guide
from stratified.config import read
from stratified.evaluation import score as scoring
from stratified.learner import batching, processes
from stratified.runs import examples, held_out, pairs
from stratified.runs.rollouts import Rollouts
from stratified.runs.stage_parts import StageParts
from stratified.runs.surroundings import (
  blame,
  evaluate,
  evaluate_first,
  row_of,
  Surroundings,
  unrewarded,
  update_row,
  writing,
)
from stratified.runs.writer import trajectory_records
from stratified.types import Batch, TrainState, Trajectory


class Demonstrations:
  """Imitates the task's scripted demonstrations."""

  label, rate = "warm-start steps", "warm_start.learning_rate"

  def __init__(self, parts: StageParts, around: Surroundings, policy: Callable):
    self._parts, self._writer, self._task = parts, around.writer, around.run.task
    self._demonstrations = around.run.task.demonstrations
    self._guide, self._seed = read(guide.GuideSettings, around.run.config), around.run.config.seed

  def start(self, state: TrainState) -> bool:
    return False

  def take(self, step: int, state: TrainState) -> tuple[Batch, dict]:
    return unrewarded(self._guided(step), self._parts), {}

  def _guided(self, step: int) -> list[list[Trajectory]]:
    """A step's demonstrations, a share of them after a prompt that shows them already."""
    groups, settings = self._demonstrations(step), self._guide
    if not settings.share:
      return groups
    task, chance = self._task, np.random.default_rng([self._seed, step])
    write = lambda t: guide.guided(t, settings, **writing(task))
    return [
      [write(t) if chance.random() < settings.share else t for t in group] for group in groups
    ]

  def finish(self, step: int, state, stats: dict, batch: Batch, row: dict) -> str:
    loss = float(stats["warm_start/loss"])
    row = {
      "warm_start/step": step,
      "stage": self._parts.stage.name,
      "warm_start/loss": loss,
      "grad/norm": float(stats["grad/norm"]),
    }
    self._writer.write(row, trained=batching.num_tokens(batch))
    return f"loss {loss:.3f}"

  def __enter__(self) -> "Demonstrations":
    return self

  def __exit__(self, *unused) -> None:
    pass


class Reinforcement:
  """Samples the policy's rollouts, rewards them, sorts them into strata; evaluates on the way."""

  label, rate = "training steps", "optimizer.learning_rate"

  def __init__(self, parts: StageParts, around: Surroundings, policy: Callable):
    self._parts, self._around, self._policy = parts, around, policy
    end = parts.first + parts.stage.num_steps
    self._rollouts = Rollouts(
      around.run.config, around.run.task, around.sampler, end, self._has_signal
    )
    self._clock = time.perf_counter()

  def take(self, step: int, state: TrainState) -> tuple[Batch, dict]:
    run = self._around.run
    groups, times, counts = self._rollouts.take(step, functools.partial(self._policy, state))
    scores, reward, strata, parts = self._judged(groups, step)
    self._sampled = groups, reward, strata
    row = scoring.rollout_row(groups, scores, step, run.task.tool_names)
    row |= {f"rollout/{name}": value for name, value in counts.items()}
    steps = self._steps(groups)
    if steps:
      of_rollouts = [sum(turns) for group in steps for turns in group]
      row["reward/steps"] = sum(of_rollouts) / max(1, len(of_rollouts) - row["rollout/failed"])
    spent = times["rollout_s"] + times["search_s"]
    row["rollout/tokens_per_second"] = sampled_tokens(row) / spent
    row |= {f"time/{name}": value for name, value in times.items()}
    batch = batching.collate(
      groups,
      packing=self._parts.packing,
      algorithm=self._parts.stage.algorithm,
      rewards=reward,
      strata=strata,
      num_strata=run.partition.num_strata,
      parts=parts,
      steps=steps,
    )
    return batch, row

  def _steps(self, groups) -> list[list[list[float]]] | None:
    """[Q][K] the rewards of each rollout's turns; None where single searches earn nothing."""
    run = self._around.run
    if run.steps is None:
      return None
    with blame("reward.documents", run.config.reward.documents):
      return [[[] if t.fault else run.steps(t) for t in group] for group in groups]

  def _judged(self, groups, step: int):
    """(scores or None, rewards, strata [Q][K], parts [Q][K][P] or None) of a step's rollouts."""
    run, wanted = self._around.run, self._parts.stage.algorithm.num_parts
    with blame("reward.name", run.config.reward.name):
      scores = [[None if t.fault else run.reward(t) for t in group] for group in groups]
      reward = [[0.0 if s is None else s.total for s in group] for group in scores]
    with blame("strata.name", run.config.strata.name):
      strata = [run.partition.assign(group, step=step) for group in groups]
    parts_of = lambda s: [0.0] * wanted if s is None else list(s.parts.values())
    parts = [[parts_of(s) for s in group] for group in scores] if wanted else None
    return scores, reward, strata, parts

  def _has_signal(self, groups, step: int) -> list[bool]:
    """Of each group whether it has an advantage; on the policy that sampled it."""
    _, reward, strata, parts = self._judged(groups, step)
    algorithm = self._parts.stage.algorithm
    return algorithm.has_signal(groups, reward, strata, step - self._parts.first, parts)

  def finish(self, step: int, state, stats: dict, batch: Batch, row: dict) -> str:
    config, writer, now = self._around.run.config, self._around.writer, time.perf_counter()
    advantage = np.asarray(stats.pop("advantage_qk"))
    row = row_of(self._parts.stage, step) | row
    row |= self._around.run.task.row_at(step - 1)  # `step` steps are over
    row |= update_row(stats, batch, row["time/update_s"]) | {"time/step_s": now - self._clock}
    self._clock = now
    trained = batching.num_tokens(batch) * config.update.epochs
    writer.write(row, sampled=sampled_tokens(row), trained=trained)
    every = config.logging.trajectories_every
    if every and step % every == 0:
      groups, reward, strata = self._sampled
      task = self._around.run.task
      records = trajectory_records(
        groups, task.tokenizer.decode, reward, strata, advantage, task.tool_names
      )
      writer.write_trajectories(step, records)
    if step > self._parts.first + self._parts.stage.num_steps - self._parts.stage.keeps:
      keep = functools.partial(pairs.keep, self._around.workdir, step, self._sampled[0])
      processes.first_then_all(keep, f"rollouts of step {step}")
    if held_out.due(config, self._parts, step):
      self._rollouts.settle()
      evaluate(self._around, functools.partial(self._policy, state), step)
    return f"reward {row['reward/mean']:.3f}, searches {row['rollout/searches_mean']:.2f}"

  def start(self, state: TrainState) -> bool:
    """Evaluates the policy that the run begins with; that takes long enough to be kept."""
    return evaluate_first(self._around, self._parts, functools.partial(self._policy, state))

  def __enter__(self) -> "Reinforcement":
    self._rollouts.__enter__()
    return self

  def __exit__(self, *error) -> None:
    self._rollouts.__exit__(*error)


def sampled_tokens(row: dict) -> float:
  """The tokens that a step sampled, those of groups that gave way to others too."""
  return row["rollout/policy_tokens"] + row.get("rollout/resampled_tokens", 0)


SOURCES = {
  "demonstrations": Demonstrations,
  "rollouts": Reinforcement,
  "pairs": pairs.Pairs,
  "examples": examples.Examples,
}
