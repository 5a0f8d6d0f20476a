"""The one update step: advantages -> loss -> gradients -> parameters, jitted once, its state
donated.

Gradient accumulation runs over packed micro-batches. Each token's weight in the loss is fixed over
the whole batch beforehand, so splitting rows differently changes memory and nothing else. The
number of micro-batches that hold anything is a traced number: short batches cost less, and the step
still compiles once.
"""

from collections.abc import Callable, Collection
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stratified import losses, sharding
from stratified.advantages import theory
from stratified.policy import decoder, log_probs, lora
from stratified.types import Batch, TrainState

P = jax.P

# A loss of one micro-batch: (logp, entropy, reference_logp, advantage per token, micro-batch) ->
# (loss per token, stats per token to average, stats per token to take the maximum of).
TokenLoss = Callable[..., tuple[Any, dict, dict]]


def policy_gradient(
  *,
  clip_ratio: float,
  kl_coefficient: float,
  kl_estimator: str,
  old_log_probs: str = "trainer",
  importance_cap: float | None = None,
  importance: str = "token",
) -> TokenLoss:
  """Clipped surrogate plus kl_coefficient x KL to the reference.

  old_log_probs: "trainer" takes this step's own log-probs (one update a batch: the ratio is 1 and
  its gradient that of the plain policy gradient); "sampler" takes what the sampler reported.
  importance_cap turns on truncated importance sampling of the gap between the two, `importance`
  says whether by "token" or by whole "sequence".
  """

  def loss(logp, entropy, reference_logp, advantage, micro):
    mask = micro.loss_mask_art
    sampled = jnp.where(mask > 0, micro.sampler_logp_art, logp)
    old = sampled if old_log_probs == "sampler" else logp
    surrogate, clipped = losses.clipped_surrogate(
      logp, jax.lax.stop_gradient(old), advantage, clip_ratio=clip_ratio
    )
    if importance_cap is not None:
      surrogate *= losses.importance_weight(
        jax.lax.stop_gradient(logp),
        sampled,
        cap=importance_cap,
        position_rt=micro.position_art if importance == "sequence" else None,
      )
    total, stats = surrogate, {"loss/policy": surrogate}
    if reference_logp is not None:
      kl = losses.kl_estimate(logp, reference_logp, estimator=kl_estimator)
      total, stats = total + kl_coefficient * kl, stats | {"loss/kl": kl}
    gap = jnp.abs(sampled - logp)
    stats |= {"policy/entropy": entropy, "policy/clip_share": clipped, "policy/logp_gap_mean": gap}
    return total, stats, {"policy/logp_gap_max": gap * mask}

  return loss


def supervised(logp, entropy, reference_logp, advantage, micro):
  """Cross-entropy of the policy tokens, for demonstrations."""
  return -logp, {"warm_start/loss": -logp, "policy/entropy": entropy}, {}


