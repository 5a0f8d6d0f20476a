"""Makes the rollouts of one training step after another, by all processes together."""

from collections.abc import Sequence
import concurrent.futures
import time

from stratified.agents import loop
from stratified.learner import processes
from stratified.tasks.base import Task
from stratified.types import Question, Trajectory


def collect_share(
  task: Task, questions: Sequence[Question], *, indices: Sequence[int] | None = None, **how
) -> list[list[Trajectory]]:
  """Makes [n][K] rollouts of this process's share of the questions; other threads may call it.

  indices: the questions' numbers in the random keys, 0, 1, ... unless given. how: see
  `loop.collect`.
  """
  mine = processes.mine(len(questions))
  return loop.collect(
    [questions[q] for q in mine],
    indices=[q if indices is None else indices[q] for q in mine],
    tokenizer=task.tokenizer,
    protocol=task.protocol,
    **how,
  )


def collect(task: Task, questions: Sequence[Question], **how) -> list[list[Trajectory]]:
  """Makes those of all questions: every process makes its share and gets those of the others."""
  return processes.exchange(collect_share(task, questions, **how), len(questions))


class Rollouts:
  """The rollouts of one training step after another.

  With rollout.max_staleness 0, a step's rollouts come from its own parameters. With 1, they come
  from those before, while that update runs; only the first step of a process, also a resumed one,
  waits for its own.
  """

  def __init__(self, config, task: Task, sampler, end: int):
    """end: the step before which rollouts are wanted."""
    self._end = end
    self._config, self._task, self._sampler = config, task, sampler
    self._pool = (
      concurrent.futures.ThreadPoolExecutor(1, "rollouts") if config.rollout.max_staleness else None
    )
    self._next = None

  def take(self, step: int, params) -> tuple[list, dict[str, float]]:
    """Takes ([Q][K] trajectories of the step, their seconds); the step updates `params`."""
    groups, times = self._next.result() if self._next else self._begin(step, step, params)()
    self._next = None
    if self._pool and step + 1 < self._end:
      self._next = self._pool.submit(self._begin(step + 1, step, params))
    elif self._config.sampler.release:
      self._sampler.release()
    return processes.exchange(groups, self._config.data.questions_per_step), times

  def _begin(self, step: int, version: int, params):
    """Loads the parameters; returns what samples the step's rollouts, in any thread."""
    start = time.perf_counter()
    self._sampler.load(params, version)
    load_s = time.perf_counter() - start

    def run():
      start, searched = time.perf_counter(), self._task.seconds
      groups = collect_share(
        self._task,
        self._task.questions_at(step),
        sampler=self._sampler,
        tools=self._task.tools,
        limits=self._task.limits,
        step=step,
        weight_version=version,
        samples_per_question=self._config.rollout.samples_per_question,
      )
      search_s = self._task.seconds - searched
      return groups, {
        "rollout_s": load_s + time.perf_counter() - start - search_s,
        "load_s": load_s,
        "search_s": search_s,
      }

    return run

  def settle(self) -> None:
    """Waits for rollouts under way, so that retriever and servers are free for an evaluation."""
    if self._next:
      concurrent.futures.wait([self._next])

  def __enter__(self) -> "Rollouts":
    return self

  def __exit__(self, *unused) -> None:
    if self._pool:
      self._pool.shutdown(cancel_futures=True)
