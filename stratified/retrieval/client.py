"""A retriever behind HTTP: `search(queries, topk)` like every other, over a faulty network.

What becomes of a search:

  - A reply of 429 or 5xx, a lost connection, no reply in time, a broken or truncated body: it is
    tried again, a bounded number of times, after a random pause that doubles.
  - A reply of 400, 413 ...: the request itself is at fault and is not repeated. A query that is
    refused alone, while another is answered, finds nothing: what a policy asks must not decide
    whether its rollout is scored.
  - Still no reply: the request is split, so that one bad query is lost alone. Its place in the
    results holds a RetrieverError, and the rollout that asked is masked and counted.
  - The server is out of reach: searches wait for it to come back. After `give_up_s` without a
    usable reply, or where it comes back with another index, RetrieverDown ends the run, whose last
    checkpoint is safe.
"""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import json
import logging
import random
import threading
import time
from urllib.parse import urlsplit

import httpx

from stratified.config import setting, Settings, without_password
from stratified.retrieval import wire
from stratified.retrieval.corpus import Passage, RetrieverError

# httpx reports every request at the level INFO, which absl's handler prints.
logging.getLogger("httpx").setLevel(logging.WARNING)

_LOG = logging.getLogger(__name__)

# What the request itself is to blame for. Other 4xx say that this is no retriever, or not for us.
_REFUSED = (400, 413, 414, 415, 422, 431)
_AGAIN = (408, 425, 429)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_MOST_REPLY_BYTES = 512 * 2**20


class RetrieverDown(RuntimeError):
  """The retriever is gone for longer than the run waits, or is another than at the start."""


class _Retry(Exception):
  """This attempt failed; another may not.

  after_s: what the server asked for. away: nobody took the connection, so the search is not why.
  """

  def __init__(self, reason: str, after_s: float = 0.0, away: bool = False):
    super().__init__(reason)
    self.after_s, self.away = after_s, away


class _Refused(Exception):
  """The server won't answer this request, however often it is sent."""


