"""BM25 over passages held in memory: the embedded retriever, on the index of the `bm25s` library.

The index is bm25s's: every score is computed when it is built, and stored by term. Searching is
done here, because bm25s's own `retrieve` returns arbitrary passages of score 0 when too few match,
and breaks ties arbitrarily.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unicodedata

import numpy as np

from stratified.imports import unavailable
from stratified.progress import Progress
from stratified.retrieval.corpus import corpus_digest, Passage


def _import_bm25s():
  """Imports bm25s with jax out of its sight.

  bm25s runs a jax function when it is imported. That would claim the accelerator in a process that
  only retrieves, and start jax's backends before `jax.distributed.initialize`, which must come
  first.
  """
  with unavailable("jax"):
    import bm25s
  # It sets its logger to DEBUG; absl's handler would then print every step of the index's making.
  logging.getLogger("bm25s").setLevel(logging.WARNING)
  return bm25s


bm25s = _import_bm25s()

# Part of the name of a cached index: change it when tokenisation or scoring changes.
_FORMAT = 1
# Above this many passages an index takes seconds to build, so progress is shown.
_MANY_PASSAGES = 20_000
_ASCII_WORD = re.compile("[a-z0-9]+")
# Scripts written without spaces: each character is a word of its own, as in Lucene's standard
# analyser.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"

ENGLISH_STOP_WORDS = frozenset(
  "a an and are as at be but by for if in into is it no not of on or such that the their then "
  "there these "
  "they this to was will with".split()
)


def _strip_plural(word: str) -> str:
  """Harman's S stemmer (1991): queries -> query, names -> name, but focus and class stay."""
  if len(word) < 4 or not word.endswith("s") or word[-2] in "us":
    return word
  return word[:-3] + "y" if word.endswith("ies") and word[-4] not in "ea" else word[:-1]


STEMMERS: dict[str, Callable[[str], str] | None] = {"none": None, "plural": _strip_plural}


@functools.cache
def _word_pattern() -> re.Pattern:
  # \w leaves out combining vowel signs, which would break Hindi or Thai words at every vowel.
  marks = "".join(chr(c) for c in range(0x10000) if unicodedata.category(chr(c)) in ("Mn", "Mc"))
  return re.compile(f"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[^\\W_]|[{marks}])+")


def words(text: str) -> list[str]:
  """The words of a text in any script, in order, case folded, without accents (ć becomes c).

  Letters, digits and combining marks make words; everything else separates them. Chinese characters
  and Japanese kana are words by themselves. No word is left out.
  """
  if text.isascii():
    return _ASCII_WORD.findall(text.lower())
  bare = re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFKD", text.casefold()))
  return _word_pattern().findall(unicodedata.normalize("NFKC", bare))


