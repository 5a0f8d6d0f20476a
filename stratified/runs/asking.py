"""Answers single questions with a policy as it stands: one rollout each, no training around it."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import itertools
from typing import Any

from stratified import rewards
from stratified.agents import loop, rollout_setting
from stratified.evaluation import runner
from stratified.runs import build, samplers
from stratified.runs.writer import trajectory_record
from stratified.tasks.base import Task
from stratified.types import Question, Trajectory

SET = "asked"  # names the random keys of what is asked here


def alone(config, temperature: float = 0.0):
  """Makes room for one rollout only, of that temperature; 0 is greedy."""
  config.sampler.lanes = config.sampler.rows = config.sampler.devices = 1
  config.rollout.temperature = temperature or config.rollout.temperature
  return config


@dataclasses.dataclass(frozen=True)
class Agent:
  """A policy that can be asked.

  ask: question -> the record of its rollout: `writer.trajectory_record`'s without the numbers of a
    group, and with `reward`, the exact match, where golden answers are known. It raises ValueError
    for a question that leaves no room for an answer, RetrieverDown or SamplerError where a server
    is gone for good.
  examples: held-out questions that it can be asked.
  """

  ask: Callable[[Question], dict[str, Any]]
  examples: Sequence[Question]


@contextlib.contextmanager
def opened(made: build.Run, params, temperature: float = 0.0) -> Iterator[Agent]:
  """Opens the policy of these parameters; `made` is built from a config of `alone`."""
  task, numbers = made.task, itertools.count()
  # held-out sets search without the noise that training may have
  examples, tools = next(iter(task.held_out(made.config.eval.questions).values()))
  setting = rollout_setting.Setting.of(task.tokenizer, task.protocol, task.limits)
  with samplers.samplers(made.config, made.mesh, made.model, task.tokenizer) as both:
    sampler = both[temperature == 0]
    sampler.load(params, runner.FIRST_STEP)

    def ask(question: Question) -> dict[str, Any]:
      rollout_setting.check_prompts(setting, [question])
      [[rollout]] = loop.collect(
        [question],
        sampler=sampler,
        tools=tools,
        tokenizer=task.tokenizer,
        protocol=task.protocol,
        limits=task.limits,
        samples_per_question=1,
        step=runner.step_of(SET),
        indices=[next(numbers)],
      )
      return record_of(rollout, task)

    yield Agent(ask, examples)


def record_of(rollout: Trajectory, task: Task) -> dict[str, Any]:
  """The record of a rollout that no group is around."""
  golden = rollout.question.golden_answers
  known = bool(golden) and rollout.fault is None
  record = trajectory_record(
    rollout,
    task.tokenizer.decode,
    reward=rewards.exact_match(rollout.answer, golden) if known else None,
    stratum=None,
    advantage=None,
    tools=task.tool_names,
  )
  unknown = ("stratum", "advantage") + (() if known else ("reward",))
  return {key: value for key, value in record.items() if key not in unknown}
