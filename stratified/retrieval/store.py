"""Keeps a corpus on disk and reads passages by row when they are wanted.

    store = PassageStore("wiki18.jsonl", offsets="wiki18-offsets.npy")
    store[20_000_000].contents

Twenty-one million passages take 15 GB as text and several times that as Python objects; here they
take eight bytes each, memory-mapped. A .gz corpus can't be read from the middle: it is unpacked
into memory, so it should be small.
"""

from collections.abc import Callable, Sequence
import contextlib
import gzip
import hashlib
import os
import pathlib
import zlib

import numpy as np

from stratified import files
from stratified.progress import Progress
from stratified.retrieval.corpus import (
  corpus_digest,
  json_object,
  passage_from_record,
  RetrieverError,
)

Path = str | os.PathLike

_MOST_UNPACKED = 4 << 30
_MANY_BYTES = 100 << 20  # a corpus that takes seconds to scan, so progress is shown
_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16


class PassageStore(Sequence):
  """The passages of a JSON Lines corpus (form: `corpus.read_corpus`), by row from 0, on demand.

  Several threads may read one store.
  """

  def __init__(self, path: Path, *, offsets: Path | None = None):
    """Opens a corpus; finds and checks its lines once, then remembers them in `offsets` (.npy).

    Raises FileNotFoundError without the corpus; ValueError where a line is no passage, an id comes
    twice, the file holds none, or a .gz file is damaged or unpacks to more than 4 GiB.
    """
    self.path = pathlib.Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(
        f"the corpus {self.path} does not exist; name a JSON Lines file of passages."
      )
    self._read, self.num_bytes = _reader(self.path)
    sample = sample_digest(self._read, self.num_bytes)
    kept = None if offsets is None else pathlib.Path(offsets)
    found = _load_offsets(kept, self.num_bytes, sample)
    if found is None:
      found = _scan(self.path, self._read, self.num_bytes)
      if kept is not None:
        _save_offsets(kept, sample, *found)
        found = _load_offsets(kept, self.num_bytes, sample)
    digest, self._offsets = found
    self.manifest = {
      "path": str(self.path.resolve()),
      "count": len(self),
      "digest": digest,
      "bytes": self.num_bytes,
      "sample_sha256": sample,
    }

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, row):
    if isinstance(row, slice):
      return [self[at] for at in range(*row.indices(len(self)))]
    if not -len(self) <= row < len(self):
      raise IndexError(f"row {row} of a corpus of {len(self)} passages")
    row %= len(self)
    start, end = int(self._offsets[row]), int(self._offsets[row + 1])
    where = f"{self.path}, byte {start}"
    try:
      return passage_from_record(json_object(self._read(start, end), where), where)
    except (ValueError, OSError) as error:
      raise RetrieverError(
        f"{error} (the corpus was changed after it was opened; open it again)"
      ) from error

  def sha256(self) -> str:
    """SHA-256 of the whole (unpacked) corpus; `manifest` has that of a sample, which is fast."""
    digest = hashlib.sha256()
    for start in range(0, self.num_bytes, 1 << 24):
      digest.update(self._read(start, min(self.num_bytes, start + (1 << 24))))
    return digest.hexdigest()


def _reader(path: pathlib.Path) -> tuple[Callable[[int, int], bytes], int]:
  """(bytes of the range [start, end), number of bytes) of the unpacked corpus."""
  if path.suffix == ".gz":
    data = _unpacked(path)
    return lambda start, end: data[start:end], len(data)
  file = path.open("rb")  # kept open: a store that replaces it under the same name is another file

  def read(start, end):
    return os.pread(file.fileno(), end - start, start)

  return read, os.fstat(file.fileno()).st_size


def _unpacked(path: pathlib.Path) -> bytes:
  try:
    with gzip.open(path, "rb") as file:
      data = file.read(_MOST_UNPACKED + 1)
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise ValueError(f"{path}: the compressed file is damaged ({error}); get it again.") from error
  if len(data) > _MOST_UNPACKED:
    raise ValueError(
      f"{path} unpacks to more than {_MOST_UNPACKED >> 30} GiB; unpack it with gzip -d, so that "
      "passages "
      "can be read where they lie."
    )
  return data


