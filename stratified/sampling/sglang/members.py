"""Gives one server of several its weights: pauses, updates, flushes, goes on, has them proven."""

import asyncio
from collections.abc import Awaitable, Sequence
import dataclasses
from typing import Protocol

from stratified.config import setting, Settings, without_password
from stratified.sampling.sglang import wire
from stratified.sampling.sglang.errors import Busy, Lost, Refused, SamplerError, Stale
from stratified.sampling.sglang.server import Server


@dataclasses.dataclass(frozen=True)
class FleetConfig(Settings):
  """Where the servers are, and how long anything may take.

  urls: of each server, such as http://127.0.0.1:30000.
  health_every_s: how often servers at work are asked for their version.
  probe_tolerance: largest difference of a log-prob of the probe.

  A generation ends, or is given up, within (retries + 1) timeout_s + outage_s.
  """

  SECTION = "sampler"
  urls: tuple[str, ...]
  in_flight: int = setting(
    64, "generations a server is given at once", low=1, high=65536, affects=[]
  )
  timeout_s: float = setting(
    600.0, "seconds of one attempt of a generation", above=0, high=7 * 86400, affects=[]
  )
  retries: int = setting(
    4, "further attempts, on another server where there is one", low=0, high=1000, affects=[]
  )
  start_s: float = setting(
    120.0,
    "seconds until every server must have answered first",
    above=0,
    high=7 * 86400,
    affects=[],
  )
  outage_s: float = setting(
    120.0, "seconds for which no server may be usable", above=0, high=7 * 86400, affects=[]
  )
  health_s: float = setting(
    15.0, "seconds in which a server must tell its version", above=0, high=7 * 86400, affects=[]
  )
  update_s: float = setting(
    600.0, "seconds of one update of the weights", above=0, high=7 * 86400, affects=[]
  )
  health_every_s: float = 2.0
  probe_tolerance: float = 1e-3

  def __post_init__(self):
    super().__post_init__()
    if not self.urls or any(not url.startswith(("http://", "https://")) for url in self.urls):
      raise ValueError(
        f"sampler.urls is {', '.join(map(without_password, self.urls)) or 'empty'}; name each "
        "SGLang server as http://HOST:PORT, with commas between them"
      )
    if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
      raise ValueError(
        f"sampler.urls names a server twice: {', '.join(map(without_password, self.urls))}; name "
        "each once"
      )
    for name in ("health_every_s", "probe_tolerance"):
      if not getattr(self, name) > 0:
        raise ValueError(f"sampler.{name}={getattr(self, name)} must be above 0")


class Publication(Protocol):
  """Weights on offer to the servers.

  version: their name on the servers. number: counts updates.
  probe_ids, probe_log_probs: a prompt, and the trainer's log-prob of each token but the first.
  together: all servers have to take part at once.
  leads: whether this process gives the weights; another process of the same run waits until the
    servers have them.
  """

  version: str
  number: int
  probe_ids: Sequence[int]
  probe_log_probs: Sequence[float]
  together: bool
  leads: bool

  async def apply(self, server: Server, ranks: int) -> None:
    """Gives a paused server the weights and its version; raises Lost or Refused."""

  async def apply_together(
    self, servers: Sequence[tuple[Server, int]]
  ) -> list[Lost | Refused | None]:
    """Does the same for several; returns what went wrong with each."""


@dataclasses.dataclass(eq=False)
class Member:
  """A server and what is known of it; `lost` is done, with the reason, until it returns."""

  server: Server
  ranks: int = 1
  usable: bool = False
  in_flight: int = 0
  failures: int = 0
  reason: Exception | None = None
  lost: asyncio.Future | None = None
  recovery: asyncio.Task | None = None


async def quietly(work: Awaitable) -> Exception | None:
  """Returns what went wrong with the server, None if nothing; raises a SamplerError."""
  try:
    await work
  except (Lost, Busy, Refused, Stale) as error:
    return error
  return None


async def give(member: Member, publication: Publication, config: FleetConfig) -> None:
  """Pauses, updates, flushes (part of each updating route), goes on; so do running generations."""
  server = member.server
  try:
    async with asyncio.timeout(config.update_s):
      if not publication.leads:
        while await server.weight_version() != publication.version:
          await asyncio.sleep(0.2)
        return
      await server.pause("retract")
      await publication.apply(server, member.ranks)
      await server.flush()
      await server.resume()
  except TimeoutError as error:
    raise Lost(f"{server.url} did not take the weights within {config.update_s:g} s") from error


async def give_together(
  members: Sequence[Member], publication: Publication, config: FleetConfig
) -> list[Exception | None]:
  """Does the same for weights that all servers take at once; returns what went wrong with each."""
  paused = await asyncio.gather(*(quietly(member.server.pause("retract")) for member in members))
  ready = [member for member, error in zip(members, paused) if error is None]
  try:
    async with asyncio.timeout(config.update_s):
      found = (
        await publication.apply_together([(member.server, member.ranks) for member in ready])
        if ready
        else []
      )
  except TimeoutError:
    found = [Lost(f"the broadcast of the weights did not end within {config.update_s:g} s")] * len(
      ready
    )
  given = dict(zip(map(id, ready), found, strict=True))
  return [
    error
    or given[id(member)]
    or await quietly(member.server.flush())
    or await quietly(member.server.resume())
    for member, error in zip(members, paused)
  ]


async def prove(member: Member, publication: Publication, config: FleetConfig, rid: str) -> float:
  """Checks the version, then the probe; returns the probe's largest difference.

  Raises Stale where the version is another, SamplerError where it is right and the log-probs are
  not.
  """
  server = member.server
  await server.resume()  # a server left paused would not answer
  found = await server.weight_version()
  if found != publication.version:
    raise Stale(
      f"{server.url} says it holds version {found!r} after an update to {publication.version!r}"
    )
  answer = await server.generate(wire.probe_body(publication.probe_ids, rid), config.timeout_s)
  theirs = wire.read_probe(answer, publication.probe_ids)
  gap, at = max(
    (abs(a - b) if a == a else float("inf"), i)
    for i, (a, b) in enumerate(zip(theirs, publication.probe_log_probs, strict=True))
  )
  if gap > config.probe_tolerance:
    raise SamplerError(
      f"{server.url} says it holds the trainer's weights and does not: it gives token {at + 1} of "
      "the probe the "
      f"log-prob {theirs[at]:.6f}, the trainer {publication.probe_log_probs[at]:.6f}, which differ "
      "by more than "
      f"sampler.probe_tolerance={config.probe_tolerance:g}; compare its --dtype and model with the "
      "trainer's"
    )
  return gap
