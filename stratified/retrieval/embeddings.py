"""Vectors of a corpus on disk: float16 shards as .npy files, memory-mapped when read.

    DIR/embeddings/manifest.json      encoder, corpus, count, dimension, shard_size
    DIR/embeddings/shard_00000.npy    float16 [shard_size, dimension]; the last one may be shorter

A unit vector's components lie within [-1, 1], where float16 is exact to 2^-12 of the component or
better: inner products move by less than 1e-3.
"""

from collections.abc import Callable, Iterator, Sequence
import os
import pathlib

import numpy as np

from stratified import files
from stratified.progress import Progress
from stratified.retrieval import manifest as manifests
from stratified.retrieval.corpus import Passage

Path = str | os.PathLike


class Embeddings:
  """The vectors of a corpus, [count, dimension] by row; all shards must be there."""

  def __init__(self, directory: Path):
    """Raises FileNotFoundError for a manifest or shard that is missing or not whole."""
    self.directory = pathlib.Path(directory)
    self.manifest = manifests.read(self.directory / "manifest.json")
    self.count, self.dimension = self.manifest["count"], self.manifest["dimension"]
    self._size = self.manifest["shard_size"]
    self._shards = []
    for number, rows in enumerate(shard_rows(self.count, self._size)):
      shard = _open_shard(shard_path(self.directory, number), len(rows), self.dimension)
      if shard is None:
        raise FileNotFoundError(
          f"{shard_path(self.directory, number)} is missing or cut short; run "
          "experiments/build_index.py again, which makes what is missing."
        )
      self._shards.append(shard)

  def __len__(self) -> int:
    return self.count

  def read(self, start: int, stop: int) -> np.ndarray:
    """float32 [stop - start, dimension], normalised again after the rounding to float16."""
    return self.take(np.arange(start, stop))

  def take(self, rows: np.ndarray) -> np.ndarray:
    """float32 [len(rows), dimension] of any rows, in their order."""
    rows = np.asarray(rows, np.int64)
    values = np.empty((len(rows), self.dimension), np.float32)
    shard_of = rows // self._size
    for number in np.unique(shard_of).tolist():
      here = np.flatnonzero(shard_of == number)
      values[here] = self._shards[number][rows[here] - number * self._size]
    return unit(values)


def unit(values: np.ndarray) -> np.ndarray:
  """Rows divided by their length; a row of zeros stays as it is."""
  return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)


def shard_rows(count: int, size: int) -> list[range]:
  return [range(start, min(count, start + size)) for start in range(0, count, size)]


def shard_path(directory: Path, number: int) -> pathlib.Path:
  return pathlib.Path(directory) / f"shard_{number:05d}.npy"


def _open_shard(path: pathlib.Path, count: int, dimension: int) -> np.ndarray | None:
  """The shard, memory-mapped; None where it is missing or not whole."""
  try:
    shard = np.load(path, mmap_mode="r", allow_pickle=False)
  except (OSError, ValueError, EOFError):
    return None
  return shard if shard.shape == (count, dimension) and shard.dtype == np.float16 else None


def encode_corpus(
  directory: Path,
  passages: Sequence[Passage],
  encode: Callable[[list[str]], np.ndarray],
  dimension: int,
  *,
  encoder: dict,
  corpus: dict,
  shard_size: int = 8192,
  part: tuple[int, int] = (0, 1),
) -> None:
  """Encodes the passages' contents shard by shard; shards that are there are not made again.

  Args:
    directory: where the shards and their manifest go.
    encode: texts -> unit vectors, the encoder's way with passages.
    encoder, corpus: their manifests, kept; another encoder or corpus than the directory's is
      refused.
    part: (i, n) makes only every n-th shard from the i-th on, so that n machines share the work.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  shard_size = _settle_manifest(directory / "manifest.json", dimension, encoder, corpus, shard_size)
  todo = list(_todo(directory, len(passages), dimension, shard_size, part))
  total = sum(
    len(rows)
    for _, rows in list(enumerate(shard_rows(len(passages), shard_size)))[part[0] :: part[1]]
  )
  done = total - sum(len(rows) for _, rows in todo)
  with Progress(total, "passages encoded", done=done) as progress:
    for number, rows in todo:
      pieces = []
      # pieces, so that progress shows within a shard
      for start in range(rows.start, rows.stop, 1024):
        texts = [passages[row].contents for row in range(start, min(start + 1024, rows.stop))]
        pieces.append(encode(texts).astype(np.float16))
        progress.update(len(texts))
      _save_shard(shard_path(directory, number), np.concatenate(pieces))


def _settle_manifest(path, dimension, encoder, corpus, shard_size) -> int:
  """Writes the manifest, or checks the one that is there; returns the size of its shards."""
  if path.is_file():
    there = manifests.read(path)
    manifests.check_encoder(path, there["encoder"], encoder, vectors=True)
    manifests.check_corpus(path, there["corpus"], corpus)
    return there["shard_size"]
  manifests.write(
    path,
    dict(
      encoder=encoder,
      corpus=corpus,
      count=corpus["count"],
      dimension=dimension,
      dtype="float16",
      shard_size=shard_size,
    ),
  )
  return shard_size


def _todo(directory, count, dimension, size, part) -> Iterator[tuple[int, range]]:
  for number, rows in enumerate(shard_rows(count, size)):
    if (
      number % part[1] == part[0]
      and _open_shard(shard_path(directory, number), len(rows), dimension) is None
    ):
      yield number, rows


def _save_shard(path: pathlib.Path, values: np.ndarray) -> None:
  partial = path.with_name(f".{path.name}.partial.npy")
  np.save(partial, values, allow_pickle=False)
  files.settle(partial, path)
