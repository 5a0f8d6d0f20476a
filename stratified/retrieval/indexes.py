"""faiss indexes over the vectors of a corpus: built in resumable steps, opened memory-mapped.

    build(IndexConfig("hnsw"), Embeddings("DIR/embeddings"), "DIR/hnsw")
    index = load("DIR/hnsw")

The metric is the inner product, which for unit vectors is the cosine. `memory` says what each kind
takes.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import logging
import os
import pathlib
import time

# It reports which builds of itself it tries; absl's handler would print that at every start.
logging.getLogger("faiss").setLevel(logging.WARNING)
import faiss  # noqa: E402
import numpy as np

from stratified import files
from stratified.progress import Progress
from stratified.retrieval import manifest as manifests
from stratified.retrieval import memory
from stratified.retrieval.embeddings import Embeddings
from stratified.retrieval.memory import IndexConfig

Path = str | os.PathLike

_QUANTIZERS = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
CLASSES = {
  "flat": faiss.IndexFlatCodes,
  "hnsw": faiss.IndexHNSW,
  "ivf_pq": faiss.IndexIVFPQ,
  "ivf_sq": faiss.IndexIVF,
}
FILE = "index.faiss"


def make(config: IndexConfig, count: int, dimension: int) -> faiss.Index:
  """An empty index of the kind; `count` is how many vectors it will get."""
  c, ip = config.settled(count, dimension), faiss.METRIC_INNER_PRODUCT
  plain = c.storage == "float32"
  if c.kind == "flat":
    return (
      faiss.IndexFlatIP(dimension)
      if plain
      else faiss.IndexScalarQuantizer(dimension, _QUANTIZERS[c.storage], ip)
    )
  if c.kind == "hnsw":
    index = (
      faiss.IndexHNSWFlat(dimension, c.links, ip)
      if plain
      else faiss.IndexHNSWSQ(dimension, _QUANTIZERS[c.storage], c.links, ip)
    )
    index.hnsw.efConstruction = c.ef_construction
    return index
  cells = faiss.IndexFlatIP(dimension)
  if c.kind == "ivf_pq":
    index = faiss.IndexIVFPQ(cells, dimension, c.lists, c.code_bytes, 8, ip)
  elif plain:
    index = faiss.IndexIVFFlat(cells, dimension, c.lists, ip)
  else:
    index = faiss.IndexIVFScalarQuantizer(cells, dimension, c.lists, _QUANTIZERS[c.storage], ip)
  index.cp.spherical = True  # cell centres of unit length, as the vectors are
  return index


def train(index: faiss.Index, config: IndexConfig, embeddings: Embeddings) -> None:
  """Fits cells and codes to a sample drawn by a fixed seed; nothing to do for an exact index."""
  if index.is_trained:
    return
  c = config.settled(len(embeddings), embeddings.dimension)
  size = c.training_vectors or min(len(embeddings), 100_000)
  rows = np.sort(np.random.default_rng(0).choice(len(embeddings), size, replace=False))
  index.train(embeddings.take(rows))


def build(
  config: IndexConfig,
  embeddings: Embeddings,
  directory: Path,
  *,
  save_every_s: float = 600.0,
  free: int | None = None,
) -> pathlib.Path:
  """Builds the index of all vectors in `directory`, or goes on where such a build stopped.

  Saves after training, then every `save_every_s` seconds. Returns the index's path. Raises
  MemoryError, before any work, where the index would not fit into free memory (`free` bytes; None
  asks the system); ValueError where `directory` holds an index of other vectors or settings.
  """
  directory = pathlib.Path(directory)
  count, dimension = len(embeddings), embeddings.dimension
  path, partial = directory / FILE, directory / f"{FILE}.partial"
  manifest = _manifest(config.settled(count, dimension), embeddings)
  if _is_built(directory, manifest):
    return path
  memory.require(
    config, count, dimension, memory.build_bytes(config, count, dimension), "building", free
  )
  directory.mkdir(parents=True, exist_ok=True)
  index = _resume(partial, manifest)
  if index is None:
    index = make(config, count, dimension)
    train(index, config, embeddings)
    manifests.write(directory / "partial.json", manifest)
    _save(index, partial)
  add(index, config, embeddings, lambda: _save(index, partial), save_every_s)
  if index.ntotal != count:
    raise ValueError(
      f"{partial} holds {index.ntotal:,} vectors of {count:,}; delete {directory} and build it "
      "again."
    )
  _save(index, path)
  manifests.write(
    directory / "manifest.json",
    manifest | {"index": manifest["index"] | {"bytes": path.stat().st_size}},
  )
  for left in (partial, directory / "partial.json"):
    left.unlink(missing_ok=True)
  return path


def _manifest(settled: IndexConfig, embeddings: Embeddings) -> dict:
  kept = ("encoder", "corpus", "count", "dimension")
  return {name: embeddings.manifest[name] for name in kept} | {
    "metric": "inner_product",
    "index": dataclasses.asdict(settled),
    "faiss": faiss.__version__,
  }


# Settings of searching, which a built index may change.
_SEARCHING = ("ef_search", "probes", "rerank", "bytes")


def _refuse_other(path, there: dict, wanted: dict) -> None:
  manifests.check_encoder(path, there["encoder"], wanted["encoder"], vectors=True)
  manifests.check_corpus(path, there["corpus"], wanted["corpus"])
  for name, value in wanted["index"].items():
    if name not in _SEARCHING and there.get("index", {}).get(name) != value:
      raise ValueError(
        f"{path} was built with {name}={there.get('index', {}).get(name)!r}, not {value!r}; choose "
        "another "
        "folder, or delete this one."
      )


def _is_built(directory, manifest) -> bool:
  path = directory / "manifest.json"
  if not path.is_file() or not (directory / FILE).is_file():
    return False
  there = manifests.read(path)
  _refuse_other(path, there, manifest)
  if there["index"] != manifest["index"] | {"bytes": there["index"].get("bytes")}:
    manifests.write(
      path, manifest | {"index": manifest["index"] | {"bytes": there["index"].get("bytes")}}
    )
  return True


def _resume(partial, manifest) -> faiss.Index | None:
  path = partial.with_name("partial.json")
  if not path.is_file() or not partial.is_file():
    return None
  _refuse_other(path, manifests.read(path), manifest)
  return _read(partial)


def _save(index, path: pathlib.Path) -> None:
  aside = path.with_name(f".{path.name}.aside")
  try:
    faiss.write_index(index, str(aside))
    files.settle(aside, path)
  except RuntimeError as error:
    raise OSError(
      f"{path} could not be written ({_first_line(error)}); is the disk full?"
    ) from error
  finally:
    aside.unlink(missing_ok=True)


def add(
  index: faiss.Index,
  config: IndexConfig,
  embeddings: Embeddings,
  save: Callable[[], None],
  save_every_s: float,
) -> None:
  """Adds the vectors that `index` lacks, and calls `save` every `save_every_s` seconds."""
  count = len(embeddings)
  _reserve(index, config, count)
  chunk = max(1, memory.CHUNK_BYTES // (4 * embeddings.dimension))
  if config.kind == "hnsw":
    chunk = min(chunk, 10_000)  # slow to add: so many take seconds
  saved_at = time.monotonic()
  many = count > 100_000
  shown = (
    Progress(count, "vectors indexed", done=index.ntotal) if many else contextlib.nullcontext()
  )
  with shown as progress:
    for start in range(index.ntotal, count, chunk):
      values = embeddings.read(start, min(count, start + chunk))
      index.add(values)
      if progress:
        progress.update(len(values))
      if time.monotonic() - saved_at > save_every_s:
        save()
        saved_at = time.monotonic()


def _reserve(index, config, count) -> None:
  """Reserves memory for all codes: growing by doubling would hold them twice for a while."""
  codes = {"flat": lambda: index, "hnsw": lambda: faiss.downcast_index(index.storage)}.get(
    config.kind
  )
  if codes is not None and isinstance(codes(), faiss.IndexFlatCodes):
    vector, used = codes().codes, codes().codes.size()
    vector.resize(count * codes().code_size)
    vector.resize(used)


def _read(path, flags: int = 0) -> faiss.Index:
  try:
    return faiss.read_index(str(path), flags)
  except RuntimeError as error:
    raise ValueError(
      f"{path} is damaged or cut short ({_first_line(error)}); build the index again."
    ) from error


def _first_line(error) -> str:
  return (str(error).splitlines() or [""])[0][:200]


def load(
  directory: Path,
  *,
  mapped: bool = True,
  probes: int | None = None,
  ef_search: int | None = None,
  free: int | None = None,
) -> tuple[faiss.Index, dict]:
  """Opens a built index; returns it and its manifest.

  Args:
    mapped: leave the index on disk and map it into memory, so that several processes share it and
      it is ready at once; False reads it.
    probes, ef_search: how thoroughly ivf_* and hnsw search; None is what the manifest says.
    free: bytes that may be spent; None asks the system.

  Raises FileNotFoundError, ValueError for a damaged index or one that disagrees with its manifest,
  MemoryError where what searching touches would not fit into free memory.
  """
  directory = pathlib.Path(directory)
  manifest = manifests.read(directory / "manifest.json")
  count, dimension = manifest["count"], manifest["dimension"]
  names = {field.name for field in dataclasses.fields(IndexConfig)}
  try:
    config = IndexConfig(
      **{"kind": manifest["index"]["kind"]}
      | {name: value for name, value in manifest["index"].items() if name in names}
    )
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{directory / 'manifest.json'} does not describe an index ({error}); build it again."
    ) from error
  changes = {"probes": probes, "ef_search": ef_search}
  config = dataclasses.replace(
    config, **{name: value for name, value in changes.items() if value is not None}
  )
  config = config.settled(count, dimension)
  path = directory / FILE
  if not path.is_file():
    raise FileNotFoundError(
      f"{path} does not exist; build the index with experiments/build_index.py."
    )
  needed = (memory.touched_bytes if mapped else memory.index_bytes)(config, count, dimension)
  memory.require(config, count, dimension, needed, "searching", free)
  index = _read(path, faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY if mapped else 0)
  if not isinstance(index, CLASSES[config.kind]) or index.metric_type != faiss.METRIC_INNER_PRODUCT:
    raise ValueError(
      f"{path} holds a {type(index).__name__} of another kind or metric than {config.kind} by "
      "inner product, "
      "which its manifest says; build the index again."
    )
  if (index.ntotal, index.d) != (count, dimension):
    raise ValueError(
      f"{path} holds {index.ntotal:,} vectors of {index.d}, its manifest says {count:,} of "
      f"{dimension}; "
      "build the index again."
    )
  set_search(index, config)
  return index, manifest | {"index": manifest["index"] | dataclasses.asdict(config)}


def set_search(index: faiss.Index, config: IndexConfig) -> None:
  if config.kind == "hnsw":
    index.hnsw.efSearch = config.ef_search
  elif config.kind.startswith("ivf"):
    index.nprobe = config.probes
