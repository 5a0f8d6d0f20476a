"""Held-out questions during training: before its first step, on the way, and after its last."""

import dataclasses
import json
import pathlib

from stratified import files
from stratified.evaluation import score as scoring
from stratified.learner import processes
from stratified.progress import Progress
from stratified.runs.rollouts import collect
from stratified.tasks.base import Task

# Names the random keys of evaluation, which greedy decoding never draws from.
EVALUATION_STEP = 2**30
CHUNK = 256  # held-out questions in flight; more would only delay the progress line


def evaluate(
  config,
  params,
  task: Task,
  sampler,
  *,
  count: int,
  forced: int | None = None,
  only: str | None = None,
) -> dict:
  """{set: scores} of every held-out set, or of `only` one; `forced` makes each rollout search
  exactly that often."""
  sampler.load(params, EVALUATION_STEP)
  scores = {}
  for name, (questions, tools) in task.held_out(count).items():
    if only not in (None, name):
      continue
    what = f"questions of {name}" + ("" if forced is None else f" with {forced} searches each")
    groups = []
    with Progress(len(questions), what, active=processes.is_first()) as progress:
      for at in range(0, len(questions), CHUNK):
        part = questions[at : at + CHUNK]
        groups += processes.exchange(
          collect(
            task,
            part,
            sampler=sampler,
            tools=tools,
            samples_per_question=1,
            step=EVALUATION_STEP + at,
            limits=dataclasses.replace(task.limits, forced_searches=forced),
          ),
          len(part),
        )
        progress.update(len(part))
    scores[name] = scoring.summary(groups, task.tool_names)
  return scores


def evaluate_start(config, params, task, sampler, writer, workdir: pathlib.Path) -> None:
  """The policy before reinforcement learning: by its own choice, and made to search 0, 1, 2, ...
  times."""
  scores = evaluate(config, params, task, sampler, count=config.eval.questions)
  parts = {"warm_start": {"sets": scores}}
  if config.eval.forced:
    parts["warm_start_forced"] = {
      str(n): {
        "sets": evaluate(
          config, params, task, sampler, count=config.eval.questions, forced=n, only="held_out"
        )
      }
      for n in range(config.rollout.max_turns + 1)
    }
  writer.write({"step": 0} | scoring.metrics_row(scores))
  record(workdir, parts)


def evaluate_at(config, params, task, sampler, writer, workdir: pathlib.Path, step: int) -> None:
  """The policy now; evaluation.json keeps the newest."""
  scores = evaluate(config, params, task, sampler, count=config.eval.questions)
  writer.write({"step": step} | scoring.metrics_row(scores))
  record(workdir, {"step": step, "sets": scores})


def record(workdir: pathlib.Path, parts: dict) -> None:
  """Adds parts to workdir/evaluation.json."""
  if not processes.is_first():
    return
  path = workdir / "evaluation.json"
  known = files.read_object(path) if path.exists() else {}
  files.write_atomic(path, json.dumps(known | parts, indent=2) + "\n")
