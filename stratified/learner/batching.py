"""Trajectories -> Batch: the only door from Python objects to arrays.

Rollouts are packed by first fit, longest first, into rows of one fixed length; rows go into
micro-batches of a fixed number of rows. Shapes never change over a run: what a step doesn't need
stays empty, and the update skips it.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from stratified import sharding
from stratified.config import setting, Settings
from stratified.types import Batch, Trajectory


@dataclasses.dataclass(frozen=True)
class PackingSettings(Settings):
  """The rows that rollouts are packed into."""

  SECTION = "packing"
  row_length: int = setting(
    4096, "tokens of a packed row", low=2, affects=["training", "warm_start"]
  )
  rows: int = setting(
    0,
    "packed rows of a micro-batch over all devices; 0 is one for each part that the mesh splits "
    "rows into",
    low=0,
    affects=["training", "warm_start"],
  )


@dataclasses.dataclass(frozen=True)
class Packing:
  """Fixed shapes of a batch: `micro` micro-batches at most, of `rows` rows of `length` tokens,
  split over `shards`."""

  length: int
  rows: int
  micro: int
  shards: int = 1

  @classmethod
  def for_rollouts(cls, count: int, *, length: int, rows: int, shards: int = 1) -> "Packing":
    """Room for `count` rollouts even if each fills a row of its own."""
    return cls(length=length, rows=rows, micro=-(-count // rows), shards=shards)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
  """Packs items into bins: longest first, each into the first bin with room. Returns the item
  indices of each bin."""
  bins, room = [], np.zeros(len(lengths), np.int64)
  for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    if lengths[item] > capacity:
      raise ValueError(
        f"a rollout of {lengths[item]} tokens does not fit a row of {capacity}; "
        "raise the row length or lower --config.rollout.max_tokens"
      )
    fits = np.nonzero(room[: len(bins)] >= lengths[item])[0]
    if fits.size:
      index = int(fits[0])
    else:
      index = len(bins)
      bins.append([])
      room[index] = capacity
    bins[index].append(item)
    room[index] -= lengths[item]
  return bins


def deal(bins: Sequence[list[int]], lengths: Sequence[int], packing: Packing) -> list[list[int]]:
  """Bins -> rows, some of them empty, so that the shards of each micro-batch hold like numbers of
  tokens.

  Fullest first, a micro-batch's bins go to its shards to and fro; a shard's rows lie together.
  """
  if packing.shards == 1:
    return list(bins)
  fullest = sorted(bins, key=lambda items: -sum(lengths[i] for i in items))
  each, rows = packing.rows // packing.shards, []
  for at in range(0, len(fullest), packing.rows):
    part = [[] for _ in range(packing.rows)]
    for j, items in enumerate(fullest[at : at + packing.rows]):
      turn, shard = divmod(j, packing.shards)
      part[(packing.shards - 1 - shard if turn % 2 else shard) * each + turn] = items
    rows += part
  return rows


def collate(
  groups: Sequence[Sequence[Trajectory]],
  *,
  packing: Packing,
  rewards: Sequence[Sequence[float]],
  strata: Sequence[Sequence[int]],
  num_strata: int,
) -> Batch:
  """A Batch of NumPy arrays. `groups`, `rewards`, `strata` are [Q][K], every group of the same size
  K.

  A rollout with a fault takes no tokens and is masked in every statistic. Raises on a ragged group,
  a stratum id outside [0, num_strata) or a reward that is not finite.
  """
  k = len(groups[0])
  if any(len(group) != k for group in groups):
    raise ValueError(
      f"groups of {sorted({len(group) for group in groups})} rollouts: every question needs the "
      "same "
      "number; mark a lost rollout with a fault instead of leaving it out"
    )
  stratum = np.asarray(strata, np.int32)
  if stratum.min() < 0 or stratum.max() >= num_strata:
    raise ValueError(
      f"stratum ids run from {stratum.min()} to {stratum.max()}, outside [0, {num_strata}); "
      "cap the partition function or raise its number of strata"
    )
  flat = [trajectory for group in groups for trajectory in group]
  valid = [i for i, trajectory in enumerate(flat) if trajectory.fault is None]
  reward = np.asarray(rewards, np.float32)
  broken = [i for i in valid if not np.isfinite(reward[i // k, i % k])]
  if broken:
    raise ValueError(
      f"rollout {broken[0] % k} of question {flat[broken[0]].question.id!r} has the reward "
      f"{reward[broken[0] // k, broken[0] % k]}: a reward function must return a finite number"
    )
  encoded = {i: _encode(flat[i]) for i in valid}
  lengths = [len(encoded[i][0]) for i in valid]
  rows = deal(first_fit(lengths, packing.length), lengths, packing)
  arrays = _fill([[(valid[j], encoded[valid[j]]) for j in items] for items in rows], packing)
  return Batch(
    *arrays,
    num_micro=np.int32(max(1, -(-len(rows) // packing.rows))),
    length_qk=np.asarray([t.num_policy_tokens for t in flat], np.float32).reshape(len(groups), k),
    reward_qk=reward,
    stratum_qk=stratum,
    valid_qk=np.asarray([t.fault is None for t in flat], np.float32).reshape(len(groups), k),
  )


def _encode(trajectory: Trajectory):
  token, mask, logp = [], [], []
  for segment in trajectory.segments:
    token.extend(segment.token_ids)
    sampled = segment.origin == "policy"
    mask.extend([float(sampled)] * len(segment.token_ids))
    logp.extend(segment.log_probs if sampled else [0.0] * len(segment.token_ids))
  return token, mask, logp


def _fill(bins, packing: Packing):
  shape = (packing.micro * packing.rows, packing.length)
  if len(bins) > shape[0]:
    raise ValueError(
      f"{len(bins)} rows are needed, {shape[0]} are planned: raise the packing's micro-batches"
    )
  token, position, segment, trajectory = (np.zeros(shape, np.int32) for _ in range(4))
  mask, logp = (np.zeros(shape, np.float32) for _ in range(2))
  for row, items in enumerate(bins):
    start = 0
    for number, (index, (tokens, sampled, log_probs)) in enumerate(items, 1):
      at = slice(start, start + len(tokens))
      token[row, at], mask[row, at], logp[row, at] = tokens, sampled, log_probs
      position[row, at] = np.arange(len(tokens))
      segment[row, at] = number
      trajectory[row, at] = index
      start += len(tokens)
  deal = lambda x: x.reshape(packing.micro, packing.rows, packing.length)
  return tuple(deal(x) for x in (token, position, segment, mask, logp, trajectory))


def weigh_context(batch: Batch, weight: float) -> Batch:
  """For supervision: tokens that the policy read rather than wrote count `weight` in the loss, each
  segment's first token aside (nothing precedes it). 0 leaves the batch as it is."""
  if not weight:
    return batch
  context = (batch.loss_mask_art == 0) & (batch.segment_art > 0) & (batch.position_art > 0)
  mask = np.where(context, np.float32(weight), batch.loss_mask_art)
  length = np.bincount(
    batch.trajectory_art.ravel(), weights=mask.ravel(), minlength=batch.length_qk.size
  )
  return batch._replace(
    loss_mask_art=mask, length_qk=length.astype(np.float32).reshape(batch.length_qk.shape)
  )


def padding_share(batch: Batch) -> float:
  """Share of the positions the update runs over that hold no token."""
  used = batch.segment_art[: int(batch.num_micro)]
  return float((used == 0).mean())


def num_tokens(batch: Batch) -> int:
  return int((batch.segment_art > 0).sum())


def place(mesh, batch: Batch) -> Batch:
  """The batch on the mesh: rows and questions are split, micro-batches and positions are not."""
  rows, questions, scalar = (
    sharding.named(mesh, axes) for axes in ((None, "row", None), ("question", None), ())
  )
  where = {"num_micro": scalar} | {
    name: questions for name in ("length_qk", "reward_qk", "stratum_qk", "valid_qk")
  }
  return Batch(
    **{name: sharding.put(value, where.get(name, rows)) for name, value in batch._asdict().items()}
  )
