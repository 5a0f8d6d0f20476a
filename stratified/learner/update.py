"""The one jitted step of every method: credit -> losses -> gradients -> parameters.

A step takes one rollout batch and makes one update, or several: `epochs` passes over `mini_batches`
parts of its questions, against what the policy said before the first of them. Each update sums its
gradient over packed micro-batches. A token's weight in the loss is fixed over the whole mini-batch
beforehand, so splitting rows differently changes memory and nothing else. The number of
micro-batches that hold anything is traced: short batches cost less, and the step compiles once.
"""

from collections.abc import Callable, Collection
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from stratified import losses, sharding
from stratified.advantages import theory
from stratified.algorithms.base import Algorithm, Loss, Outputs
from stratified.config import setting, Settings
from stratified.learner import outputs as outputs_of
from stratified.learner import state as states
from stratified.policy import decoder, lora
from stratified.types import Batch, TrainState


@dataclasses.dataclass(frozen=True)
class UpdateSettings(Settings):
  """How often a rollout batch is used."""

  SECTION: ClassVar[str] = "update"
  epochs: int = setting(1, "passes over a rollout batch", low=1, affects=("training",))
  mini_batches: int = setting(
    1, "updates in a pass, each on its part of the step's questions", low=1, affects=("training",)
  )


def make_update(
  mesh,
  model: decoder.DecoderConfig,
  optimizer: optax.GradientTransformation,
  algorithm: Algorithm,
  *,
  settings: UpdateSettings = UpdateSettings(),
  num_strata: int = 0,
  eps: float = 1e-6,
  temperature: float = 1.0,
  chunk: int | None = None,
  adapter: lora.LoraConfig | None = None,
  host: Collection[str] = (),
) -> "OnMesh":
  """Makes the step (state, batch) -> (state, stats) on `mesh`; it reuses the old state's buffers.

  Args:
    algorithm: what credit and losses are.
    num_strata, eps: of the diagnostics of advantages and strata (`theory.diagnostics`); with 0
      strata there are none.
    temperature, chunk: of the log-probs (`log_probs.token_log_probs`).
    adapter: trains the adapters in state.params beside the frozen weights in state.reference, which
      are the reference of the KL too; None trains every weight.
    host: the parts of the state ("opt_state", "reference") that lie in host memory between steps.

  Returns:
    A function jitted once (`.lower(state, batch)` gives what a compiler sees). An update whose loss
    or gradient is not finite leaves parameters and optimizer as they were, and counts in
    `update/skipped` and state.skipped_in_a_row. stats["advantage_qk"] is [Q, K], every other entry
    a float32 scalar: the mean over the step's updates, `update/skipped` their sum.
  """
  if algorithm.teacher:
    forward = functools.partial(outputs_of.compare, model, adapter, algorithm.teacher, chunk)
  else:
    fixed = model, adapter, algorithm.critic, temperature, chunk, algorithm.learns_entropy
    forward = functools.partial(outputs_of.forward, *fixed)
  alone_steps = algorithm.critic.alone_steps if algorithm.critic else 0
  several = settings.epochs * settings.mini_batches > 1

  def step(state: TrainState, batch: Batch):
    before = None
    if several or algorithm.looks_before:
      before = _every_micro(forward, state, batch)
    credit = algorithm.credit(batch, before, state.step)
    by_token = {name: x if x.ndim == 3 else flat(x) for name, x in credit.token.items()}

    def one_update(state: TrainState, m):
      counts = _counts(batch, m, settings.mini_batches, credit.valid)

      def loss_of(trained, rows):
        micro, micro_before, micro_credit = rows
        known = micro_before and micro_before.reference_logp
        outputs = forward(trained, state.reference, micro, reference_logp=known)
        components = algorithm.losses(outputs, micro_before, micro_credit, micro)
        return _weighted(components, micro, counts)

      rows_at = functools.partial(_micro_batch, batch, before, by_token)
      first, last = (0 if settings.mini_batches == 1 else batch.first_m[m]), batch.first_m[m + 1]
      trained = states.trained(state)
      gradient, loss, means, maxima = _accumulate(loss_of, trained, rows_at, first, last)
      state, skipped = _apply_if_finite(optimizer, state, gradient, loss, alone_steps)
      state = _follow(algorithm.teacher, state)
      return state, (means | _norms(gradient, algorithm.critic), maxima, skipped)

    state, stats = _repeat(one_update, state, settings)
    stats |= credit.stats | _diagnostics(batch, credit.advantage_qk, num_strata, eps)
    stats["advantage_qk"] = sharding.replicate(credit.advantage_qk)
    return state._replace(step=state.step + 1), stats

  return OnMesh(mesh, jax.jit(states.from_host(step, host), donate_argnums=0))


