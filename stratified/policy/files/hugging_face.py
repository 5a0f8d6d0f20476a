"""Reads and writes Hugging Face model directories: config.json, and weights as a flat table.

    config = load_config(directory)
    params = load_params(
      directory, config, dtype="float32", sharding_of=lambda name: named(mesh, axes[name])
    )
    save(other_directory, config, params, dtype="bfloat16", tokenizer_files=directory)

A directory stores each layer apart, and a projection as [outputs, inputs]; the decoder stacks the
layers and keeps heads and head dimensions as axes of their own, [layers, inputs ..., outputs ...].
Which tensor is which weight stands in `weights.ROWS` and in the families' names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import functools
import gc
import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from stratified.policy import decoder
from stratified.policy.families import config_json
from stratified.policy.families import load_config as load_config  # for those who read weights
from stratified.policy.files import safetensors
from stratified.policy.files.safetensors import DTYPES
from stratified.policy.weights import ROWS, Weight

Path = str | os.PathLike

# What a tokenizer may consist of, and the generation settings that belong to it.
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "vocab.json",
  "merges.txt",
  "tokenizer.model",
  "generation_config.json",
)

# Keys of config.json that the decoder does not use and an inference server does.
KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def load_params(
  directory: Path,
  config: decoder.DecoderConfig,
  *,
  dtype=None,
  sharding_of: Callable[[str], jax.sharding.Sharding | None] | None = None,
) -> decoder.Params:
  """Reads the weights as `decoder.weights(config)` names and shapes them.

  dtype: of the result, of all or by the decoder's name; None keeps the directory's (a stack whose
    layers differ takes the wider).
  sharding_of: the sharding to put each named weight on; None is the default device.

  Reads only what this process's devices hold of a weight, one device's part after the other: the
  host never holds more than one such part beside the result.

  Raises FileNotFoundError where a file is missing; ValueError where one is truncated, or a tensor
  is missing, has another shape than `config` says, is quantised, or has no place in the decoder.
  All of that comes before any weight is read.
  """
  directory = pathlib.Path(directory)
  with contextlib.ExitStack() as stack:
    files = safetensors.open_all(directory, stack)
    _check_tensors(directory, config, files)
    params = {}
    for name, weight in decoder.weights(config).items():
      sharding = sharding_of(name) if sharding_of else None
      kind = dtype[name] if isinstance(dtype, Mapping) else dtype
      read = functools.partial(_read, files, weight, kind)
      params[name] = _placed(read, weight.shape, sharding)
    return params


def check(directory: Path, config: decoder.DecoderConfig) -> None:
  """Raises what `load_params` would before it reads a weight."""
  with contextlib.ExitStack() as stack:
    _check_tensors(directory, config, safetensors.open_all(pathlib.Path(directory), stack))


def stored_dtypes(directory: Path) -> dict[str, str]:
  """Maps a directory's tensor names to their dtypes' names, for `save` to write the same."""
  with contextlib.ExitStack() as stack:
    files = safetensors.open_all(pathlib.Path(directory), stack)
    codes = {stored: file.get_slice(stored).get_dtype() for stored, file in files.items()}
    return {
      stored: jnp.dtype(DTYPES[code]).name for stored, code in codes.items() if code in DTYPES
    }


def _tensors_of(config) -> Iterator[tuple[str, str, tuple[int, ...]]]:
  """Yields (decoder's name, directory's name, shape there) of every tensor that `config` needs."""
  for name, weight in decoder.weights(config).items():
    for _, stored in _parts(weight):
      yield name, stored, weight.stored_shape


def _parts(weight: Weight) -> Iterator[tuple[Any, str]]:
  """(index into the stacked weight, the directory's name) of each tensor that makes it up."""
  if not weight.stacked:
    return iter([(..., weight.stored)])
  return ((n, weight.stored.format(n=n)) for n in range(weight.shape[0]))


def _check_tensors(directory, config, files) -> None:
  expected = {stored: (name, shape) for name, stored, shape in _tensors_of(config)}
  for stored, (name, shape) in expected.items():
    if stored not in files:
      raise ValueError(
        f"{directory} has no tensor {stored}, the decoder's {name!r}; its config.json and its "
        "weights don't belong together, or a file is missing"
      )
    found = files[stored].get_slice(stored)
    if tuple(found.get_shape()) != shape:
      raise ValueError(
        f"{stored} in {directory} has shape {found.get_shape()}, its config.json says "
        f"{list(shape)}; they don't belong together"
      )
    if found.get_dtype() not in DTYPES:
      raise ValueError(
        f"{stored} in {directory} is stored as {found.get_dtype()}; only "
        f"{', '.join(DTYPES)} are read, convert it first"
      )
  # A tied model may store its embedding twice; old files hold the rotary frequencies, which are
  # computed.
  extra = [
    name for name in sorted(set(files) - set(expected)) if not name.endswith("rotary_emb.inv_freq")
  ]
  output = ROWS["head"].stored
  if config.tied_embeddings and output in extra:
    extra.remove(output)
    if not _equal(files, output, decoder.weights(config)["embed"].stored):
      raise ValueError(
        f"{directory} has an {output} other than its embedding, though its config.json "
        "says tie_word_embeddings=true; set it to false, or remove the tensor"
      )
  if extra:
    raise ValueError(
      f"{directory} has {len(extra)} tensors without a place in this decoder, {extra[0]} the "
      "first; its config.json and its weights don't belong together"
    )


def _equal(files, first, second) -> bool:
  """Whether two stored matrices are equal, compared a few rows at a time."""
  a, b = (files[name].get_slice(name) for name in (first, second))
  if a.get_shape() != b.get_shape():
    return False
  rows, columns = a.get_shape()
  step = max(1, 2**20 // columns)
  cuts = (slice(start, min(start + step, rows)) for start in range(0, rows, step))
  return all(np.array_equal(a[cut], b[cut]) for cut in cuts)


def _read(files, weight: Weight, dtype, region: tuple[slice, ...]) -> np.ndarray:
  """Reads a rectangle of a stacked weight, of each stored tensor only the block with its part."""
  parts = [stored for _, stored in _parts(weight)]
  if dtype is None:
    dtype = jnp.result_type(
      *{DTYPES[files[stored].get_slice(stored).get_dtype()] for stored in parts}
    )
  if not weight.stacked:
    return _read_part(files, weight, parts[0], region).astype(dtype, copy=False)
  layers, region = parts[region[0]], region[1:]
  host = np.empty((len(layers), *(cut.stop - cut.start for cut in region)), dtype)
  for row, stored in zip(host, layers):
    row[...] = _read_part(files, weight, stored, region)
  return host


def _read_part(files, weight: Weight, stored: str, region) -> np.ndarray:
  """Reads a rectangle of one stored tensor, in the decoder's order of axes.

  The directory flattens a projection's outputs into rows, its inputs into columns, and a bias into
  a vector: a cut of the first of the axes flattened together is a cut there, one of the others is
  made in what was read.
  """
  shape, inputs = weight.part_shape, weight.inputs
  flat = len(weight.stored_shape) < len(shape)
  leading = {0, inputs} if inputs else {0} if flat else set(range(len(shape)))
  sizes = [
    cut.stop - cut.start if axis in leading else size
    for axis, (size, cut) in enumerate(zip(shape, region))
  ]
  cuts = []
  for axis in sorted(leading):
    last = min((other for other in leading if other > axis), default=len(shape))
    stride = math.prod(shape[axis + 1 : last])
    cuts.append(slice(region[axis].start * stride, region[axis].stop * stride))
  tensor = files[stored].get_slice(stored)
  block = tensor[tuple(cuts[::-1])].T if inputs else tensor[tuple(cuts)]
  if not np.isfinite(block).all():
    raise ValueError(
      f"{stored} holds values that are not finite; the file is damaged or training had diverged: "
      "get another copy"
    )
  return block.reshape(sizes)[
    tuple(slice(None) if axis in leading else cut for axis, cut in enumerate(region))
  ]


def _placed(read: Callable[[tuple[slice, ...]], np.ndarray], shape, sharding) -> jax.Array:
  """Makes an array of what `read` gives for this process's devices; reads a shared part once."""
  bounded = lambda index: tuple(
    slice(*cut.indices(size)[:2]) for cut, size in zip(index, shape, strict=True)
  )
  if sharding is None:
    return _on_device(read(bounded([slice(None)] * len(shape))), None)
  holders: dict[tuple, list] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    holders.setdefault(tuple((cut.start, cut.stop) for cut in bounded(index)), []).append(device)
  shards = []
  for bounds, devices in holders.items():
    host = read(tuple(slice(*bound) for bound in bounds))
    shards += [_on_device(host, device) for device in devices]
    del host
  return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _on_device(host, device) -> jax.Array:
  # a transfer under way would keep its buffer on the host
  value = jax.block_until_ready(jax.device_put(host, device))
  del host
  gc.collect(0)  # jax lets go of a buffer it has copied at Python's next collection, however small
  return value


def save(
  directory: Path,
  config: decoder.DecoderConfig,
  params: decoder.Params,
  *,
  dtype: str | Mapping[str, str] = "float32",
  tokenizer_files: Path | Iterable[Path] | None = None,
  extra: Mapping[str, Any] | None = None,
  shard_bytes: int | None = None,
) -> None:
  """Writes config.json and model.safetensors, which transformers, vLLM and SGLang load.

  dtype: float32, bfloat16 or float16, of all or by the tensor's name there (`stored_dtypes`); a
    value that it can't hold, or that is not finite, is refused.
  tokenizer_files: files to copy, or the model directory the weights came from: then its tokenizer,
    chat template, generation settings, token ids and longest position are taken over.
  extra: further keys of config.json (eos_token_id, max_position_embeddings, ...).
  shard_bytes: the most that a file holds; the weights are then several files with an index. None
    makes one file.

  Weights are written one layer at a time and appear under their names when they are whole.
  With several processes every one must call; the first writes.
  """
  directory = pathlib.Path(directory)
  stored = {name: shape for _, name, shape in _tensors_of(config)}
  dtypes = (
    dict.fromkeys(stored, dtype)
    if isinstance(dtype, str)
    else {name: dtype.get(name, "float32") for name in stored}
  )
  safetensors.check_dtypes(sorted(set(dtypes.values())))
  table = decoder.weights(config)
  wrong = sorted(set(table) ^ set(params)) or [
    name for name, value in params.items() if value.shape != table[name].shape
  ]
  if wrong:
    raise ValueError(
      f"params don't belong to this config: {', '.join(wrong)} missing, unknown or of another "
      "shape; merge adapters first"
    )
  main = max(dtypes.values(), key=list(dtypes.values()).count)
  raw = config_json(config, main)
  files, kept = _tokenizer(tokenizer_files)
  tensors = stored_tensors(config, params, dtypes)
  if jax.process_index():
    for _ in tensors:
      pass
    return
  directory.mkdir(parents=True, exist_ok=True)
  specs = {name: safetensors.Spec(shape, dtypes[name]) for name, shape in stored.items()}
  safetensors.write_model(directory, specs, tensors, shard_bytes)
  for file in files:
    if file.resolve().parent != directory.resolve():
      shutil.copy(file, directory / file.name)
  text = json.dumps(raw | kept | dict(extra or {}), indent=2)
  (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer(files) -> tuple[list[pathlib.Path], dict[str, Any]]:
  """The files to copy and the keys of config.json to keep."""
  if files is None:
    return [], {}
  if not isinstance(files, (str, os.PathLike)):
    return [pathlib.Path(file) for file in files], {}
  source = pathlib.Path(files)
  found = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
  if not found:
    raise FileNotFoundError(
      f"{source} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}"
    )
  config = source / "config.json"
  raw = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
  return found, {key: raw[key] for key in KEPT_KEYS if raw.get(key) is not None}


def stored_tensors(
  config: decoder.DecoderConfig, params: decoder.Params, dtype: str | Mapping[str, str] = "float32"
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, tensor on the host) in the directory's layout, of anything shaped like params."""
  for name, weight in decoder.weights(config).items():
    shape = weight.stored_shape
    for index, stored in _parts(weight):
      # A slice or a copy: an array on a device keeps what was fetched from it on the host while it
      # lives.
      value = on_host(jnp.copy(params[name]) if index is ... else params[name][index])
      value = value.reshape(shape[::-1]).T if weight.inputs else value.reshape(shape)
      with np.errstate(over="ignore"):
        yield (
          stored,
          np.ascontiguousarray(value.astype(dtype if isinstance(dtype, str) else dtype[stored])),
        )


def on_host(value) -> np.ndarray:
  """Brings a whole array to this host, wherever its parts lie; every process must ask."""
  if getattr(value, "is_fully_addressable", True):
    return np.asarray(value)
  return multihost_utils.process_allgather(value, tiled=True)
