"""Lists the classes that declare a run's settings, and derives what follows from them."""

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
from typing import Any

from stratified import algorithms, files
from stratified import config as configs
from stratified.algorithms import AlgorithmSettings
from stratified.config import setting, Settings
from stratified.learner import optimizer
from stratified.learner.optimizer import OptimizerSettings
from stratified.learner.packing import PackingSettings
from stratified.learner.update import UpdateSettings
from stratified.policy.lora import LoraSettings
from stratified.policy.settings import PolicySettings
from stratified.retrieval.client import HttpSettings
from stratified.retrieval.noise import NoiseSettings
from stratified.retrieval.retrievers import RetrieverSettings
from stratified.rewards import RewardSettings
from stratified.rewards.steps import StepSettings
from stratified.runs import workdir as workdirs
from stratified.runs.checkpoint import CheckpointSettings
from stratified.runs.convergence import ConvergenceSettings
from stratified.runs.samplers import SamplerSettings
from stratified.runs.writer import LoggingSettings
from stratified.sampling.in_process import SamplerConfig
from stratified.sampling.interface import SamplingSettings
from stratified.sampling.sglang.members import FleetConfig
from stratified.sampling.sglang.publish import PublishConfig
from stratified.sharding import MeshSettings
from stratified.strata import StrataSettings
from stratified.tasks import named


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
  """A run as a whole."""

  seed: int = setting(0, "what every random key derives from", low=0, high=2**31 - 1)
  num_steps: int = setting(
    200, "steps of reinforcement learning", low=1, affects=["training"], grows=True
  )


@dataclasses.dataclass(frozen=True)
class RolloutSettings(Settings):
  """How many rollouts a step has, and of which policy they are."""

  SECTION = "rollout"
  samples_per_question: int = setting(
    8, "rollouts of each question, its group", low=1, high=10_000, affects=["training"]
  )
  max_staleness: int = setting(
    0,
    "steps that the sampling policy may lag behind; 1 samples while the update runs",
    choices=[0, 1],
    affects=["training"],
  )


@dataclasses.dataclass(frozen=True)
class WarmStartSettings(Settings):
  """Supervised training on scripted demonstrations, before reinforcement learning."""

  SECTION = "warm_start"
  num_steps: int = setting(0, "its steps; 0 has none", low=0, affects=["warm_start"])
  demonstrations_per_step: int = setting(
    20, "demonstrations of a step", low=1, high=100_000, affects=["warm_start"]
  )
  optimizer: str = setting(
    "muon", "the update rule", choices=optimizer.NAMES, affects=["warm_start"]
  )
  learning_rate: float = setting(2e-3, "its highest rate", above=0, affects=["warm_start"])
  weight_decay: float = setting(0.0, "decay of matrices", low=0, affects=["warm_start"])
  context_weight: float = setting(
    0.3, "loss weight of tokens that the script did not write", low=0, affects=["warm_start"]
  )


@dataclasses.dataclass(frozen=True)
class MemorySettings(Settings):
  """Where parts of the training state lie between updates."""

  SECTION = "memory"
  optimizer: str = setting(
    "device", "where the optimizer's state lies", choices=["device", "host"], affects=[]
  )
  reference: str = setting(
    "device", "where the KL's reference lies", choices=["device", "host"], affects=[]
  )

  @property
  def host_parts(self) -> tuple[str, ...]:
    """The parts of the training state that lie in the host's memory between updates."""
    parts = {"opt_state": self.optimizer, "reference": self.reference}
    return tuple(part for part, where in parts.items() if where == "host")


@dataclasses.dataclass(frozen=True)
class EvalSettings(Settings):
  """When a run is evaluated, and on how much."""

  SECTION = "eval"
  questions: int = setting(
    400, "questions of each held-out set", low=1, high=10**6, affects=["scores"]
  )
  every: int = setting(
    0,
    "steps between evaluations during training; 0 is only before and after",
    low=0,
    affects=["rows"],
  )
  forced: bool = setting(
    False, "also the first policy made to search exactly 0, 1, 2, ... times", affects=["rows"]
  )


CLASSES = (
  RunSettings,
  PolicySettings,
  LoraSettings,
  OptimizerSettings,
  StrataSettings,
  RewardSettings,
  StepSettings,
  WarmStartSettings,
  *named.SETTINGS,
  AlgorithmSettings,
  *algorithms.SETTINGS,
  UpdateSettings,
  RolloutSettings,
  SamplingSettings,
  SamplerSettings,
  SamplerConfig,
  FleetConfig,
  PublishConfig,
  RetrieverSettings,
  NoiseSettings,
  HttpSettings,
  PackingSettings,
  MemorySettings,
  MeshSettings,
  EvalSettings,
  ConvergenceSettings,
  CheckpointSettings,
  LoggingSettings,
)


def default_config():
  """A ConfigDict with every field at its default, which presets change."""
  return configs.to_config(*CLASSES)


def of_preset(presets: Mapping[str, Mapping[str, Any]], preset: str, file: str):
  """The config of a preset: the defaults with its changes.

  presets: name -> {dotted field: value}. file: whose presets they are, for the error. Raises
  ValueError, one sentence, for a preset that does not exist.
  """
  if preset not in presets:
    raise ValueError(
      f"preset {preset!r} is unknown; choose one of {sorted(presets)}, as in "
      f"{file}:{next(iter(presets))}"
    )
  config = default_config()
  config.update_from_flattened_dict(presets[preset])
  return config


def read_workdir(workdir: pathlib.Path):
  """Reads the config that a run's folder keeps; a field that it lacks is at its default.

  Raises ValueError for a field that does not exist any more.
  """
  config, path = default_config(), workdir / "config.json"
  stored = workdirs.config_of(workdir)
  if stored is None:
    raise FileNotFoundError(f"{path} does not exist: {workdir} holds no run")
  for name, value in files.flatten(stored).items():
    if name not in rules():
      raise ValueError(
        f"{path} has the field {name}, which this version does not know; use the version that "
        "trained the run"
      )
    value = tuple(value) if isinstance(value, list) else value
    try:
      configs.check(name, value, rules()[name])
    except ValueError as error:
      raise ValueError(f"{path}: {error}; bring it back from a copy") from error
    config.update_from_flattened_dict({name: value})
  return config


@functools.cache
def rules() -> dict[str, configs.Rule]:
  """{dotted name: rule} of every field of a run."""
  return configs.rules(*CLASSES)


def free() -> tuple[str, ...]:
  """The fields that may change when a run resumes."""
  return configs.free(rules())


def within_group() -> tuple[str, ...]:
  """The fields in which runs of one group may differ: the seed, and what changes no number."""
  effects = ("training", "warm_start", "answers", "scores")
  return ("seed", *configs.unaffected(rules(), *effects))


def not_in_warm_start() -> tuple[str, ...]:
  """The fields in which runs may differ that share a warm start bit for bit."""
  return configs.unaffected(rules(), "warm_start", "rounding")
