"""Tries a method on made-up rollouts before any work: what it gives must fit the update."""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from stratified import made_up
from stratified.algorithms.base import Algorithm, Critic, Outputs
from stratified.learner import batching, optimizer
from stratified.learner.packing import Packing
from stratified.losses import AGGREGATIONS
from stratified.policy import heads
from stratified.types import Batch

NUM_STRATA = 2  # of the made-up rollouts


def check(algorithm: Algorithm, field: str, samples: int = 4) -> None:
  """Raises ValueError, one sentence, where what a method gives does not fit the update.

  algorithm: made for NUM_STRATA strata.
  field: the config field that names the method, with its value, for the sentence.
  """
  who = f"{field}: {type(algorithm).__name__}"
  try:
    problem = _wrong_critic(algorithm) or _problem(algorithm, samples)
  except (Exception, SystemExit) as error:
    text = " ".join(str(error).split())
    raise ValueError(
      f"{who} failed on made-up rollouts with {type(error).__name__}: {text[:200]}"
    ) from error
  if problem:
    raise ValueError(f"{who} {problem}")


def _problem(algorithm: Algorithm, samples: int) -> str | None:
  with np.errstate(over="ignore"):  # what float32 does not hold is infinite, which is said below
    batch = _batch(algorithm, samples)
  if problem := _wrong_batch(batch):
    return problem
  made = _outputs(algorithm, batch.token_art.shape)
  before = made if algorithm.looks_before else None
  credit = jax.jit(functools.partial(algorithm.credit, step=0))(batch, before)
  return _wrong_credit(credit, batch) or _wrong_losses(algorithm, credit, batch, made)


def _wrong_critic(algorithm: Algorithm) -> str | None:
  critic = algorithm.critic
  if critic is None:
    return None
  if not isinstance(critic, Critic):
    return f"has the critic {critic!r}; it must be a Critic (stratified/algorithms/base.py) or None"
  try:
    heads.check(critic.heads)
    optimizer.make(**critic.optimizer)
  except (TypeError, ValueError) as error:
    return f"has a critic that can't be: {' '.join(str(error).split())}"
  if critic.body not in ("policy", "own"):
    return f"has a critic with body={critic.body!r}; choose policy or own"
  return None


def _batch(algorithm: Algorithm, samples: int) -> Batch:
  return batching.collate(
    [made_up.rollouts(samples)],
    # with padding at the end of each row
    packing=Packing.for_rollouts(samples, length=made_up.LONGEST + 2, rows=samples),
    algorithm=algorithm,
    rewards=[[float(k % 2) for k in range(samples)]],
    strata=[[k % NUM_STRATA for k in range(samples)]],
    num_strata=NUM_STRATA,
  )


def _wrong_batch(batch: Batch) -> str | None:
  """What is wrong with the streams and arrays, None where nothing is."""
  for name, value in batch.stream_art.items():
    if not np.isfinite(value).all():
      return f"gives the stream {name!r} numbers that are not finite (as float32); they must be"
  shape = batch.reward_qk.shape
  for name, value in batch.array_qk.items():
    if np.shape(value)[:2] != shape:
      return (
        f"gives the array {name!r} of shape {list(np.shape(value))}; it must begin with questions "
        f"and rollouts, {list(shape)}"
      )
    if not np.isfinite(value).all():
      return f"gives the array {name!r} values that are not finite; they must be"
  return None


def _outputs(algorithm: Algorithm, shape: Sequence[int]) -> Outputs:
  value = lambda x, *size: jnp.full((*shape, *size), x, jnp.float32)
  sizes = algorithm.critic.heads if algorithm.critic else {}
  of_heads = {name: value(0.1, *[size] * (size > 1)) for name, size in sizes.items()}
  return Outputs(value(-1.0), value(1.0), value(-1.1), of_heads)


def _wrong_credit(credit, batch: Batch) -> str | None:
  sizes = (batch.reward_qk.shape, batch.token_art.shape)
  for name, value in {"advantage_qk": credit.advantage_qk, **credit.token}.items():
    wanted = sizes[:1] if name == "advantage_qk" else sizes
    if value.shape not in wanted:
      words = " or ".join(f"{list(size)}" for size in wanted)
      return f"gives credit {name!r} of shape {list(value.shape)}; it must be {words}"
    if not bool(jnp.isfinite(value).all()):
      return f"gives credit {name!r} that is not finite; it must be for finite rewards"
  for key, value in credit.stats.items():
    if np.shape(value):
      return f"gives the statistic {key!r} of shape {list(np.shape(value))}; it must be a scalar"
  return None


def _wrong_losses(algorithm: Algorithm, credit, batch: Batch, made: Outputs) -> str | None:
  at = lambda x: x[0]
  micro = batch._replace(
    **{
      name: jax.tree.map(at, value)
      for name, value in batch._asdict().items()
      if name.endswith("_art")
    }
  )
  by_token = {
    name: at(x) if x.ndim == 3 else jnp.asarray(x).reshape(-1)[micro.trajectory_art]
    for name, x in credit.token.items()
  }
  outputs, shape = jax.tree.map(at, made), micro.token_art.shape
  before = outputs if algorithm.looks_before else None
  found = algorithm.losses(outputs, before, by_token, micro)
  if not found:
    return "gives no loss; it must give one at least"
  for name, loss in found.items():
    if loss.aggregation not in AGGREGATIONS:
      return f"aggregates {name!r} by {loss.aggregation!r}; choose one of {', '.join(AGGREGATIONS)}"
    if name not in micro.stream_art:
      return f"gives a loss {name!r} without a stream of that name; STREAMS has {algorithm.STREAMS}"
    if np.shape(loss.value) != shape:
      return (
        f"gives a loss {name!r} of shape {list(np.shape(loss.value))}; it must be {list(shape)}"
      )
    used = jnp.where(micro.stream_art[name] > 0, loss.value, 0)
    if not bool(jnp.isfinite(used).all()):
      return f"gives a loss {name!r} that is not finite"
  return None
