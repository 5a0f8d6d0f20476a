"""Hostile clients of the retriever server on 127.0.0.1, beside honest ones that must be served."""

import http.client
import json
import random
import socket
import threading
import time

import uvicorn

from experiments.benchmarks.attacks.count import Count
from stratified.retrieval import server, wire
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.client import HttpRetriever
from stratified.retrieval.corpus import Passage

TOWNS = "Oslo Bergen Lisbon Porto Kyoto Quito Lima Accra Hanoi Turin".split()
PASSAGES = [Passage(f"{i}", town, f"{town} is a town.") for i, town in enumerate(TOWNS)]
READ_S = 1.0  # an unfinished request is given up after that
SLOWEST_S = 20.0


def attack(count: int, seed: int = 0) -> Count:
  """Lets so many clients at a server, one in four of them honest; the server must outlive all."""
  chance, found = random.Random(seed), Count()
  app = server.make_app(BM25(PASSAGES), read_s=READ_S, bounds=wire.Bounds(max_body_bytes=10_000))
  bound = server.bind("127.0.0.1", 0)
  settings = uvicorn.Config(
    app, http=type("Protocol", (server._Impatient,), {"read_s": READ_S}), log_level="critical"
  )
  running = uvicorn.Server(settings)
  running.install_signal_handlers = lambda: None
  thread = threading.Thread(target=running.run, args=([bound],), daemon=True)
  thread.start()
  while not running.started:
    time.sleep(0.01)
  port = bound.getsockname()[1]
  try:
    for number in range(count):
      if number % 4 == 0:
        found.note("honest")
        found.add(_honest(port, chance))
      else:
        found.add(_hostile(port, chance))
    found.add(_honest(port, chance))
  finally:
    running.should_exit = True
    thread.join(SLOWEST_S)
  found.add("the server did not end" if thread.is_alive() else None)
  return found


def _honest(port: int, chance: random.Random) -> str | None:
  towns = chance.sample(TOWNS, 3)
  start = time.perf_counter()
  try:
    retriever = HttpRetriever(f"http://127.0.0.1:{port}", timeout_s=SLOWEST_S, retries=1)
    results = retriever.search(towns, 1)
  except Exception as error:
    return f"an honest client got {type(error).__name__} {error}"
  if [[passage.title for passage in passages] for passages in results] != [[t] for t in towns]:
    return f"an honest client got other passages for {towns}"
  took = time.perf_counter() - start
  return f"an honest client waited {took:.0f} s" if took > SLOWEST_S / 2 else None


def _hostile(port: int, chance: random.Random) -> str | None:
  """Sends something no client should; whatever is answered must be an error of HTTP or a reply."""
  whole = chance.random() < 0.7
  data = _request(_body(chance)) if whole else _broken(chance)
  with socket.create_connection(("127.0.0.1", port), timeout=SLOWEST_S) as connection:
    try:
      connection.sendall(data)
      if chance.random() < 0.3:
        return None  # gone before the answer
      answer = http.client.HTTPResponse(connection)
      answer.begin()
      text = answer.read()
    except (http.client.HTTPException, ConnectionError):
      return "a whole request was not answered" if whole else None
    except TimeoutError:
      return f"no end to a connection that sent {data[:40]!r}"
  if answer.status in (200, 400, 404, 405, 408, 411, 413, 414, 431, 501, 503):
    return None
  return f"status {answer.status} {text[:80]!r} for {data[:80]!r}"


def _request(body: bytes, length: int | None = None) -> bytes:
  head = "POST /retrieve HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: "
  return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body


def _body(chance: random.Random) -> bytes:
  value = chance.choice(
    [None, -1, 10**30, 1e308, True, "x" * 5000, [], {}, [[]], [None], "\x00", ["Oslo"] * 2000]
  )
  field = chance.choice(["queries", "query", "topk", "return_scores", "\x00"])
  body = json.dumps({"queries": ["Oslo"], "topk": 1} | {field: value}).encode()
  return chance.choice(
    [
      body,
      body[: chance.randrange(len(body))],
      b"[" * 9000,
      b"\xff\xfe" * 99,
      b"NaN",
      b"",
      b"1e999",
    ]
  )


def _broken(chance: random.Random) -> bytes:
  body = b'{"queries": ["Oslo"]}'
  return chance.choice(
    [
      _request(body, 10**12),
      _request(body, 500),  # never ends
      _request(body, 3),
      _request(body).replace(b"content-length: ", b"content-length: -"),
      b"POST /retrieve HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
      b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
      b"\x16\x03\x01" + chance.randbytes(200),  # as TLS begins
      b"POST /retr",
      b"DELETE /retrieve HTTP/9.9\r\n\r\n",
      chance.randbytes(300) + b"\r\n\r\n",
    ]
  )
