"""Opens the retriever that a config names, and checks that it searches what the run is about."""

from collections.abc import Callable, Sequence
import dataclasses
import os
import pathlib
import socket
from urllib.parse import urlsplit

from stratified import files
from stratified.config import read, setting, Settings, without_password
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.cache import Cached
from stratified.retrieval.client import HttpRetriever, HttpSettings
from stratified.retrieval.corpus import corpus_digest, Passage

BM25_CACHE = pathlib.Path(".cache/bm25")
CONNECT_S = 5.0  # until a server must have taken a connection


@dataclasses.dataclass(frozen=True)
class RetrieverSettings(Settings):
  """What searches. Fields of `name=http` stand in client.HttpSettings."""

  SECTION = "retriever"
  name: str = setting(
    "bm25",
    "what searches: words, vectors, both, or a server",
    choices=["bm25", "dense", "hybrid", "http"],
    affects=["training", "answers"],
  )
  index: str = setting(
    "",
    "dense, hybrid: a folder that experiments/build_index.py made",
    affects=["training", "answers"],
  )
  encoder: str = setting(
    "",
    "dense, hybrid: the encoder's model directory, where it is not the index's own",
    affects=["training", "answers"],
  )
  corpus: str = setting(
    "",
    "http, dense, hybrid: digest that the manifest must have; empty takes any",
    affects=["training", "answers"],
  )
  cache: int = setting(
    10_000, "queries whose passages are remembered; 0 is none", low=0, affects=[]
  )


def bm25(passages: Sequence[Passage]) -> BM25:
  """Opens BM25: keeps the index of many passages; indexing an encyclopedia anew is faster."""
  return BM25(passages, cache_dir=BM25_CACHE if len(passages) > 10_000 else None)


def dense(index: str, encoder: str = "", corpus: str = ""):
  """Opens a folder's index with the encoder that made it, or the one named.

  corpus: the passages, where the index's own file has gone.
  """
  # jax and FAISS take seconds to import, and a server of BM25 needs neither
  from stratified.encoder.text_encoder import Encoder
  from stratified.retrieval import manifest as manifests
  from stratified.retrieval.dense import open_dense

  made = manifests.read(pathlib.Path(index) / "manifest.json")
  moved = corpus if corpus and not pathlib.Path(made["corpus"].get("path", "")).is_file() else None
  return open_dense(index, Encoder.matching(made["encoder"], encoder or None), corpus=moved)


def hybrid(index: str, passages: Sequence[Passage], encoder: str = "", corpus: str = ""):
  from stratified.retrieval.hybrid import Hybrid

  return Hybrid([bm25(passages), dense(index, encoder, corpus)])


def open_retriever(config, passages: Callable[[], Sequence[Passage]]):
  """Opens the retriever that `config.retriever` names over what `passages` gives, with its cache.

  `passages` is called where the passages themselves are needed. Raises ValueError or OSError, in
  one sentence, where it can't be opened or does not search what the config says.
  """
  r, corpus = read(RetrieverSettings, config), os.path.expandvars(config.data.corpus)
  opened = {
    "bm25": lambda: bm25(passages()),
    "dense": lambda: dense(r.index, r.encoder, corpus),
    "hybrid": lambda: hybrid(r.index, passages(), r.encoder, corpus),
    "http": lambda: HttpRetriever(**dataclasses.asdict(read(HttpSettings, config))),
  }[r.name]()
  if r.name == "http":
    opened.connect(config.rollout.topk)
  if r.name != "bm25":
    _check_corpus(config, opened, passages)
  return Cached(opened, r.cache) if r.cache else opened


def missing(config) -> list[str]:
  """Lists what `open_retriever` would lack, one sentence each with the commands that get it."""
  r = read(RetrieverSettings, config)
  if r.name in ("dense", "hybrid") and not (r.index and pathlib.Path(r.index).is_dir()):
    return [
      f"retriever.index={r.index!r} is no folder of an index, which retriever.name={r.name!r} "
      "needs; build one with python experiments/build_index.py and name it with "
      "--config.retriever.index=FOLDER"
    ]
  if r.name == "http":
    return _unreachable(read(HttpSettings, config).address, config.data.name)
  return []


def _unreachable(address: str, world: str) -> list[str]:
  parts = urlsplit(address)
  port = parts.port or {"http": 80, "https": 443}[parts.scheme]
  try:
    socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
  except OSError as error:
    flags = (
      "--retriever=dense --index=FOLDER, where experiments/build_index.py made the index"
      if world == "files"
      else "--config=... and the settings of this run"
    )
    return [
      f"no retriever answers at {without_password(address)} ({error}); start one with "
      f"python experiments/serve_retriever.py {flags}, or name another with "
      "--config.retriever.url=URL"
    ]
  return []


def _check_corpus(config, opened, passages: Callable[[], Sequence[Passage]]) -> None:
  """Refuses a server or index of another corpus than the encyclopedia's, or the digest's."""
  r, encyclopedia = config.retriever, config.data.name == "encyclopedia"
  manifest = opened.manifest
  wanted = corpus_digest(passages()) if encyclopedia else r.corpus
  found = manifest.get("corpus")
  if wanted and found != wanted:
    way_out = (
      "serve it with python experiments/serve_retriever.py --config=... and the settings of this "
      "run"
      if encyclopedia
      else "use another server or index, or another --config.retriever.corpus"
    )
    where = f"at {opened.url}" if r.name == "http" else f"in {r.index}"
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
  """Holds a run to the index that it began with, whose manifest workdir/retriever.json keeps.

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
