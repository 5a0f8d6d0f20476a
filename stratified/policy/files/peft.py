"""Writes LoRA adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors.

PEFT keeps each layer's factors apart, as the weights of two linear layers: lora_A [rank, inputs],
lora_B [outputs, rank], under `base_model.model.` and the module's own name; its update is
(lora_alpha / r) lora_B lora_A, as ours.
"""

from collections.abc import Iterator
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from stratified import files
from stratified.policy import decoder
from stratified.policy import lora as adapters_
from stratified.policy.files import hugging_face, safetensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def save(
  directory: str | os.PathLike,
  config: decoder.DecoderConfig,
  lora: adapters_.LoraConfig,
  adapters: decoder.Params,
  *,
  base: str,
  dtype: str = "float32",
) -> None:
  """Writes adapters that peft.PeftModel loads beside the model `base`, a directory or a hub's name.

  dtype: float32, bfloat16 or float16. Raises ValueError for another, for a value that it can't
  hold, and for adapters that are not those of `config` and `lora`. With several processes every
  one must call; the first writes.
  """
  directory, table = pathlib.Path(directory), adapters_.weights(config, lora)
  safetensors.check_dtypes([dtype])
  wrong = sorted(set(adapters) ^ set(table)) or [
    name for name, w in table.items() if adapters[name].shape != w.shape
  ]
  if wrong:
    raise ValueError(
      f"adapters don't belong to this config: {', '.join(wrong)} missing, unknown or of another "
      "shape"
    )
  tensors = ((name, value.astype(dtype)) for name, value in _tensors(config, lora, adapters))
  if jax.process_index():
    for _ in tensors:
      pass
    return
  directory.mkdir(parents=True, exist_ok=True)
  specs = {name: safetensors.Spec(shape, dtype) for name, shape in _shapes(config, lora)}
  partial = directory / f".{TENSORS}.partial"
  try:
    safetensors.write(partial, specs, tensors)
    files.settle(partial, directory / TENSORS)
  finally:
    partial.unlink(missing_ok=True)
  text = json.dumps(adapter_config(config, lora, base), indent=2)
  (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def adapter_config(
  config: decoder.DecoderConfig, lora: adapters_.LoraConfig, base: str
) -> dict[str, Any]:
  """The content of adapter_config.json; what it leaves out is PEFT's default."""
  alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "target_modules": [module.rpartition(".")[2] for module in _modules(config, lora).values()],
  }


def _modules(config, lora) -> dict[str, str]:
  """Target -> the module's name there, {n} the layer, in the order of the decoder's table."""
  return {
    name: weight.stored.removesuffix(".weight")
    for name, weight in decoder.weights(config).items()
    if name in lora.targets
  }


def _names(config, lora) -> Iterator[tuple[str, str, int, str]]:
  """(the name there, target, layer, "a" or "b") of each tensor."""
  for target, module in _modules(config, lora).items():
    for layer in range(config.num_layers):
      for part in "ab":
        name = f"base_model.model.{module.format(n=layer)}.lora_{part.upper()}.weight"
        yield name, target, layer, part


def _shapes(config, lora) -> Iterator[tuple[str, tuple[int, int]]]:
  table = adapters_.weights(config, lora)
  for name, target, _, part in _names(config, lora):
    rest = np.prod([*table[f"{target}_{part}"].shape[1:]]) // lora.rank
    yield name, (lora.rank, int(rest)) if part == "a" else (int(rest), lora.rank)


def _tensors(config, lora, adapters) -> Iterator[tuple[str, np.ndarray]]:
  for name, target, layer, part in _names(config, lora):
    value = hugging_face.on_host(adapters[f"{target}_{part}"][layer])
    yield name, (value.reshape(-1, lora.rank) if part == "a" else value.reshape(lora.rank, -1)).T
