"""Builds the parts of a run from its config: what was checked here is what the run then uses.

    run = build(config)        # ValueError or OSError, in one sentence, for what can't run

Nothing is written, trained or compiled here, so that a refusal leaves no trace.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax

from stratified import algorithms, files, sharding, strata
from stratified import config as configs
from stratified.agents import agent
from stratified.algorithms import AlgorithmSettings
from stratified.algorithms.base import Algorithm, Stage
from stratified.algorithms.supervised import Supervised
from stratified.config import read
from stratified.learner import batching, trial, update
from stratified.learner import optimizer as optimizers
from stratified.policy import decoder, families, lora
from stratified.policy.files import hugging_face
from stratified.policy.settings import check_platform, decoder_config, PolicySettings
from stratified.retrieval import retrievers
from stratified.runs import samplers, settings
from stratified.tasks import base, named, search_qa
from stratified.tools.search import Search


@dataclasses.dataclass(frozen=True)
class StageParts:
  """What a stage trains with: its optimizer, the shapes of its batches, its jitted update."""

  stage: Stage
  optimizer: Any
  packing: batching.Packing
  learn: update.OnMesh


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run.

  stages: in their order, the warm start first where there is one.
  task: None where the run was built without one.
  reward: what a rollout is worth, see rewards.Reward.
  """

  config: Any
  mesh: jax.sharding.Mesh
  model: decoder.DecoderConfig
  partition: strata.Partition
  algorithm: Algorithm
  stages: tuple[StageParts, ...]
  task: base.Task | None = None
  reward: Any = None

  @property
  def last(self) -> StageParts:
    """The stage that the run ends with: whose state its checkpoints hold."""
    return self.stages[-1]

  @property
  def workdir_config(self) -> dict:
    """The config as plain values, for a workdir to keep."""
    return json.loads(self.config.to_json())


def build(config, *, task: bool = True) -> Run:
  """Validates a config and makes its parts.

  Args:
    config: a ConfigDict with the fields of `settings.default_config()`.
    task: whether to read the data and to open the tools as well.

  Raises:
    ValueError, OSError: one sentence naming field, value, rule and way out; what is missing here is
      listed together.
  """
  check_settings(config)
  check_missing(missing_parts(config))
  check_protocol(config)
  check_warm_start(config)
  check_devices(config)
  run = assemble(config, mesh_of(config), model_config(config))
  if not task:
    return run
  opened = open_task(config)
  return dataclasses.replace(
    run,
    task=opened,
    reward=named.reward(config, opened),
    partition=partition(config, opened.tool_names),
  )


def assemble(config, mesh, model: decoder.DecoderConfig) -> Run:
  """Makes the parts of a checked config on a mesh; ValueError where they do not fit each other."""
  assign = partition(config)
  method = algorithm(config, assign.num_strata)
  model = dataclasses.replace(model, heads=method.HEADS)
  check_split(config, mesh, model)
  check_adapter(config, model)
  if config.sampler.name == "sglang":
    families.check_served(model, config.rollout.max_tokens)
  return Run(
    config, mesh, model, assign, method, stages(config, mesh, model, method, assign.num_strata)
  )


###  Parts  ###


def mesh_of(config, devices=None):
  """Makes the mesh of `mesh.*` over all devices, or over those given."""
  return sharding.make_mesh(
    **dataclasses.asdict(read(sharding.MeshSettings, config)), devices=devices
  )


def model_config(config, *, platform: str | None = None) -> decoder.DecoderConfig:
  """The decoder of a run. `platform` ("cpu", "gpu", "tpu") picks the attention where that is left
  open; None asks jax."""
  policy = read(PolicySettings, config)
  return decoder_config(
    policy,
    vocab_size=0 if policy.checkpoint else named.tokenizer(config).vocab_size,
    platform=platform or jax.default_backend(),
    row_length=config.packing.row_length,
  )


