"""Packs trajectories into a Batch: the only door from Python objects to arrays.

Rollouts lie in rows of one fixed length, as packing.py plans them. Shapes never change over a run:
what a step doesn't need stays empty, and the update skips it.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from stratified import sharding
from stratified.algorithms.base import Algorithm
from stratified.learner.packing import pack, Packing
from stratified.types import Batch, Question, Trajectory


def collate(
  groups: Sequence[Sequence[Trajectory]],
  *,
  packing: Packing,
  algorithm: Algorithm,
  rewards: Sequence[Sequence[float]],
  strata: Sequence[Sequence[int]],
  num_strata: int,
  parts: Sequence[Sequence[Sequence[float]]] | None = None,
  steps: Sequence[Sequence[Sequence[float]]] | None = None,
  prompts: Sequence[Sequence[Sequence[int]]] | None = None,
  others: Sequence[Sequence[Sequence[int]]] | None = None,
) -> Batch:
  """Makes a Batch of NumPy arrays; `groups`, `rewards`, `strata` are [Q][K], all groups of size K.

  parts: [Q][K][P] the rewards' parts, for a method that reads them; zeros where not given.
  steps: [Q][K] the rewards of each rollout's turns, for a method that takes them.
  prompts: [Q][K] token ids that a teacher reads in place of a rollout's own prompt.
  others: likewise the prompts with which it is contrasted (`Teacher.contrast`).

  A rollout with a fault takes no tokens and is masked in every statistic; one that counts in no
  loss (`Algorithm.idle`) takes no tokens either. Raises ValueError for a ragged group, a stratum id
  outside [0, num_strata), a reward that is not finite or too large for float32 statistics, and
  streams that do not fit the rollout.
  """
  q, k = len(groups), len(groups[0])
  if any(len(group) != k for group in groups):
    raise ValueError(
      f"groups of {sorted({len(group) for group in groups})} rollouts: every question needs the "
      "same number; mark a lost rollout with a fault instead of leaving it out"
    )
  stratum = np.asarray(strata, np.int32)
  if stratum.min() < 0 or stratum.max() >= num_strata:
    raise ValueError(
      f"stratum ids run from {stratum.min()} to {stratum.max()}, outside [0, {num_strata}); "
      "cap the partition function or raise its number of strata"
    )
  flat = [trajectory for group in groups for trajectory in group]
  given = np.asarray(rewards, np.float64)
  _check_rewards(groups, given)
  encoded = {
    i: _encode(trajectory, algorithm, float(given[i // k, i % k]), steps and steps[i // k][i % k])
    for i, trajectory in enumerate(flat)
    if trajectory.fault is None
  }
  valid = np.asarray([t.fault is None for t in flat], np.float32).reshape(q, k)
  idle = algorithm.idle(given, valid)
  in_rows = {i: fields for i, fields in encoded.items() if not idle[i // k, i % k]}
  taught = {"": prompts, "other_": others}
  taught = {kind: sum(map(list, read), []) for kind, read in taught.items() if read is not None}
  for kind, flat_prompts in taught.items():
    for i, fields in encoded.items():
      fields["taught", kind] = _after_prompt(flat[i], flat_prompts[i])
  rows, first_m = pack(in_rows, q, k, packing)
  names = ["token", "sampled", "logp", *(("stream", name) for name in algorithm.STREAMS)]
  fields = _fill(rows, encoded, packing, names)
  # The sum of the numbers as the update sees them, in float32.
  mass_of = lambda i, name: (
    np.asarray(encoded[i]["stream", name], np.float32).sum(dtype=np.float64) if i in encoded else 0
  )
  mass = lambda name: [mass_of(i, name) for i in range(len(flat))]
  return Batch(
    token_art=fields["token"],
    position_art=fields["position"],
    segment_art=fields["segment"],
    policy_art=fields["sampled"],
    sampler_logp_art=fields["logp"],
    trajectory_art=fields["trajectory"],
    stream_art={name: fields["stream", name] for name in algorithm.STREAMS},
    first_m=first_m,
    mass_qk={name: np.asarray(mass(name), np.float32).reshape(q, k) for name in algorithm.STREAMS},
    array_qk=algorithm.arrays(groups, rewards) | _reward_parts(parts, algorithm, (q, k)),
    reward_qk=given.astype(np.float32),
    stratum_qk=stratum,
    valid_qk=valid,
    teacher_art={
      kind + name: array
      for kind in taught
      for name, array in _fill_teacher(rows, encoded, packing, kind).items()
    },
  )


def _reward_parts(parts, algorithm: Algorithm, shape: tuple[int, int]) -> dict[str, np.ndarray]:
  """{"reward_parts": [Q, K, P]} for a method that reads them, else {}."""
  if not algorithm.num_parts:
    return {}
  whole = np.zeros((*shape, algorithm.num_parts), np.float32)
  if parts is not None:
    whole[:] = parts
  return {"reward_parts": whole}


# Squares of rewards are summed in float32, whose largest number is 3e38.
LARGEST_REWARD = 1e15


def _check_rewards(groups: Sequence[Sequence[Trajectory]], reward_qk: np.ndarray) -> None:
  for q, group in enumerate(groups):
    for k, trajectory in enumerate(group):
      if trajectory.fault is None and not abs(reward_qk[q, k]) <= LARGEST_REWARD:
        raise ValueError(
          f"rollout {k} of question {trajectory.question.id!r} has the reward {reward_qk[q, k]}: a "
          f"reward function must return a finite number of at most {LARGEST_REWARD:g} in size"
        )


def _encode(
  trajectory: Trajectory, algorithm: Algorithm, reward: float, steps: Sequence[float] | None = None
) -> dict[Any, Sequence]:
  """Lists what each token carries: its id, whether it was sampled, its log-prob, its streams."""
  token, sampled, logp = [], [], []
  for segment in trajectory.segments:
    size, policy = len(segment.token_ids), segment.origin == "policy"
    token.extend(segment.token_ids)
    sampled.extend([float(policy)] * size)
    logp.extend(segment.log_probs if policy else [0.0] * size)
  given = (trajectory, reward) if steps is None else (trajectory, reward, steps)
  streams = algorithm.streams(*given)
  for name in algorithm.STREAMS:
    if len(streams.get(name, ())) != len(token):
      raise ValueError(
        f"{type(algorithm).__name__}.streams gives {len(streams.get(name, ()))} numbers under "
        f"{name!r} for a rollout of {len(token)} tokens; it must give one a token"
      )
  carried = {("stream", name): streams[name] for name in algorithm.STREAMS}
  return {"token": token, "sampled": sampled, "logp": logp} | carried


def _after_prompt(trajectory: Trajectory, prompt: Sequence[int]) -> tuple[list[int], int]:
  """(the rollout's tokens after another prompt, by how many tokens they stand later there)."""
  tokens, own = trajectory.token_ids, 0
  for segment in trajectory.segments:
    if segment.origin != "prompt":
      break
    own += len(segment.token_ids)
  return [*prompt, *tokens[own:]], len(prompt) - own


def _fill(rows, encoded, packing: Packing, names: Sequence) -> dict[Any, np.ndarray]:
  """{name: [A, R, T]} of what tokens carry, and their position, segment and trajectory."""
  shape = (packing.micro * packing.rows, packing.length)
  if len(rows) > shape[0]:
    raise ValueError(
      f"{len(rows)} rows are needed, {shape[0]} are planned: raise the packing's micro-batches"
    )
  places = {name: np.zeros(shape, np.int32) for name in ("position", "segment", "trajectory")}
  carried = {name: np.zeros(shape, np.int32 if name == "token" else np.float32) for name in names}
  for row, items in enumerate(rows):
    start = 0
    for number, index in enumerate(items, 1):
      size = len(encoded[index]["token"])
      at = slice(start, start + size)
      for name, array in carried.items():
        array[row, at] = encoded[index][name]
      places["position"][row, at] = np.arange(size)
      places["segment"][row, at] = number
      places["trajectory"][row, at] = index
      start += size
  split = (packing.micro, packing.rows, packing.length)
  return {name: array.reshape(split) for name, array in (carried | places).items()}


def _fill_teacher(rows, encoded, packing: Packing, kind: str) -> dict[str, np.ndarray]:
  """What the teacher reads: the same rollouts in the same rows, each after its other prompt."""
  count = packing.micro * packing.rows
  shape, read = (count, packing.length), (count, packing.teacher_length)
  arrays = {name: np.zeros(read, np.int32) for name in ("token", "position", "segment")}
  arrays["at"] = np.zeros(shape, np.int32)
  for row, items in enumerate(rows):
    start, begin = 0, 0
    for number, index in enumerate(items, 1):
      own, (taught, moved) = encoded[index]["token"], encoded[index]["taught", kind]
      at = slice(begin, begin + len(taught))
      arrays["token"][row, at] = taught
      arrays["position"][row, at] = np.arange(len(taught))
      arrays["segment"][row, at] = number
      shared = np.arange(max(0, -moved), len(own))  # a prompt's tokens are where they happen to be
      arrays["at"][row, start + shared] = begin + shared + moved
      start, begin = start + len(own), begin + len(taught)
  split = lambda x: x.reshape(packing.micro, packing.rows, x.shape[-1])
  return {name: split(array) for name, array in arrays.items()}


def padding_share(batch: Batch) -> float:
  """Share of the positions the update runs over that hold no token."""
  used = batch.segment_art[: int(batch.first_m[-1])]
  return float((used == 0).mean())


def num_tokens(batch: Batch) -> int:
  return int((batch.segment_art > 0).sum())


def shardings(mesh, batch: Batch) -> Batch:
  """Where each array of a batch lies: rows and questions are split, micro-batches are not."""
  rows, scalar = sharding.named(mesh, (None, "row", None)), sharding.named(mesh, (None,))
  question = lambda x: sharding.named(mesh, ("question", *[None] * (x.ndim - 1)))
  place = {
    name: jax.tree.map(question if name.endswith("_qk") else lambda _: rows, value)
    for name, value in batch._asdict().items()
  }
  return Batch(**place | {"first_m": scalar})


def place(mesh, batch: Batch) -> Batch:
  """The batch on the mesh."""
  return jax.tree.map(sharding.put, batch, shardings(mesh, batch))


# Takes no tokens and counts nowhere: stands where a batch has room for a rollout and there is none.
LOST = Trajectory(Question("", "", ()), 0, (), stop="fault", fault="stands in for a rollout")


def abstract(mesh, packing: Packing, algorithm: Algorithm, questions: int, samples: int) -> Batch:
  """The shapes, dtypes and shardings of a step's batch, for compiling without one."""
  zeros = np.zeros((questions, samples))
  contrasted = bool(packing.teacher_length and algorithm.teacher.contrast)
  small = dataclasses.replace(
    packing,
    micro=packing.mini_batches,
    rows=1,
    length=1,
    teacher_length=packing.teacher_length and 1,
  )
  made = collate(
    [[LOST] * samples] * questions,
    packing=small,
    algorithm=algorithm,
    rewards=zeros,
    strata=zeros,
    num_strata=1,
    prompts=[[()] * samples] * questions if packing.teacher_length else None,
    others=[[()] * samples] * questions if contrasted else None,
  )
  rows = (packing.micro, packing.rows)
  full = {
    name: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (*rows, packing.length) if name.endswith("_art") else x.shape, x.dtype
      ),
      value,
    )
    for name, value in made._asdict().items()
  }
  for name, x in full["teacher_art"].items():
    length = packing.length if name.removeprefix("other_") == "at" else packing.teacher_length
    full["teacher_art"][name] = jax.ShapeDtypeStruct((*rows, length), x.dtype)
  return jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    Batch(**full),
    shardings(mesh, made),
  )
