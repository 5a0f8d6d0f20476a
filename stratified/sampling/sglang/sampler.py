"""Samples on SGLang servers: many generations in flight, weights kept in step, faults survived.

    with Servers(fleet_config, publisher, tokenizer) as servers:
      sampler = SglangSampler(servers, Sampling(temperature=1.0))
      judge = SglangSampler(servers, Sampling(temperature=0.0))     # greedy, on the same servers
      sampler.load(params, step); sampler.submit(request); sampler.poll()

What becomes of a fault:

    a server is killed, hangs, answers 5xx or garbage
        its generations run again on another server; up to `retries`
    it is restarted with its first, old weights
        found by its version; it gets the weights and proves itself
    a generation fails on every attempt
        the rollout has a fault: masked and counted
    no server is usable for outage_s, or none at start
        SamplerError, one sentence; the run ends, checkpoints stay
    a server's log-probs are not the trainer's
        SamplerError at load(): such weights are never sampled from
"""

import asyncio
from collections.abc import Coroutine, Sequence
import contextlib
import queue
import threading
from typing import Any
import weakref

from stratified.sampling.interface import Completion, Request
from stratified.sampling.sglang.errors import SamplerError
from stratified.sampling.sglang.fleet import Fleet
from stratified.sampling.sglang.members import FleetConfig
from stratified.sampling.sglang.publish import Publisher
from stratified.sampling.sglang.wire import check_request, Generation, Sampling

__all__ = ["SamplerError", "Sampling", "Servers", "SglangSampler"]


class Servers:
  """The servers' weights, and the thread whose event loop speaks to them.

  max_tokens: of a rollout; servers with a smaller context are refused.
  interrupt: whether load() may be called while generations run. They then go on with the new
    weights, and their tokens' versions say which came from which.

  Raises SamplerError where a server does not answer.
  """

  def __init__(
    self,
    config: FleetConfig,
    publisher: Publisher,
    *,
    vocab_size: int,
    eos_id: int,
    max_tokens: int,
    interrupt: bool = False,
  ):
    self.config, self.publisher, self.interrupt = config, publisher, interrupt
    self.vocab_size, self.eos_id = vocab_size, eos_id
    self.running = 0
    self._steps: dict[int, int] = {}
    self._held: dict[str, weakref.ref] = {}
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
    self._thread.start()
    try:
      self.fleet = self.wait(self._make(), config.start_s + 60)
      self.wait(self.fleet.start(), config.start_s + 60)
      if self.fleet.context < max_tokens:
        raise SamplerError(
          f"a server's context holds {self.fleet.context} tokens, rollout.max_tokens is "
          f"{max_tokens}; "
          "start the servers with a larger --context-length and --max-total-tokens"
        )
    except BaseException:
      self.close()
      raise

  async def _make(self) -> Fleet:
    return Fleet(
      self.config, vocab_size=self.vocab_size, eos_id=self.eos_id, run=self.publisher.run
    )

  @property
  def stats(self) -> dict[str, float]:
    """Counts since the start: retries, lost, returned, faults; and the probe's largest gap."""
    return dict(self.fleet.stats)

  @property
  def usable(self) -> list[str]:
    """URLs of the servers that hold the last weights."""
    return self.fleet.usable

  def load(self, params: Any, step: int) -> None:
    """Gives `params` to every server; returns once each usable one has proven to hold them.

    The same parameters again cost nothing. With several processes every one must call.
    """
    if self.running and not self.interrupt:
      raise RuntimeError("load() while generations are running: poll them to their end first")
    if (
      self.loaded
      and params.keys() == self._held.keys()
      and all(self._held[n]() is params[n] for n in params)
    ):
      self._steps[max(self._steps)] = step
      return
    self._held = {}
    weights = self.publisher.publish(params)
    self._steps[weights.number] = step
    self.wait(self.fleet.update(weights), 2 * self.config.update_s + self.config.outage_s + 120)
    # Every array, since some may be shared by two states; weakly, so that none outlives the
    # trainer's need of it.
    self._held = {name: weakref.ref(value) for name, value in params.items()}

  def release(self) -> None:
    """Gives the servers' memory (weights, cache) to whoever shares their GPUs, until load().

    Needs servers started with --enable-memory-saver. Raises RuntimeError while generations run.
    """
    if self.running:
      raise RuntimeError("release() while generations are running: poll them to their end first")
    self._held = {}
    self.wait(self.fleet.release(), self.config.update_s + 60)

  @property
  def loaded(self) -> bool:
    """Whether the servers hold weights, the last ones that were given."""
    return bool(self._held)

  @property
  def alive(self) -> bool:
    return self._thread.is_alive()

  def step_of(self, number: int) -> int:
    return self._steps[number]

  def spawn(self, work: Coroutine) -> None:
    asyncio.run_coroutine_threadsafe(work, self._loop)

  def wait(self, work: Coroutine, timeout: float) -> Any:
    """Runs `work` on the loop, with a bound on top of its own so that nothing can hang for ever."""
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      return future.result(timeout)
    except TimeoutError as error:
      future.cancel()
      raise SamplerError(
        f"the SGLang servers did not finish within {timeout:g} s; look at their logs"
      ) from error

  def close(self) -> None:
    """Ends the thread and removes what was written for the servers; they themselves run on."""
    if not self._thread.is_alive():
      return
    last = [self.fleet.abort, self.fleet.close] if hasattr(self, "fleet") else []
    last += [self.publisher.group.close] if self.publisher.group else []
    for end in (*last, _cancel_all):
      with contextlib.suppress(SamplerError):  # a server that hangs gives no answer to its abort
        self.wait(end(), 5)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(10)
    self.publisher.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


