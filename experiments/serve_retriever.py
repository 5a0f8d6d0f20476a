"""Serves a retriever over HTTP, in Search-R1's wire format, until SIGTERM or Ctrl-C.

    python experiments/serve_retriever.py --corpus=data/wiki18.jsonl             # BM25
    python experiments/serve_retriever.py --retriever=dense --index=indexes/wiki18
    python experiments/serve_retriever.py --retriever=hybrid --index=indexes/wiki18 \\
        --corpus=data/wiki18.jsonl
    python experiments/serve_retriever.py --config=configs/search_r1.py:tiny     # a run's own pages

A run uses it with --config.retriever.name=http --config.retriever.url=http://127.0.0.1:8000; so
does any client of Search-R1's POST /retrieve. GET /health tells what is searched. It listens on
this machine alone unless --host says otherwise: there is no password.
"""

import os
import sys
import time

from absl import flags
from ml_collections import config_flags

from stratified.retrieval import retrievers, server, wire
from stratified.retrieval.cache import Cached
from stratified.retrieval.corpus import read_corpus
from stratified.runs import command_line

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A run's config, whose passages are served."
)
_RETRIEVER = flags.DEFINE_enum("retriever", "bm25", ["bm25", "dense", "hybrid"], "How to search.")
_CORPUS = flags.DEFINE_string("corpus", "", "Passages, JSON Lines, plain or .gz (bm25, hybrid).")
_INDEX = flags.DEFINE_string(
  "index", "", "A folder that experiments/build_index.py made (dense, hybrid)."
)
_ENCODER = flags.DEFINE_string(
  "encoder", "", "The encoder's model directory, where it is not the index's own."
)
_HOST = flags.DEFINE_string(
  "host", "127.0.0.1", "Address to listen on; 0.0.0.0 is every network of the machine."
)
_PORT = flags.DEFINE_integer("port", 8000, "Port; 0 is any free one.", 0, 65535)
_TOPK = flags.DEFINE_integer("topk", 3, "Passages a query where a request leaves that open.", 1)
_CACHE = flags.DEFINE_integer(
  "cache", 0, "Queries whose passages are remembered; 0 remembers none.", 0
)
_MAX_BATCH = flags.DEFINE_integer(
  "max_batch", 64, "Queries of one search; 1 searches for one at a time.", 1
)
_MAX_QUEUED = flags.DEFINE_integer(
  "max_queued", 16_384, "Queries that may wait; more are told to come back (503).", 1
)
_MAX_WAIT_S = flags.DEFINE_float("max_wait_s", 60.0, "Seconds that a search may wait and run.", 0.1)
_THREADS = flags.DEFINE_integer("threads", 1, "Searches at the same time.", 1)
_MAX_TOPK = flags.DEFINE_integer("max_topk", 100, "The largest topk of a request.", 1)
_MAX_QUERIES = flags.DEFINE_integer("max_queries", 4096, "Queries of one request.", 1)
_MAX_CHARACTERS = flags.DEFINE_integer("max_query_characters", 8192, "Characters of a query.", 1)
_MAX_BODY = flags.DEFINE_integer("max_body_bytes", 16 * 2**20, "Bytes of a request's body.", 1)
_READ_S = flags.DEFINE_float(
  "read_s", 30.0, "Seconds that a request's headers, or its body, may take to come.", 0.1
)
_GRACE_S = flags.DEFINE_float(
  "grace_s", 30.0, "Seconds that running requests get to end after SIGTERM.", 0
)


def passages():
  """Reads the passages to serve: the config's task's, or the corpus file's."""
  if _CONFIG.value is not None:
    from stratified.tasks import named  # brings jax, which a server of files has no use for

    return named.passages(_CONFIG.value)
  if not _CORPUS.value:
    raise ValueError(
      f"--retriever={_RETRIEVER.value} needs passages: give --corpus=FILE, or a run's --config"
    )
  return read_corpus(os.path.expanduser(_CORPUS.value))


def retriever():
  name, index = _RETRIEVER.value, _INDEX.value
  if name != "bm25" and not index:
    raise ValueError(f"--retriever={name} needs --index=FOLDER, made by experiments/build_index.py")
  opened = {
    "bm25": lambda: retrievers.bm25(passages()),
    "dense": lambda: retrievers.dense(index, _ENCODER.value, _CORPUS.value),
    "hybrid": lambda: retrievers.hybrid(index, passages(), _ENCODER.value, _CORPUS.value),
  }[name]()
  return Cached(opened, _CACHE.value) if _CACHE.value else opened


def main(_) -> None:
  try:
    bounds = wire.Bounds(
      max_queries=_MAX_QUERIES.value,
      max_query_characters=_MAX_CHARACTERS.value,
      max_topk=_MAX_TOPK.value,
      max_body_bytes=_MAX_BODY.value,
    )
    bound, start = server.bind(_HOST.value, _PORT.value), time.perf_counter()
    searched = retriever()
    served = server.make_app(
      searched,
      default_topk=_TOPK.value,
      bounds=bounds,
      read_s=_READ_S.value,
      max_batch=_MAX_BATCH.value,
      max_queued=_MAX_QUEUED.value,
      max_wait_s=_MAX_WAIT_S.value,
      threads=_THREADS.value,
    )
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  what = ", ".join(
    f"{key} {value}"
    for key, value in searched.manifest.items()
    if key in ("kind", "count", "corpus")
  )
  server.serve(
    served,
    bound,
    read_s=_READ_S.value,
    grace_s=_GRACE_S.value,
    on_start=lambda: print(
      f"serving {what} at {server.address(bound)} after {time.perf_counter() - start:.1f} s",
      flush=True,
    ),
  )
  print("stopped", flush=True)


if __name__ == "__main__":
  command_line.run(main)