def make_update(
  mesh,
  config: decoder.DecoderConfig,
  optimizer: optax.GradientTransformation,
  *,
  token_loss: TokenLoss,
  advantage: Callable | None = None,
  num_strata: int = 1,
  eps: float = 1e-6,
  aggregation: str = "token_mean",
  max_tokens: int = 1,
  temperature: float = 1.0,
  chunk: int | None = None,
  adapter: lora.LoraConfig | None = None,
  host: Collection[str] = (),
):
  """The step (state, batch) -> (state, stats) on `mesh`; the state's buffers are reused, so the old
  one is gone.

  It is jitted once; `step.lower(state, batch)` gives what a compiler sees.

  advantage: (reward_qk, stratum_qk, valid_qk, step) -> [Q, K]; None gives every trajectory 1
  (supervision). eps is the estimator's, for the diagnostics. adapter: trains the adapters in
  state.params beside the frozen weights in state.reference, which are the KL's reference too; None
  trains every weight. host: the parts of the state ("opt_state", "reference") that lie in the
  host's memory between steps. A non-finite loss or gradient leaves parameters and optimizer as they
  were and counts in `update/skipped` and `state.skipped_in_a_row`. stats["advantage_qk"] is [Q, K],
  every other entry a float32 scalar.
  """
  if aggregation not in losses.AGGREGATIONS:
    raise ValueError(
      f"loss.aggregation={aggregation!r} is unknown; choose one of {losses.AGGREGATIONS}"
    )

  def step(state: TrainState, batch: Batch):
    state = _moved(state, host, jax.memory.Space.Device)
    advantage_qk, stats = _advantages(advantage, num_strata, eps, batch, state.step)
    totals = dict(
      tokens=(batch.length_qk * batch.valid_qk).sum(), trajectories=batch.valid_qk.sum()
    )
    weigh = functools.partial(
      losses.token_weights, aggregation=aggregation, max_tokens=max_tokens, **totals
    )
    whole = (
      functools.partial(lora.join, adapter, state.reference) if adapter else lambda params: params
    )
    loss_of = _micro_loss(
      config, token_loss, weigh, whole, state.reference, batch, advantage_qk, temperature, chunk
    )
    gradient, loss, averages, maxima = _accumulate(loss_of, state.params, batch)
    stats |= averages | maxima
    stats["grad/norm"] = optax.global_norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(stats["grad/norm"])
    state = _apply(optimizer, state, gradient, finite)
    stats["update/skipped"] = 1.0 - finite
    state = _moved(state, host, jax.memory.Space.Host)
    return state, stats | {"advantage_qk": _whole(advantage_qk)}

  return OnMesh(mesh, jax.jit(step, donate_argnums=0))


@dataclasses.dataclass(frozen=True)
class OnMesh:
  """A jitted function that always runs under its mesh, while the caller (a sampler, say) stays
  outside."""

  mesh: Any
  jitted: Any

  def __call__(self, *args):
    with jax.set_mesh(self.mesh):
      return self.jitted(*args)

  def lower(self, *args):
    with jax.set_mesh(self.mesh):
      return self.jitted.lower(*args)


# The parts of a state that may lie in the host's memory.
HOST_PARTS = ("opt_state", "reference")


def _moved(state: TrainState, parts: Collection[str], space) -> TrainState:
  """The state with the named parts in another memory; scalars stay, they are needed at once."""
  move = lambda x: jax.device_put(x, space) if x.ndim else x
  return state._replace(**{part: jax.tree.map(move, getattr(state, part)) for part in parts})


def _flat(x_qk):
  """[Q, K] -> [Q K]: any row may hold any trajectory's tokens."""
  return _whole(x_qk).reshape(-1)


def _whole(x_qk):
  """A small array whole on every device."""
  return x_qk if not sharding.meshed() else jax.sharding.reshard(x_qk, P(None, None))


def _advantages(advantage, num_strata, eps, batch, step):
  if advantage is None:
    return jnp.ones_like(batch.reward_qk), {}
  advantage_qk = advantage(batch.reward_qk, batch.stratum_qk, batch.valid_qk, step)
  return advantage_qk, theory.diagnostics(
    batch.reward_qk, batch.stratum_qk, batch.valid_qk, advantage_qk, num_strata=num_strata, eps=eps
  )


def _micro_loss(
  config, token_loss, weigh, whole, reference, batch, advantage_qk, temperature, chunk
):
  """(params, micro-batch) -> (loss, (sums, maxima)), additive over micro-batches."""
  per_trajectory = [_flat(x) for x in (advantage_qk, batch.valid_qk, batch.length_qk)]

  def log_probs_of(params, micro):
    x = decoder.hidden(config, params, micro.token_art, micro.position_art, micro.segment_art)
    return log_probs.token_log_probs(
      config, params, x, micro.token_art, temperature=temperature, chunk=chunk
    )

  def loss_of(params, micro):
    advantage, valid, length = (
      sharding.take(x, micro.trajectory_art, "row", None) for x in per_trajectory
    )
    logp, entropy = log_probs_of(whole(params), micro)
    reference_logp = None
    if reference is not None:
      reference_logp = jax.lax.stop_gradient(log_probs_of(reference, micro)[0])
    loss, mean_stats, max_stats = token_loss(logp, entropy, reference_logp, advantage, micro)
    mask = micro.loss_mask_art
    # Padding may hold anything, infinities too: select, never multiply.
    used = lambda x: jnp.where(mask > 0, x, 0.0)
    total = (weigh(mask, valid, length) * used(loss)).sum()
    sums = {name: (mask * used(x)).sum() for name, x in jax.lax.stop_gradient(mean_stats).items()}
    sums["tokens"] = mask.sum()
    return total, (
      sums,
      {name: used(x).max() for name, x in jax.lax.stop_gradient(max_stats).items()},
    )

  return loss_of