async def _cancel_all() -> None:
  """Ends every other task of the loop, so that none is left when it closes."""
  tasks = asyncio.all_tasks() - {asyncio.current_task()}
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)


class SglangSampler:
  """Implements stratified.sampling.interface.Sampler on `servers`."""

  def __init__(self, servers: Servers, sampling: Sampling):
    self._servers, self._sampling = servers, sampling
    self._results: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
    self._pending = 0

  def load(self, params: Any, step: int) -> None:
    self._servers.load(params, step)

  def release(self) -> None:
    """See `Servers.release`."""
    self._servers.release()

  def submit(self, request: Request) -> None:
    """Hands over a request; ValueError for one that no server may get: foreign ids, or too many."""
    if not self._servers.loaded:
      raise RuntimeError("submit() before load(): there are no parameters to sample from")
    check_request(request, self._servers.vocab_size, self._servers.fleet.context)
    self._pending += 1
    self._servers.running += 1
    self._servers.spawn(self._run(request))

  async def _run(self, request: Request) -> None:
    try:
      self._results.put(
        self._completion(request, await self._servers.fleet.generate(request, self._sampling))
      )
    except (
      BaseException
    ) as error:  # whatever it is belongs to the thread that polls, which would wait for ever
      self._results.put(error)
      if not isinstance(error, Exception):
        raise

  def _completion(self, request: Request, found: Generation | str) -> Completion:
    if isinstance(found, str):
      return Completion(request.key, (), (), "fault", fault=found)
    versions = tuple(self._servers.step_of(number) for number in found.versions)
    if found.finish == "abort":
      return Completion(
        request.key,
        found.token_ids,
        found.log_probs,
        "fault",
        weight_versions=versions,
        fault=f"the generation was aborted ({found.message or 'as asked'})",
      )
    return Completion(
      request.key, found.token_ids, found.log_probs, found.finish, weight_versions=versions
    )

  def poll(self) -> list[Completion]:
    """Blocks until a generation has ended; raises SamplerError where the run has to stop."""
    if not self._pending:
      return []
    results = [self._first()]
    while not self._results.empty():
      results.append(self._results.get())
    self._pending -= len(results)
    self._servers.running -= len(results)
    for result in results:
      if isinstance(result, BaseException):
        raise result
    return results

  def _first(self) -> Completion | BaseException:
    while True:
      try:
        return self._results.get(timeout=5)
      except queue.Empty:
        if not self._servers.alive:
          raise SamplerError(
            "the thread that speaks to the SGLang servers has ended; start the run again"
          ) from None

  def abort(self, keys: Sequence[tuple[int, int, int]] | None = None) -> None:
    """Ends the named generations, or all; poll() returns each as a fault with its tokens so far."""
    self._servers.wait(self._servers.fleet.abort(keys), 60)

  def generate(self, requests: Sequence[Request]) -> list[Completion]:
    """Submits all, polls to the end, returns in the order of the requests."""
    for request in requests:
      self.submit(request)
    done = {}
    while len(done) < len(requests):
      done |= {completion.key: completion for completion in self.poll()}
    return [done[request.key] for request in requests]
