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

from stratified import algorithms, sharding, strata
from stratified.agents import agent
from stratified.algorithms import AlgorithmSettings
from stratified.algorithms.base import Algorithm, Stage
from stratified.algorithms.supervised import Supervised
from stratified.config import read, Rule
from stratified.data.tokenizer import Tokenizer
from stratified.learner import batching, trial, update
from stratified.learner import optimizer as optimizers
from stratified.policy import decoder, families, lora
from stratified.policy.files import hugging_face
from stratified.policy.settings import decoder_config, PolicySettings
from stratified.runs import check_task, refusals, settings
from stratified.tasks import base, named


@dataclasses.dataclass(frozen=True)
class StageParts:
  """What a stage trains with: its optimizer, the shapes of its batches, its jitted update."""

  stage: Stage
  first: int  # the run's step at which the stage begins; the warm start has steps of its own
  optimizer: Any
  packing: batching.Packing
  learn: update.OnMesh
  adapter: lora.LoraConfig | None = None

  @property
  def supervised(self) -> bool:
    """Whether it imitates the task's demonstrations, with every weight and without a reference."""
    return self.stage.source == "demonstrations"

  @property
  def with_reference(self) -> bool:
    """Whether its state holds frozen weights: what the KL or a teacher reads, or adapters need."""
    teacher = self.stage.algorithm.teacher
    if self.stage.source == "pairs":
      return bool(self.adapter) or bool(teacher and teacher.weights != "current")
    return not self.supervised


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
  def rules(self) -> dict[str, Rule]:
    """{dotted name: rule} of its fields; several stages would each change with more steps."""
    found = settings.rules()
    if sum(not parts.supervised for parts in self.stages) == 1:
      return found
    return found | {"num_steps": dataclasses.replace(found["num_steps"], grows=False)}

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
  check(config)
  refusals.check_missing(refusals.missing_parts(config))
  refusals.check_protocol(config)
  refusals.check_warm_start(config)
  refusals.check_devices(config)
  return assemble(config, mesh_of(config), model_config(config), task=task)


def check(config) -> None:
  """Refuses what the config says wrongly: no files, no devices of the run's.

  A function or method of a user's own runs once, on something made up. Raises ValueError, one
  sentence.
  """
  refusals.check_settings(config)
  method = algorithm(config, trial.NUM_STRATA)
  found = refusals.checked_stages(config, method)
  if ":" in config.algorithm.name:
    for tried in {id(one.algorithm): one.algorithm for one in found}.values():
      trial.check(tried, f"algorithm.name={config.algorithm.name!r}")


def assemble(config, mesh, model: decoder.DecoderConfig, *, task: bool = False) -> Run:
  """Makes the parts of a checked config on a mesh; ValueError where they do not fit each other.

  task: whether to open the task, which may take long: what can be refused before is.
  """
  refusals.check_split(config, mesh, model, packing(config, mesh).rows)
  refusals.check_adapter(config, model, adapter(config), config.optimizer.name, "lora")
  if config.sampler.name == "sglang":
    families.check_served(model, config.rollout.max_tokens)
  opened = open_task(config) if task else None
  if opened and isinstance(opened.tokenizer, Tokenizer):  # a task from outside may bring another
    opened.tokenizer.check_embedded(model.vocab_size)
  assign = partition(config, opened and opened.tool_names)
  method = algorithm(config, assign.num_strata)
  model = dataclasses.replace(model, heads=method.HEADS)
  trained = stages(config, mesh, model, method, assign.num_strata)
  reward = named.reward(config, opened) if opened else None
  return Run(config, mesh, model, assign, method, trained, opened, reward)


###  Parts  ###


def mesh_of(config, devices=None):
  """Makes the mesh of `mesh.*` over all devices, or over those given."""
  return sharding.make_mesh(
    **dataclasses.asdict(read(sharding.MeshSettings, config)), devices=devices
  )


def model_config(config, *, platform: str | None = None) -> decoder.DecoderConfig:
  """Describes the decoder of a run.

  platform: "cpu", "gpu" or "tpu", picks the attention where that is left open; None asks jax.
  """
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
  for steps in ("warmup_steps", "decay_steps"):
    settings[steps] *= config.update.epochs * config.update.mini_batches
  return optimizers.make(**settings)


def partition(config, tools=None) -> strata.Partition:
  """Makes the partition of `strata`; `tools` are the task's, None where no task is opened."""
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
    questions_per_step=config.data.questions_per_step,
  )
  name = read(AlgorithmSettings, config).name
  return algorithms.make(name, functools.partial(read, config=config), facts)


def stages(config, mesh, model, method: Algorithm, num_strata: int) -> tuple[StageParts, ...]:
  """Makes the parts of every stage: the warm start's, where there is one, and the method's own."""
  found = [warm_start(config, mesh, model)] if config.warm_start.num_steps else []
  repeat = read(update.UpdateSettings, config)
  shapes, first = packing(config, mesh, mini_batches=repeat.mini_batches), 0
  for stage in refusals.checked_stages(config, method):
    if stage.source == "pairs":
      found.append(on_pairs(config, mesh, model, stage, first))
    else:
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
      found.append(StageParts(stage, first, chain, shapes, learn, adapter(config)))
    first += stage.num_steps
  return tuple(found)


def on_pairs(config, mesh, model, stage: Stage, first: int) -> StageParts:
  """The parts of a stage on pairs of rollouts: one update a step, an optimizer of its own."""
  teacher, chain = stage.algorithm.teacher, optimizers.make(**stage.trained.optimizer)
  adapters = stage.trained.adapter and lora.LoraConfig(**stage.trained.adapter)
  refusals.check_teacher(config, model, adapters, teacher)
  read = teacher and (teacher.row_length or 2 * config.packing.row_length)
  shapes = dataclasses.replace(
    packing(config, mesh, stage.trained.rollouts), teacher_length=read or 0
  )
  learn = update.make_update(
    mesh,
    model,
    chain,
    stage.algorithm,
    chunk=config.policy.logit_chunk or None,
    adapter=adapters,
    host=host_parts(config),
  )
  return StageParts(stage, first, chain, shapes, learn, adapters)


def warm_start(config, mesh, model) -> StageParts:
  """The parts of the warm start: the task's demonstrations, imitated."""
  w = config.warm_start
  stage = Stage("warm_start", "demonstrations", w.num_steps, Supervised(w.context_weight))
  chain = optimizer(config, warm_start=True)
  learn = update.make_update(
    mesh, model, chain, stage.algorithm, chunk=config.policy.logit_chunk or None
  )
  return StageParts(stage, 0, chain, packing(config, mesh, w.demonstrations_per_step), learn)


def open_task(config) -> base.Task:
  """Opens the task: reads data, opens the retriever, draws the held-out questions once.

  Raises ValueError or OSError for a task that can't be, and for limits that its protocol can't
  keep to.
  """
  task = named.make(config)
  setting = agent.Setting.of(task.tokenizer, task.protocol, task.limits)
  agent.check(setting)
  task = dataclasses.replace(task, held_out=functools.cache(task.held_out))
  check_task.check(config, task)
  agent.check_prompts(setting, task.questions_at(0))
  return check_task.watched(config, task)


def leave_devices() -> None:
  """Keeps to the CPU, in a program that only looks at configs: the devices are those of runs."""
  jax.config.update("jax_platforms", "cpu")


def enable_compilation_cache() -> None:
  """Keeps compiled programs beside the project: a second run or a resumed one starts at once."""
  jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(".cache/jax").absolute()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
