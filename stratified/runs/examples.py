"""Gives a supervised stage its batches: golden answers, or demonstrations that are right."""

from collections.abc import Callable
import functools

from stratified.agents.tags import ANSWER
from stratified.algorithms.supervised import SftSettings
from stratified.config import read
from stratified.learner import batching
from stratified.runs.stage_parts import StageParts
from stratified.runs.surroundings import (
  blame,
  evaluate_first,
  evaluate_if_due,
  Surroundings,
  unrewarded,
  write_update,
)
from stratified.types import Batch, Question, Segment, TrainState, Trajectory, Turn


class Examples:
  """One update a step on what `sft.targets` says."""

  label, rate = "supervised steps", "optimizer.learning_rate"

  def __init__(self, parts: StageParts, around: Surroundings, policy: Callable):
    self._parts, self._around, self._policy = parts, around, policy
    self._settings = read(SftSettings, around.run.config)

  def start(self, state: TrainState) -> bool:
    return evaluate_first(self._around, self._parts, functools.partial(self._policy, state))

  def take(self, step: int, state: TrainState) -> tuple[Batch, dict]:
    found = {"answers": self._answers, "demonstrations": self._demonstrations}
    examples = found[self._settings.targets](step)
    kept = sum(one.fault is None for one in examples) / len(examples)
    return unrewarded([[one] for one in examples], self._parts), {"sft/kept_share": kept}

  def _answers(self, step: int) -> list[Trajectory]:
    task, most = self._around.run.task, self._around.run.config.rollout.max_tokens
    found = [answered(task, question) for question in task.questions_at(step)]
    return [one if len(one.token_ids) <= most else batching.LOST for one in found]

  def _demonstrations(self, step: int) -> list[Trajectory]:
    run = self._around.run
    with blame("reward.name", run.config.reward.name):
      right = lambda one: not one.fault and run.reward(one).total >= self._settings.correct_at
      return [one if right(one) else batching.LOST for (one,) in run.task.demonstrations(step)]

  def finish(self, step: int, state, stats: dict, batch: Batch, row: dict) -> str:
    row = write_update(self._around, self._parts, step, stats, batch, row)
    evaluate_if_due(self._around, self._parts, self._policy, step, state)
    return f"loss {row['sft/loss']:.3f}"

  def __enter__(self) -> "Examples":
    return self

  def __exit__(self, *unused) -> None:
    pass


def answered(task, question: Question) -> Trajectory:
  """The rollout that answers a question at once, rightly."""
  protocol, encode = task.protocol, task.tokenizer.encode
  golden = question.golden_answers[0]
  text = f"{protocol.opening(ANSWER)} {golden}{protocol.closing(ANSWER)}"
  ids = tuple(encode(text))
  segments = (
    Segment(tuple(encode(protocol.prompt(question.text))), "prompt"),
    Segment(ids, "policy", (0.0,) * len(ids)),
  )
  return Trajectory(question, 0, segments, (Turn("answer", text),), golden, "answer")
