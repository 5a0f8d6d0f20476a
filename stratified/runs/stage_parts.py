"""Makes what each stage of a run trains with: its optimizer, the shapes of its batches, its update.

    for parts in stages(config, mesh, model, method, num_strata): ...

Stages of equal settings share an update, so that it is traced and compiled once.
"""

import dataclasses
import functools
from typing import Any

from stratified.algorithms.base import Algorithm, Critic, Stage
from stratified.algorithms.supervised import Supervised
from stratified.config import read
from stratified.learner import optimizer as optimizers
from stratified.learner import update
from stratified.learner.packing import Packing
from stratified.policy import lora
from stratified.runs import refusals, settings


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
  packing: Packing
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
  learn = _learn(config, mesh, model, chain, stage.algorithm, adapters)
  return StageParts(stage, first, stage.trained.rollouts, chain, shapes, learn, adapters)


def on_examples(config, mesh, model, stage: Stage, first: int) -> StageParts:
  """The parts of a supervised stage: one update a step, with the run's optimizer and adapters."""
  asked = config.data.questions_per_step
  if config.sft.targets == "demonstrations":
    asked = config.warm_start.demonstrations_per_step
  chain = optimizer(config)
  learn = _learn(config, mesh, model, chain, stage.algorithm, adapter(config))
  shapes = packing(config, mesh, asked)
  return StageParts(stage, first, asked, chain, shapes, learn, adapter(config))


def _learn(config, mesh, model, chain, algorithm, adapters):
  """The compiled update of a stage that trains with one update a step."""
  chunk, host = config.policy.logit_chunk or None, host_parts(config)
  return update_of(mesh, model, chain, algorithm, chunk=chunk, adapter=adapters, host=host)


def warm_start(config, mesh, model) -> StageParts:
  """The parts of the warm start: the task's demonstrations, imitated."""
  w = config.warm_start
  stage = Stage("warm_start", "demonstrations", w.num_steps, Supervised(w.context_weight))
  chain = optimizer(config, warm_start=True)
  learn = update_of(mesh, model, chain, stage.algorithm, chunk=config.policy.logit_chunk or None)
  count = w.demonstrations_per_step
  return StageParts(stage, 0, count, chain, packing(config, mesh, count), learn)


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
      embedding_rate=o.embedding_rate,
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


def packing(config, mesh, count: int | None = None, mini_batches: int = 1) -> Packing:
  """Plans the shapes of a step's batch: of `count` rollouts, or of a training step's."""
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  return Packing.for_rollouts(
    count or config.data.questions_per_step * config.rollout.samples_per_question,
    length=config.packing.row_length,
    rows=config.packing.rows or shards,
    shards=shards,
    mini_batches=mini_batches,
  )


def host_parts(config) -> tuple[str, ...]:
  """The parts of the training state that lie in the host's memory between updates."""
  return read(settings.MemorySettings, config).host_parts


def adapter(config) -> lora.LoraConfig | None:
  """The adapters that are trained in place of the weights; None where every weight is."""
  return read(lora.LoraSettings, config).adapter()
