"""Stores a part of the training state that never changes once, beside the checkpoints that need it.

    checkpoints/FIELD.HASH        its arrays; HASH is of their digests
    checkpoints/STEP              names HASH in its metadata, and holds the rest of the state

It is whole before the first checkpoint that names it is begun.
"""

from collections.abc import Mapping
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import orbax.checkpoint as ocp

from stratified.learner import processes
from stratified.runs import on_disk


def store(folder: pathlib.Path, field: str, tree: Any, digests: Mapping[str, str]) -> str:
  """Writes a field of the state unless it lies there; returns its hash.

  digests: those of the state's arrays, by dotted name.
  """
  found = hash_of(field, digests)
  path = _path(folder, field, found)
  if not path.exists():
    with ocp.StandardCheckpointer() as writer:
      writer.save(path, tree, force=True)  # renamed into its place when it is whole
  return found


def hash_of(field: str, digests: Mapping[str, str]) -> str:
  """The hash that names a field, from its digests among those of the state."""
  own = {name: text for name, text in digests.items() if name.startswith(f"{field}.")}
  return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]


def store_again(folder: pathlib.Path, damage: on_disk.Damaged, remade: Mapping[str, Any]) -> bool:
  """Replaces a damaged field by one made again, if it is the same bit for bit; says whether.

  remade: {field: a function that makes it}.
  """
  field = getattr(damage, "field", None)
  if field not in remade:
    return False
  tree = remade[field]()
  digests = on_disk.digests({field: tree})
  if hash_of(field, digests) != damage.found:
    return False
  path = _path(folder, field, damage.found)

  def move():
    aside = path.with_name(f"{path.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
      os.replace(path, aside)
    print(f"{path} is damaged ({on_disk.reason(damage)}); it is made again", flush=True)

  processes.first_then_all(move, f"damaged {path.name}")
  store(folder, field, tree, digests)
  return True


def shapes(folder: pathlib.Path, hashes: Mapping[str, str]) -> dict[str, str]:
  """on_disk.shapes of the fields that are stored there."""
  known = {}
  for field, found in hashes.items():
    with _reading(folder, field, found) as path, ocp.StandardCheckpointer() as reader:
      known |= on_disk.shapes({field: reader.metadata(path).item_metadata.tree})
  return known


def read(folder: pathlib.Path, hashes: Mapping[str, str], abstract: Any, metadata: Mapping) -> dict:
  """Reads {field: tree} and checks it.

  abstract: the state, or {field: tree}, of jax.ShapeDtypeStruct to restore into. metadata: the
    checkpoint's, with digests.
  """
  of = abstract if isinstance(abstract, Mapping) else abstract._asdict()
  fields = {}
  for field, found in hashes.items():
    with _reading(folder, field, found) as path, ocp.StandardCheckpointer() as reader:
      fields[field] = reader.restore(path, of[field])
      on_disk.check({field: fields[field]}, metadata, path)
  return fields


def without(state: Any, fields) -> Any:
  """The state with these fields None."""
  return state._replace(**dict.fromkeys(fields)) if fields else state


def _path(folder: pathlib.Path, field: str, found: str) -> pathlib.Path:
  return folder / f"{field}.{found}"


@contextlib.contextmanager
def _reading(folder: pathlib.Path, field: str, found: str):
  path = _path(folder, field, found)
  way_out = (
    "bring it back from a copy, or train in a new workdir; evaluate.py and export.py do without it"
  )
  try:
    with on_disk.reading(path, way_out):
      if not path.exists():
        raise FileNotFoundError("it is gone")
      yield path
  except on_disk.Damaged as error:
    error.field, error.found = field, found
    raise
