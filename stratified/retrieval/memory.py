"""Tells how much memory an index takes before it is spent, and how much is free."""

import dataclasses
import math
import os
import pathlib

KINDS = ("flat", "hnsw", "ivf_pq", "ivf_sq")
STORAGE_BYTES = {"float32": 4, "float16": 2, "int8": 1}
_PQ_BITS = 8
CHUNK_BYTES = 64 << 20  # vectors that are read, normalised and added at once, in float32
_MIN_TRAINING = 39  # vectors a cell: what faiss asks for before k-means


@dataclasses.dataclass(frozen=True)
class IndexConfig:
  """Which index, and its settings; 0 chooses by the size of the corpus.

  kind: "flat" (exact), "hnsw" (a graph; fast, largest), "ivf_pq" (cells, product-quantised
    residuals; smallest), "ivf_sq" (cells, scalar-quantised vectors).
  storage: how flat, hnsw and ivf_sq keep a component: "float32", "float16" or "int8" (8 bits
    between the extremes).
  links, ef_construction, ef_search: hnsw's neighbours of a node (twice that at the bottom), and how
    many candidates are held while building and searching.
  lists, probes: cells of ivf_*, and how many of them a query looks into. 0: the power of two
    nearest 4 sqrt(count); 256, or a 64th of the cells where that is more.
  code_bytes: bytes of a vector in ivf_pq, a divisor of the dimension; 0 is the one nearest
    dimension / 4.
  training_vectors: sample that cells and codes are fitted to; 0 is 64 a cell.
  rerank: candidates that are scored again with the float16 vectors on disk, for approximate codes;
    0 is none, -1 is 50 for ivf_pq and none for the others.

  Settings of other kinds are ignored.
  """

  kind: str = "flat"
  storage: str = "float16"
  links: int = 32
  ef_construction: int = 200
  ef_search: int = 128
  lists: int = 0
  probes: int = 0
  code_bytes: int = 0
  training_vectors: int = 0
  rerank: int = -1

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"index {self.kind!r} is unknown; choose one of {', '.join(KINDS)}.")
    if self.storage not in STORAGE_BYTES:
      raise ValueError(
        f"storage {self.storage!r} is unknown; choose one of {', '.join(STORAGE_BYTES)}."
      )
    for name in ("links", "ef_construction", "ef_search"):
      if getattr(self, name) < 2:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 2.")
    if self.rerank < -1:
      raise ValueError(f"rerank={self.rerank} must be at least 0, or -1 to choose by the kind.")
    for name in ("lists", "probes", "code_bytes", "training_vectors"):
      if getattr(self, name) < 0:
        raise ValueError(
          f"{name}={getattr(self, name)} must be at least 0; 0 chooses by the size of the corpus."
        )

  def settled(self, count: int, dimension: int) -> "IndexConfig":
    """Replaces every 0 that means "by the size of the corpus"; refuses what can't be fitted."""
    rerank = self.rerank if self.rerank >= 0 else 50 if self.kind == "ivf_pq" else 0
    if not self.kind.startswith("ivf"):
      return dataclasses.replace(self, rerank=rerank)
    lists = self.lists or min(
      2 ** round(math.log2(4 * math.sqrt(count))), max(1, count // _MIN_TRAINING)
    )
    if lists * _MIN_TRAINING > count and lists > 1:
      raise ValueError(
        f"lists={lists} needs at least {lists * _MIN_TRAINING:,} vectors to be fitted, the corpus "
        "has "
        f"{count:,}; choose fewer lists, or 0."
      )
    if self.kind == "ivf_pq" and count < _MIN_TRAINING * 2**_PQ_BITS:
      raise ValueError(
        f"ivf_pq needs at least {_MIN_TRAINING * 2**_PQ_BITS:,} vectors to fit its codes, the "
        "corpus has "
        f"{count:,}; choose flat, which is small and exact there."
      )
    code = self.code_bytes or min(
      (m for m in range(1, dimension + 1) if dimension % m == 0),
      key=lambda m: (abs(m - dimension / 4), m),
    )
    if dimension % code:
      raise ValueError(f"code_bytes={code} must divide the dimension {dimension}.")
    wanted = self.training_vectors or max(64 * lists, _MIN_TRAINING * 2**_PQ_BITS)
    if self.training_vectors and wanted < min(count, lists * _MIN_TRAINING):
      raise ValueError(
        f"training_vectors={wanted:,} is too few for {lists} lists; give at least "
        f"{lists * _MIN_TRAINING:,}, or 0."
      )
    return dataclasses.replace(
      self,
      lists=lists,
      probes=min(lists, self.probes or max(256, lists // 64)),
      code_bytes=code,
      training_vectors=min(count, wanted),
      rerank=rerank,
    )


def index_bytes(config: IndexConfig, count: int, dimension: int) -> int:
  """Bytes of a loaded index, from faiss's layout."""
  c = config.settled(count, dimension)
  stored = dimension * STORAGE_BYTES[c.storage]
  if c.kind == "flat":
    return count * stored
  if c.kind == "hnsw":
    # 4 bytes a link, 2 links at the bottom for each that upper layers have, of which a node meets 1
    # / (links - 1) on average; 12 bytes for its level and offset.
    return round(count * (stored + 8 * c.links + 4 * c.links / (c.links - 1) + 12))
  code = c.code_bytes if c.kind == "ivf_pq" else stored
  codebook = 4 * dimension * 2**_PQ_BITS if c.kind == "ivf_pq" else 0
  return count * (code + 8) + c.lists * dimension * 4 + codebook


def build_bytes(config: IndexConfig, count: int, dimension: int) -> int:
  """Peak bytes of building an index.

  That is the training sample twice (read, normalised), or the index with what grows by copying,
  whichever is more; and a chunk in its three forms (read, its squares, normalised).
  """
  c = config.settled(count, dimension)
  size, chunk = index_bytes(c, count, dimension), 3 * min(CHUNK_BYTES, 4 * count * dimension)
  if c.kind == "flat":
    return size + chunk
  if c.kind == "hnsw":  # lists of links double when they are full; vectors are reserved
    return size + round(count * 8 * c.links) + chunk
  return max(round(1.25 * size), 2 * c.training_vectors * dimension * 4) + chunk


def touched_bytes(config: IndexConfig, count: int, dimension: int) -> int:
  """Bytes that a memory-mapped index keeps in memory: all but cells that no query looks into."""
  c = config.settled(count, dimension)
  size = index_bytes(c, count, dimension)
  return size * c.probes // c.lists if c.kind.startswith("ivf") else size


def free_bytes() -> int | None:
  """Free bytes, page cache included, within the control group's limit; None where unknown."""
  found = []
  try:
    fields = dict(
      line.split(":", 1) for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
    )
    found.append(int(fields["MemAvailable"].split()[0]) * 1024)
  except (OSError, KeyError, ValueError):
    try:
      found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
      pass
  for limit, used in (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
  ):
    try:
      root = pathlib.Path("/sys/fs/cgroup")
      found.append(int((root / limit).read_text()) - int((root / used).read_text()))
    except (OSError, ValueError):  # no control group, or its limit is "max"
      pass
  return max(0, min(found)) if found else None


def require(
  config: IndexConfig, count: int, dimension: int, needed: int, what: str, free: int | None = None
) -> None:
  """Raises MemoryError where `needed` exceeds nine tenths of what is free; names what would fit."""
  free = free_bytes() if free is None else free
  if free is None or needed <= 0.9 * free:
    return
  smaller = [
    f"{kind} ({gigabytes(size)})"
    for kind, size in _smaller(config, count, dimension)
    if size <= 0.9 * free
  ]
  way_out = f"choose {' or '.join(smaller)}" if smaller else "use a machine with more memory"
  raise MemoryError(
    f"{what} a {config.kind} index of {count:,} vectors of {dimension} takes {gigabytes(needed)}, "
    "and "
    f"{gigabytes(free)} are free; {way_out}."
  )


def _smaller(config, count, dimension):
  options = {"ivf_sq with int8": IndexConfig("ivf_sq", "int8"), "ivf_pq": IndexConfig("ivf_pq")}
  for name, option in options.items():
    if option.kind != config.kind or option.storage != config.storage:
      try:
        yield name, build_bytes(option, count, dimension)
      except ValueError:  # too few vectors for that kind
        pass


def gigabytes(size: float) -> str:
  return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
