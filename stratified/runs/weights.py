"""Holds what of the policy a stage trains and keeps: every weight, or adapters beside frozen ones.

Frozen weights are in no checkpoint. They are read again where they came from (the last checkpoint
of the stage before, or the model directory, or the seed), and refused if they are not those beside
which the adapters were trained.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
from typing import Any

import jax

from stratified import sharding
from stratified.config import read
from stratified.learner import state as states
from stratified.policy import decoder, lora
from stratified.runs import build, checkpoint, stage_parts
from stratified.runs.convergence import ConvergenceSettings
from stratified.types import TrainState


@dataclasses.dataclass(frozen=True)
class Weights:
  """A stage's state in three forms: in training, in a checkpoint, as the decoder that samples.

  before: reads the policy that the stage before ended with again; None for the first stage.
  """

  config: Any
  mesh: Any
  model: decoder.DecoderConfig
  parts: stage_parts.StageParts
  before: Callable[[], decoder.Params] | None = None

  @property
  def adapter(self) -> lora.LoraConfig | None:
    return self.parts.adapter

  @property
  def optimizer(self):
    return self.parts.optimizer

  @property
  def host(self) -> tuple[str, ...]:
    return () if self.parts.supervised else stage_parts.host_parts(self.config)

  @property
  def start_dtype(self) -> str | dict[str, str]:
    """Dtypes of the weights at the start: masters float32, frozen ones as a forward pass reads."""
    if not self.adapter:
      return "float32"
    return {name: decoder.seen_dtype(self.model, name) for name in decoder.weights(self.model)}

  @property
  def unchanging(self) -> tuple[str, ...]:
    """The parts of the state that no step changes, and a checkpoint holds."""
    teacher = self.parts.stage.algorithm.teacher
    follows = bool(teacher and teacher.weights == "ema")
    kept = self.parts.with_reference and not self.adapter and not follows
    return ("reference",) if kept else ()

  def remade(self) -> dict[str, Callable[[], decoder.Params]]:
    """What makes the parts of `unchanging` again, where they come from the stage's own start."""
    own = self.parts.stage.reference_of is None
    return {name: self._reference_again for name in self.unchanging if own}

  def _reference_again(self) -> decoder.Params:
    wanted = self.abstract().reference
    if self.before:
      params, _ = self.before()
    else:
      params = build.initial_params(self.config, self.model, self.mesh)
    return {
      name: sharding.put(params[name].astype(x.dtype), x.sharding) for name, x in wanted.items()
    }

  def begin(self, params, opt_state=None, reference=None) -> TrainState:
    """Makes the state at step 0 from `params`, which it takes over.

    opt_state, reference: of an earlier stage, in place of new ones.
    """
    if self.adapter:
      params = {name: value.astype(self.start_dtype[name]) for name, value in params.items()}
    state = states.init_state(
      self.mesh,
      self.model,
      params,
      self.optimizer,
      with_reference=self.parts.with_reference and reference is None,
      adapter=self.adapter,
      critic=self.parts.stage.algorithm.critic,
      seed=self.config.seed,
      host=self.host,
    )
    if opt_state is not None:
      state = state._replace(opt_state=opt_state)
    return state if reference is None else state._replace(reference=reference)

  def abstract(self) -> TrainState:
    return states.abstract_state(
      self.mesh,
      self.model,
      self.optimizer,
      with_reference=self.parts.with_reference,
      adapter=self.adapter,
      critic=self.parts.stage.algorithm.critic,
      host=self.host,
    )

  def at_rest(self, state: TrainState) -> TrainState:
    """The state as a checkpoint keeps it: frozen weights are a fingerprint."""
    return state._replace(reference=lora.fingerprint(state.reference)) if self.adapter else state

  def resume(self, restored: tuple[TrainState, int] | None) -> tuple[TrainState, int] | None:
    """Prepares a restored checkpoint for training; ValueError where frozen weights have changed."""
    if restored is None or not self.adapter:
      return restored
    state, step = restored
    return state._replace(reference=self._frozen(state.reference)), step

  def policy(self, state: TrainState) -> decoder.Params:
    """The decoder's own weights as they stand, adapters merged in."""
    if not self.adapter:
      return state.params
    return self.merged(state.reference, state.params)

  def restore_policy(
    self, workdir: pathlib.Path, step: int | None = None
  ) -> tuple[decoder.Params, int] | None:
    """Reads (weights, step) of a checkpoint, the newest unless `step` says which; None before any.

    Nothing else of the checkpoint is read.
    """
    found = self.restore_parts(workdir, step)
    if found is None:
      return None
    frozen, params, step = found
    return (params if frozen is None else self.merged(frozen, params)), step

  def restore_parts(self, workdir: pathlib.Path, step: int | None = None):
    """Reads (frozen weights or None, what was trained, step) of a checkpoint; None before any."""
    whole = self.abstract()
    wanted = {"params": whole.params} | ({"reference": whole.reference} if self.adapter else {})
    found = checkpoint.restore_part(workdir, wanted, step)
    if found is None:
      return None
    parts, step = found
    return (self._frozen(parts["reference"]) if self.adapter else None, parts["params"], step)

  def _frozen(self, fingerprint) -> decoder.Params:
    """The frozen weights, read again and checked."""
    c = self.config
    if self.before:
      params, source = self.before()
    else:
      source = c.policy.checkpoint or f"the policy made from seed={c.seed}"
      params = build.initial_params(c, self.model, self.mesh, dtype=self.start_dtype)
    axes = decoder.logical_axes(self.model)
    params = {
      name: sharding.put(
        value.astype(self.start_dtype[name]), sharding.named(self.mesh, axes[name])
      )
      for name, value in params.items()
    }
    lora.check_fingerprint(params, fingerprint, source)
    return params

  def merged(self, frozen, adapters) -> decoder.Params:
    """The decoder's own weights, in the dtype of the frozen ones."""
    with jax.set_mesh(self.mesh):
      return _merge(self.model, self.adapter, frozen, adapters)


