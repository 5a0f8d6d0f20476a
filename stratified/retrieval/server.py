"""Serves a retriever over HTTP: POST /retrieve in Search-R1's wire format, GET /health."""

import asyncio
import contextlib
import functools
import signal
import socket

import h11
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from stratified.retrieval import wire
from stratified.retrieval.batcher import Batcher, Busy
from stratified.retrieval.corpus import RetrieverError

_JSON = "application/json"
RETRY_AFTER_S = 1  # what a client is told when the queue is full
READ_S = 30.0  # how long the headers, or the body, of a request may take to come
BODIES = 16  # bodies of the largest size that may be in memory at the same time
_SMALL = 2**16  # bytes of a body that is read between two other requests
# longer than a client keeps an idle connection, so that the client is the one to close it
KEEP_ALIVE_S = 75


def make_app(
  retriever,
  *,
  default_topk: int = 3,
  bounds: wire.Bounds = wire.Bounds(),
  read_s: float = READ_S,
  **batching,
) -> Starlette:
  """Makes the ASGI application.

  Args:
    retriever: `search(queries, topk)` and `manifest`, a dict that says what is searched.
    default_topk: passages a query where a request leaves that open.
    bounds: what one request may ask for; beyond it is 413 or 400.
    read_s: how long a request's body may take to come.
    batching: settings of Batcher.

  Replies: 200; 400, 413 for a request that breaks the wire format or the bounds; 408 for one that
  does not come in time; 503 with Retry-After where the queue, or the memory for bodies, is full;
  500 where the search failed. All but 200 carry {"error": "one sentence"}. A search whose client
  has left is not begun.
  """
  if not 1 <= default_topk <= bounds.max_topk:
    raise ValueError(
      f"the default topk is {default_topk}; it must lie between 1 and {bounds.max_topk}"
    )
  batcher = Batcher(retriever.search, **batching)
  index = {wire.INDEX_HEADER: wire.digest(retriever.manifest)}

  bodies = _Bodies(bounds.max_body_bytes, read_s)

  async def retrieve(request: Request) -> Response:
    try:
      async with bodies.read(request) as body:
        parse = functools.partial(
          wire.parse_request, body, default_topk=default_topk, bounds=bounds
        )
        # a long text would hold up everyone else's requests
        ask = parse() if len(body) <= _SMALL else await asyncio.to_thread(parse)
      results = await _while_connected(request, batcher.search(ask.queries, ask.topk))
      reply = await asyncio.to_thread(wire.reply_body, results, return_scores=ask.return_scores)
    except ClientDisconnect:
      return Response(status_code=400)  # nobody is there to read it
    except wire.BadRequest as error:
      return _error(f"{error}", error.status)
    except Busy as error:
      return _error(f"{error}", 503, {"retry-after": f"{RETRY_AFTER_S}"})
    except RetrieverError as error:
      return _error(f"the search failed: {error}", 500)
    return Response(reply, headers=index, media_type=_JSON)

  async def health(_) -> Response:
    return JSONResponse(
      {
        "status": "ok",
        "manifest": retriever.manifest,
        "default_topk": default_topk,
        "queued": batcher.queued,
        "searched": batcher.searched,
        "batches": batcher.batches,
      },
      headers=index,
    )

  @contextlib.asynccontextmanager
  async def lifespan(_):
    yield
    await batcher.close()

  return Starlette(
    routes=[
      Route(wire.PATH, retrieve, methods=["POST"]),
      Route(wire.HEALTH_PATH, health, methods=["GET"]),
    ],
    exception_handlers={HTTPException: _not_here},
    lifespan=lifespan,
  )


class _Bodies:
  """Reads bodies, each within `most` bytes and `read_s`, all within BODIES times `most`."""

  def __init__(self, most: int, read_s: float):
    self._most, self._read_s, self._held = most, read_s, 0

  @contextlib.asynccontextmanager
  async def read(self, request: Request):
    """Yields the body; BadRequest once it is too long, whatever length was announced, or late."""
    body = bytearray()
    try:
      async with asyncio.timeout(self._read_s):
        await self._fill(body, request)
    except TimeoutError:
      self._held -= len(body)
      raise wire.BadRequest(f"the body did not come within {self._read_s:g} s", 408) from None
    except BaseException:
      self._held -= len(body)
      raise
    try:
      yield bytes(body)
    finally:
      self._held -= len(body)

  async def _fill(self, body: bytearray, request: Request) -> None:
    too_long = wire.BadRequest(
      f"the body is longer than {self._most} bytes; send fewer queries at once", 413
    )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > self._most:
      raise too_long
    if request.headers.get("content-encoding", "identity") != "identity":
      raise wire.BadRequest("the body is compressed; send plain JSON", 415)
    async for chunk in request.stream():
      if len(body) + len(chunk) > self._most:
        raise too_long
      if self._held + len(chunk) > BODIES * self._most:
        raise Busy("too many requests are being read; try again later")
      body += chunk
      self._held += len(chunk)


