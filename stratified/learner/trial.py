"""Tries a method on made-up rollouts before any work: what it gives must fit the update."""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from stratified.algorithms.base import Algorithm, Outputs
from stratified.learner import batching
from stratified.losses import AGGREGATIONS
from stratified.types import Batch, Call, Question, Segment, Trajectory, Turn


def made_up(samples: int) -> list[Trajectory]:
  """Rollouts of one question, the odd ones with a search between two turns."""
  question = Question("made-up", "Who?", ("Ada",))

  def policy(*tokens):
    return Segment(tokens, "policy", (-1.0,) * len(tokens))

  short = (Segment((1, 2), "prompt"), policy(3, 4))
  long = (*short, Segment((5, 6), "observation"), policy(7))
  search = Turn("call", "", (Call("search", "who", "hit", ("1",)),))
  return [
    Trajectory(
      question,
      k,
      long if k % 2 else short,
      (search, Turn("answer", "")) if k % 2 else (Turn("answer", ""),),
      answer="Ada" if k % 3 else None,
    )
    for k in range(samples)
  ]


def check(algorithm: Algorithm, field: str, samples: int = 4) -> None:
  """Raises ValueError, one sentence, where streams, credit or losses do not fit the update.

  field: the config field that names the method, for the sentence.
  """
  try:
    batch, problem = _batch(algorithm, samples), None
    made = _outputs(algorithm, batch.token_art.shape)
    before = made if algorithm.looks_before else None
    credit = jax.jit(functools.partial(algorithm.credit, step=0))(batch, before)
    problem = _wrong_credit(credit, batch) or _wrong_losses(algorithm, credit, batch, made)
  except (Exception, SystemExit) as error:
    text = " ".join(str(error).split())
    raise ValueError(
      f"{field}: {type(algorithm).__name__} failed on made-up rollouts with "
      f"{type(error).__name__}: {text[:200]}"
    ) from error
  if problem:
    raise ValueError(f"{field}: {type(algorithm).__name__} {problem}")


def _batch(algorithm: Algorithm, samples: int) -> Batch:
  packing = batching.Packing.for_rollouts(samples, length=8, rows=samples)
  return batching.collate(
    [made_up(samples)],
    packing=packing,
    algorithm=algorithm,
    rewards=[[float(k % 2) for k in range(samples)]],
    strata=[[k % 2 for k in range(samples)]],
    num_strata=2,
  )


def _outputs(algorithm: Algorithm, shape: Sequence[int]) -> Outputs:
  value = lambda x: jnp.full(shape, x, jnp.float32)
  return Outputs(
    value(-1.0), value(1.0), value(-1.1), {name: value(0.1) for name in algorithm.HEADS}
  )


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
