"""Checks what a task gives: before any work, and a user's own at every step of the run."""

from collections.abc import Callable
import dataclasses
from typing import Any

from stratified.runs.stop import OutsideFailed
from stratified.tasks import base
from stratified.tools import base as tools
from stratified.types import Question, Trajectory


def check(config, task: base.Task) -> None:
  """Refuses a task that does not give what training asks of it; one's own also runs its tools once.

  Raises ValueError or OSError, one sentence.
  """
  name = name_of(config)
  if config.warm_start.num_steps and task.demonstrations is None:
    raise ValueError(
      f"warm_start.num_steps={config.warm_start.num_steps} must be 0: {name} has no demonstrations"
    )
  imitates = config.algorithm.name == "sft" and config.sft.targets == "demonstrations"
  if imitates and task.demonstrations is None:
    raise ValueError(
      f"sft.targets='demonstrations': {name} has none; set --config.sft.targets=answers"
    )
  tools.check(task.tools, name)
  for ask, wrong in (
    (lambda: task.questions_at(0), wrong_questions),
    (lambda: task.held_out(config.eval.questions), wrong_sets),
    (lambda: task.demonstrations(0), wrong_demonstrations),
  )[: 3 if config.warm_start.num_steps or imitates else 2]:
    try:
      given = ask()
    except (ValueError, OSError):
      raise
    except Exception as error:
      raise ValueError(f"{name} failed with {_said(error)}") from error
    if problem := wrong(config, given):
      raise ValueError(f"{name} {problem}")
  if ":" in config.task.name:
    for tool in task.tools:
      tools.try_out(tool, name)


def name_of(config) -> str:
  return f"task.name={config.task.name or config.data.name!r}"


def watched(config, task: base.Task) -> base.Task:
  """A user's own task with a check at every step: OutsideFailed, one sentence, for a mistake."""
  if ":" not in config.task.name:
    return task

  def watch(function: Callable[[int], Any], wrong: Callable) -> Callable[[int], Any]:
    def at(step: int) -> Any:
      try:
        given = function(step)
      except Exception as error:
        problem, cause = f"failed with {_said(error)}", error
      else:
        problem, cause = wrong(config, given), None
      if problem:
        raise OutsideFailed(
          f"{name_of(config)} {problem} (at step {step}); mend it, and the same command goes on "
          "from the last step"
        ) from cause
      return given

    return at

  play = task.demonstrations and watch(task.demonstrations, wrong_demonstrations)
  return dataclasses.replace(
    task, questions_at=watch(task.questions_at, wrong_questions), demonstrations=play
  )


def wrong_questions(config, asked: Any) -> str | None:
  wanted = config.data.questions_per_step
  if not isinstance(asked, list | tuple) or len(asked) != wanted:
    return (
      f"gives {_count(asked)} for the questions of a step; it must give "
      f"data.questions_per_step={wanted} of them"
    )
  return _wrong_elements(asked, "the questions of a step")


def wrong_sets(config, sets: Any) -> str | None:
  if not isinstance(sets, dict) or "held_out" not in sets:
    got = ", ".join(map(str, sets)) if isinstance(sets, dict) else type(sets).__name__
    return f"gives {got or 'none'} for the held-out sets; one must be called 'held_out'"
  for name, pair in sets.items():
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], list | tuple):
      return (
        f"gives {type(pair).__name__} for the held-out set {name!r}; it must be a pair (questions, "
        "tools)"
      )
    asked, given = pair
    if not asked:
      return f"gives no question in the held-out set {name!r}; it must give one at least"
    if problem := _wrong_elements(asked, f"the held-out set {name!r}"):
      return problem
    if not isinstance(given, list | tuple):
      return f"gives {type(given).__name__} for the tools of the set {name!r}; it must be a tuple"
  return None


def wrong_demonstrations(config, groups: Any) -> str | None:
  wanted = config.warm_start.demonstrations_per_step
  if not isinstance(groups, list | tuple) or len(groups) != wanted:
    return (
      f"gives {_count(groups)} for the demonstrations of a step; it must give "
      f"warm_start.demonstrations_per_step={wanted} of them"
    )
  for group in groups:
    one = group[0] if isinstance(group, list | tuple) and len(group) == 1 else None
    if not isinstance(one, Trajectory):
      got = type(one).__name__ if one is not None else _count(group)
      return f"gives {got} for a demonstration; it must be a list of one Trajectory"
  if all(one.fault for [one] in groups):
    return f"gives demonstrations that were all lost, the first to this: {groups[0][0].fault}"
  return None


def _wrong_elements(asked, where: str) -> str | None:
  for question in asked:
    if not isinstance(question, Question):
      return f"gives {type(question).__name__} in {where}; each must be a Question"
    if isinstance(question.golden_answers, str):
      return (
        f"gives golden_answers={question.golden_answers!r} to the question {question.id!r}; they "
        "must be a tuple of texts"
      )
  return None


def _count(given: Any) -> str:
  return str(len(given)) if hasattr(given, "__len__") else type(given).__name__


def _said(error: Exception) -> str:
  return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
