"""Keeps what an index was made from as JSON beside it, checked before the index answers anything.

    {"format": 1, "encoder": {...}, "corpus": {...}, "count": 59479, "dimension": 384,
     "metric": "inner_product", "index": {"kind": "hnsw", ...}}

`encoder` is the encoder's own manifest (name, SHA-256, pooling, prefixes, longest text), `corpus`
that of the passage store (count, digest, bytes, SHA-256). An index of other vectors than the
query's gives answers that look right and are not.
"""

import os
import pathlib
from typing import Any

from stratified import files

FORMAT = 1
# What must agree between the encoder of the passages and that of the queries; and for vectors of
# one index.
_SPACE = ("sha256", "pooling", "normalized", "prefixes")
_VECTORS = (*_SPACE, "max_length", "dtype")


def write(path: str | os.PathLike, value: dict[str, Any]) -> None:
  """Writes a manifest so that it is whole or absent."""
  files.write_json(path, {"format": FORMAT, **value}, ensure_ascii=False)


def read(path: str | os.PathLike) -> dict[str, Any]:
  """Reads a manifest.

  Raises FileNotFoundError where there is none, ValueError where it is damaged or of another format.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f"{path} does not exist; build the index with experiments/build_index.py, or name its folder."
    )
  try:
    value = files.parse(path.read_text(encoding="utf-8"))
    format_, found = (
      value["format"],
      {name: type(value[name]) for name in ("encoder", "corpus", "count", "dimension")},
    )
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f"{path} is no manifest of an index ({error!r}); build the index again."
    ) from error
  if format_ != FORMAT:
    raise ValueError(
      f"{path} has format {format_}, this version reads {FORMAT}; build the index again."
    )
  if found != {"encoder": dict, "corpus": dict, "count": int, "dimension": int}:
    raise ValueError(
      f"{path} is damaged: its fields have other types than a manifest's; build the index again."
    )
  return value


def check_encoder(
  path: str | os.PathLike, built: dict, now: dict, *, vectors: bool = False
) -> None:
  """Refuses encoder `now` where `built` encoded the passages; `vectors`: to add more of them."""
  for name in _VECTORS if vectors else _SPACE:
    if built.get(name) != now.get(name):
      raise ValueError(
        f"{path} was built with encoder {built.get('name')!r}, {name} {built.get(name)!r}, but the "
        "encoder here is "
        f"{now.get('name')!r}, {name} {now.get(name)!r}; use the one it was built with, or build "
        "another index."
      )


def check_corpus(path: str | os.PathLike, built: dict, now: dict) -> None:
  """Refuses a corpus other than the one that was indexed."""
  for name in ("count", "digest", "bytes", "sample_sha256", "sha256"):
    if name in built and name in now and built[name] != now[name]:
      raise ValueError(
        f"{path} was built from corpus {built.get('path')!r}, {name} {built[name]!r}, but the "
        "corpus here is "
        f"{now.get('path')!r}, {name} {now[name]!r}; name the file it was built from, or build the "
        "index again."
      )