def sample_digest(read: Callable[[int, int], bytes], num_bytes: int) -> str:
  """SHA-256 of the length and 256 even blocks of 64 KiB; of all of the file up to 16 MiB."""
  digest = hashlib.sha256(b"%d:" % num_bytes)
  if num_bytes <= _SAMPLES * _SAMPLE_BYTES:
    starts = range(0, num_bytes, _SAMPLE_BYTES)
  else:
    starts = [(num_bytes - _SAMPLE_BYTES) * at // (_SAMPLES - 1) for at in range(_SAMPLES)]
  for start in starts:
    digest.update(read(start, min(num_bytes, start + _SAMPLE_BYTES)))
  return digest.hexdigest()


def _scan(path, read, num_bytes) -> tuple[str, np.ndarray]:
  """Checks every line: (corpus.corpus_digest, starts and end of passages, uint64 [count + 1]).

  Blank lines belong to the passage in front of them, those at the very start are skipped.
  """
  starts, ids, end = [], [], 0

  def passages(progress):
    nonlocal end
    for line, (start, raw) in enumerate(_lines(read, num_bytes), start=1):
      end = start + len(raw)
      if not raw.isspace():
        passage = passage_from_record(
          json_object(raw, f"{path}, line {line}"), f"{path}, line {line}"
        )
        starts.append(start)
        ids.append(hashlib.blake2b(passage.id.encode(), digest_size=8).digest())
        yield passage
      if progress and end >> 20 > start >> 20:
        progress.update((end >> 20) - (start >> 20))

  many = num_bytes > _MANY_BYTES
  with (
    Progress(num_bytes >> 20, "MiB of corpus scanned")
    if many
    else contextlib.nullcontext() as progress
  ):
    digest = corpus_digest(passages(progress))
  if not starts:
    raise ValueError(f"{path} holds no passage; it must hold one JSON object a line.")
  _refuse_repeated_ids(path, ids)
  return digest, np.array([*starts, end], np.uint64)


def _lines(read, num_bytes):
  """(offset, bytes) of each line, newline included."""
  start, rest = 0, b""
  for at in range(0, num_bytes, 1 << 22):
    rest += read(at, min(num_bytes, at + (1 << 22)))
    *lines, rest = rest.split(b"\n")
    for line in lines:
      yield start, line + b"\n"
      start += len(line) + 1
  if rest:
    yield start, rest


def _refuse_repeated_ids(path, ids: list[bytes]) -> None:
  """Refuses ids of equal 8-byte hash: of 21 million ids two agree in one corpus of 80,000."""
  values = np.frombuffer(b"".join(ids), np.uint64)
  order = np.argsort(values, kind="stable")
  same = np.flatnonzero(values[order][1:] == values[order][:-1])
  if len(same):
    first, second = sorted(order[same[0] : same[0] + 2].tolist())
    raise ValueError(
      f"{path}: passages {first + 1:,} and {second + 1:,} have the same id; ids must be unique."
    )


def _save_offsets(path: pathlib.Path, sample: str, digest: str, offsets: np.ndarray) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.partial.npy")
  header = np.frombuffer(bytes.fromhex(sample + digest), np.uint64)  # four numbers and one
  np.save(partial, np.concatenate([header, offsets]), allow_pickle=False)
  files.settle(partial, path)


def _load_offsets(
  path: pathlib.Path | None, num_bytes: int, sample: str
) -> tuple[str, np.ndarray] | None:
  """Loads the remembered digest and offsets, memory-mapped; None without any of this corpus."""
  if path is None or not path.is_file():
    return None
  try:
    values = np.load(path, mmap_mode="r", allow_pickle=False)
  except (ValueError, OSError, EOFError):
    return None
  if (
    values.dtype != np.uint64
    or values.ndim != 1
    or len(values) < 7
    or values[:4].tobytes().hex() != sample
  ):
    return None
  return (values[4:5].tobytes().hex(), values[5:]) if int(values[-1]) <= num_bytes else None
