"""Makes the training state sharded at step 0, describes it without values, moves it in memory."""

from collections.abc import Callable, Collection
import functools

import jax
import jax.numpy as jnp
import numpy as np

from stratified import sharding
from stratified.algorithms.base import Critic
from stratified.policy import decoder, heads, lora
from stratified.types import TrainState

# The parts of a state that may lie in the host's memory between steps.
HOST_PARTS = ("opt_state", "reference")


def critic_weights(config: decoder.DecoderConfig, critic: Critic) -> dict[str, decoder.Weight]:
  """Describes the critic's weights: its heads', and those of a body of its own."""
  body = decoder.weights(config) if critic.body == "own" else {}
  return body | heads.weights(config, critic.heads)


def trained(state: TrainState):
  """What the optimizer moves: the parameters, or {"policy": ..., "critic": ...}."""
  if state.critic is None:
    return state.params
  return {"policy": state.params, "critic": state.critic}


def init_state(
  mesh,
  config: decoder.DecoderConfig,
  params,
  optimizer,
  *,
  with_reference: bool,
  adapter: lora.LoraConfig | None = None,
  critic: Critic | None = None,
  seed: int = 0,
  host: Collection[str] = (),
) -> TrainState:
  """Makes a sharded state at step 0 from `params`, whose memory the first update may reuse.

  The reference is a copy in the dtypes that a forward pass reads (`decoder.seen_dtype`). With an
  adapter `params` become the frozen weights, themselves the reference, and new adapters are what is
  trained. A critic's own body is a float32 copy of `params`, its heads are zero.
  """
  place = lambda tree, table: {
    name: sharding.put(value, sharding.named(mesh, table[name].axes))
    for name, value in tree.items()
  }
  with jax.set_mesh(mesh):
    params, reference = place(params, decoder.weights(config)), None
    beside = critic and _critic(config, critic, params, place)
    if adapter:
      new = lora.init(config, adapter, jax.random.key(seed))
      reference, params = params, place(new, lora.weights(config, adapter))
    elif with_reference:
      reference = {
        name: jnp.array(x, decoder.seen_dtype(config, name), copy=True)
        for name, x in params.items()
      }
    opt_state = jax.jit(optimizer.init)(
      params if critic is None else {"policy": params, "critic": beside}
    )
    zero = sharding.put(np.zeros((), np.int32), sharding.named(mesh, ()))
    state = TrainState(
      step=zero,
      params=params,
      opt_state=opt_state,
      reference=reference,
      skipped_in_a_row=jnp.copy(zero),
      critic=beside,
    )
    return to_memory(state, host, jax.memory.Space.Host)


def _critic(config: decoder.DecoderConfig, critic: Critic, params, place: Callable):
  """The critic's weights at their start; its own body a copy of the policy `params`."""
  table = heads.weights(config, critic.heads)
  zero = place({name: np.zeros(w.shape, np.float32) for name, w in table.items()}, table)
  body = params if critic.body == "own" else {}
  return {name: jnp.array(x, jnp.float32, copy=True) for name, x in body.items()} | zero


def abstract_state(
  mesh,
  config: decoder.DecoderConfig,
  optimizer,
  *,
  with_reference: bool,
  adapter: lora.LoraConfig | None = None,
  critic: Critic | None = None,
  host: Collection[str] = (),
) -> TrainState:
  """Describes the state's shapes, dtypes and shardings: what a checkpoint is restored into.

  With an adapter the checkpoint holds the frozen weights' fingerprint in their place
  (`lora.fingerprint`).
  """
  table = decoder.weights(config)
  struct = lambda shape, dtype, axes: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding.named(mesh, axes)
  )
  params = {
    name: struct(w.shape, jnp.float32, w.axes)
    for name, w in (lora.weights(config, adapter) if adapter else table).items()
  }
  beside = critic and {
    name: struct(w.shape, jnp.float32, w.axes) for name, w in critic_weights(config, critic).items()
  }
  with jax.set_mesh(mesh):
    shapes = jax.eval_shape(
      optimizer.init, params if critic is None else {"policy": params, "critic": beside}
    )
  opt_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, x.sharding.spec if x.sharding else jax.P())
    ),
    shapes,
  )
  reference = None
  if with_reference:
    reference = {
      name: struct(w.shape, decoder.seen_dtype(config, name), w.axes) for name, w in table.items()
    }
  if adapter:
    reference = struct((len(table), 2), jnp.uint32, ())
  scalar = struct((), jnp.int32, ())
  state = TrainState(scalar, params, opt_state, reference, skipped_in_a_row=scalar, critic=beside)
  there = lambda x: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host")
  )
  return state._replace(
    **{
      part: jax.tree.map(lambda x: there(x) if x.ndim else x, getattr(state, part)) for part in host
    }
  )


def to_memory(state: TrainState, parts: Collection[str], space) -> TrainState:
  """Moves the named parts of the state to another memory; scalars stay, they are needed at once."""
  move = lambda x: jax.device_put(x, space) if x.ndim else x
  return state._replace(**{part: jax.tree.map(move, getattr(state, part)) for part in parts})


def from_host(step: Callable, parts: Collection[str]) -> Callable:
  """Wraps a step: fetches the named parts of the state from host memory, puts them back after."""
  if not parts:
    return step

  @functools.wraps(step)
  def moved(state: TrainState, batch):
    state, stats = step(to_memory(state, parts, jax.memory.Space.Device), batch)
    return to_memory(state, parts, jax.memory.Space.Host), stats

  return moved
