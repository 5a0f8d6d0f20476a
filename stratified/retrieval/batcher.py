"""Joins the searches of concurrent requests: those that arrive while one runs then run as one."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import logging

from stratified.retrieval.corpus import Passage, RetrieverError

_LOG = logging.getLogger(__name__)


class Busy(Exception):
  """The queue is full, or a search waited in it for too long."""


@dataclasses.dataclass(eq=False)
class _Job:
  queries: tuple[str, ...]
  topk: int
  done: asyncio.Future
  queued: bool = True


class Batcher:
  """Runs `search(queries, topk)`, a blocking function, for many waiting coroutines at once.

  No search waits for company: an idle batcher starts at once; a busy one then takes all that
  arrived meanwhile with the same topk, up to `max_batch` queries, each distinct query once. Blank
  queries find nothing and are not searched for.

  Args:
    search: list of queries, topk -> one list of passages (or a RetrieverError) a query; runs in a
      thread.
    max_batch: queries of one call of `search`.
    max_queued: queries that may wait; more raise Busy at once.
    max_wait_s: how long a search may wait and run before Busy is raised.
    threads: calls of `search` at the same time.
  """

  def __init__(
    self,
    search: Callable,
    *,
    max_batch: int = 64,
    max_queued: int = 16_384,
    max_wait_s: float = 60.0,
    threads: int = 1,
  ):
    for name, value in dict(max_batch=max_batch, max_queued=max_queued, threads=threads).items():
      if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    self._search, self._max_batch, self._max_queued, self._max_wait_s = (
      search,
      max_batch,
      max_queued,
      max_wait_s,
    )
    self._waiting: deque[_Job] = deque()
    self._free = threads
    self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="search")
    self._running: set[asyncio.Task] = set()
    self.queued = self.searched = self.batches = 0

  async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """Searches: one list of passages a query.

    Raises:
      Busy: there is no room in the queue, or the time is up.
      RetrieverError: the search failed for these queries.
    """
    asked = list(dict.fromkeys(query for query in queries if query.strip()))
    if self.queued + len(asked) > self._max_queued:
      raise Busy(
        f"{self.queued} queries are waiting, which leaves no room for {len(asked)} more "
        f"of {self._max_queued}; try again later"
      )
    slices = [
      tuple(asked[at : at + self._max_batch]) for at in range(0, len(asked), self._max_batch)
    ]
    jobs = [_Job(part, topk, asyncio.get_running_loop().create_future()) for part in slices]
    self._waiting.extend(jobs)
    self.queued += len(asked)
    self._start()
    try:
      async with asyncio.timeout(self._max_wait_s):
        results = await asyncio.gather(*(job.done for job in jobs))
    except TimeoutError:
      raise Busy(f"the search did not end within {self._max_wait_s:g} s; try again later") from None
    finally:  # also where nobody waits any more: those that have not begun never do
      for job in jobs:
        job.done.cancel()
        self._unqueue(job)
    found = dict(zip(asked, (passages for result in results for passages in result), strict=True))
    return [found.get(query, []) for query in queries]

  async def close(self) -> None:
    """Waits for the searches that run."""
    while self._running:
      await asyncio.gather(*self._running)
    self._pool.shutdown()

  def _start(self) -> None:
    while self._free and (batch := self._next_batch()):
      self._free -= 1
      task = asyncio.create_task(self._run(batch))
      self._running.add(task)
      task.add_done_callback(self._running.discard)

  def _next_batch(self) -> list[_Job]:
    """Takes the first jobs of one topk that fit in a batch; drops those nobody waits for now."""
    batch, size = [], 0
    while self._waiting:
      job = self._waiting[0]
      if not job.done.done():
        if batch and (job.topk != batch[0].topk or size + len(job.queries) > self._max_batch):
          break
        batch.append(job)
        size += len(job.queries)
      self._unqueue(self._waiting.popleft())
    return batch

  def _unqueue(self, job: _Job) -> None:
    if job.queued:
      self.queued, job.queued = self.queued - len(job.queries), False

  async def _run(self, batch: list[_Job]) -> None:
    try:
      queries = list(dict.fromkeys(query for job in batch for query in job.queries))
      outcome = await self._outcome(queries, batch[0].topk)
      for job in batch:
        # One request's bad query must not lose the searches of the others, so each is tried on its
        # own.
        alone = len(batch) > 1 and isinstance(outcome, RetrieverError)
        _settle(job, await self._outcome(job.queries, job.topk) if alone else outcome)
    finally:
      self._free += 1
      self._start()

  async def _outcome(
    self, queries: Sequence[str], topk: int
  ) -> dict[str, list[Passage]] | RetrieverError:
    try:
      results = await asyncio.get_running_loop().run_in_executor(
        self._pool, self._search, list(queries), topk
      )
      if len(results) != len(queries):
        raise RetrieverError(
          f"the retriever returned {len(results)} results for {len(queries)} queries"
        )
    except (
      Exception
    ) as error:  # whatever a retriever raises, the server goes on and says so in its reply
      if not isinstance(error, RetrieverError):
        _LOG.exception("a search of %d queries failed", len(queries))
      return (
        error
        if isinstance(error, RetrieverError)
        else RetrieverError(f"{type(error).__name__}: {error}")
      )
    self.searched += len(queries)
    self.batches += 1
    return dict(zip(queries, results))


def _settle(job: _Job, outcome: dict | RetrieverError) -> None:
  if job.done.done():
    return
  if isinstance(outcome, dict):
    lost = [outcome[query] for query in job.queries if isinstance(outcome[query], RetrieverError)]
    outcome = lost[0] if lost else [outcome[query] for query in job.queries]
  if isinstance(outcome, RetrieverError):
    job.done.set_exception(outcome)
  else:
    job.done.set_result(outcome)
