"""Makes the rollouts of one training step after another, by all processes together."""

from collections.abc import Callable, Sequence
import concurrent.futures
import time

from stratified.agents import loop
from stratified.learner import processes
from stratified.tasks.base import Task
from stratified.types import Question, Trajectory


def collect(
  task: Task, questions: Sequence[Question], *, indices: Sequence[int] | None = None, **how
) -> list[list[Trajectory]]:
  """Makes [Q][K] rollouts: every process makes its share and gets those of the others.

  indices: the questions' numbers in the random keys, 0, 1, ... unless given. how: see
  `loop.collect`.
  """
  mine = processes.mine(len(questions))
  share = loop.collect(
    [questions[q] for q in mine],
    indices=[q if indices is None else indices[q] for q in mine],
    tokenizer=task.tokenizer,
    protocol=task.protocol,
    **how,
  )
  return processes.exchange(share, len(questions))


class Rollouts:
  """The rollouts of one training step after another.

  With rollout.max_staleness 0, a step's rollouts come from its own parameters. With 1, they come
  from those before, while that update runs; only the first step of a process, also a resumed one,
  waits for its own.

  With loss.resample_groups N a question whose rollouts have no advantage gives way to the one in
  its place in another batch of questions, N times at most. A step then owns N + 1 batches, so that
  its questions stay a function of the step, and do not depend on how many processes there are.
  """

  def __init__(self, config, task: Task, sampler, end: int, has_signal: Callable | None = None):
    """end: the step before which rollouts are wanted.

    has_signal: (groups [n][K], step) -> whether each has an advantage that is not 0.
    """
    self._end, self._has_signal = end, has_signal
    self._resamples = config.loss.resample_groups if has_signal else 0
    self._config, self._task, self._sampler = config, task, sampler
    self._pool = (
      concurrent.futures.ThreadPoolExecutor(1, "rollouts") if config.rollout.max_staleness else None
    )
    self._next = None

  def take(self, step: int, policy: Callable) -> tuple[list, dict[str, float], dict[str, int]]:
    """Takes ([Q][K] trajectories of the step, their seconds, counts).

    policy() gives the parameters that the step updates, which nothing here holds on to.
    The counts say what was sampled in vain; {} where nothing is sampled anew.
    """
    groups, times, counts = self._next.result() if self._next else self._begin(step, step, policy)()
    self._next = None
    if self._pool and step + 1 < self._end:
      self._next = self._pool.submit(self._begin(step + 1, step, policy))
    elif self._config.sampler.release:
      self._sampler.release()
    counts = processes.total(counts) if counts else {}
    return processes.exchange(groups, self._config.data.questions_per_step), times, counts

  def _begin(self, step: int, version: int, policy: Callable):
    """Loads the parameters; returns what samples the step's rollouts, in any thread."""
    start = time.perf_counter()
    self._sampler.load(policy(), version)
    load_s = time.perf_counter() - start

    def run():
      start, searched = time.perf_counter(), self._task.seconds
      places = processes.mine(self._config.data.questions_per_step)
      groups, counts = self._sample(step, version, places), {}
      if self._resamples:
        counts = self._resample(step, version, places, groups)
      search_s = self._task.seconds - searched
      return (
        groups,
        {
          "rollout_s": load_s + time.perf_counter() - start - search_s,
          "load_s": load_s,
          "search_s": search_s,
        },
        counts,
      )

    return run

  def _sample(self, step: int, version: int, places: Sequence[int], attempt: int = 0) -> list:
    """Makes the rollouts of some of the questions of one of the step's batches."""
    questions = self._task.questions_at(step * (self._resamples + 1) + attempt)
    return loop.collect(
      [questions[q] for q in places],
      indices=[attempt * len(questions) + q for q in places],
      sampler=self._sampler,
      tools=self._task.tools,
      tokenizer=self._task.tokenizer,
      protocol=self._task.protocol,
      limits=self._task.limits,
      step=step,
      weight_version=version,
      samples_per_question=self._config.rollout.samples_per_question,
    )

  def _resample(self, step: int, version: int, places, groups: list) -> dict[str, int]:
    """Replaces groups without signal, in place; counts what was dropped, and what stayed."""
    count = {"resampled": 0, "resampled_tokens": 0, "without_signal": 0}
    empty = self._without_signal(groups, range(len(groups)), step)
    for attempt in range(1, self._resamples + 1):
      if not empty:
        break
      found = self._sample(step, version, [places[i] for i in empty], attempt)
      for i, group in zip(empty, found):
        count["resampled"] += 1
        count["resampled_tokens"] += sum(t.num_policy_tokens for t in groups[i])
        groups[i] = group
      empty = self._without_signal(groups, empty, step)
    return count | {"without_signal": len(empty)}

  def _without_signal(self, groups, of: Sequence[int], step: int) -> list[int]:
    of = list(of)
    found = self._has_signal([groups[i] for i in of], step) if of else []
    return [i for i, fine in zip(of, found) if not fine]

  def settle(self) -> None:
    """Waits for rollouts under way, so that retriever and servers are free for an evaluation."""
    if self._next:
      concurrent.futures.wait([self._next])

  def __enter__(self) -> "Rollouts":
    return self

  def __exit__(self, *unused) -> None:
    if self._pool:
      self._pool.shutdown(cancel_futures=True)
