"""Runs several SGLang servers as one: routes generations, survives losses, holds weights together.

A server is used only while it is proven to hold the weights of the last update: it took them, it
says so (`weight_version`), and its log-probs of a fixed prompt are the trainer's. Every answer is
checked again. A lost server is watched; when it answers again it gets the weights and has to prove
itself before it is used.

Everything here runs on one event loop.
"""

import asyncio
import collections
from collections.abc import Callable, Coroutine, Sequence
import dataclasses
import itertools
import time
from typing import Any

from stratified.sampling.interface import Request
from stratified.sampling.sglang import wire
from stratified.sampling.sglang.admission import Key, Places
from stratified.sampling.sglang.errors import Busy, Lost, Refused, SamplerError, Stale
from stratified.sampling.sglang.members import (
  FleetConfig,
  give,
  give_together,
  Member,
  prove,
  Publication,
  quietly,
)
from stratified.sampling.sglang.server import Server

FAILURES = 3  # failed generations in a row after which a server that still answers counts as lost


@dataclasses.dataclass(eq=False)
class _Running:
  """A generation between submission and its end."""

  rid: str = ""
  member: Member | None = None
  aborted: bool = False
  place: asyncio.Future | None = None


class Fleet:
  """See the module's docstring. `stats`: retries, lost (servers), returned, faults, probe_gap."""

  def __init__(self, config: FleetConfig, *, vocab_size: int, eos_id: int, run: str):
    self.config, self.run = config, run
    self._vocab_size, self._eos_id = vocab_size, eos_id
    self._members = [Member(Server(url)) for url in config.urls]
    self._rids = itertools.count()
    self._places = Places(self._members, config.in_flight)
    self._running: dict[Key, _Running] = {}
    self._publication: Publication | None = None
    self._numbers: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._outage_since: float | None = None
    self._fatal: SamplerError | None = None
    self._released = False
    self._watch: asyncio.Task | None = None
    self.context = 0
    self.stats = collections.Counter()

  async def start(self) -> None:
    """Waits for every server; raises SamplerError for one that does not answer within start_s."""
    deadline = time.monotonic() + self.config.start_s
    await asyncio.gather(*(self._greet(member, deadline) for member in self._members))
    self._watch = self._background(self._watch_over())

  async def _greet(self, member: Member, deadline: float) -> None:
    while True:
      try:
        limits = await member.server.limits()
        break
      except (Lost, Busy, Refused) as error:
        if time.monotonic() > deadline:
          raise SamplerError(
            f"no SGLang server answers at {member.server.url} after {self.config.start_s:g} s "
            f"({error}); start it "
            "(third_party/sglang/README.md says how) or correct --config.sampler.urls"
          ) from error
        await asyncio.sleep(min(1.0, self.config.start_s / 4))
    member.ranks = limits["tensor_parallel"]
    self.context = min(self.context or limits["context"], limits["context"])

  async def close(self) -> None:
    for task in [self._watch, *(member.recovery for member in self._members)]:
      if task:
        task.cancel()
    for member in self._members:
      member.server.close()

  @property
  def usable(self) -> list[str]:
    return [member.server.url for member in self._members if member.usable]

  ###  Generations  ###

  async def generate(self, request: Request, sampling: wire.Sampling) -> wire.Generation | str:
    """Generates; returns a sentence where all attempts failed. Raises SamplerError."""
    running = self._running[request.key] = _Running()
    try:
      errors = []
      for attempt in range(self.config.retries + 1):
        found = None if running.aborted else await self._attempt(request, sampling, running, errors)
        if found is not None:
          return found
        if running.aborted:
          return wire.Generation((), (), (), "abort", "before it began")
        self.stats["retries"] += attempt < self.config.retries
        await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
      self.stats["faults"] += 1
      return f"the generation failed {len(errors)} times, the last: {errors[-1]}"
    finally:
      del self._running[request.key]

  async def _attempt(
    self, request, sampling, running: _Running, errors: list
  ) -> wire.Generation | None:
    if self._fatal:
      raise self._fatal
    running.place = self._places.ask(request.key)
    member = await running.place
    if running.aborted:
      if member:
        self._places.give_back(member)
      return None
    running.rid, running.member = f"{self.run}-{next(self._rids)}", member
    oldest = self._publication.number
    try:
      answer = await self._ask(
        member, wire.generate_body(request, sampling, self._eos_id, running.rid)
      )
      found = wire.read_generation(answer, request, self._vocab_size, self._numbers.get)
      if found.versions and min(found.versions) < oldest:
        raise Stale(f"it sampled from the weights of update {min(found.versions)}, not {oldest}")
      if found.finish == "abort" and not running.aborted:
        raise Lost(f"it broke the generation off: {found.message or 'no reason given'}")
      member.failures = 0
      return found
    except Refused as error:
      self._stop(
        SamplerError(
          f"{error}; the server refuses what the sampler's contract allows, so the run stops"
        )
      )
      raise self._fatal from error
    except (Lost, Stale, Busy) as error:
      errors.append(f"{member.server.url}: {error}")
      await self._blame(member, error, running.rid)
      return None
    finally:
      running.member = None
      self._places.give_back(member)

  async def _ask(self, member: Member, body: dict[str, Any]) -> Any:
    """Asks a server: its answer, or Lost as soon as the server is known to be."""
    task = asyncio.ensure_future(member.server.generate(body, self.config.timeout_s))
    try:
      await asyncio.wait({task, member.lost}, return_when=asyncio.FIRST_COMPLETED)
      if task.done():
        return task.result()
      raise Lost(str(member.lost.result()))
    finally:
      if not task.done():
        task.cancel()

  async def _blame(self, member: Member, error: Exception, rid: str) -> None:
    """Decides whether a failed generation means that its server is lost."""
    if not member.usable or isinstance(error, Busy):
      return
    member.failures += 1
    if isinstance(error, Stale) or member.failures >= FAILURES:
      self._lose(member, error)
      return
    try:
      await member.server.abort(rid)  # it would go on with what nobody waits for
      await self._check_version(member)
    except (Lost, Busy, Refused, Stale) as worse:
      self._lose(member, worse)

  async def abort(self, keys: Sequence[Key] | None = None) -> None:
    """Ends the named generations, or all; they return with what they have."""
    chosen = [
      self._running[key]
      for key in (list(self._running) if keys is None else keys)
      if key in self._running
    ]
    for running in chosen:
      running.aborted = True
      if running.place and not running.place.done():
        running.place.set_result(None)
    calls = [running.member.server.abort(running.rid) for running in chosen if running.member]
    await asyncio.gather(*calls, return_exceptions=True)

  ###  Loss and return  ###

  def _lose(self, member: Member, error: Exception) -> None:
    if not member.usable:
      return
    member.usable, member.reason = False, error
    self.stats["lost"] += 1
    member.lost.set_result(f"the server was lost: {error}")
    self._watch_for(member)

  def _watch_for(self, member: Member) -> None:
    """Marks an outage and starts waiting for the server's return."""
    if self._outage_since is None and not self.usable:
      self._outage_since = time.monotonic()
    if member.recovery is None or member.recovery.done():
      member.recovery = self._background(self._recover(member))

  async def _recover(self, member: Member) -> None:
    while not member.usable and not self._fatal:
      await asyncio.sleep(self.config.health_every_s)
      if self._released:
        continue  # the trainer has its memory now
      try:
        found = await member.server.weight_version(self.config.health_s)
        await member.server.abort()  # what it still does, nobody waits for
        if found != self._publication.version:
          await give(member, self._publication, self.config)
        await self._prove(member)
        self._admit(member)
        self.stats["returned"] += 1
      except (Lost, Busy, Refused, Stale) as error:
        member.reason = error
      except SamplerError as error:
        self._stop(error)

  def _admit(self, member: Member) -> None:
    member.usable, member.failures, member.reason = True, 0, None
    member.lost = asyncio.get_running_loop().create_future()
    self._outage_since = None
    self._places.dispatch()

  def _stop(self, error: SamplerError) -> None:
    """Ends every generation with one error, now and from now on."""
    self._fatal = self._fatal or error
    self._places.fail(self._fatal)

  def _background(self, work: Coroutine) -> asyncio.Task:
    """Starts a task whose unforeseen end stops the run: nobody else would ever hear of it."""

    def ended(task):
      if not task.cancelled() and task.exception():
        self._stop(SamplerError(f"the watch over the SGLang servers broke: {task.exception()!r}"))

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task

  async def _watch_over(self) -> None:
    """Finds servers that hang or hold other weights, and outages that last too long."""
    while not self._fatal:
      await asyncio.sleep(self.config.health_every_s)
      if not self._places.closed:
        await asyncio.gather(
          *(self._look_at(member) for member in self._members if member.usable and member.in_flight)
        )
      since = self._outage_since
      if (
        since is not None
        and self._places.waiting
        and time.monotonic() - since > self.config.outage_s
      ):
        self._stop(self._outage())

  async def _look_at(self, member: Member) -> None:
    try:
      await self._check_version(member)
    except (Lost, Stale, Refused) as error:
      if not self._places.closed:
        self._lose(member, error)
    except Busy:
      pass

  async def _check_version(self, member: Member) -> None:
    expected = self._publication.version
    found = await member.server.weight_version(self.config.health_s)
    if found != expected and expected == self._publication.version:
      raise Stale(
        f"it holds weights of version {found!r}, not {expected!r}: it was restarted or missed an "
        "update"
      )

  def _outage(self) -> SamplerError:
    reasons = "; ".join(f"{member.server.url}: {member.reason}" for member in self._members)
    return SamplerError(
      f"no SGLang server was usable for {self.config.outage_s:g} s ({reasons}); start one again, "
      "and "
      "the same command goes on from the last checkpoint"
    )

  ###  Weights  ###

  async def update(self, publication: Publication) -> None:
    """Gives every usable server the weights, and has it prove them; the others when they return.

    Raises SamplerError where no server took them, or where one's log-probs are not the trainer's.
    """
    if self._fatal:
      raise self._fatal
    if self._released:
      self._released = False
      await self._each_usable(Server.take_memory)
    members = [member for member in self._members if member.usable or self._publication is None]
    away = [member for member in self._members if member not in members]
    self._adopt(publication, away)
    try:
      if publication.together and publication.leads:
        errors = await give_together(members, publication, self.config)
      else:
        errors = await asyncio.gather(
          *(quietly(give(member, publication, self.config)) for member in members)
        )
      proven = await asyncio.gather(
        *(quietly(self._prove(member)) for member, error in zip(members, errors) if not error)
      )
    except SamplerError as error:
      self._stop(error)
      raise
    finally:
      self._places.closed = False
    proven = iter(proven)
    errors = [error or next(proven) for error in errors]
    for member, error in zip(members, errors):
      self._settle(member, error)
    for member in away:
      self._watch_for(member)
    self._places.dispatch()
    await self._until_usable([error for error in errors if error])

  def _adopt(self, publication: Publication, away: list[Member]) -> None:
    """Makes these the weights; while they are given no generation starts and no server recovers."""
    self._places.closed, self._publication = True, publication
    self._numbers[publication.version] = publication.number
    while len(self._numbers) > 8:
      self._numbers.popitem(last=False)
    self._places.forget_homes()
    for member in away:
      if member.recovery:
        member.recovery.cancel()
        member.recovery = None

  def _settle(self, member: Member, error: Exception | None) -> None:
    if error is None and not member.usable:
      self._admit(member)
    elif error is not None and member.usable:
      self._lose(member, error)
    elif error is not None:
      member.reason = error
      self._watch_for(member)

  async def _until_usable(self, errors: list) -> None:
    if self.usable:
      return
    if errors and all(isinstance(error, Refused) for error in errors):
      raise SamplerError(f"no SGLang server took the weights: {errors[0]}")
    self._outage_since = self._outage_since or time.monotonic()
    while (
      not self.usable
      and time.monotonic() - self._outage_since < self.config.outage_s
      and not self._fatal
    ):
      await asyncio.sleep(0.1)
    if self._fatal or not self.usable:
      raise self._fatal or self._outage()

  async def _prove(self, member: Member) -> None:
    self.stats["probe_gap"] = await prove(
      member, self._publication, self.config, f"{self.run}-probe-{next(self._rids)}"
    )

  async def release(self) -> None:
    """Has usable servers give back the memory of weights and cache, until the next update."""
    self._released = True
    await self._each_usable(Server.release)

  async def _each_usable(self, do: Callable) -> None:
    members = [member for member in self._members if member.usable]
    calls = (quietly(do(member.server, self.config.update_s)) for member in members)
    for member, error in zip(members, await asyncio.gather(*calls)):
      if error:
        self._lose(member, error)