class BM25:
  """Searches passages by BM25 (Lucene's variant) over title and text.

      score(q, d) = sum over distinct words w of q of
                    idf(w) * tf / (tf + k1 * (1 - b + b * len(d) / mean len))
      idf(w)      = log(1 + (N - df + 0.5) / (df + 0.5))

  tf counts w in d, df the passages that hold w, N all passages.

  The same query always gets the same passages: ties go to the passage that comes first in the
  corpus, and the order and repetition of a query's words make no difference. Several threads may
  search one object.
  """

  def __init__(
    self,
    passages: Sequence[Passage],
    *,
    k1: float = 1.2,
    b: float = 0.75,
    stop_words: frozenset[str] | Sequence[str] = (),
    stemmer: str = "none",
    cache_dir: str | os.PathLike | None = None,
  ):
    """Builds the index, or maps it from `cache_dir` where it was built before.

    Args:
      passages: what to search; at least one with a word in it.
      k1: how slowly repetitions of a word saturate, >= 0.
      b: how much long passages are held back, in [0, 1].
      stop_words: words that are not indexed. None by default: "will", "it" and "the" are also parts
        of names.
      stemmer: "none", or "plural" for English plurals.
      cache_dir: folder that keeps indexes, one subfolder for each content and setting; None keeps
        none.

    Raises:
      ValueError: a setting out of range, or nothing to index.
    """
    if stemmer not in STEMMERS:
      raise ValueError(f"stemmer {stemmer!r} is unknown; choose from {', '.join(STEMMERS)}.")
    if k1 < 0 or not 0 <= b <= 1:
      raise ValueError(
        f"BM25 with k1 = {k1}, b = {b}: k1 must be at least 0 and b must lie in [0, 1]."
      )
    self.passages = list(passages)
    self._stem = STEMMERS[stemmer]
    self._stop_words = frozenset(word for stop_word in stop_words for word in words(stop_word))
    settings = {"k1": k1, "b": b, "stop_words": sorted(self._stop_words), "stemmer": stemmer}
    self._settings = settings
    if cache_dir is None:
      index = self._build(k1, b)
    else:
      folder = pathlib.Path(cache_dir) / _index_name(self.passages, settings)
      if not folder.exists():
        _save(self._build(k1, b), folder)
      index = bm25s.BM25.load(folder, mmap=True)
    self._id_of_word = index.vocab_dict
    self._starts = index.scores["indptr"].tolist()
    self._scores, self._rows = index.scores["data"], index.scores["indices"]

  @functools.cached_property
  def manifest(self) -> dict:
    """Says what is searched and how: equal manifests find equal passages."""
    return {
      "kind": "bm25",
      "format": _FORMAT,
      "count": len(self.passages),
      "corpus": corpus_digest(self.passages),
      **self._settings,
    }

  def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    """Returns for each query at most `topk` passages, best first, their `score` set.

    Only passages that share a word with the query are returned; an empty query, or one without a
    known word, gets an empty list.
    """
    if isinstance(queries, str):
      raise TypeError(
        f"queries is the string {queries!r}; search takes a sequence of queries, [query]."
      )
    if topk < 1:
      raise ValueError(f"topk is {topk}; it must be at least 1.")
    return [self._search_one(query, topk) for query in queries]

  def _search_one(self, query: str, topk: int) -> list[Passage]:
    ids = sorted(
      {self._id_of_word[word] for word in self._terms(query) if word in self._id_of_word}
    )
    if not ids:
      return []
    score = np.zeros(len(self.passages), np.float32)
    for id in ids:
      start, end = self._starts[id], self._starts[id + 1]
      # a passage comes once among a word's rows
      score[self._rows[start:end]] += self._scores[start:end]
    best = _best(score, topk)
    return [self._hit(row, value) for row, value in zip(best.tolist(), score[best].tolist())]

  def _hit(self, row: int, score: float) -> Passage:
    passage = self.passages[row]
    return Passage(passage.id, passage.title, passage.text, score)

  def _terms(self, text: str) -> list[str]:
    terms = words(text)
    if self._stop_words:
      terms = [word for word in terms if word not in self._stop_words]
    return terms if self._stem is None else [self._stem(word) for word in terms]

  def _build(self, k1: float, b: float) -> "bm25s.BM25":
    many = len(self.passages) > _MANY_PASSAGES
    id_of_word, ids = {}, []
    with (
      Progress(len(self.passages), "BM25 passages read")
      if many
      else contextlib.nullcontext() as progress
    ):
      for passage in self.passages:
        ids.append(
          [id_of_word.setdefault(word, len(id_of_word)) for word in self._terms(passage.contents)]
        )
        if progress and (len(ids) % 1_000 == 0 or len(ids) == len(self.passages)):
          progress.update((len(ids) - 1) % 1_000 + 1)
    if not id_of_word:
      raise ValueError(
        f"BM25 got {len(ids)} passages without a word; it needs at least one word to index."
      )
    index = bm25s.BM25(k1=k1, b=b, method="lucene")
    index.index(
      (ids, id_of_word), create_empty_token=False, show_progress=many and sys.stderr.isatty()
    )
    return index


def _best(score: np.ndarray, topk: int) -> np.ndarray:
  """Rows of the `topk` highest positive scores, highest first, ties by row."""
  rows = np.flatnonzero(score)
  if len(rows) > topk:
    least = np.partition(score[rows], len(rows) - topk)[len(rows) - topk]
    rows = rows[score[rows] >= least]
  return rows[np.argsort(-score[rows], kind="stable")][:topk]


def _index_name(passages: Sequence[Passage], settings: dict) -> str:
  digest = hashlib.sha256(
    json.dumps({"format": _FORMAT, "bm25s": bm25s.__version__, **settings}).encode()
  )
  for passage in passages:
    contents = passage.contents.encode()
    # the length keeps two passages from running into each other
    digest.update(b"%d:" % len(contents))
    digest.update(contents)
  return f"bm25-{digest.hexdigest()[:24]}"


def _save(index: "bm25s.BM25", folder: pathlib.Path) -> None:
  """Writes the index aside and renames it into place, so that a half-written one is never read."""
  folder.parent.mkdir(parents=True, exist_ok=True)
  aside = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
  try:
    index.save(aside, show_progress=False)
    os.rename(aside, folder)
  except OSError:
    if not folder.exists():  # otherwise another process was first, with the same content
      raise
  finally:
    shutil.rmtree(aside, ignore_errors=True)