@dataclasses.dataclass(frozen=True)
class OnMesh:
  """A jitted function that always runs under its mesh, while the caller stays outside of it."""

  mesh: Any
  jitted: Any

  def __call__(self, *args):
    with jax.set_mesh(self.mesh):
      return self.jitted(*args)

  def lower(self, *args):
    with jax.set_mesh(self.mesh):
      return self.jitted.lower(*args)


def _diagnostics(batch: Batch, advantage_qk, num_strata: int, eps: float) -> dict[str, Any]:
  if not num_strata:
    return {}
  return theory.diagnostics(
    batch.reward_qk, batch.stratum_qk, batch.valid_qk, advantage_qk, num_strata=num_strata, eps=eps
  )


def _follow(teacher, state: TrainState) -> TrainState:
  """Moves a teacher's weights towards the policy's where they follow it."""
  if not teacher or teacher.weights != "ema":
    return state
  keep = teacher.decay
  mix = lambda old, new: (keep * old + (1 - keep) * new).astype(old.dtype)
  return state._replace(reference=jax.tree.map(mix, state.reference, state.params))


def _every_micro(forward, state: TrainState, batch: Batch) -> Outputs:
  """Outputs [A, R, T] of the state's parameters on all micro-batches, zeros where nothing lies."""

  @jax.jit  # traced once
  def outputs(i):
    return forward(states.trained(state), state.reference, _micro_batch(batch, None, {}, i)[0])

  def fill(i, filled):
    put = lambda whole, one: jax.lax.dynamic_update_index_in_dim(whole, one, i, 0)
    return jax.tree.map(put, filled, outputs(i))

  micros = batch.token_art.shape[0]

  def zeros(x):
    return sharding.constrain(
      jnp.zeros((micros, *x.shape), x.dtype), None, "row", *[None] * (x.ndim - 1)
    )

  empty = jax.tree.map(zeros, jax.eval_shape(outputs, jnp.int32(0)))
  return jax.lax.fori_loop(jnp.int32(0), batch.first_m[-1], fill, empty)


def _micro_batch(batch: Batch, before: Outputs | None, credit: dict[str, Any], i):
  """(batch, before, credit by token) of micro-batch i: what was [A, R, T] or [Q K] is [R, T]."""
  at = lambda tree: jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree
  )
  micro = batch._replace(
    **{name: at(value) for name, value in batch._asdict().items() if name.endswith("_art")}
  )
  by_token = {
    name: of_token(value, micro) if value.ndim == 1 else at(value) for name, value in credit.items()
  }
  return micro, at(before), by_token


def flat(x_qk):
  """[Q, K] -> [Q K], whole on every device: any row may hold any rollout's tokens."""
  return sharding.replicate(x_qk).reshape(-1)


def of_token(x_n, micro: Batch):
  """At each token of a micro-batch [R, T] the value of its rollout."""
  return sharding.take(x_n, micro.trajectory_art, "row", None)


class Counts(NamedTuple):
  """What a mini-batch's losses are divided by, by stream: rollouts that count, and their tokens."""

  valid: dict[str, Any]  # [Q K]
  mass: dict[str, Any]  # [Q K], the sum of the stream over a rollout
  tokens: dict[str, Any]  # its sum over the rollouts that count
  trajectories: dict[str, Any]


def _counts(batch: Batch, m, mini_batches: int, valid: dict[str, Any] = {}) -> Counts:
  """Counts of mini-batch m; `valid` is Credit's."""

  def own(valid_qk):
    if mini_batches == 1:
      return valid_qk
    own_q = (jnp.arange(valid_qk.shape[0]) * mini_batches) // valid_qk.shape[0] == m
    own_q = sharding.constrain(own_q.astype(valid_qk.dtype), "question")
    return valid_qk * own_q[:, None]

  every = own(batch.valid_qk)
  kept = {name: own(valid[name]) if name in valid else every for name in batch.mass_qk}
  mass = batch.mass_qk.items()
  return Counts(
    valid={name: flat(valid_qk) for name, valid_qk in kept.items()},
    mass={name: flat(mass_qk) for name, mass_qk in mass},
    tokens={name: (mass_qk * kept[name]).sum() for name, mass_qk in mass},
    trajectories={name: valid_qk.sum() for name, valid_qk in kept.items()},
  )


