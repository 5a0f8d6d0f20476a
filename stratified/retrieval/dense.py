"""Dense retrieval: from a query's vector to the nearest passages' vectors, to the passages.

    from stratified.encoder.text_encoder import Encoder
    retriever = open_dense("DIR/hnsw", Encoder.load(".cache/models/all-minilm-l6-v2"))
    # or, with the encoder that its manifest names:
    made = manifest.read("DIR/hnsw/manifest.json")
    retriever = open_dense("DIR/hnsw", Encoder.matching(made["encoder"]))
    retriever.search(["Who wrote Hamlet?"], topk=3)[0][0].title

`DIR` is what experiments/build_index.py made. This module knows no encoder: anything with
`encode(texts, "query")` and a `manifest` will do, as long as the manifest is that of the encoder
that made the index.
"""

from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any, Protocol

import numpy as np

from stratified.retrieval import indexes
from stratified.retrieval import manifest as manifests
from stratified.retrieval.corpus import Passage, RetrieverError
from stratified.retrieval.embeddings import Embeddings
from stratified.retrieval.store import PassageStore


class QueryEncoder(Protocol):
  """What `Dense` asks of an encoder: unit vectors [len(texts), dimension], and a manifest."""

  manifest: dict[str, Any]

  def encode(self, texts: Sequence[str], role: str) -> np.ndarray: ...


class Dense:
  """Searches passages by inner product of unit vectors. Threads may share one object.

  `manifest` says what is searched and how: equal manifests find equal passages, wherever their
  files lie.
  """

  def __init__(
    self,
    index,
    passages: Sequence[Passage],
    encoder: QueryEncoder,
    manifest: dict[str, Any],
    *,
    rerank: int = 0,
    embeddings: Embeddings | None = None,
  ):
    """`rerank` candidates are scored again with the vectors of `embeddings`; 0 is none."""
    if rerank and embeddings is None:
      raise ValueError(f"rerank={rerank} needs the vectors on disk; give embeddings, or rerank=0.")
    self.manifest = _searched(manifest)
    self._index, self._passages, self._encoder = index, passages, encoder
    self._rerank, self._embeddings = rerank, embeddings

  def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """Returns up to `topk` passages a query, best first, `score` the cosine; none for a blank one.

    Raises RetrieverError where a query can't be encoded or a passage can't be read.
    """
    if isinstance(queries, str):
      raise TypeError(
        f"queries is the string {queries!r}; search takes a sequence of queries, [query]."
      )
    if topk < 1:
      raise ValueError(f"topk is {topk}; it must be at least 1.")
    asked = [at for at, query in enumerate(queries) if query.strip()]
    hits: list[list[Passage]] = [[] for _ in queries]
    if not asked:
      return hits
    try:
      vectors = self._encoder.encode([queries[at] for at in asked], "query")
    except FloatingPointError as error:
      raise RetrieverError(str(error)) from error
    for at, (scores, rows) in zip(asked, self._nearest(vectors, topk), strict=True):
      hits[at] = [
        dataclasses.replace(self._passages[row], score=score)
        for score, row in zip(scores.tolist(), rows.tolist())
      ]
    return hits

  def _nearest(self, vectors: np.ndarray, topk: int):
    """(scores, rows) of each vector, best first; ties go to the passage first in the corpus."""
    wanted = min(max(topk, self._rerank), self._index.ntotal)
    scores, rows = self._index.search(np.ascontiguousarray(vectors, np.float32), wanted)
    for vector, score, row in zip(vectors, scores, rows):
      score, row = score[row >= 0], row[row >= 0]  # faiss fills up with -1 where it found fewer
      if self._rerank:
        score = self._embeddings.take(row) @ vector
      best = np.lexsort((row, -score))[:topk]
      yield score[best], row[best]


def _searched(manifest: dict[str, Any]) -> dict[str, Any]:
  """An index's manifest in every retriever's form: kind, count, corpus digest, then the rest."""
  encoder = {name: value for name, value in manifest["encoder"].items() if name != "path"}
  index = {name: value for name, value in manifest["index"].items() if name != "bytes"}
  return {
    "kind": "dense",
    "count": manifest["count"],
    "corpus": manifest["corpus"].get("digest"),
    "dimension": manifest["dimension"],
    "metric": manifest.get("metric"),
    "encoder": encoder,
    "index": index,
  }


def open_dense(
  directory: str | os.PathLike,
  encoder: QueryEncoder,
  *,
  corpus: str | os.PathLike | None = None,
  mapped: bool = True,
  probes: int | None = None,
  ef_search: int | None = None,
  rerank: int | None = None,
  passages: PassageStore | None = None,
) -> Dense:
  """Opens an index that experiments/build_index.py made, such as `DIR/flat` or `DIR/hnsw`.

  Args:
    directory: the index's folder, with manifest.json and index.faiss.
    encoder: the encoder of queries; it must be the one that encoded the passages.
    corpus: the corpus file; None is where it lay when the index was built.
    mapped: memory-map the index (see `indexes.load`).
    probes, ef_search, rerank: search settings; None is what the manifest says. Reranking reads
      DIR/embeddings.
    passages: a store that is open already, shared between retrievers.

  Raises FileNotFoundError, MemoryError, or ValueError naming what the index was built with and what
  is here instead.
  """
  directory = pathlib.Path(directory)
  index, manifest = indexes.load(directory, mapped=mapped, probes=probes, ef_search=ef_search)
  manifests.check_encoder(directory, manifest["encoder"], encoder.manifest)
  if passages is None:
    passages = PassageStore(
      corpus or manifest["corpus"]["path"], offsets=directory.parent / "offsets.npy"
    )
  manifests.check_corpus(directory, manifest["corpus"], passages.manifest)
  rerank = manifest["index"]["rerank"] if rerank is None else rerank
  manifest["index"]["rerank"] = rerank
  vectors = directory.parent / "embeddings"
  if rerank and not (vectors / "manifest.json").is_file():
    raise FileNotFoundError(
      f"{directory} scores {rerank} candidates again with the vectors in {vectors}, which is not "
      "there; copy that "
      "folder too, or run experiments/build_index.py with --rerank=0, which leaves the index as it "
      "is."
    )
  return Dense(
    index,
    passages,
    encoder,
    manifest,
    rerank=rerank,
    embeddings=Embeddings(vectors) if rerank else None,
  )
