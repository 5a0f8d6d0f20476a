"""Reads a text encoder's directory into a flat table of weights.

    config = load_config(directory)
    params = load_params(directory, config)
    sha256 = fingerprint(directory)

A directory holds config.json, safetensors and tokenizer.json.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import sys
from typing import Any

import ml_dtypes  # noqa: F401  teaches NumPy bfloat16, which safetensors may hold
import numpy as np
import safetensors

Path = str | os.PathLike

# model_type -> number of positions in front that stand for padding, as a function of config.json.
# The RoBERTa family counts real positions from pad_token_id + 1 on.
POSITION_OFFSETS = {
  "bert": lambda raw: 0,
  "roberta": lambda raw: raw.get("pad_token_id", 1) + 1,
  "xlm-roberta": lambda raw: raw.get("pad_token_id", 1) + 1,
}

# Parts of a layer: the encoder's name -> the directory's names, joined along the outputs where
# there are several.
PROJECTIONS = {
  "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
  "o": ("attention.output.dense",),
  "up": ("intermediate.dense",),
  "down": ("output.dense",),
}
NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}

FLOATS = ("F32", "F16", "BF16")
# Tensors that a checkpoint may hold and mean pooling does not use: buffers, BERT's pooler, heads of
# its pre-training.
UNUSED = re.compile(
  r"embeddings\.(position_ids|token_type_ids)$|pooler\.|cls\.|lm_head\.|classifier\."
)


def load_config(directory: Path) -> dict[str, Any]:
  """Reads the fields of an EncoderConfig from `directory`/config.json.

  Raises FileNotFoundError without a config.json, ValueError for what the encoder would compute
  wrongly: another architecture, activation or kind of position, a pooling other than the mean.
  """
  directory = pathlib.Path(directory)
  raw = _json(
    directory / "config.json", "name the directory of a BERT-type encoder in Hugging Face's form"
  )
  kind = raw.get("model_type")
  checks = [
    (kind in POSITION_OFFSETS, f"model_type={kind!r}", ", ".join(POSITION_OFFSETS)),
    (raw.get("hidden_act", "gelu") == "gelu", f"hidden_act={raw.get('hidden_act')!r}", "gelu"),
    (
      raw.get("position_embedding_type") in (None, "absolute"),
      f"position_embedding_type={raw.get('position_embedding_type')!r}",
      "absolute",
    ),
    (not raw.get("is_decoder"), "is_decoder=true", "an encoder"),
    (not raw.get("quantization_config"), "quantization_config", f"weights in {', '.join(FLOATS)}"),
  ]
  for supported, what, instead in checks:
    if not supported:
      raise ValueError(f"{directory}/config.json: {what} is not supported; what is: {instead}.")
  _check_pooling(directory)
  try:
    fields = dict(
      vocab_size=raw["vocab_size"],
      width=raw["hidden_size"],
      num_layers=raw["num_hidden_layers"],
      num_heads=raw["num_attention_heads"],
      mlp_width=raw["intermediate_size"],
      max_positions=raw["max_position_embeddings"] - POSITION_OFFSETS[kind](raw),
      position_offset=POSITION_OFFSETS[kind](raw),
      norm_eps=raw.get("layer_norm_eps", 1e-12),
    )
  except KeyError as error:
    raise ValueError(
      f"{directory}/config.json has no {error}, which the encoder's size depends on."
    ) from error
  return fields


def _check_pooling(directory: pathlib.Path) -> None:
  path = directory / "1_Pooling/config.json"
  if not path.is_file():
    _check_named_pooling(directory)
    return
  modes = _json(path, "")
  on = sorted(name for name, value in modes.items() if name.startswith("pooling_mode_") and value)
  if modes and on != ["pooling_mode_mean_tokens"] and modes.get("pooling_mode") != "mean":
    raise ValueError(
      f"{path} asks for {', '.join(on) or modes.get('pooling_mode')}; only mean pooling is "
      "implemented (E5, MiniLM), choose an encoder trained with it."
    )


def _check_named_pooling(directory: pathlib.Path) -> None:
  """Without a pooling file the name tells: refuses a family of another pooling, names a doubt."""
  names = _names(directory)
  if any(re.search(r"(^|[-_/. ])(bge|mxbai|arctic|simcse|gte-modernbert)", name) for name in names):
    raise ValueError(
      f"{directory} has no 1_Pooling/config.json, and encoders of this name pool by their first "
      "token; only mean pooling is implemented (E5, MiniLM), choose an encoder trained with it."
    )
  if not any(re.search(r"(^|[-_/. ])(e5|minilm|mpnet|gte)([-_/. ]|$)", name) for name in names):
    print(
      f"{directory} does not say how it pools (no 1_Pooling/config.json): mean pooling is taken; "
      "copy that file from where the encoder came from to be sure",
      file=sys.stderr,
      flush=True,
    )


def _names(directory: pathlib.Path) -> tuple[str, str]:
  """The names that an encoder goes by: its directory's, and what config.json was made from."""
  raw = _json(directory / "config.json", "name the directory of an encoder")
  return directory.resolve().name.lower(), str(raw.get("_name_or_path", "")).lower()