def _weighted(components: dict[str, Loss], micro: Batch, counts: Counts):
  """(loss, (sums, maxima)) of a micro-batch: weight x loss over all components; both add up."""
  totals, sums, maxima = [], {}, {}
  for name, loss in components.items():
    stream = micro.stream_art[name]
    weight = losses.token_weights(
      stream,
      of_token(counts.valid[name], micro),
      of_token(counts.mass[name], micro),
      aggregation=loss.aggregation,
      max_tokens=loss.max_tokens,
      tokens=counts.tokens[name],
      trajectories=counts.trajectories[name],
    )
    # Padding may hold anything, infinities too: select, never multiply.
    used = lambda x: jnp.where(stream > 0, x, 0.0)
    totals.append((weight * used(loss.value)).sum())
    means, largest = jax.lax.stop_gradient((loss.means, loss.maxima))
    sums[name] = {key: (stream * used(x)).sum() for key, x in means.items()}
    sums[name][""] = stream.sum()
    maxima |= {key: used(x).max() for key, x in largest.items()}
  return functools.reduce(jnp.add, totals), (sums, maxima)


def _accumulate(loss_of: Callable, trained, rows_at: Callable, first, last):
  """(gradient, loss, means, maxima) over the micro-batches from `first` to before `last`."""
  gradient_of = jax.value_and_grad(loss_of, has_aux=True)

  @jax.jit  # traced once
  def micro(i):
    (loss, (sums, maxima)), gradient = gradient_of(trained, rows_at(i))
    return gradient, (loss, sums), maxima

  def body(i, carry):
    gradient, sums, maxima = micro(i)
    add = lambda old, new: jax.tree.map(jnp.add, old, new)
    return add(carry[0], gradient), add(carry[1], sums), jax.tree.map(jnp.maximum, carry[2], maxima)

  _, sums, maxima = jax.eval_shape(micro, jnp.int32(first))
  full = lambda tree, value: jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), tree)
  start = jax.tree.map(jnp.zeros_like, trained), full(sums, 0.0), full(maxima, -jnp.inf)
  gradient, (loss, sums), maxima = jax.lax.fori_loop(jnp.int32(first), last, body, start)
  means = {}
  for by_key in sums.values():
    mass = jnp.maximum(by_key.pop(""), 1.0)
    means |= {key: total / mass for key, total in by_key.items()}
  return gradient, loss, means, maxima


def _apply_if_finite(optimizer, state: TrainState, gradient, loss, alone_steps: int = 0):
  """(state after the optimizer's update, 0), or (state as it was, 1) where something overflowed.

  In the first `alone_steps` steps the policy and its moments stay as they are.
  """
  finite = jnp.isfinite(loss) & jnp.isfinite(optax.global_norm(gradient))
  trained = states.trained(state)
  updates, opt_state = optimizer.update(gradient, state.opt_state, trained)
  moved = optax.apply_updates(trained, updates)
  keep = lambda when, new, old: jax.tree.map(lambda a, b: jnp.where(when, a, b), new, old)
  if state.critic is None:
    params, critic = keep(finite, moved, trained), None
    opt_state = keep(finite, opt_state, state.opt_state)
  else:
    learns = {"policy": finite & (state.step >= alone_steps), "critic": finite}
    opt_state = {
      part: keep(learns[part], opt_state[part], state.opt_state[part]) for part in learns
    }
    params, critic = (keep(learns[part], moved[part], trained[part]) for part in learns)
  state = state._replace(
    params=params,
    critic=critic,
    opt_state=opt_state,
    skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
  )
  return state, 1.0 - finite


def _norms(gradient, critic) -> dict[str, Any]:
  """The gradient's norms before clipping: the policy's, and the critic's where there is one."""
  if not critic:
    return {"grad/norm": optax.global_norm(gradient)}
  return {
    "grad/norm": optax.global_norm(gradient["policy"]),
    "value/grad_norm": optax.global_norm(gradient["critic"]),
  }


def _repeat(one_update: Callable, state: TrainState, settings: UpdateSettings):
  """All updates of a step, one after the other, and their statistics: means, maxima, sums."""
  if settings.epochs * settings.mini_batches == 1:
    state, (means, maxima, skipped) = one_update(state, 0)
  else:
    order = jnp.tile(jnp.arange(settings.mini_batches), settings.epochs)
    state, (means, maxima, skipped) = jax.lax.scan(one_update, state, order)
    means, maxima = jax.tree.map(jnp.mean, means), jax.tree.map(jnp.max, maxima)
    skipped = skipped.sum()
  return state, means | maxima | {"update/skipped": skipped}