async def _while_connected(request: Request, search):
  """What `search` returns; cancels it, and raises ClientDisconnect, where the client leaves."""
  searching = asyncio.ensure_future(search)
  leaving = asyncio.ensure_future(_left(request))
  try:
    await asyncio.wait((searching, leaving), return_when=asyncio.FIRST_COMPLETED)
    if not searching.done():
      raise ClientDisconnect
    return searching.result()
  finally:
    for task in (searching, leaving):
      task.cancel()


async def _left(request: Request) -> None:
  while (await request.receive())["type"] != "http.disconnect":
    pass


class _Impatient(H11Protocol):
  """Closes a connection whose next request's headers take longer than `read_s` to come.

  uvicorn itself ends only connections that are idle after a request.
  """

  read_s = READ_S
  _late: asyncio.TimerHandle | None = None

  def connection_made(self, transport) -> None:
    super().connection_made(transport)
    self._late = self.loop.call_later(self.read_s, self.transport.close)

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._watch()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._watch()

  def _watch(self) -> None:
    """Starts the clock where headers have begun to come, stops it where they are here."""
    begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
    if begun and self._late is None:
      self._late = self.loop.call_later(self.read_s, self.transport.close)
    elif not begun and self._late is not None:
      self._late.cancel()
      self._late = None

  def connection_lost(self, exc) -> None:
    if self._late is not None:
      self._late.cancel()
    super().connection_lost(exc)


def _error(message: str, status: int, headers: dict | None = None) -> Response:
  return Response(wire.error_body(message), status, headers, _JSON)


async def _not_here(request: Request, error: HTTPException) -> Response:
  return _error(
    f"{request.method} {request.url.path} is not served: use POST {wire.PATH} or GET "
    f"{wire.HEALTH_PATH}",
    error.status_code,
    error.headers,
  )


def bind(host: str, port: int) -> socket.socket:
  """Binds a socket that does not listen yet; OSError, one sentence, for an address that is taken.

  Port 0 is any free one. Bind before the index is loaded: minutes of loading are then not lost to a
  taken port.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  made = socket.socket(family, socket.SOCK_STREAM)
  made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    made.bind((host, port))
  except OSError as error:
    made.close()
    raise OSError(
      f"{host} port {port} can't be bound ({error.strerror or error}); "
      "choose another with --port, or --port=0 for any free one"
    ) from error
  return made


def address(bound: socket.socket) -> str:
  """http://host:port of a bound socket."""
  host, port = bound.getsockname()[:2]
  return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
  app: Starlette,
  bound: socket.socket,
  *,
  read_s: float = READ_S,
  grace_s: float = 30.0,
  on_start=None,
) -> None:
  """Serves until SIGTERM or Ctrl-C, then takes no more requests, ends those that run, and returns.

  Args:
    app: from `make_app`.
    bound: from `bind`.
    read_s: how long a request's headers may take to come.
    grace_s: how long running requests may take to end.
    on_start: called once connections are accepted.
  """
  # uvicorn raises the signal that stopped it once more, for whoever handled it before: here nobody
  # needs it.
  before = {
    number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
  }
  server = uvicorn.Server(
    uvicorn.Config(
      app,
      http=type("Protocol", (_Impatient,), {"read_s": read_s}),
      log_level="warning",
      access_log=False,
      timeout_keep_alive=KEEP_ALIVE_S,
      timeout_graceful_shutdown=grace_s,
      backlog=2048,
      server_header=False,
      date_header=False,
    )
  )

  async def run():
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not serving.done():
      await asyncio.sleep(0.01)
    if on_start and server.started:
      on_start()
    await serving

  try:
    asyncio.run(run())
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
