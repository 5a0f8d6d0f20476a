"""Serves a retriever over HTTP: POST /retrieve in Search-R1's wire format, GET /health."""

import asyncio
import contextlib
import signal
import socket

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
import uvicorn

from stratified.retrieval import wire
from stratified.retrieval.batcher import Batcher, Busy
from stratified.retrieval.corpus import RetrieverError

_JSON = "application/json"
RETRY_AFTER_S = 1  # what a client is told when the queue is full
# longer than a client keeps an idle connection, so that the client is the one to close it
KEEP_ALIVE_S = 75


def make_app(
  retriever, *, default_topk: int = 3, bounds: wire.Bounds = wire.Bounds(), **batching
) -> Starlette:
  """Makes the ASGI application.

  Args:
    retriever: `search(queries, topk)` and `manifest`, a dict that says what is searched.
    default_topk: passages a query where a request leaves that open.
    bounds: what one request may ask for; beyond it is 413 or 400.
    batching: settings of Batcher.

  Replies: 200; 400, 413 for a request that breaks the wire format or the bounds; 503 with
  Retry-After where the queue is full; 500 where the search failed. All but 200 carry
  {"error": "one sentence"}.
  """
  if not 1 <= default_topk <= bounds.max_topk:
    raise ValueError(
      f"the default topk is {default_topk}; it must lie between 1 and {bounds.max_topk}"
    )
  batcher = Batcher(retriever.search, **batching)
  index = {wire.INDEX_HEADER: wire.digest(retriever.manifest)}

  async def retrieve(request: Request) -> Response:
    try:
      ask = wire.parse_request(
        await _body(request, bounds.max_body_bytes), default_topk=default_topk, bounds=bounds
      )
      results = await batcher.search(ask.queries, ask.topk)
    except ClientDisconnect:
      return Response(status_code=400)  # nobody is there to read it
    except wire.BadRequest as error:
      return _error(f"{error}", error.status)
    except Busy as error:
      return _error(f"{error}", 503, {"retry-after": f"{RETRY_AFTER_S}"})
    except RetrieverError as error:
      return _error(f"the search failed: {error}", 500)
    return Response(
      wire.reply_body(results, return_scores=ask.return_scores), headers=index, media_type=_JSON
    )

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


async def _body(request: Request, most: int) -> bytes:
  """Reads the request's body; refuses it once it is too long, whatever length was announced."""
  too_long = wire.BadRequest(
    f"the body is longer than {most} bytes; send fewer queries at once", 413
  )
  announced = request.headers.get("content-length", "")
  if announced.isdigit() and int(announced) > most:
    raise too_long
  if request.headers.get("content-encoding", "identity") != "identity":
    raise wire.BadRequest("the body is compressed; send plain JSON", 415)
  body = bytearray()
  async for chunk in request.stream():
    body += chunk
    if len(body) > most:
      raise too_long
  return bytes(body)


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


def serve(app: Starlette, bound: socket.socket, *, grace_s: float = 30.0, on_start=None) -> None:
  """Serves until SIGTERM or Ctrl-C, then takes no more requests, ends those that run, and returns.

  Args:
    app: from `make_app`.
    bound: from `bind`.
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
