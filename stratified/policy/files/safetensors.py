"""Opens safetensors files without reading them, and writes them one tensor at a time.

A file is the length of a header, the header (JSON: dtype, shape and place of each tensor), and the
bytes of each.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import itertools
import json
import math
import pathlib
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from stratified.files import settle

# safetensors' code of each dtype that is read, and of each that is written.
DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
CODES = {jnp.dtype(value).name: code for code, value in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Spec(NamedTuple):
  """A tensor to be written: its shape, and its dtype by name."""

  shape: tuple[int, ...]
  dtype: str

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def open_all(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
  """Maps tensor names to open files: model.safetensors, or the shards of its index.

  Raises FileNotFoundError where a file is missing, ValueError where one is damaged or lacks what
  the index says it has.
  """
  single, index = directory / SINGLE, directory / INDEX
  if single.is_file():
    return _open(single, stack)
  if not index.is_file():
    raise FileNotFoundError(
      f"{directory} holds neither {single.name} nor {index.name}; convert weights of "
      "another format with transformers' save_pretrained first"
    )
  files, named = {}, _weight_map(index)
  for name in sorted(set(named.values())):
    path = directory / name
    if not path.is_file():
      raise FileNotFoundError(
        f"{path} is in {index.name} and does not exist; copy or download it again"
      )
    files |= _open(path, stack)
  return files


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  try:
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    # A name is one of a file in this directory, never a way out of it.
    if all(
      isinstance(name, str) and pathlib.PurePath(name).name == name for name in named.values()
    ):
      return named
    problem = "a shard is no plain file name"
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    problem = f"{type(error).__name__}: {error}"
  raise ValueError(f"{index} is damaged or cut short ({problem}); copy or download it again")


def _open(path, stack) -> dict[str, Any]:
  try:
    file = stack.enter_context(safetensors.safe_open(path, framework="np"))
  except safetensors.SafetensorError as error:
    raise ValueError(
      f"{path} is damaged or cut short ({error}); copy or download it again"
    ) from error
  return dict.fromkeys(file.keys(), file)


def write_model(
  directory: pathlib.Path,
  specs: Mapping[str, Spec],
  tensors: Iterator[tuple[str, np.ndarray]],
  shard_bytes: int | None = None,
) -> None:
  """Writes tensors in the order of `specs`, to one file or to files of `shard_bytes` and an index.

  Replaces the files of an earlier model in that directory, only when all of the new ones are whole.
  """
  groups = _groups(specs, shard_bytes)
  many = len(groups) > 1
  names = (
    [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    if many
    else [SINGLE]
  )
  partial = [directory / f".{name}.partial" for name in names]
  try:
    for path, group in zip(partial, groups, strict=True):
      write(path, group, itertools.islice(tensors, len(group)))
    for path, name in zip(partial, names):
      settle(path, directory / name)
  finally:
    for path in partial:
      path.unlink(missing_ok=True)
  if many:
    named = {tensor: name for name, group in zip(names, groups) for tensor in group}
    text = json.dumps(
      {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": named,
      },
      indent=2,
    )
    (directory / INDEX).write_text(text + "\n", encoding="utf-8")
  else:
    (directory / INDEX).unlink(missing_ok=True)
  # an earlier model's, in another number of files
  for path in directory.glob("model*.safetensors"):
    if path.name not in names and re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", path.name):
      path.unlink()


def _groups(specs, shard_bytes) -> list[dict[str, Spec]]:
  groups: list[dict[str, Spec]] = [{}]
  for name, spec in specs.items():
    if (
      shard_bytes
      and groups[-1]
      and sum(s.nbytes for s in groups[-1].values()) + spec.nbytes > shard_bytes
    ):
      groups.append({})
    groups[-1][name] = spec
  return groups


def write(
  path: pathlib.Path, specs: Mapping[str, Spec], tensors: Iterator[tuple[str, np.ndarray]]
) -> None:
  """Writes one file; ValueError where a value is not finite in the dtype that it is written in."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, spec in specs.items():
    start, end = end, end + spec.nbytes
    header[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for name, value in tensors:
      if not np.isfinite(value).all():
        raise ValueError(
          f"{name} holds a value that is not finite in {value.dtype}; nothing was saved"
        )
      file.write(np.ascontiguousarray(value).view(np.uint8).data)


def check_dtypes(dtypes: Sequence[str]) -> None:
  for dtype in dtypes:
    if dtype not in CODES:
      raise ValueError(f"dtype={dtype!r} can't be saved; choose one of {', '.join(CODES)}")
