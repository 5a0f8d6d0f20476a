"""What can't run is refused here, in one sentence each: before anything is loaded, written or
compiled."""

import math
import pathlib

import jax

from stratified import advantages, files, losses
from stratified.policy import attention, lora
from stratified.retrieval import client
from stratified.runs import build, samplers
from stratified.tasks import base, named, search_qa
from stratified.tools.search import Search


def check(config) -> None:
  """Refuses, in one sentence each, what can't run: before anything is loaded, written or
  compiled."""
  check_settings(config)
  if config.sampler.name == "sglang":
    samplers.settings(config)
  if config.rollout.protocol == "tool_calls" and not config.policy.checkpoint:
    raise ValueError(
      "rollout.protocol='tool_calls' needs policy.checkpoint: the calls' form comes with a model's "
      "chat template"
    )
  if config.rollout.chat_template and not config.policy.checkpoint:
    raise ValueError(
      "rollout.chat_template=True needs policy.checkpoint: the template comes with a model's "
      "directory"
    )
  if named.name_of(config) == "search_qa":
    if config.warm_start.num_steps:
      raise ValueError(
        f"warm_start.num_steps={config.warm_start.num_steps} must be 0 with data.name='files': "
        "demonstrations are scripted for the generated encyclopedia alone"
      )
    _check_files(config)
    base.protocol(config, (Search,))
  else:
    named.check(config)
  _check_retriever(config.retriever)
  if config.warm_start.num_steps:
    if config.rollout.protocol != "short":
      raise ValueError(
        f"rollout.protocol={config.rollout.protocol!r} must be 'short' with warm_start.num_steps="
        f"{config.warm_start.num_steps}: the demonstrations are scripted in its tags; the methods "
        "of "
        "configs/baselines.py that learn nothing need a preset with weights, such as smollm2"
      )
    build.optimizer(config, warm_start=True)
  _check_devices(config)
  model = build.model_config(config)
  build.check_split(config, build.mesh_of(config), model)
  check_adapter(config, model)


def check_settings(config) -> None:
  """The part of `check` that needs neither files nor devices."""
  named.name_of(config)
  _one_of("sampler.name", config.sampler.name, ("jax", "sglang"))
  _one_of("retriever.name", config.retriever.name, ("bm25", "dense", "hybrid", "http"))
  _one_of("rollout.protocol", config.rollout.protocol, base.PROTOCOLS)
  _one_of("loss.kl_estimator", config.loss.kl_estimator, losses.KL_ESTIMATORS)
  _one_of("loss.aggregation", config.loss.aggregation, losses.AGGREGATIONS)
  _one_of("loss.old_log_probs", config.loss.old_log_probs, ("trainer", "sampler"))
  _one_of("policy.dtype", config.policy.dtype, ("float32", "bfloat16"))
  _one_of("policy.attention", config.policy.attention, ("auto", *attention.IMPLEMENTATIONS))
  for name in ("optimizer", "reference"):
    _one_of(f"memory.{name}", config.memory[name], ("device", "host"))
  _one_of("loss.importance", config.loss.importance, ("token", "sequence"))
  _check_ranges(config)
  _one_of("rollout.max_staleness", config.rollout.max_staleness, (0, 1))
  if (
    config.rollout.max_staleness
    and config.loss.old_log_probs == "trainer"
    and not config.loss.importance_cap
  ):
    raise ValueError(
      "rollout.max_staleness=1 trains on the last step's policy: correct for it with "
      "--config.loss.old_log_probs=sampler, or with --config.loss.importance_cap=2"
    )
  if config.packing.row_length < config.rollout.max_tokens:
    raise ValueError(
      f"packing.row_length={config.packing.row_length} must be at least "
      f"rollout.max_tokens={config.rollout.max_tokens}: a rollout fills at most one row"
    )
  if config.policy.logit_chunk and config.packing.row_length % config.policy.logit_chunk:
    raise ValueError(
      f"policy.logit_chunk={config.policy.logit_chunk} does not divide packing.row_length="
      f"{config.packing.row_length}; choose a divisor, or 0 for no chunks"
    )
  advantages.validate(
    config.advantage.name, config.rollout.samples_per_question, build.advantage_options(config)
  )
  build.partition(config)
  base.limits(config)
  build.optimizer(config)


def _check_devices(config):
  name, here = config.policy.attention, jax.default_backend()
  only = {"cudnn": "gpu", "splash": "tpu"}.get(name, here)
  if only != here:
    raise ValueError(
      f"policy.attention={name!r} runs on a {only.upper()} alone, and jax has a {here.upper()} "
      "here; leave it at auto"
    )
  if config.sampler.devices > len(jax.local_devices()):
    raise ValueError(
      f"sampler.devices={config.sampler.devices} is more than the {len(jax.local_devices())} "
      "devices of this "
      "process; 0 takes all of them"
    )


# field -> (least, most, what holds beside it); a field is checked where the config has it.
_ANY, _TINY = math.inf, 1e-12


