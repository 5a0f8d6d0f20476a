"""Holds what all stages of a run share, and what each does: rows, evaluations, blame."""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np

from stratified.evaluation import runner
from stratified.learner import batching, processes
from stratified.runs import build, held_out
from stratified.runs.convergence import StageScores
from stratified.runs.stage_parts import StageParts
from stratified.runs.stop import OutsideFailed, Stop
from stratified.runs.timetable import Timetable
from stratified.runs.writer import Writer
from stratified.types import Batch


@dataclasses.dataclass(frozen=True)
class Surroundings:
  """What all stages of a run share: its parts, training's sampler and the judge's, the writer.

  times: what is still to come, in seconds. scores: the held-out ones of the stage that is trained.
  """

  run: build.Run
  workdir: Any
  sampler: Any
  judge: Any
  writer: Writer
  stop: Stop
  times: Timetable
  scores: StageScores = dataclasses.field(default_factory=StageScores)


@contextlib.contextmanager
def blame(field: str, name: str):
  """Turns what a function of one's own raises into a sentence that names its field."""
  try:
    yield
  except Exception as error:
    text = " ".join(str(error).split())
    raise OutsideFailed(
      f"{field}={name!r} failed on a rollout with {type(error).__name__}: {text}; mend it, and the "
      "same command goes on from the last step"
    ) from error


def row_of(stage, step: int) -> dict[str, Any]:
  """What a step's row says of where in the run it stands."""
  row = {"step": step, "stage": stage.name}
  if stage.cycle:
    row |= {"cycle": stage.cycle, "phase": stage.name.removesuffix(f"_{stage.cycle}")}
  return row


def update_row(stats: dict, batch: Batch, seconds: float) -> dict[str, float]:
  """What a step's row says of its update, which took so many seconds."""
  return {name: float(value) for name, value in stats.items()} | {
    "update/tokens_per_second": batching.num_tokens(batch) / seconds,
    "update/padding_share": batching.padding_share(batch),
  }


def write_update(
  around: Surroundings, parts: StageParts, step: int, stats: dict, batch: Batch, row: dict,
  *, sampled: int = 0,
) -> dict[str, Any]:  # fmt: skip
  """Writes the row of a step without rewards, and returns it; sampled: tokens sampled for it."""
  stats.pop("advantage_qk")
  row = row_of(parts.stage, step) | row | update_row(stats, batch, row["time/update_s"])
  around.writer.write(row, sampled=sampled, trained=batching.num_tokens(batch))
  return row


def evaluate_if_due(around: Surroundings, parts: StageParts, policy_of, step: int, state):
  """Evaluates policy_of(state) where the step is one after which a run is evaluated."""
  if held_out.due(around.run.config, parts, step):
    evaluate(around, functools.partial(policy_of, state), step)


def unrewarded(groups, parts: StageParts, prompts=None, others=None) -> Batch:
  """Makes a batch of rollouts [n][1] without rewards or strata.

  prompts, others: a teacher's own, see `batching.collate`.
  """
  zeros = np.zeros((len(groups), 1), np.int32)
  return batching.collate(
    groups,
    packing=parts.packing,
    algorithm=parts.stage.algorithm,
    rewards=zeros,
    strata=zeros,
    num_strata=1,
    prompts=prompts,
    others=others,
  )


def writing(task) -> dict[str, Any]:
  """How a task's prompts are written, as `guide.prompt` and `guide.guided` take it."""
  tokenizer = task.tokenizer
  return {
    "write": task.protocol.prompt,
    "encode": tokenizer.encode,
    "decode": tokenizer.decode,
    "eos_id": tokenizer.eos_id,
  }


def evaluate_missing(around: Surroundings, parts: StageParts, policy: Callable, step: int):
  """Evaluates a step that a run goes on from, where the run was stopped in its evaluation."""
  if parts.supervised or not held_out.due(around.run.config, parts, step):
    return
  if not processes.any_of(around.writer.evaluated(step)):
    evaluate(around, policy, step)


def evaluate(around: Surroundings, policy: Callable, step: int) -> None:
  """Evaluates the policy after a step; policy() gives its weights."""
  a = around
  with judging(a, policy):
    held_out.evaluate_at(
      a.run.config, a.run.task, a.judge, a.writer, a.workdir, a.scores.add, a.stop.alone, step
    )


def evaluate_first(around: Surroundings, parts: StageParts, policy: Callable) -> bool:
  """Evaluates the policy that a run begins with; says whether so much was done that it is kept."""
  a = around
  if not parts.first:
    with judging(a, policy):
      held_out.evaluate_start(
        a.run.config, a.run.task, a.judge, a.writer, a.workdir, a.scores.add, a.stop.alone
      )
  return not parts.first


@contextlib.contextmanager
def judging(around: Surroundings, policy: Callable):
  """Loads the greedy sampler, alone on its devices; in this process they are freed of it after.

  Training's sampler gets weights anew before its next rollouts in any case.
  """
  here = around.run.config.sampler.name == "jax"
  if here:
    around.sampler.release()
  around.judge.load(policy(), runner.FIRST_STEP)
  yield
  if here:
    around.judge.release()
