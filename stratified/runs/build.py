"""Builds the parts of a run from its config: what was checked here is what the run then uses.

    run = build(config)        # ValueError or OSError, in one sentence, for what can't run

Nothing is written, trained or compiled here, so that a refusal leaves no trace.
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax

from stratified import algorithms, rewards, sharding, strata
from stratified.agents import agent
from stratified.algorithms import AlgorithmSettings
from stratified.algorithms.base import Algorithm, Critic, Stage
from stratified.algorithms.supervised import Supervised
from stratified.config import read, Rule
from stratified.data.tokenizer import Tokenizer
from stratified.learner import batching, trial, update
from stratified.learner import optimizer as optimizers
from stratified.policy import decoder, families, lora
from stratified.policy.files import hugging_face
from stratified.policy.settings import decoder_config, PolicySettings
from stratified.rewards import steps as step_rewards
from stratified.runs import check_task, refusals, settings
from stratified.tasks import base, named


@dataclasses.dataclass(frozen=True)
class StageParts:
  """What a stage trains with: its optimizer, the shapes of its batches, its jitted update.

  first: the run's step at which the stage begins; the warm start has steps of its own.
  rollouts: in a step's batch.
  """

  stage: Stage
  first: int
  rollouts: int
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
    if self.stage.source in ("pairs", "examples"):
      return bool(self.adapter) or bool(teacher and teacher.weights != "current")
    return not self.supervised


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run.

  stages: in their order, the warm start first where there is one.
  task: None where the run was built without one.
  reward: what a rollout is worth, see rewards.Reward. steps: what its single searches are; None
    where they are worth nothing.
  """

  config: Any
  mesh: jax.sharding.Mesh
  model: decoder.DecoderConfig
  partition: strata.Partition
  algorithm: Algorithm
  stages: tuple[StageParts, ...]
  task: base.Task | None = None
  reward: Any = None
  steps: Any = None

  @property
  def facts(self) -> dict[str, Any]:
    """What run.json says of it: the policy's number of parameters, and the devices."""
    sizes = [math.prod(weight.shape) for weight in decoder.weights(self.model).values()]
    device = self.mesh.devices.flat[0].device_kind
    return {"parameters": sum(sizes), "devices": f"{self.mesh.devices.size} x {device}"}

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
  refusals.check_steps(config, found)
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
  trained = stages(config, mesh, model, method, assign.num_strata)
  reward = named.reward(config, opened) if opened else None
  wants_parts = any(parts.stage.algorithm.num_parts for parts in trained)
  if opened and wants_parts and not isinstance(reward, rewards.Reward):
    raise ValueError(
      f"advantage.name={config.advantage.name!r} takes the parts of a reward, and the task's own "
      "has none; name them with --config.reward.name, such as 'exact_match + 0.1*format'"
    )
  worth = opened and step_rewards.of(
    read(step_rewards.StepSettings, config), opened.tokenizer.decode
  )
  return Run(config, mesh, model, assign, method, trained, opened, reward, worth)


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


def optimizer(config, *, warm_start: bool = False, critic: Critic | None = None):
  """Makes the optimizer of reinforcement learning, or the warm start's with a cosine decay.

  critic: has one of its own beside it.
  """
  o, w = config.optimizer, config.warm_start
  if warm_start:
    return shared_optimizer(
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
  updates = config.update.epochs * config.update.mini_batches
  of_steps = lambda given: (
    given | {name: updates * given.get(name, 0) for name in ("warmup_steps", "decay_steps")}
  )
  chain = shared_optimizer(**of_steps(settings))
  return shared_beside(chain, shared_optimizer(**of_steps(critic.optimizer))) if critic else chain


# Equal settings give the same object, so that an update is found again by what it was made of.
shared_optimizer = functools.lru_cache(maxsize=16)(optimizers.make)
shared_beside = functools.lru_cache(maxsize=4)(optimizers.beside)


@functools.lru_cache(maxsize=16)
def shared_update(*args, **options) -> update.OnMesh:
  """The update of these parts: the stages of a run that have it in common trace it once."""
  return update.make_update(*args, **options)


def update_of(mesh, model, chain, method: Algorithm, **options) -> update.OnMesh:
  """The update of a stage, shared where the method can be told from others."""
  try:
    hash(method)
  except TypeError:  # one from outside, with a list or a dict among its settings
    return update.make_update(mesh, model, chain, method, **options)
  return shared_update(mesh, model, chain, method, **options)


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
    part_weights=tuple(
      weight for weight, *_ in rewards.of(read(rewards.RewardSettings, config)).terms
    ),
  )
  name = read(AlgorithmSettings, config).name
  return algorithms.make(name, functools.partial(read, config=config), facts)


