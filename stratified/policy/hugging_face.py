"""Hugging Face model directories in and out: config.json and safetensors weights <-> `decoder`'s flat table.

    config = load_config(directory)
    params = load_params(directory, config, dtype="float32", sharding_of=lambda name: named(mesh, axes[name]))
    save(other_directory, config, params, dtype="bfloat16", tokenizer_files=directory)

A directory stores each layer apart, and a projection as [outputs, inputs]; the decoder stacks the layers and
keeps heads and head dimensions as axes of their own, [layers, inputs ..., outputs ...].
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
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
import safetensors

from stratified.policy import decoder
from stratified.policy.hugging_face_config import config_json, load_config

# Decoder's name -> the directory's name ({n} is the layer), and how many of the decoder's leading axes (after
# `layers`) are a projection's inputs; 0: no projection, same order of axes on both sides.
NAMES = {
    "embed": ("model.embed_tokens.weight", 0),
    "attention_norm": ("model.layers.{n}.input_layernorm.weight", 0),
    "q": ("model.layers.{n}.self_attn.q_proj.weight", 1),
    "k": ("model.layers.{n}.self_attn.k_proj.weight", 1),
    "v": ("model.layers.{n}.self_attn.v_proj.weight", 1),
    "q_bias": ("model.layers.{n}.self_attn.q_proj.bias", 0),
    "k_bias": ("model.layers.{n}.self_attn.k_proj.bias", 0),
    "v_bias": ("model.layers.{n}.self_attn.v_proj.bias", 0),
    "q_norm": ("model.layers.{n}.self_attn.q_norm.weight", 0),
    "k_norm": ("model.layers.{n}.self_attn.k_norm.weight", 0),
    "o": ("model.layers.{n}.self_attn.o_proj.weight", 2),
    "mlp_norm": ("model.layers.{n}.post_attention_layernorm.weight", 0),
    "gate": ("model.layers.{n}.mlp.gate_proj.weight", 1),
    "up": ("model.layers.{n}.mlp.up_proj.weight", 1),
    "down": ("model.layers.{n}.mlp.down_proj.weight", 1),
    "final_norm": ("model.norm.weight", 0),
    "head": ("lm_head.weight", 0),
}

# safetensors' code of each dtype that is read, and of each that is written.
DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}

Path = str | os.PathLike

# What a tokenizer may consist of, and the generation settings that belong to it.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json")

# Keys of config.json that the decoder does not use and an inference server does.
KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def load_params(directory: Path, config: decoder.DecoderConfig, *, dtype=None,
                sharding_of: Callable[[str], jax.sharding.Sharding | None] | None = None) -> decoder.Params:
  """The weights as `decoder.weights(config)` names and shapes them.

  dtype: of the result; None keeps the directory's (a stack whose layers differ takes the wider).
  sharding_of: the sharding to put each named weight on; None is the default device.
  On the host there is at most one stacked weight at a time beside the result.
  Raises FileNotFoundError where a file is missing; ValueError where one is truncated, or a tensor is missing,
  has another shape than `config` says, is quantised, or has no place in the decoder. All of it before any
  weight is read.
  """
  directory = pathlib.Path(directory)
  with contextlib.ExitStack() as stack:
    files = _open(directory, stack)
    _check_tensors(directory, config, files)
    params = {}
    for name, weight in decoder.weights(config).items():
      host = _read(files, name, weight, dtype)
      params[name] = _place(host, sharding_of(name) if sharding_of else None)
      del host
      gc.collect(0)  # jax lets go of a buffer it has copied at Python's next collection, however small
    return params


def _open(directory, stack) -> dict[str, Any]:
  """Tensor name -> the open file that holds it, from model.safetensors or from the shards of its index."""
  single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
  if single.is_file():
    shards = [single]
  elif index.is_file():
    shards = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
  else:
    raise FileNotFoundError(f"{directory} holds neither {single.name} nor {index.name}; convert weights of "
                            "another format with transformers' save_pretrained first")
  files = {}
  for path in shards:
    if not path.is_file():
      raise FileNotFoundError(f"{path} is in {index.name} and does not exist; copy or download it again")
    try:
      file = stack.enter_context(safetensors.safe_open(path, framework="np"))
    except safetensors.SafetensorError as error:
      raise ValueError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
    files |= dict.fromkeys(file.keys(), file)
  return files


def _stored(config) -> Iterator[tuple[str, str, tuple[int, ...]]]:
  """(decoder's name, the directory's name, the shape there) of every tensor that `config` asks for."""
  for name, weight in decoder.weights(config).items():
    for _, stored in _parts(name, weight):
      yield name, stored, _stored_shape(name, weight)


def _parts(name, weight) -> Iterator[tuple[Any, str]]:
  """(index into the stacked weight, the directory's name) of each tensor that makes it up."""
  template = NAMES[name][0]
  if weight.axes[0] != "layers":
    return iter([(..., template)])
  return ((n, template.format(n=n)) for n in range(weight.shape[0]))


def _part_shape(weight):
  return weight.shape[1:] if weight.axes[0] == "layers" else weight.shape


def _stored_shape(name, weight) -> tuple[int, ...]:
  shape, inputs = _part_shape(weight), NAMES[name][1]
  if inputs:
    return math.prod(shape[inputs:]), math.prod(shape[:inputs])
  return (math.prod(shape),) if name.endswith("_bias") else shape


def _check_tensors(directory, config, files) -> None:
  expected = {stored: (name, shape) for name, stored, shape in _stored(config)}
  for stored, (name, shape) in expected.items():
    if stored not in files:
      raise ValueError(f"{directory} has no tensor {stored}, the decoder's {name!r}; its config.json and its "
                       "weights don't belong together, or a file is missing")
    found = files[stored].get_slice(stored)
    if tuple(found.get_shape()) != shape:
      raise ValueError(f"{stored} in {directory} has shape {found.get_shape()}, its config.json says "
                       f"{list(shape)}; they don't belong together")
    if found.get_dtype() not in DTYPES:
      raise ValueError(f"{stored} in {directory} is stored as {found.get_dtype()}; only "
                       f"{', '.join(DTYPES)} are read, convert it first")
  # A tied model may store its embedding twice; old files hold the rotary frequencies, which are computed.
  extra = [name for name in sorted(set(files) - set(expected)) if not name.endswith("rotary_emb.inv_freq")]
  if config.tied_embeddings and "lm_head.weight" in extra:
    extra.remove("lm_head.weight")
    if not np.array_equal(files["lm_head.weight"].get_tensor("lm_head.weight"),
                          files[NAMES["embed"][0]].get_tensor(NAMES["embed"][0])):
      raise ValueError(f"{directory} has an lm_head.weight other than its embedding, though its config.json "
                       "says tie_word_embeddings=true; set it to false, or remove the tensor")
  if extra:
    raise ValueError(f"{directory} has {len(extra)} tensors without a place in this decoder, {extra[0]} the "
                     "first; its config.json and its weights don't belong together")


def _read(files, name, weight, dtype) -> np.ndarray:
  parts = list(_parts(name, weight))
  if dtype is None:
    dtype = jnp.result_type(*{DTYPES[files[stored].get_slice(stored).get_dtype()] for _, stored in parts})
  host = np.empty(weight.shape, dtype)
  for index, stored in parts:
    tensor = files[stored].get_tensor(stored)
    host[index] = (tensor.T if NAMES[name][1] else tensor).reshape(_part_shape(weight))
  return host


def _place(host, sharding) -> jax.Array:
  if sharding is None:
    value = jax.device_put(host)
  else:
    value = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
  return jax.block_until_ready(value)  # a transfer under way would keep its buffer on the host


def save(directory: Path, config: decoder.DecoderConfig, params: decoder.Params, *, dtype: str = "float32",
         tokenizer_files: Path | Iterable[Path] | None = None,
         extra: Mapping[str, Any] | None = None) -> None:
  """Writes config.json and model.safetensors, which transformers, vLLM and SGLang load.

  dtype: float32, bfloat16 or float16; a value that it can't hold, or that is not finite, is refused.
  tokenizer_files: files to copy, or the model directory the weights came from: then its tokenizer, chat
    template, generation settings, token ids and longest position are taken over.
  extra: further keys of config.json (eos_token_id, max_position_embeddings, ...).
  The weights are written one layer at a time and appear under their name when they are whole. With several
  processes every one must call; the first writes.
  """
  directory = pathlib.Path(directory)
  codes = {jnp.dtype(value).name: code for code, value in DTYPES.items()}
  if dtype not in codes:
    raise ValueError(f"dtype={dtype!r} can't be saved; choose one of {', '.join(codes)}")
  table = decoder.weights(config)
  wrong = sorted(set(params) ^ set(table)) or [n for n, w in table.items() if params[n].shape != w.shape]
  if wrong:
    raise ValueError(f"params don't belong to this config: {', '.join(wrong)} missing, unknown or of another "
                     "shape; merge adapters first")
  raw = config_json(config, dtype)  # before anything is written: it refuses what no family can express
  files, kept = _tokenizer(tokenizer_files)
  tensors = stored_tensors(config, params, dtype)
  if jax.process_index():
    for _ in tensors:
      pass
    return
  directory.mkdir(parents=True, exist_ok=True)
  _write_safetensors(directory / "model.safetensors", codes[dtype], jnp.dtype(dtype).itemsize,
                     {stored: shape for _, stored, shape in _stored(config)}, tensors)
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
    raise FileNotFoundError(f"{source} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
  config = source / "config.json"
  raw = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
  return found, {key: raw[key] for key in KEPT_KEYS if raw.get(key) is not None}


def stored_tensors(config: decoder.DecoderConfig, params: decoder.Params,
                   dtype: str = "float32") -> Iterator[tuple[str, np.ndarray]]:
  """(name, tensor on the host) in the directory's layout, one by one, of anything shaped like the params."""
  for name, weight in decoder.weights(config).items():
    shape = _stored_shape(name, weight)
    for index, stored in _parts(name, weight):
      # A slice or a copy: an array on a device keeps what was fetched from it on the host while it lives.
      value = _on_host(jnp.copy(params[name]) if index is ... else params[name][index])
      value = value.reshape(shape[::-1]).T if NAMES[name][1] else value.reshape(shape)
      with np.errstate(over="ignore"):
        yield stored, np.ascontiguousarray(value.astype(dtype))


def _on_host(value) -> np.ndarray:
  if getattr(value, "is_fully_addressable", True):
    return np.asarray(value)
  return multihost_utils.process_allgather(value, tiled=True)


def _write_safetensors(path, code, itemsize, shapes, tensors) -> None:
  """Streams tensors of one dtype in safetensors' format: length of the header, header, the bytes of each."""
  header, end = {"__metadata__": {"format": "pt"}}, 0
  for name, shape in shapes.items():
    start, end = end, end + math.prod(shape) * itemsize
    header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8 bytes
  partial = path.with_name(f".{path.name}.partial")
  try:
    with open(partial, "wb") as file:
      file.write(len(text).to_bytes(8, "little") + text)
      for name, value in tensors:
        if not np.isfinite(value).all():
          raise ValueError(f"{name} holds a value that is not finite in {value.dtype}; nothing was saved")
        file.write(value.view(np.uint8).data)
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