RANGES = {
  "seed": (0, 2**31 - 1),
  "num_steps": (1, _ANY),
  "data.questions_per_step": (1, _ANY),
  "rollout.samples_per_question": (1, _ANY),
  "rollout.temperature": (_TINY, _ANY),
  "rollout.top_p": (_TINY, 1),
  "sampler.lanes": (1, 65536),
  "sampler.block": (1, _ANY),
  "sampler.rows": (1, _ANY),
  "sampler.devices": (0, _ANY),
  "sampler.prefill_tokens": (1, _ANY),
  "warm_start.num_steps": (0, _ANY),
  "warm_start.demonstrations_per_step": (1, _ANY),
  "warm_start.encyclopedias": (1, _ANY),
  "warm_start.context_weight": (0, _ANY),
  "packing.rows": (0, _ANY),
  "packing.row_length": (2, _ANY),
  "loss.kl_coefficient": (0, _ANY),
  "loss.clip_ratio": (0, _ANY),
  "loss.importance_cap": (0, _ANY),
  "optimizer.b1": (0, 1 - _TINY),
  "optimizer.b2": (0, 1 - _TINY),
  "policy.width": (1, _ANY),
  "policy.num_layers": (1, _ANY),
  "policy.num_heads": (1, _ANY),
  "policy.num_kv_heads": (1, _ANY),
  "policy.mlp_width": (1, _ANY),
  "policy.rope_theta": (_TINY, _ANY),
  "lora.rank": (0, _ANY),
  "lora.alpha": (_TINY, _ANY),
  "policy.unroll": (1, _ANY),
  "policy.logit_chunk": (0, _ANY),
  "eval.questions": (1, _ANY),
  "eval.every": (0, _ANY),
  "checkpoint.every": (1, _ANY),
  "logging.trajectories_every": (0, _ANY),
  "retriever.timeout_s": (_TINY, _ANY),
  "retriever.retries": (0, _ANY),
  "retriever.give_up_s": (_TINY, _ANY),
  "retriever.queries_per_request": (1, _ANY),
  "retriever.in_flight": (1, _ANY),
  "retriever.cache": (0, _ANY),
}


def _check_ranges(config):
  values = files.flatten(config.to_dict())
  for name, (least, most) in RANGES.items():
    value = values.get(name, least)
    if not (least <= value <= most and math.isfinite(value)):
      low = "above 0" if least == _TINY else f"at least {least}"
      high = "" if most == _ANY else " and below 1" if most == 1 - _TINY else f" and at most {most}"
      raise ValueError(f"{name}={value} must be {low}{high}, and finite")
  width, heads = values.get("policy.width", 0), values.get("policy.num_heads", 1)
  if width % heads or (width // heads) % 2:
    raise ValueError(
      f"policy.width={width} must be an even multiple of policy.num_heads={heads}: "
      "each head takes an equal part, of which rotary positions turn pairs"
    )


def check_adapter(config, model):
  adapter = build.adapter(config)
  if adapter is None:
    return
  lora.weights(model, adapter)
  if config.memory.reference == "host":
    raise ValueError(
      f"memory.reference='host' must be 'device' with lora.rank={adapter.rank}: the reference is "
      "the frozen "
      "weights, which every pass computes with"
    )
  if config.optimizer.name == "muon":
    raise ValueError(
      "optimizer.name='muon' makes every singular value of an update alike, which the two thin "
      "factors of "
      f"lora.rank={adapter.rank} have no use for; train adapters with --config.optimizer.name=adamw"
    )


def _one_of(name, value, choices):
  if value not in choices:
    raise ValueError(
      f"{name}={value!r} is unknown; choose one of {', '.join(map(str, sorted(choices)))}"
    )


def _check_retriever(r):
  if r.name == "http":
    client.base_url(r.url)
  if r.name in ("dense", "hybrid") and not (r.index and pathlib.Path(r.index).is_dir()):
    raise FileNotFoundError(
      f"retriever.index={r.index!r} is no folder of an index, which retriever.name={r.name!r} "
      "needs; build one with python experiments/build_index.py and name it with "
      "--config.retriever.index=FOLDER"
    )


def _check_files(config):
  if not config.policy.checkpoint:
    raise ValueError(
      "policy.checkpoint is empty: data from files needs a model directory, "
      "e.g. --config.policy.checkpoint=.cache/models/smollm2-135m-instruct"
    )
  fetch = (
    "python third_party/smollm2/fetch.py"
    if "smollm2" in config.policy.checkpoint
    else ("download the model there, or name its directory with --config.policy.checkpoint")
  )
  if not (pathlib.Path(config.policy.checkpoint) / "config.json").exists():
    raise FileNotFoundError(
      f"policy.checkpoint={config.policy.checkpoint!r} holds no model (no config.json); "
      f"to get it: {fetch}"
    )
  most = files.read_object(pathlib.Path(config.policy.checkpoint) / "config.json").get(
    "max_position_embeddings"
  )
  if isinstance(most, int) and config.rollout.max_tokens > most:
    raise ValueError(
      f"rollout.max_tokens={config.rollout.max_tokens} is more than the {most} positions that the "
      "model of "
      f"policy.checkpoint={config.policy.checkpoint!r} was made for; lower it"
    )
  # A server, or a dense index, has its passages elsewhere.
  names = (
    ["questions"]
    + ["evaluation"] * bool(config.data.evaluation)
    + ["corpus"] * (config.retriever.name in ("bm25", "hybrid"))
  )
  for name in names:
    if not search_qa.path_of(config.data[name]).exists():
      raise FileNotFoundError(
        f"data.{name}={config.data[name]!r} does not exist; "
        f"name the file with --config.data.{name}=PATH or make it with "
        "experiments/prepare_data.py"
      )