def _json(path: pathlib.Path, way_out: str) -> dict:
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist; {way_out}.")
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON ({error}); copy or download it again.") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds a JSON {type(value).__name__}; it must be one object.")
  return value


INSTRUCTION = (
  "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
)


def prefixes_of(directory: Path) -> dict[str, str]:
  """Prefixes of a query and a passage, as the directory says them, else by its name, else none.

  `prompts` of config_sentence_transformers.json count first, `document` for a passage. E5 by name
  has "query: " and "passage: " (Wang et al., arXiv 2212.03533); E5 tuned on instructions has an
  instruction in front of a query alone (arXiv 2401.00368). The name is the directory's, or the one
  that config.json was made from.
  """
  directory = pathlib.Path(directory)
  path = directory / "config_sentence_transformers.json"
  prompts = _json(path, "").get("prompts") if path.is_file() else None
  said = {name: text for name, text in (prompts or {}).items() if isinstance(text, str) and text}
  if {"query", "passage", "document"} & said.keys():
    passage = said.get("passage", said.get("document", ""))
    return {"query": said.get("query", ""), "passage": passage}
  names = _names(directory)
  if any(re.search(r"(^|[-_/. ])e5([-_/. ]|$)", name) for name in names):
    if any("instruct" in name for name in names):
      return {"query": INSTRUCTION, "passage": ""}
    return {"query": "query: ", "passage": "passage: "}
  return {"query": "", "passage": ""}


def shard_paths(directory: Path) -> list[pathlib.Path]:
  """The weight files of a directory: model.safetensors, or the shards that its index names."""
  directory = pathlib.Path(directory)
  single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
  if single.is_file():
    return [single]
  if not index.is_file():
    raise FileNotFoundError(
      f"{directory} holds neither {single.name} nor {index.name}; convert weights of another "
      "format with transformers' save_pretrained first."
    )
  names = sorted(set(_json(index, "")["weight_map"].values()))
  for name in names:
    if pathlib.PurePath(name).name != name or not (directory / name).is_file():
      raise FileNotFoundError(
        f"{index} names {name!r}, which is no file beside it; copy or download it again."
      )
  return [directory / name for name in names]


def fingerprint(directory: Path) -> str:
  """SHA-256 over weights, configuration and tokenizer: encoders with the same one embed alike."""
  digest = hashlib.sha256()
  for path in [
    *shard_paths(directory),
    pathlib.Path(directory, "config.json"),
    pathlib.Path(directory, "tokenizer.json"),
  ]:
    with path.open("rb") as file:
      digest.update(hashlib.file_digest(file, "sha256").digest())
  return digest.hexdigest()


