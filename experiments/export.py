"""Writes a trained policy as a Hugging Face directory, which transformers, vLLM and SGLang load.

    python experiments/export.py --workdir=runs/tiny --output=exports/tiny [--step=200|best] \\
        [--dtype=bfloat16]
    python experiments/export.py --workdir=runs/lora --output=exports/lora --adapters
    python experiments/export.py --config=configs/search_r1.py:smollm2 --output=exports/untrained

It takes a run's newest checkpoint, that of --step, or with --step=best the one that was best on
held-out questions; with --config and no workdir, the preset's model as it is. Weights have the
dtypes of the model directory that the run began with, float32 where it began with none. LoRA
adapters are merged, or with --adapters written by themselves in PEFT's layout. The directory
appears when it is whole; an earlier export under that name is replaced, anything else is left
alone.
"""

import json
import os
import pathlib
import shutil
import sys

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags

from stratified import config as configs
from stratified.data import tokenizer as tokenizers
from stratified.policy import decoder
from stratified.policy.files import hugging_face, peft, safetensors
from stratified.runs import build, checkpoint, command_line, settings
from stratified.runs.weights import of_stage, Weights
from stratified.tasks import named

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The preset, where there is no --workdir."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.")
_OUTPUT = flags.DEFINE_string("output", None, "The directory to write.", required=True)
_STEP = command_line.define_step(
  "step", "Which checkpoint of the run, or best, on held-out questions; the newest unless given."
)
_DTYPE = flags.DEFINE_string(
  "dtype", None, "float32, bfloat16 or float16; that of the weights it began with unless given."
)
_ADAPTERS = flags.DEFINE_boolean(
  "adapters", False, "Write the LoRA adapters alone, in PEFT's layout."
)
_SHARD_GB = flags.DEFINE_float(
  "shard_gb", 5.0, "The most that one file of weights holds.", lower_bound=0.001
)

MARK = "export.json"  # in a directory that this program wrote, and may replace


def export(
  config,
  output: pathlib.Path,
  *,
  workdir: pathlib.Path | None = None,
  step: int | str | None = None,
  dtype: str | None = None,
  adapters: bool = False,
  shard_bytes: int | None = None,
) -> int:
  """Writes the policy of `workdir`; without one, of `config`.

  step: which checkpoint, or "best"; the newest unless given.

  Returns the step. Raises ValueError or FileNotFoundError, before anything is written, for what
  can't be exported and for an output that holds something else; nothing is replaced before the new
  directory is whole.
  """
  check_output(output)
  if dtype is not None:
    safetensors.check_dtypes([dtype])
  # One device: the weights pass through the host one by one, whatever mesh they were trained on.
  config = config.copy_and_resolve_references()
  config.mesh.update(data=1, fsdp=1, tensor=1)
  configs.check_all(config, settings.rules())
  made = build.assemble(config, build.mesh_of(config), build.model_config(config))
  weights = of_stage(made, made.last, workdir)
  if adapters and (weights.adapter is None or workdir is None):
    raise ValueError(
      "--adapters: there are none, since "
      + (
        "no --workdir names a run that trained them"
        if workdir is None
        else "the run trained every weight (lora.rank=0)"
      )
      + "; leave the flag out to export the whole policy"
    )
  if workdir is None:
    parts = None, _initial(weights), 0
  else:
    parts = weights.restore_parts(workdir, checkpoint.step_of(workdir, step))
  if parts is None:
    raise ValueError(
      f"{workdir} holds no checkpoint yet; its training command writes the first before step 1"
    )
  frozen, params, step = parts
  write = (
    (lambda folder: _write_adapters(folder, output, weights, frozen, params, dtype))
    if adapters
    else (
      lambda folder: write_model(
        folder, config, weights.model, _whole(weights, frozen, params), dtype, shard_bytes
      )
    )
  )
  origin = (
    {"checkpoint": config.policy.checkpoint}
    if workdir is None
    else {"workdir": str(workdir), "step": step}
  )
  replace(output, write, origin | {"dtype": dtype or "as it began", "adapters": adapters})
  return step


def check_output(output: pathlib.Path) -> None:
  """Refuses an output that is not to be replaced."""
  if output.exists() and not output.is_dir():
    raise ValueError(f"--output={output} is a file; name a directory")
  if output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
    raise ValueError(
      f"--output={output} holds files that are no export (no {MARK}); name another directory, or "
      "empty it"
    )


