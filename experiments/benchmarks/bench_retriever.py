"""Measures a retrieval server at 64 clients against the same server without batching.

    python experiments/benchmarks/bench_retriever.py --questions=$STRATIFIED_DATA/questions \\
        --corpus=$STRATIFIED_DATA/corpus.jsonl.gz
    python experiments/benchmarks/bench_retriever.py --questions=... --corpus=... \\
        --index=indexes/wiki --kinds=bm25,flat,hnsw,hybrid:flat

Each client is a connection that sends one query, waits for the passages and sends the next, as
rollouts do; no query repeats. The clients share the machine with the server. `one at a time` is the
reference of the ratio: the server searches for one query at a time (--max_batch=1), everything else
equal. The two take turns, and the median of the rounds counts, since other programs of the machine
come and go. `client` is a trainer's way of asking: 512 queries in one call of HttpRetriever.
"""

import asyncio
import pathlib
import statistics
import subprocess
import sys
import time

from absl import app, flags

from stratified.data import readers
from stratified.retrieval import wire
from stratified.retrieval.client import HttpRetriever

_QUESTIONS = flags.DEFINE_string(
  "questions", None, "Questions that are asked (file or folder).", required=True
)
_CORPUS = flags.DEFINE_string("corpus", "", "Passages (bm25, hybrid).")
_INDEX = flags.DEFINE_string(
  "index", "", "What experiments/build_index.py made: a folder with one for each kind."
)
_KINDS = flags.DEFINE_list(
  "kinds", ["bm25"], "bm25, a kind of index in --index (flat, hnsw, ...), or hybrid:KIND."
)
_CLIENTS = flags.DEFINE_integer("clients", 64, "Concurrent clients.", 1)
_SECONDS = flags.DEFINE_float("seconds", 5.0, "Length of a round.", 0.1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds for each of the two servers.", 1)
_TOPK = flags.DEFINE_integer("topk", 3, "Passages a query.", 1)


def flags_of(kind: str) -> list[str]:
  """The server's flags for a kind of retriever."""
  index = lambda name: f"--index={pathlib.Path(_INDEX.value) / name}"
  if kind == "bm25":
    return ["--retriever=bm25", f"--corpus={_CORPUS.value}"]
  if kind.startswith("hybrid:"):
    return ["--retriever=hybrid", f"--corpus={_CORPUS.value}", index(kind.removeprefix("hybrid:"))]
  return ["--retriever=dense", index(kind)]


class Server:
  """experiments/serve_retriever.py as a process, for as long as the `with` lasts."""

  def __init__(self, *flags_: str):
    self._flags = flags_

  def __enter__(self) -> str:
    program = pathlib.Path(__file__).parents[1] / "serve_retriever.py"
    self._process = subprocess.Popen(
      [sys.executable, program, "--port=0", *self._flags], stdout=subprocess.PIPE, text=True
    )
    line = self._process.stdout.readline()
    if " at http" not in line:
      self._process.wait()
      sys.exit("the server did not start; its reason stands above")
    return line.split(" at ")[1].split()[0]

  def __exit__(self, *unused):
    self._process.terminate()
    self._process.wait()


async def load(url: str, queries, seconds: float) -> tuple[float, list[float]]:
  """Has all clients ask for that long: (queries a second, seconds of each query)."""
  took, stop = [], time.perf_counter() + seconds
  host, port = url.removeprefix("http://").split(":")

  async def client():
    reader, writer = await asyncio.open_connection(host, int(port))
    while (start := time.perf_counter()) < stop:
      await exchange(reader, writer, wire.request_body([next(queries)], _TOPK.value))
      took.append(time.perf_counter() - start)
    writer.close()

  start = time.perf_counter()
  await asyncio.gather(*(client() for _ in range(_CLIENTS.value)))
  return len(took) / (time.perf_counter() - start), took


async def exchange(reader, writer, body: bytes) -> bytes:
  """Sends one request on a kept bare socket: an HTTP library would take longer than the server."""
  writer.write(
    b"POST %s HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n"
    % (wire.PATH.encode(), len(body))
    + body
  )
  head = (await reader.readuntil(b"\r\n\r\n")).lower()
  reply = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
  if b" 200 " not in head.split(b"\r\n")[0]:
    sys.exit(f"the server answers {head.decode().splitlines()[0]}: {wire.error_of(reply)}")
  return reply


def endless(texts: list[str]):
  """Yields the questions, then again with a number behind each, so that no query comes twice."""
  number = 0
  while True:
    yield from (f"{text} {number}" if number else text for text in texts)
    number += 1


def from_trainer(url: str, queries) -> float:
  """Measures queries a second of one caller that asks for 512 at once."""
  retriever, asked = HttpRetriever(url), [next(queries) for _ in range(512)]
  start = time.perf_counter()
  retriever.search(asked, _TOPK.value)
  return len(asked) / (time.perf_counter() - start)


def measure(kind: str, texts: list[str]) -> dict[str, list]:
  queries, found = (
    endless(texts),
    {"batched": [], "one": [], "took": [], "took_one": [], "trainer": []},
  )
  with Server(*flags_of(kind)) as batched, Server(*flags_of(kind), "--max_batch=1") as one:
    for url in (batched, one):
      # connections, caches and compilation
      asyncio.run(load(url, queries, min(2.0, _SECONDS.value)))
    for _ in range(_ROUNDS.value):
      for name, took, url in (("one", "took_one", one), ("batched", "took", batched)):
        rate, times = asyncio.run(load(url, queries, _SECONDS.value))
        found[name].append(rate)
        found[took] += times
      found["trainer"].append(from_trainer(batched, queries))
  return found


def main(_) -> None:
  questions = readers.read_questions(pathlib.Path(_QUESTIONS.value).expanduser())
  texts = list(dict.fromkeys(question.text for question in questions))
  print(
    f"{len(texts)} questions, {_CLIENTS.value} clients, top {_TOPK.value}, {_ROUNDS.value} rounds "
    "of "
    f"{_SECONDS.value:g} s\n"
  )
  print(
    "| retriever | queries/s | p50 ms | p99 ms | one at a time: queries/s | p99 ms | ratio "
    "| client: queries/s |"
  )
  print("|---" * 8 + "|")
  for kind in _KINDS.value:
    found = measure(kind, texts)
    median = {name: statistics.median(found[name]) for name in ("batched", "one", "trainer")}
    late = lambda took, share: (
      f"{1e3 * sorted(took)[min(len(took) - 1, int(share * len(took)))]:.1f}"
    )
    cells = [
      kind,
      f"{median['batched']:.0f}",
      late(found["took"], 0.5),
      late(found["took"], 0.99),
      f"{median['one']:.0f}",
      late(found["took_one"], 0.99),
      f"{median['batched'] / median['one']:.2f}",
      f"{median['trainer']:.0f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
  app.run(main)