def load_params(directory: Path, config) -> dict[str, np.ndarray]:
  """Reads the float32 weights as `text_encoder.shapes(config)` names them, layers stacked.

  The embedding of token type 0, which every token of a single text has, is added to the positions'.
  Raises ValueError where a file is cut short, or a tensor is missing, has another shape than
  config.json says, is quantised, or has no place in the encoder.
  """
  directory = pathlib.Path(directory)
  with contextlib.ExitStack() as stack:
    files = _open(directory, stack)
    used = set()

    def read(name, *shape):
      used.add(name)
      return _tensor(files, name, shape, directory)

    params = _embeddings(config, read, files) | _layers(config, read)
    extra = sorted(name for name in files if name not in used and not UNUSED.search(name))
    if extra:
      raise ValueError(
        f"{directory} has {len(extra)} tensors without a place in this encoder, {extra[0]} the "
        "first; "
        "its config.json and its weights don't belong together."
      )
  return params


def _open(directory, stack) -> dict[str, tuple[Any, str]]:
  """Maps tensor names without their model class's prefix to (the open file, the name there)."""
  files = {}
  for path in shard_paths(directory):
    try:
      file = stack.enter_context(safetensors.safe_open(path, framework="np"))
    except safetensors.SafetensorError as error:
      raise ValueError(
        f"{path} is damaged or cut short ({error}); copy or download it again."
      ) from error
    for name in file.keys():
      files[re.sub(r"^(bert|roberta)\.", "", name)] = (file, name)
  return files


def _tensor(files, name, shape, directory) -> np.ndarray:
  if name not in files:
    raise ValueError(
      f"{directory} has no tensor {name}; its config.json and its weights don't belong together, "
      "or a "
      "file is missing."
    )
  file, stored = files[name]
  found = file.get_slice(stored)
  rows, *rest = found.get_shape()
  if len(shape) != 1 + len(rest) or any(
    want not in (None, got) for want, got in zip(shape, (rows, *rest))
  ):
    raise ValueError(
      f"{stored} in {directory} has shape {found.get_shape()}, its config.json says {list(shape)}; "
      "they don't belong together."
    )
  if found.get_dtype() not in FLOATS:
    raise ValueError(
      f"{stored} in {directory} is stored as {found.get_dtype()}; only {', '.join(FLOATS)} are "
      "read, "
      "convert it first."
    )
  return file.get_tensor(stored).astype(np.float32)


def _embeddings(config, read, files) -> dict[str, np.ndarray]:
  d = config.width
  position = read(
    "embeddings.position_embeddings.weight", config.position_offset + config.max_positions, d
  )
  position = position[config.position_offset :]
  if "embeddings.token_type_embeddings.weight" in files:
    position = position + read("embeddings.token_type_embeddings.weight", None, d)[0]
  return {
    "word": read("embeddings.word_embeddings.weight", config.vocab_size, d),
    "position": position,
    "embedding_norm": read("embeddings.LayerNorm.weight", d),
    "embedding_norm_bias": read("embeddings.LayerNorm.bias", d),
  }


def _layers(config, read) -> dict[str, np.ndarray]:
  d, f = config.width, config.mlp_width
  sizes = {"qkv": (d, d), "o": (d, d), "up": (d, f), "down": (f, d)}
  stacks: dict[str, list[np.ndarray]] = {}
  for layer in range(config.num_layers):
    at = f"encoder.layer.{layer}."
    for name, parts in PROJECTIONS.items():
      inputs, outputs = sizes[name]
      weight = [read(f"{at}{part}.weight", outputs, inputs).T for part in parts]
      stacks.setdefault(name, []).append(np.concatenate(weight, axis=1))
      bias = [read(f"{at}{part}.bias", outputs) for part in parts]
      stacks.setdefault(f"{name}_bias", []).append(np.concatenate(bias))
    for name, part in NORMS.items():
      stacks.setdefault(name, []).append(read(f"{at}{part}.weight", d))
      stacks.setdefault(f"{name}_bias", []).append(read(f"{at}{part}.bias", d))
  return {name: np.stack(values) for name, values in stacks.items()}
