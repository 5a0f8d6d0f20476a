"""Retrievers by their config name. What an index searches is compared with what the run is about, before any work."""

from collections.abc import Callable, Sequence
import json
import pathlib

from stratified.metrics import write_atomic
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.cache import Cached
from stratified.retrieval.client import HttpRetriever
from stratified.retrieval.corpus import Passage, corpus_digest

BM25_CACHE = pathlib.Path(".cache/bm25")


def bm25(passages: Sequence[Passage]) -> BM25:
  """Many passages are indexed once and kept; the few of an encyclopedia are indexed anew faster than they are read."""
  return BM25(passages, cache_dir=BM25_CACHE if len(passages) > 10_000 else None)


def dense(index: str, encoder: str):
  from stratified.encoder import Encoder  # FAISS and the encoder take seconds to import
  from stratified.retrieval import manifest as manifests
  from stratified.retrieval.dense import open_dense
  made_by = manifests.read(pathlib.Path(index) / "manifest.json")["encoder"]
  return open_dense(index, Encoder.matching(made_by, encoder or None))


def hybrid(index: str, encoder: str, passages: Sequence[Passage]):
  from stratified.retrieval.hybrid import Hybrid
  return Hybrid([bm25(passages), dense(index, encoder)])


def http(r) -> HttpRetriever:
  return HttpRetriever(r.url, timeout_s=r.timeout_s, retries=r.retries, give_up_s=r.give_up_s,
                       queries_per_request=r.queries_per_request, in_flight=r.in_flight)


def open_retriever(config, passages: Callable[[], Sequence[Passage]]):
  """The retriever that `config.retriever` names, over what `passages` gives, with its cache.

  `passages` is called where the passages themselves are needed. Raises ValueError or OSError, in one sentence, where
  it can't be opened or does not search what the config says.
  """
  r = config.retriever
  opened = {
      "bm25": lambda: bm25(passages()),
      "dense": lambda: dense(r.index, r.encoder),
      "hybrid": lambda: hybrid(r.index, r.encoder, passages()),
      "http": lambda: http(r),
  }[r.name]()
  if r.name == "http":
    _check_served(config, opened.connect(config.rollout.topk), passages)
  return Cached(opened, r.cache) if r.cache else opened


def _check_served(config, manifest: dict, passages: Callable[[], Sequence[Passage]]) -> None:
  """The server must search the config's corpus: that of the encyclopedia, or the one named by its digest."""
  r, encyclopedia = config.retriever, config.data.name == "encyclopedia"
  wanted = corpus_digest(passages()) if encyclopedia else r.corpus
  found = manifest.get("corpus")
  if wanted and found != wanted:
    start = ("start it with python experiments/serve_retriever.py --config=... and the settings of this run"
             if encyclopedia else "name the right server with --config.retriever.url, or another corpus with "
             "--config.retriever.corpus")
    raise ValueError(f"the retriever at {r.url} searches {_named(manifest)}, not the corpus {wanted}: {start}")


def _named(manifest: dict) -> str:
  count = f", {manifest['count']} passages" if "count" in manifest else ""
  return f"the corpus {manifest['corpus']}{count}" if "corpus" in manifest else "a corpus that it does not name"


def check_same(workdir: pathlib.Path, retriever) -> None:
  """A run that goes on must search the index that it began with; workdir/retriever.json keeps its manifest.

  Raises ValueError, naming what differs.
  """
  path, manifest = workdir / "retriever.json", getattr(retriever, "manifest", {})
  now = json.loads(json.dumps(manifest))
  if path.exists():
    before = json.loads(path.read_text(encoding="utf-8"))
    differ = [f"{key}: {before.get(key)} in the workdir, {now.get(key)} now"
              for key in sorted(before | now) if before.get(key) != now.get(key)]
    if differ:
      raise ValueError(f"{path} names another index than the one that would be searched now ({'; '.join(differ)}); "
                       "use the index of the start, or a new --workdir")
  write_atomic(path, json.dumps(now, indent=2, sort_keys=True) + "\n")
