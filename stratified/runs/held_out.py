"""Evaluates held-out questions before training's first step, on the way, and after its last."""

from collections.abc import Callable
import dataclasses
import functools
import json
import os
import pathlib

from stratified import files
from stratified.evaluation import runner
from stratified.evaluation import score as scoring
from stratified.learner import processes
from stratified.runs import rollouts
from stratified.tasks.base import Task

# (step, scores by set) -> what else the row says, see convergence.StageScores.add.
Watch = Callable[[int, dict], dict]


def evaluate(
  task: Task,
  sampler,
  *,
  count: int,
  forced: int | None = None,
  only: str | None = None,
  stop: Callable[[], bool] = lambda: False,
) -> dict:
  """Evaluates what the sampler holds on every held-out set, or `only` one: {set: scores}.

  Each process makes its share. forced: makes every rollout search exactly that often. Raises
  runner.Stopped where stop() says so.
  """
  collect = functools.partial(
    rollouts.collect,
    task,
    sampler=sampler,
    limits=dataclasses.replace(task.limits, forced_searches=forced),
  )
  scores = {}
  for name, (questions, tools) in task.held_out(count).items():
    if only in (None, name):
      rows = runner.run(
        name,
        questions,
        functools.partial(collect, tools=tools),
        tools=task.tool_names,
        what="" if forced is None else f" with {forced} searches each",
        active=processes.is_first(),
        stop=stop,
      )
      scores[name] = scoring.summarise(rows)
  return scores


def due(config, parts, step: int) -> bool:
  """Whether a step ends with an evaluation: its stage's last one, and every `eval.every`."""
  last = step == parts.first + parts.stage.num_steps
  return last or bool(config.eval.every) and step % config.eval.every == 0


def evaluate_start(
  config, task, sampler, writer, workdir: pathlib.Path, watch: Watch, stop: Callable[[], bool]
) -> None:
  """Evaluates the first policy: by its own choice, and made to search 0, 1, 2, ... times."""
  scores = evaluate(task, sampler, count=config.eval.questions, stop=stop)
  parts = {"warm_start": {"sets": scores}}
  if config.eval.forced:
    parts["warm_start_forced"] = {
      str(n): {
        "sets": evaluate(
          task, sampler, count=config.eval.questions, forced=n, only=scoring.HELD_OUT, stop=stop
        )
      }
      for n in range(config.rollout.max_turns + 1)
    }
  writer.write({"step": 0} | scoring.metrics_row(scores) | watch(0, scores))
  record(workdir, parts)


def evaluate_at(
  config,
  task,
  sampler,
  writer,
  workdir: pathlib.Path,
  watch: Watch,
  stop: Callable[[], bool],
  step: int,
) -> None:
  """Evaluates the policy now; evaluation.json keeps the newest."""
  scores = evaluate(task, sampler, count=config.eval.questions, stop=stop)
  writer.write({"step": step} | scoring.metrics_row(scores) | watch(step, scores))
  record(workdir, {"step": step, "sets": scores})


def record(workdir: pathlib.Path, parts: dict) -> None:
  """Adds parts to workdir/evaluation.json."""
  if not processes.is_first():
    return
  path = workdir / "evaluation.json"
  try:
    known = files.read_object(path, "it is moved aside") if path.exists() else {}
  except ValueError as error:
    known, aside = {}, path.with_name("evaluation.json.damaged")
    os.replace(path, aside)
    print(f"{error} to {aside.name}, and a new one is begun", flush=True)
  files.write_atomic(path, json.dumps(known | parts, indent=2) + "\n")
