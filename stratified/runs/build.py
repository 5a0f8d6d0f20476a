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
from stratified.agents import rollout_setting
from stratified.algorithms import AlgorithmSettings
from stratified.algorithms.base import Algorithm
from stratified.config import read, Rule
from stratified.data.tokenizer import Tokenizer
from stratified.learner import trial
from stratified.policy import decoder, families, look_back
from stratified.policy.files import hugging_face
from stratified.policy.settings import decoder_config, PolicySettings
from stratified.rewards import steps as step_rewards
from stratified.runs import check_task, refusals, settings, stage_parts
from stratified.tasks import base, named


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
  stages: tuple[stage_parts.StageParts, ...]
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
  def last(self) -> stage_parts.StageParts:
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
  model, source = model_config(config), pathlib.Path(config.policy.checkpoint)
  if config.policy.checkpoint and any(source.glob("*.safetensors")):  # a resumed run may lack them
    hugging_face.check(source, model)
  return assemble(config, mesh_of(config), model, task=task)


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
  refusals.check_split(config, mesh, model, stage_parts.packing(config, mesh).rows)
  adapter = stage_parts.adapter(config)
  refusals.check_adapter(config, model, adapter, config.optimizer.name, "lora")
  if config.sampler.name == "sglang":
    families.check_served(model, config.rollout.max_tokens)
  opened = open_task(config) if task else None
  if opened and isinstance(opened.tokenizer, Tokenizer):  # a task from outside may bring another
    opened.tokenizer.check_embedded(model.vocab_size)
  assign = partition(config, opened and opened.tool_names)
  method = algorithm(config, assign.num_strata)
  trained = stage_parts.stages(config, mesh, model, method, assign.num_strata)
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
  params = decoder.init(model, jax.random.key(config.seed))
  offsets = config.policy.look_back
  return look_back.start(model, params, offsets) if offsets else params


def partition(config, tools=None) -> strata.Partition:
  """Makes the partition of `strata`; `tools` are the task's, None where no task is opened."""
  return strata.make(config.strata.name, cap=config.strata.cap, seed=config.seed, tools=tools)


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


def open_task(config) -> base.Task:
  """Opens the task: reads data, opens the retriever, draws the held-out questions once.

  Raises ValueError or OSError for a task that can't be, and for limits that its protocol can't
  keep to.
  """
  task = named.make(config)
  setting = rollout_setting.Setting.of(task.tokenizer, task.protocol, task.limits)
  rollout_setting.check(setting)
  task = dataclasses.replace(task, held_out=functools.cache(task.held_out))
  check_task.check(config, task)
  rollout_setting.check_prompts(setting, task.questions_at(0))
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
