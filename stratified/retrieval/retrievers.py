"""Retrievers by their config name; what an index searches is compared with what the run is
about."""

from collections.abc import Callable, Sequence
import os
import pathlib

from stratified import files
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.cache import Cached
from stratified.retrieval.client import HttpRetriever
from stratified.retrieval.corpus import corpus_digest, Passage

BM25_CACHE = pathlib.Path(".cache/bm25")


def bm25(passages: Sequence[Passage]) -> BM25:
  """Many passages are indexed once and kept; the few of an encyclopedia are indexed anew faster
  than they are read."""
  return BM25(passages, cache_dir=BM25_CACHE if len(passages) > 10_000 else None)


def dense(index: str, encoder: str = "", corpus: str = ""):
  """The index in a folder, with the encoder that made it, or the one named; `corpus` where its own
  file has gone."""
  from stratified.encoder.text_encoder import (
    Encoder,  # jax and FAISS take seconds to import, and a server of BM25 needs neither
  )
  from stratified.retrieval import manifest as manifests
  from stratified.retrieval.dense import open_dense

  made = manifests.read(pathlib.Path(index) / "manifest.json")
  moved = corpus if corpus and not pathlib.Path(made["corpus"].get("path", "")).is_file() else None
  return open_dense(index, Encoder.matching(made["encoder"], encoder or None), corpus=moved)


def hybrid(index: str, passages: Sequence[Passage], encoder: str = "", corpus: str = ""):
  from stratified.retrieval.hybrid import Hybrid

  return Hybrid([bm25(passages), dense(index, encoder, corpus)])


def http(r) -> HttpRetriever:
  return HttpRetriever(
    r.url,
    timeout_s=r.timeout_s,
    retries=r.retries,
    give_up_s=r.give_up_s,
    queries_per_request=r.queries_per_request,
    in_flight=r.in_flight,
  )


def open_retriever(config, passages: Callable[[], Sequence[Passage]]):
  """The retriever that `config.retriever` names, over what `passages` gives, with its cache.

  `passages` is called where the passages themselves are needed. Raises ValueError or OSError, in
  one sentence, where it can't be opened or does not search what the config says.
  """
  r, corpus = config.retriever, os.path.expandvars(config.data.corpus)
  opened = {
    "bm25": lambda: bm25(passages()),
    "dense": lambda: dense(r.index, r.encoder, corpus),
    "hybrid": lambda: hybrid(r.index, passages(), r.encoder, corpus),
    "http": lambda: http(r),
  }[r.name]()
  if r.name == "http":
    opened.connect(config.rollout.topk)
  if r.name != "bm25":
    _check_corpus(config, opened.manifest, passages)
  return Cached(opened, r.cache) if r.cache else opened


def _check_corpus(config, manifest: dict, passages: Callable[[], Sequence[Passage]]) -> None:
  """A server or an index must search the config's corpus: the encyclopedia's, or the one named by
  its digest."""
  r, encyclopedia = config.retriever, config.data.name == "encyclopedia"
  wanted = corpus_digest(passages()) if encyclopedia else r.corpus
  found = manifest.get("corpus")
  if wanted and found != wanted:
    way_out = (
      "serve it with python experiments/serve_retriever.py --config=... and the settings of this "
      "run"
      if encyclopedia
      else "use another server or index, or another --config.retriever.corpus"
    )
    where = f"at {r.url}" if r.name == "http" else f"in {r.index}"
    raise ValueError(
      f"the retriever {where} searches {_named(manifest)}, not the corpus {wanted}: {way_out}"
    )


def _named(manifest: dict) -> str:
  count = f", {manifest['count']} passages" if "count" in manifest else ""
  return (
    f"the corpus {manifest['corpus']}{count}"
    if "corpus" in manifest
    else "a corpus that it does not name"
  )


def check_same(workdir: pathlib.Path, retriever) -> None:
  """A run that goes on must search the index that it began with; workdir/retriever.json keeps its
  manifest.

  Raises ValueError, naming what differs.
  """
  path, manifest = workdir / "retriever.json", getattr(retriever, "manifest", {})
  now = files.plain(manifest)
  if path.exists():
    before = files.read_object(path)
    differ = [
      f"{key}: {before.get(key)} in the workdir, {now.get(key)} now"
      for key in sorted(before | now)
      if before.get(key) != now.get(key)
    ]
    if differ:
      raise ValueError(
        f"{path} names another index than the one that would be searched now "
        f"({'; '.join(differ)}); "
        "use the index of the start, or a new --workdir"
      )
  files.write_json(path, now, sort_keys=True)
