"""Holds what of the policy a run trains and keeps: every weight, or adapters beside frozen ones.

Frozen weights are in no checkpoint. They are read again where they came from (the model directory,
the warm start's last checkpoint, the seed), and refused if they are not those beside which the
adapters were trained.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax

from stratified import sharding
from stratified.learner import state as states
from stratified.policy import decoder, lora
from stratified.runs import build, checkpoint
from stratified.types import TrainState


@dataclasses.dataclass(frozen=True)
class Weights:
  """A run's state in three forms: in training, in a checkpoint, as the decoder that samples."""

  config: Any
  mesh: Any
  model: decoder.DecoderConfig
  optimizer: Any
  plain: bool = False  # every weight is trained, and nothing is a reference: a supervised stage

  @property
  def adapter(self) -> lora.LoraConfig | None:
    return None if self.plain else build.adapter(self.config)

  @property
  def host(self) -> tuple[str, ...]:
    return () if self.plain else build.host_parts(self.config)

  @property
  def start_dtype(self) -> str | dict[str, str]:
    """Dtypes of the weights at the start: masters float32, frozen ones as a forward pass reads."""
    if not self.adapter:
      return "float32"
    return {name: decoder.seen_dtype(self.model, name) for name in decoder.weights(self.model)}

  def begin(self, params) -> TrainState:
    """Makes the state at step 0 from `params`, which it takes over."""
    if self.adapter:
      params = {name: value.astype(self.start_dtype[name]) for name, value in params.items()}
    return states.init_state(
      self.mesh,
      self.model,
      params,
      self.optimizer,
      with_reference=not self.plain,
      adapter=self.adapter,
      seed=self.config.seed,
      host=self.host,
    )

  def abstract(self) -> TrainState:
    return states.abstract_state(
      self.mesh,
      self.model,
      self.optimizer,
      with_reference=not self.plain,
      adapter=self.adapter,
      host=self.host,
    )

  def at_rest(self, state: TrainState) -> TrainState:
    """The state as a checkpoint keeps it: frozen weights are a fingerprint."""
    return state._replace(reference=lora.fingerprint(state.reference)) if self.adapter else state

  def resume(
    self, restored: tuple[TrainState, int] | None, workdir: pathlib.Path
  ) -> tuple[TrainState, int] | None:
    """Prepares a restored checkpoint for training; ValueError where frozen weights have changed."""
    if restored is None or not self.adapter:
      return restored
    state, step = restored
    return state._replace(reference=self._frozen(workdir, state.reference)), step

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
    return (
      self._frozen(workdir, parts["reference"]) if self.adapter else None,
      parts["params"],
      step,
    )

  def _frozen(self, workdir, fingerprint) -> decoder.Params:
    """The frozen weights, read again and checked."""
    c, source = (
      self.config,
      self.config.policy.checkpoint or f"the policy made from seed={self.config.seed}",
    )
    if c.warm_start.num_steps:
      source = f"{pathlib.Path(workdir) / 'warm_start'}"
      wanted = {
        "params": states.abstract_state(
          self.mesh, self.model, self.optimizer, with_reference=False
        ).params
      }
      found = checkpoint.restore_part(source, wanted, c.warm_start.num_steps)
      if found is None:
        raise ValueError(
          f"{source} holds no checkpoint any more, and with it the frozen weights of these "
          "adapters are "
          "gone; bring it back, or train in a new workdir"
        )
      params = found[0]["params"]
    else:
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