def adapter(config) -> lora.LoraConfig | None:
  """The adapters that are trained in place of the weights; None where every weight is."""
  return read(lora.LoraSettings, config).adapter()


def initial_params(
  config, model: decoder.DecoderConfig, mesh, *, dtype: str | dict[str, str] = "float32"
):
  if config.policy.checkpoint:
    axes = decoder.logical_axes(model)
    return hugging_face.load_params(
      config.policy.checkpoint,
      model,
      dtype=dtype,
      sharding_of=lambda name: sharding.named(mesh, axes[name]),
    )
  return decoder.init(model, jax.random.key(config.seed))


def optimizer(config, *, warm_start: bool = False):
  """Makes the optimizer of reinforcement learning, or the warm start's with a cosine decay."""
  o, w = config.optimizer, config.warm_start
  if warm_start:
    return optimizers.make(
      name=w.optimizer,
      learning_rate=w.learning_rate,
      warmup_steps=max(1, w.num_steps // 20),
      decay_steps=w.num_steps,
      weight_decay=w.weight_decay,
      clip_norm=o.clip_norm,
      b1=0.9,
      b2=0.98,
    )
  settings = dataclasses.asdict(read(optimizers.OptimizerSettings, config))
  # A step of the config is a rollout batch; the schedule counts updates.
  settings["warmup_steps"] *= config.update.epochs * config.update.mini_batches
  return optimizers.make(**settings)


def partition(config, tools=None) -> strata.Partition:
  """Makes the partition of `strata`; `tools` are the task's, None where they are not known yet."""
  return strata.make(config.strata.name, cap=config.strata.cap, seed=config.seed, tools=tools)


def packing(config, mesh, count: int | None = None, mini_batches: int = 1) -> batching.Packing:
  """Plans the shapes of a step's batch: of `count` rollouts, or of a training step's."""
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  return batching.Packing.for_rollouts(
    count or config.data.questions_per_step * config.rollout.samples_per_question,
    length=config.packing.row_length,
    rows=config.packing.rows or shards,
    shards=shards,
    mini_batches=mini_batches,
  )


def host_parts(config) -> tuple[str, ...]:
  """The parts of the training state that lie in the host's memory between updates."""
  return read(settings.MemorySettings, config).host_parts


def algorithm(config, num_strata: int) -> Algorithm:
  """Makes the method of `algorithm.name` with its settings."""
  facts = algorithms.Facts(
    num_strata=num_strata,
    samples_per_question=config.rollout.samples_per_question,
    max_tokens=config.rollout.max_tokens,
    max_turns=config.rollout.max_turns + 1,
  )
  name = read(AlgorithmSettings, config).name
  made = algorithms.make(name, functools.partial(read, config=config), facts)
  if ":" in name:
    trial.check(made, f"algorithm.name={name!r}")
  return made


def stages(config, mesh, model, method: Algorithm, num_strata: int) -> tuple[StageParts, ...]:
  """Makes the parts of every stage: the warm start's, where there is one, and the method's own."""
  found = [warm_start(config, mesh, model)] if config.warm_start.num_steps else []
  repeat = read(update.UpdateSettings, config)
  shapes = packing(config, mesh, mini_batches=repeat.mini_batches)
  for stage in method.stages(config.num_steps):
    chain = optimizer(config)
    learn = update.make_update(
      mesh,
      model,
      chain,
      stage.algorithm,
      settings=repeat,
      num_strata=num_strata,
      eps=config.advantage.eps,
      temperature=config.rollout.temperature,
      chunk=config.policy.logit_chunk or None,
      adapter=adapter(config),
      host=host_parts(config),
    )
    found.append(StageParts(stage, chain, shapes, learn))
  return tuple(found)


def warm_start(config, mesh, model) -> StageParts:
  """The parts of the warm start: the task's demonstrations, imitated."""
  w = config.warm_start
  stage = Stage("warm_start", "demonstrations", w.num_steps, Supervised(w.context_weight))
  chain = optimizer(config, warm_start=True)
  learn = update.make_update(
    mesh, model, chain, stage.algorithm, chunk=config.policy.logit_chunk or None
  )
  return StageParts(stage, chain, packing(config, mesh, w.demonstrations_per_step), learn)


def open_task(config) -> base.Task:
  """Opens the task: reads data, opens the retriever, draws the held-out questions once.

  Raises ValueError or OSError for a task that can't be, and for limits that its protocol can't
  keep to.
  """
  task = named.make(config)
  tokenizer = task.tokenizer
  agent.check(
    agent.Setting(
      tokenizer.encode, tokenizer.decode, tokenizer.eos_id, task.protocol, task.limits, 0
    )
  )
  task = dataclasses.replace(task, held_out=functools.cache(task.held_out))
  task.held_out(config.eval.questions)
  return task


def enable_compilation_cache() -> None:
  """Keeps compiled programs beside the project: a second run or a resumed one starts at once."""
  jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(".cache/jax").absolute()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


###  What does not go together  ###


def check_settings(config) -> None:
  """Checks every field against its rule, and fields against each other; no files, no devices."""
  configs.check_all(config, settings.rules())
  read(PolicySettings, config)
  read(lora.LoraSettings, config)
  check_staleness(config)
  check_rows(config)
  check_updates(config)
  algorithm(config, partition(config).num_strata)
  base.limits(config)
  named.check(config)
  if config.retriever.name == "http":
    retrievers.HttpSettings(config.retriever.url).address
  if config.sampler.name == "sglang":
    samplers.settings(config)


def check_staleness(config) -> None:
  if (
    config.rollout.max_staleness
    and config.loss.old_log_probs == "trainer"
    and not config.loss.importance_cap
  ):
    raise ValueError(
      "rollout.max_staleness=1 trains on the last step's policy: correct for it with "
      "--config.loss.old_log_probs=sampler, or with --config.loss.importance_cap=2"
    )


def check_rows(config) -> None:
  length, chunk = config.packing.row_length, config.policy.logit_chunk
  if length < config.rollout.max_tokens:
    raise ValueError(
      f"packing.row_length={length} must be at least "
      f"rollout.max_tokens={config.rollout.max_tokens}: a rollout fills at most one row"
    )
  if chunk and length % chunk:
    raise ValueError(
      f"policy.logit_chunk={chunk} does not divide packing.row_length={length}; choose a divisor, "
      "or 0 for no chunks"
    )


def check_updates(config) -> None:
  parts, questions = config.update.mini_batches, config.data.questions_per_step
  if questions % parts:
    raise ValueError(
      f"update.mini_batches={parts} does not divide data.questions_per_step={questions}; choose a "
      "divisor, so that every update sees as many questions"
    )


def check_protocol(config) -> None:
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
    base.protocol(config, (Search,))


def check_warm_start(config) -> None:
  steps = config.warm_start.num_steps
  if not steps:
    return
  if named.name_of(config) == "search_qa":
    raise ValueError(
      f"warm_start.num_steps={steps} must be 0 with data.name='files': "
      "demonstrations are scripted for the generated tasks alone"
    )
  if config.rollout.protocol != "short":
    raise ValueError(
      f"rollout.protocol={config.rollout.protocol!r} must be 'short' with warm_start.num_steps="
      f"{steps}: the demonstrations are scripted in its tags; the methods of "
      "configs/baselines.py that learn nothing need a preset with weights, such as smollm2"
    )


def check_devices(config) -> None:
  check_platform(read(PolicySettings, config), jax.default_backend())
  if config.sampler.devices > len(jax.local_devices()):
    raise ValueError(
      f"sampler.devices={config.sampler.devices} is more than the {len(jax.local_devices())} "
      "devices of this process; 0 takes all of them"
    )


def check_split(config, mesh, model: decoder.DecoderConfig) -> None:
  """Refuses sizes that the mesh can't split."""
  sharding.check_divisible(
    mesh,
    {
      "data.questions_per_step": ("question", config.data.questions_per_step),
      "packing.rows": ("row", packing(config, mesh).rows),
      "num_heads": ("heads", model.num_heads),
      "num_kv_heads": ("kv_heads", model.num_kv_heads),
      "mlp_width": ("mlp", model.mlp_width),
      "vocab_size": ("vocabulary_part", model.vocab_size),
      "width": ("width", model.width),
    },
  )


def check_adapter(config, model: decoder.DecoderConfig) -> None:
  chosen = adapter(config)
  if chosen is None:
    return
  lora.weights(model, chosen)
  if config.memory.reference == "host":
    raise ValueError(
      f"memory.reference='host' must be 'device' with lora.rank={chosen.rank}: the reference is "
      "the frozen weights, which every pass computes with"
    )
  if config.optimizer.name == "muon":
    raise ValueError(
      "optimizer.name='muon' makes every singular value of an update alike, which the two thin "
      f"factors of lora.rank={chosen.rank} have no use for; train adapters with "
      "--config.optimizer.name=adamw"
    )


###  What is not here  ###


def missing_parts(config) -> list[str]:
  """Lists what the run needs and does not find, one sentence each with the command that gets it."""
  found = _missing_files(config) if named.name_of(config) == "search_qa" else []
  return found + retrievers.missing(config)


def check_missing(parts: list[str]) -> None:
  """Raises FileNotFoundError for what is missing, all of it at once."""
  if len(parts) == 1:
    raise FileNotFoundError(parts[0])
  if parts:
    raise FileNotFoundError(
      f"{len(parts)} parts of this run are missing:\n" + "\n".join(f"  {part}" for part in parts)
    )


def _missing_files(config) -> list[str]:
  # A server, or a dense index, has its passages elsewhere.
  names = (
    ["questions"]
    + ["evaluation"] * bool(config.data.evaluation)
    + ["corpus"] * (config.retriever.name in ("bm25", "hybrid"))
  )
  found = _missing_model(config)
  for name in names:
    try:
      exists = search_qa.path_of(config.data[name]).exists()
    except FileNotFoundError as error:  # STRATIFIED_DATA, or a name at all, is missing
      found.append(f"{error}")
      continue
    if not exists:
      found.append(
        f"data.{name}={config.data[name]!r} does not exist; "
        f"name the file with --config.data.{name}=PATH or make it with "
        "python experiments/prepare_data.py --download=all --remove_duplicates"
      )
  return list(dict.fromkeys(found))


def _missing_model(config) -> list[str]:
  checkpoint = config.policy.checkpoint
  if not checkpoint:
    raise ValueError(
      "policy.checkpoint is empty: data from files needs a model directory, "
      "e.g. --config.policy.checkpoint=.cache/models/smollm2-135m-instruct"
    )
  stored = pathlib.Path(checkpoint) / "config.json"
  if not stored.exists():
    fetch = (
      "python third_party/smollm2/fetch.py"
      if "smollm2" in checkpoint
      else f"hf download Qwen/{pathlib.Path(checkpoint).name} --local-dir {checkpoint}"
      if pathlib.Path(checkpoint).name.startswith("Qwen")
      else "download the model there, or name its directory with --config.policy.checkpoint"
    )
    return [f"policy.checkpoint={checkpoint!r} holds no model (no config.json); to get it: {fetch}"]
  most = files.read_object(stored).get("max_position_embeddings")
  if isinstance(most, int) and config.rollout.max_tokens > most:
    raise ValueError(
      f"rollout.max_tokens={config.rollout.max_tokens} is more than the {most} positions that the "
      f"model of policy.checkpoint={checkpoint!r} was made for; lower it"
    )
  return []
