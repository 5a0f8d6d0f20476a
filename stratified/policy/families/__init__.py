"""Reads and writes config.json by families of Hugging Face models, each a module of its own.

A family says how its config.json becomes the fields of a DecoderConfig and back, and which weights
its checkpoints call by other names (`common.Family`). To add one, write its module and its line in
FAMILIES; what it computes must be among the decoder's switches. transformers' own configs are not
used here for the time that importing them takes (see agents/chat.py); the tests compare with them.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

from stratified.policy.config import DecoderConfig
from stratified.policy.families import (
  gemma3,
  llama,
  ministral,
  mistral,
  olmo2,
  qwen2,
  qwen3,
  values,
)
from stratified.policy.families.common import Family, keys, refuse

# By model_type, in the order in which a decoder of no known origin takes the first that fits.
FAMILIES: dict[str, Family] = {
  module.FAMILY.model_type: module.FAMILY
  for module in (llama, qwen2, qwen3, mistral, ministral, gemma3, olmo2)
}

# Fields that say how a decoder is run, and whose it was; config.json has none.
_OF_THE_RUN = ("family", "dtype", "remat", "attention", "unroll")


def names(config: DecoderConfig) -> Mapping[str, str]:
  """Names the weights that the config's family calls otherwise than `weights.ROWS`."""
  kind = config.family or _kind_of(config)
  return FAMILIES[kind].names if kind else {}


@functools.lru_cache
def _kind_of(config: DecoderConfig) -> str:
  """The family of a config of no known origin, "" where none fits."""
  try:
    return resolve(config).family
  except ValueError:
    return ""


def load_config(directory: str | os.PathLike, **overrides) -> DecoderConfig:
  """Reads `directory`/config.json; `overrides` replace fields (dtype, remat, attention).

  Raises FileNotFoundError without a config.json, and ValueError naming the value that the decoder
  does not implement: another architecture, a window where its architecture has none, rotary scaling
  other than linear, Llama 3's and YaRN, biases in other places than Qwen2's, quantised weights.
  """
  path = pathlib.Path(directory) / "config.json"
  if not path.is_file():
    raise FileNotFoundError(
      f"{path} does not exist; name a Hugging Face model directory, which holds "
      "config.json and *.safetensors"
    )
  try:
    raw = json.loads(path.read_text(encoding="utf-8"))
    family = _family_of(values.check(raw))
    fields = family.read(raw) | {"family": family.model_type}
    return DecoderConfig(**fields | overrides)
  except KeyError as error:
    raise ValueError(f"{path} has no {error}, which the decoder's size depends on") from error
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
    said = f"{type(error).__name__}: {error}"
    raise ValueError(f"{path} is damaged ({said}); copy or download it again") from error


def _family_of(raw: dict) -> Family:
  by_type = {family.model_type: family.architecture for family in FAMILIES.values()}
  architecture = (raw.get("architectures") or [by_type.get(raw.get("model_type"))])[0]
  found = [family for family in FAMILIES.values() if family.architecture == architecture]
  quantised = bool(raw.get("quantization_config"))
  refuse(
    [
      (
        not found,
        f"architecture {architecture or raw.get('model_type')!r}",
        ", ".join(family.architecture for family in FAMILIES.values()),
      ),
      (quantised, "quantization_config", "weights in float32, bfloat16 or float16"),
    ]
  )
  return found[0]


def resolve(config: DecoderConfig) -> DecoderConfig:
  """Gives the config a family: its own, or the first that computes the same.

  A family fits where the config.json that it writes reads back as the same decoder. Raises
  ValueError where none does.
  """
  kinds = [config.family] if config.family else list(FAMILIES)
  differences = {kind: _differences(FAMILIES[kind], config) for kind in kinds}
  nearest = min(kinds, key=lambda kind: len(differences[kind]))
  if differences[nearest]:
    raise ValueError(
      f"a decoder with {', '.join(differences[nearest])} is none that a config.json of "
      f"{FAMILIES[nearest].architecture} can describe, and no family comes nearer; change it"
    )
  return dataclasses.replace(config, family=nearest)


def _differences(family: Family, config: DecoderConfig) -> list[str]:
  """Lists the fields, as NAME=VALUE, that the family's config.json does not read back."""
  run = {name: getattr(config, name) for name in _OF_THE_RUN}
  wanted = dataclasses.asdict(config)
  try:
    found = dataclasses.asdict(
      DecoderConfig(**family.read(_write(family, config, "float32")), **run)
    )
  except (ValueError, KeyError):
    found = {}
  missing = object()
  return [f"{name}={value}" for name, value in wanted.items() if found.get(name, missing) != value]


def check_served(config: DecoderConfig, max_tokens: int) -> None:
  """Refuses what an SGLang server would compute otherwise than the decoder.

  That is a rollout longer than a window that it does not keep, or a rotary scaling that it ignores.
  Raises ValueError; max_tokens is the longest rollout.
  """
  family = FAMILIES[resolve(config).family]
  window = config.window if "window" not in family.served else 0
  if window and max_tokens > window:
    raise ValueError(
      f"rollout.max_tokens={max_tokens} is more than the window of {window} tokens, without which "
      f"sampler.name='sglang' computes {family.architecture}; lower it to {window}, or take "
      "--config.sampler.name=jax"
    )
  if config.rope_scaling and "rope_scaling" not in family.served:
    raise ValueError(
      f"sampler.name='sglang' computes {family.architecture} without its rotary scaling "
      f"{config.rope_scaling}; take --config.sampler.name=jax"
    )


def config_json(config: DecoderConfig, dtype: str) -> dict[str, Any]:
  """The content of config.json: keys that transformers 4 and 5 both read."""
  return _write(FAMILIES[resolve(config).family], config, dtype)


def _write(family: Family, config: DecoderConfig, dtype: str) -> dict[str, Any]:
  from_all, own = keys(config, dtype), family.write(config)
  return dict(architectures=[family.architecture], model_type=family.model_type) | from_all | own