class Outage:
  """Measures how long searches have failed since one worked; time between them does not count."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock, self._before_s, self._since, self.last = clock, 0.0, None, ""

  def failed(self, began: float, why: str) -> None:
    """An attempt that began at this time of the clock has failed."""
    self.last = why
    self._since = began if self._since is None else min(self._since, began)

  def worked(self) -> None:
    self._before_s, self._since = 0.0, None

  def pause(self) -> None:
    """No search is running from now on."""
    self._before_s, self._since = self.seconds, None

  @property
  def seconds(self) -> float:
    return self._before_s + (0.0 if self._since is None else self._clock() - self._since)


@dataclasses.dataclass(frozen=True)
class HttpSettings(Settings):
  """Where the server is, and how long anything may take."""

  SECTION = "retriever"
  url: str = setting(
    "http://127.0.0.1:8000",
    "name=http: the server, with or without /retrieve at its end",
    affects=[],
    secret=True,
  )
  timeout_s: float = setting(
    30.0,
    "seconds of one request, from connecting to the last byte",
    above=0,
    high=7 * 86400,
    affects=[],
  )
  retries: int = setting(
    4,
    "attempts after the first, before a search is lost and its rollout masked",
    low=0,
    high=1000,
    affects=[],
  )
  give_up_s: float = setting(
    300.0,
    "seconds without a usable reply after which the run stops",
    above=0,
    high=7 * 86400,
    affects=[],
  )
  queries_per_request: int = setting(
    64, "a search for more is split into several requests", low=1, high=65536, affects=[]
  )
  in_flight: int = setting(
    16, "requests at the same time, each on a connection of its own", low=1, high=4096, affects=[]
  )

  @property
  def address(self) -> str:
    """The URL without /retrieve; raises ValueError where it is none."""
    return base_url(self.url)


class HttpRetriever:
  """Searches through a server of Search-R1's wire format; one thread at a time may call `search`.

  url: http://host:port, with or without /retrieve at its end; a user and a password in it are sent
  and never shown. options: the other fields of HttpSettings.

  Raises ValueError for a setting out of range or a URL that is none.
  """

  def __init__(self, url: str, **options):
    settings = HttpSettings(url, **options)
    self._address = settings.address
    self.url = without_password(self._address)
    self.manifest: dict = {}
    self.requests = self.retried = self.lost = self.refused = 0
    self._timeout_s, self._give_up_s = settings.timeout_s, settings.give_up_s
    self._retries, self._in_flight = settings.retries, settings.in_flight
    self._per_request = settings.queries_per_request
    self._index: str | None = None
    self._outage, self._random = Outage(), random.Random()
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._loop.run_forever, name="http-retriever", daemon=True).start()
    # trust_env: a proxy of the environment stands between here and the internet, not a server of
    # our own.
    self._client = httpx.AsyncClient(
      trust_env=False,
      timeout=None,
      limits=httpx.Limits(
        max_connections=settings.in_flight + 1,
        max_keepalive_connections=settings.in_flight + 1,
        keepalive_expiry=30,
      ),
    )

  def connect(self, topk: int = 1) -> dict:
    """Tries one search for `topk` passages; returns the server's manifest, {} without /health.

    Raises ConnectionError, in one sentence, where nothing that answers like a retriever is there.
    """
    try:
      return self._do(self._connect(topk))
    except (_Retry, _Refused, RetrieverDown) as error:
      raise ConnectionError(
        f"no retriever answers at {self.url} ({error}); start one with "
        "python experiments/serve_retriever.py, or name another URL"
      ) from error

  def search(self, queries: Sequence[str], topk: int) -> list[list[Passage] | RetrieverError]:
    """Searches: at most `topk` passages a query, best first, or the RetrieverError that lost it.

    Raises RetrieverDown where there is no hope left.
    """
    if isinstance(queries, str):
      raise TypeError(
        f"queries is the string {queries!r}; search takes a sequence of queries, [query]."
      )
    if topk < 1:
      raise ValueError(f"topk is {topk}; it must be at least 1.")
    return self._do(self._search(list(queries), topk))

  def close(self) -> None:
    self._do(self._client.aclose())
    self._loop.call_soon_threadsafe(self._loop.stop)

  def _do(self, coroutine):
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    try:
      return future.result()
    except BaseException:  # a second Ctrl-C: the requests stop too
      future.cancel()
      raise

  async def _connect(self, topk: int) -> dict:
    status, body, headers = await self._send("GET", wire.HEALTH_PATH, self._timeout_s)
    if status == 200:
      self.manifest, self._index = _manifest(body), headers.get(wire.INDEX_HEADER)
    elif status not in (404, 405):  # Search-R1's own server has no such page
      raise _Retry(f"GET {wire.HEALTH_PATH} answers {status} {wire.error_of(body)}".strip())
    await self._attempt(["health"], topk, self._timeout_s)
    return self.manifest

  async def _search(self, queries: list[str], topk: int) -> list[list[Passage] | RetrieverError]:
    room = asyncio.Semaphore(self._in_flight)
    parts = [
      queries[at : at + self._per_request] for at in range(0, len(queries), self._per_request)
    ]
    try:
      async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(self._part(part, topk, room, self._retries)) for part in parts]
    except BaseExceptionGroup as errors:  # all other parts are cancelled by now
      raise errors.exceptions[0] from None
    finally:
      self._outage.pause()
    return [result for task in tasks for result in task.result()]

  async def _part(
    self, queries: list[str], topk: int, room: asyncio.Semaphore, retries: int
  ) -> list:
    """Results of one request's queries; of its halves where the whole is lost."""
    try:
      async with room:
        return await self._insist(queries, topk, retries)
    except (_Retry, _Refused) as error:
      if len(queries) == 1:
        if isinstance(error, _Refused) and await self._answers(topk):
          self.refused += 1
          if self.refused == 1:
            _LOG.warning("a query finds nothing: %s", error)
          return [[]]
        self.lost += 1
        return [RetrieverError(f"{error}")]
    middle = len(queries) // 2
    # The server was given its chances with the whole; the halves only find out whose fault it is.
    first = await self._part(queries[:middle], topk, room, min(retries, 1))
    return first + await self._part(queries[middle:], topk, room, min(retries, 1))

  async def _answers(self, topk: int) -> bool:
    """Whether a harmless search works now, so that a refused query is what was refused."""
    try:
      await self._attempt(["health"], topk, self._patience())
    except (_Retry, _Refused):
      return False
    return True

  async def _insist(self, queries: list[str], topk: int, retries: int) -> list[list[Passage]]:
    """Tries until it works or the attempts are used up; those while the server is down are free."""
    failures = 0
    while True:
      began = time.monotonic()
      try:
        return await self._attempt(queries, topk, self._patience())
      except _Retry as error:
        self._note(began, f"{error}")
        if failures >= retries:
          # A server that came up since the attempt has not seen this search yet.
          if not error.away and await self._alive():
            raise
          failures = 0
        self.retried += 1
        await asyncio.sleep(self._pause(failures, error.after_s))
        failures += 1

  async def _attempt(self, queries: list[str], topk: int, timeout_s: float) -> list[list[Passage]]:
    self.requests += 1
    status, body, headers = await self._send(
      "POST", wire.PATH, timeout_s, wire.request_body(queries, topk)
    )
    if status in _REFUSED:
      self._outage.worked()
      raise _Refused(f"the retriever refused it: {status} {wire.error_of(body)}".strip())
    if status >= 500 or status in _AGAIN:
      raise _Retry(
        f"it answers {status} {wire.error_of(body)}".strip(),
        _seconds(headers.get("retry-after", "")),
      )
    if status != 200:
      raise RetrieverDown(
        f"{self.url}{wire.PATH} answers {status} {wire.error_of(body)}".strip()
        + ", as no retriever does; check retriever.url"
      )
    self._check_index(headers.get(wire.INDEX_HEADER))
    try:
      found = wire.parse_reply(body, count=len(queries), topk=topk)
    except ValueError as error:
      raise _Retry(f"{error}") from error
    self._outage.worked()
    return found

  async def _send(self, method: str, path: str, timeout_s: float, body: bytes | None = None):
    """Sends; returns (status, body, headers) within `timeout_s`; _Retry without a whole reply."""
    try:
      async with asyncio.timeout(timeout_s):
        async with self._client.stream(
          method, self._address + path, content=body, headers={"content-type": "application/json"}
        ) as reply:
          read = bytearray()
          async for chunk in reply.aiter_bytes():
            read += chunk
            if len(read) > _MOST_REPLY_BYTES:
              raise _Retry(f"its reply is longer than {_MOST_REPLY_BYTES} bytes")
          return reply.status_code, bytes(read), reply.headers
    except TimeoutError:
      raise _Retry(f"no whole reply within {timeout_s:.3g} s") from None
    except (httpx.TransportError, httpx.DecodingError) as error:
      away = isinstance(error, httpx.ConnectError)
      raise _Retry(f"{type(error).__name__}: {error}".removesuffix(": "), away=away) from error

  async def _alive(self) -> bool:
    """Whether the server answers at all: then the search, not the server, is what fails."""
    try:
      status, *_ = await self._send("GET", wire.HEALTH_PATH, self._patience())
    except _Retry:
      return False
    return status < 500

  def _note(self, began: float, why: str) -> None:
    self._outage.failed(began, why)
    if self._outage.seconds >= self._give_up_s:
      raise RetrieverDown(
        f"the retriever at {self.url} has given no usable reply for {self._outage.seconds:.0f} s "
        "(it may be gone for "
        f"{self._give_up_s:g}; last: {why}); start it again, then repeat the command: what was "
        "saved is safe"
      )

  def _patience(self) -> float:
    """Seconds for the next request: no longer than until it is time to give up."""
    left = self._give_up_s - self._outage.seconds
    return max(min(self._timeout_s, left), 0.05)

  def _pause(self, failures: int, after_s: float) -> float:
    # Between half and the whole of it, so that many clients of one server do not come back at once.
    pause = min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S) * self._random.uniform(0.5, 1)
    return min(
      max(pause, min(after_s, _LONGEST_PAUSE_S)), max(self._give_up_s - self._outage.seconds, 0.0)
    )

  def _check_index(self, index: str | None) -> None:
    if self._index is not None and index is not None and index != self._index:
      raise RetrieverDown(
        f"the retriever at {self.url} searches another index (manifest {index}) than at the start "
        "of this run "
        f"({self._index}); start the one of the start again, then repeat the command: what was "
        "saved is safe"
      )


def base_url(url: str) -> str:
  """`url` without /retrieve at its end; raises ValueError where it is no URL of a server."""
  trimmed = url.strip().rstrip("/").removesuffix(wire.PATH).rstrip("/")
  try:
    parts = urlsplit(trimmed)
    valid = (
      parts.scheme in ("http", "https")
      and parts.hostname
      and (parts.port is None or parts.port > 0)
    )
  except ValueError:  # a port that is no number
    valid = False
  if not valid or parts.query or parts.fragment:
    raise ValueError(
      f"retriever.url={without_password(url)!r} is not the URL of a retriever; give one like "
      "http://127.0.0.1:8000"
    )
  return trimmed


def _manifest(body: bytes) -> dict:
  try:
    record = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise _Retry(f"GET {wire.HEALTH_PATH} is not JSON ({error})") from error
  found = record.get("manifest") if isinstance(record, dict) else None
  return found if isinstance(found, dict) else {}


def _seconds(text: str) -> float:
  """Retry-After in seconds; its other form, a date, counts as not given."""
  return float(text) if text.isdigit() and len(text) < 7 else 0.0