_merge = functools.partial(jax.jit, static_argnums=(0, 1))(lora.merge)


def of_stage(
  run: build.Run, parts: stage_parts.StageParts, workdir: pathlib.Path | None
) -> Weights:
  """The weights of a stage of the run in `workdir`; None for one without checkpoints."""
  number = run.stages.index(parts)
  before = None
  if number and workdir is not None:
    before = functools.partial(_at_end_of, run, run.stages[number - 1], workdir)
  return Weights(run.config, run.mesh, run.model, parts, before)


def folder_of(run: build.Run, parts: stage_parts.StageParts, workdir: pathlib.Path) -> pathlib.Path:
  """Where a stage's checkpoints lie; the last one's are the run's own."""
  return workdir if parts is run.last else workdir / parts.stage.name


def end_of(config, parts: stage_parts.StageParts, folder: pathlib.Path) -> int | None:
  """The step of a finished stage that the next one goes on from; None is its newest."""
  if parts.stage.source != "rollouts":
    return parts.stage.num_steps
  rule = read(ConvergenceSettings, config)
  if rule.goes_on == "best":
    return checkpoint.best_step(folder)
  return None if rule.patience else parts.stage.num_steps


def _at_end_of(run: build.Run, parts: stage_parts.StageParts, workdir: pathlib.Path):
  """(policy, folder) that a stage ended with; ValueError where its checkpoint is gone."""
  folder = folder_of(run, parts, workdir)
  found = of_stage(run, parts, workdir).restore_policy(folder, end_of(run.config, parts, folder))
  if found is None:
    raise ValueError(
      f"{folder} holds no checkpoint any more, and with it the frozen weights of these adapters "
      "are gone; bring it back, or train in a new workdir"
    )
  return found[0], f"{folder}"