def _accumulate(loss_of, params, batch: Batch):
  gradient_of = jax.value_and_grad(loss_of, has_aux=True)

  def micro(i):
    rows = {
      name: jax.lax.dynamic_index_in_dim(value, i, 0, keepdims=False)
      for name, value in batch._asdict().items()
      if name.endswith("_art")
    }
    (loss, (sums, maxima)), gradient = gradient_of(params, batch._replace(**rows))
    return gradient, (loss, sums), maxima

  def body(i, carry):
    gradient, sums, maxima = micro(i)
    add = lambda old, new: jax.tree.map(jnp.add, old, new)
    return add(carry[0], gradient), add(carry[1], sums), jax.tree.map(jnp.maximum, carry[2], maxima)

  # The first micro-batch starts the sums: no zeros to make and add, and shardings come out as the
  # gradient has them.
  gradient, (loss, sums), maxima = jax.lax.fori_loop(1, batch.num_micro, body, micro(0))
  tokens = jnp.maximum(sums.pop("tokens"), 1.0)
  return gradient, loss, {name: total / tokens for name, total in sums.items()}, maxima


def _apply(optimizer, state: TrainState, gradient, finite) -> TrainState:
  updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
  return state._replace(
    step=state.step + 1,
    params=keep(params, state.params),
    opt_state=keep(opt_state, state.opt_state),
    skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
  )


def init_state(
  mesh,
  config: decoder.DecoderConfig,
  params,
  optimizer,
  *,
  with_reference: bool,
  adapter: lora.LoraConfig | None = None,
  seed: int = 0,
  host: Collection[str] = (),
) -> TrainState:
  """A sharded state at step 0; it takes `params` over (the first update may reuse their memory).

  The reference is a copy in the dtypes that a forward pass reads (`decoder.seen_dtype`).
  With an adapter `params` become the frozen weights, themselves the reference, and new adapters are
  what is trained.
  """
  place = lambda tree, table: {
    name: sharding.put(value, sharding.named(mesh, table[name].axes))
    for name, value in tree.items()
  }
  with jax.set_mesh(mesh):
    params, reference = place(params, decoder.weights(config)), None
    if adapter:
      new = lora.init(config, adapter, jax.random.key(seed))
      reference, params = params, place(new, lora.weights(config, adapter))
    elif with_reference:
      reference = {
        name: jnp.array(x, decoder.seen_dtype(config, name), copy=True)
        for name, x in params.items()
      }
    opt_state = jax.jit(optimizer.init)(params)
    zero = sharding.put(np.zeros((), np.int32), sharding.named(mesh, ()))
    state = TrainState(
      step=zero,
      params=params,
      opt_state=opt_state,
      reference=reference,
      skipped_in_a_row=jnp.copy(zero),
    )
    return _moved(state, host, jax.memory.Space.Host)


def abstract_state(
  mesh,
  config: decoder.DecoderConfig,
  optimizer,
  *,
  with_reference: bool,
  adapter: lora.LoraConfig | None = None,
  host: Collection[str] = (),
) -> TrainState:
  """The state's shapes, dtypes and shardings, nothing allocated: what a checkpoint is restored
  into.

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
  with jax.set_mesh(mesh):
    shapes = jax.eval_shape(optimizer.init, params)
  opt_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.NamedSharding(mesh, x.sharding.spec if x.sharding else P())
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
  state = TrainState(
    step=scalar, params=params, opt_state=opt_state, reference=reference, skipped_in_a_row=scalar
  )
  there = lambda x: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=x.sharding.with_memory_kind("pinned_host")
  )
  return state._replace(
    **{
      part: jax.tree.map(lambda x: there(x) if x.ndim else x, getattr(state, part)) for part in host
    }
  )