def replace(output: pathlib.Path, write, origin: dict) -> None:
  """Has `write` fill a folder beside `output`, then puts it in its place."""
  output = output.resolve()  # a link stays, and what it points to is replaced
  partial, old = (output.with_name(f".{output.name}.{kind}") for kind in ("partial", "old"))
  output.parent.mkdir(parents=True, exist_ok=True)
  # a call before this one was killed between its two renames
  if old.exists() and not output.exists():
    os.rename(old, output)
  for left_over in (partial, old):
    shutil.rmtree(left_over, ignore_errors=True)
  partial.mkdir()
  try:
    write(partial)
    (partial / MARK).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    if output.exists():
      os.rename(output, old)
    os.rename(partial, output)
  finally:
    if old.exists() and not output.exists():
      os.rename(old, output)
    for left_over in (partial, old):
      shutil.rmtree(left_over, ignore_errors=True)


def write_model(
  folder: pathlib.Path,
  config,
  model: decoder.DecoderConfig,
  params: decoder.Params,
  dtype: str | None = None,
  shard_bytes: int | None = None,
) -> None:
  """Writes the whole policy with its tokenizer: the model directory's, or the task's own."""
  source = config.policy.checkpoint
  kinds = dtype or (hugging_face.stored_dtypes(source) if source else "float32")
  extra = {} if source else write_tokenizer(folder, named.tokenizer(config))
  hugging_face.save(
    folder,
    model,
    params,
    dtype=kinds,
    tokenizer_files=source or None,
    extra=extra,
    shard_bytes=shard_bytes,
  )


def write_tokenizer(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
  """Writes what transformers' AutoTokenizer needs; returns the token ids for config.json."""
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(folder / "tokenizer.json")
  (end,) = (
    token
    for token, number in tokenizer.backend.get_vocab(True).items()
    if number == tokenizer.eos_id
  )
  ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.eos_id}
  for name, content in {
    "tokenizer_config.json": {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "eos_token": end,
      "pad_token": end,
      "clean_up_tokenization_spaces": False,
      "add_bos_token": False,
      "add_eos_token": False,
    },
    "generation_config.json": ids,
  }.items():
    (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  return ids


def _initial(weights: Weights):
  return build.initial_params(weights.config, weights.model, weights.mesh)


def _whole(weights: Weights, frozen, params):
  """Makes every weight, adapters added in float32 and rounded once, where it is written."""
  if frozen is None:
    return params
  return weights.merged({name: value.astype(jnp.float32) for name, value in frozen.items()}, params)


def _write_adapters(folder, output, weights: Weights, frozen, params, dtype) -> None:
  """Writes adapters, and in base/ the frozen model where it is in no model directory yet."""
  config, base = weights.config, weights.config.policy.checkpoint
  if base and not config.warm_start.num_steps:
    base = pathlib.Path(base).absolute()
    _copy_tokenizer(base, folder)
  else:
    base = output.absolute() / "base"
    write_model(folder / "base", config, weights.model, frozen)
    _copy_tokenizer(folder / "base", folder)
  peft.save(
    folder, weights.model, weights.adapter, params, base=str(base), dtype=dtype or "float32"
  )


def _copy_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> None:
  for name in hugging_face.TOKENIZER_FILES:
    if (source / name).is_file():
      shutil.copy(source / name, folder / name)


def main(_) -> None:
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")  # the accelerators may be training
  workdir = _WORKDIR.value and pathlib.Path(_WORKDIR.value)
  try:
    if (workdir is None) == (_CONFIG.value is None):
      raise ValueError("name a run with --workdir, or a preset with --config, and not both")
    if workdir is None:
      config = _CONFIG.value
    elif (workdir / "config.json").is_file():
      config = settings.read_workdir(workdir)
    else:
      raise ValueError(f"{workdir} holds no run (no config.json)")
    output = pathlib.Path(_OUTPUT.value)
    step = export(
      config,
      output,
      workdir=workdir,
      step=_STEP.value,
      dtype=_DTYPE.value,
      adapters=_ADAPTERS.value,
      shard_bytes=int(_SHARD_GB.value * 1e9),
    )
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  print(
    f"{output} holds {'the adapters' if _ADAPTERS.value else 'the policy'}"
    + (f" of step {step}" if workdir else "")
  )


if __name__ == "__main__":
  command_line.run(main)