def stages(config, mesh, model, method: Algorithm, num_strata: int) -> tuple[StageParts, ...]:
  """Makes the parts of every stage: the warm start's, where there is one, and the method's own.

  Stages of equal settings, as cycles have, share an update (`update_of`), which is compiled once.
  """
  found = [warm_start(config, mesh, model)] if config.warm_start.num_steps else []
  repeat = read(update.UpdateSettings, config)
  sampled = config.data.questions_per_step * config.rollout.samples_per_question
  shapes, first = packing(config, mesh, mini_batches=repeat.mini_batches), 0
  for stage in refusals.checked_stages(config, method):
    if stage.source == "pairs":
      found.append(on_pairs(config, mesh, model, stage, first))
    elif stage.source == "examples":
      found.append(on_examples(config, mesh, model, stage, first))
    else:
      chain = optimizer(config, critic=stage.algorithm.critic)
      learn = update_of(
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
      found.append(StageParts(stage, first, sampled, chain, shapes, learn, adapter(config)))
    first += stage.num_steps
  return tuple(found)


def on_pairs(config, mesh, model, stage: Stage, first: int) -> StageParts:
  """The parts of a stage on pairs of rollouts: one update a step, an optimizer of its own."""
  teacher, chain = stage.algorithm.teacher, shared_optimizer(**stage.trained.optimizer)
  adapters = stage.trained.adapter and lora.LoraConfig(**stage.trained.adapter)
  refusals.check_teacher(config, model, adapters, teacher)
  read = teacher and (teacher.row_length or 2 * config.packing.row_length)
  shapes = dataclasses.replace(
    packing(config, mesh, stage.trained.rollouts), teacher_length=read or 0
  )
  learn = update_of(
    mesh,
    model,
    chain,
    stage.algorithm,
    chunk=config.policy.logit_chunk or None,
    adapter=adapters,
    host=host_parts(config),
  )
  return StageParts(stage, first, stage.trained.rollouts, chain, shapes, learn, adapters)


def on_examples(config, mesh, model, stage: Stage, first: int) -> StageParts:
  """The parts of a supervised stage: one update a step, with the run's optimizer and adapters."""
  asked = config.data.questions_per_step
  if config.sft.targets == "demonstrations":
    asked = config.warm_start.demonstrations_per_step
  chain = optimizer(config)
  learn = update_of(
    mesh,
    model,
    chain,
    stage.algorithm,
    chunk=config.policy.logit_chunk or None,
    adapter=adapter(config),
    host=host_parts(config),
  )
  shapes = packing(config, mesh, asked)
  return StageParts(stage, first, asked, chain, shapes, learn, adapter(config))


def warm_start(config, mesh, model) -> StageParts:
  """The parts of the warm start: the task's demonstrations, imitated."""
  w = config.warm_start
  stage = Stage("warm_start", "demonstrations", w.num_steps, Supervised(w.context_weight))
  chain = optimizer(config, warm_start=True)
  learn = update_of(mesh, model, chain, stage.algorithm, chunk=config.policy.logit_chunk or None)
  count = w.demonstrations_per_step
  return StageParts(stage, 0, count, chain, packing(config, mesh, count), learn)


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
  """Keeps compiled programs beside the project: a second run or a resumed one starts at once.

  The many small ones too: together they take as long as the largest.
  """
  jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(".cache/jax").absolute()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
