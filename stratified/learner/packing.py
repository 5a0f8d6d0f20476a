"""Plans which rollout lies in which row: of fixed length, in micro-batches of fixed size.

A step's questions are cut into mini-batches, one update each. The rollouts of each are packed,
longest first, into rows; rows go into micro-batches, over which the gradient is accumulated.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from stratified.config import setting, Settings


@dataclasses.dataclass(frozen=True)
class PackingSettings(Settings):
  """The rows that rollouts are packed into."""

  SECTION = "packing"
  row_length: int = setting(
    4096, "tokens of a packed row", low=2, high=2**20, affects=["training", "warm_start"]
  )
  rows: int = setting(
    0,
    "packed rows of a micro-batch over all devices; 0 is one for each part that the mesh splits "
    "rows into",
    low=0,
    high=65536,
    affects=["training", "warm_start"],
  )


@dataclasses.dataclass(frozen=True)
class Packing:
  """Fixed shapes of a batch: at most `micro` micro-batches of `rows` rows of `length` tokens.

  shards: how many parts the mesh splits rows into. mini_batches: by questions, in their order.
  teacher_length: of the rows that a teacher reads; 0 without one.
  """

  length: int
  rows: int
  micro: int
  shards: int = 1
  mini_batches: int = 1
  teacher_length: int = 0

  @classmethod
  def for_rollouts(
    cls, count: int, *, rows: int, shards: int = 1, mini_batches: int = 1, **lengths
  ) -> "Packing":
    """Room for `count` rollouts even if each fills a row of its own."""
    micro = mini_batches * -(-(count // mini_batches) // rows)
    return cls(rows=rows, micro=micro, shards=shards, mini_batches=mini_batches, **lengths)


def first_fit(lengths, capacity) -> list[list[int]]:
  """Packs items into bins, longest first, each into the first with room: item indices by bin.

  lengths: one length an item and a capacity; or [items][D] and [D], its lengths in rows of D kinds,
    longest by the last.
  """
  capacity = np.atleast_1d(capacity)
  lengths = np.asarray(lengths, np.int64).reshape(-1, len(capacity))
  bins, room = [], np.zeros(lengths.shape, np.int64)
  for item in np.lexsort([-lengths[:, -1]]):
    for length, most, way in zip(lengths[item], capacity, _WAYS_OUT):
      if length > most:
        raise ValueError(f"a rollout of {length} tokens does not fit a row of {most}; {way}")
    fits = np.nonzero((room[: len(bins)] >= lengths[item]).all(-1))[0]
    if fits.size:
      index = int(fits[0])
    else:
      index = len(bins)
      bins.append([])
      room[index] = capacity
    bins[index].append(int(item))
    room[index] -= lengths[item]
  return bins


_WAYS_OUT = (
  "raise the row length or lower --config.rollout.max_tokens",
  "a teacher reads a whole rollout in its prompt too: raise --config.distillation.row_length",
)


def deal(bins: Sequence[list[int]], lengths: Sequence[int], packing: Packing) -> list[list[int]]:
  """Deals bins to rows so that the shards of each micro-batch hold like numbers of tokens.

  Fullest first, a micro-batch's bins go to its shards to and fro; a shard's rows lie together. Rows
  without a bin are empty.
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


def pack(encoded, questions: int, samples: int, packing: Packing):
  """(rows of rollouts, first_m): each mini-batch is packed by itself into whole micro-batches."""
  rows, first_m = [], [0]
  for m in range(packing.mini_batches):
    low, high = (n * questions // packing.mini_batches * samples for n in (m, m + 1))
    own = [i for i in encoded if low <= i < high]
    longest = lambda fields: max(len(x[0]) for name, x in fields.items() if name[0] == "taught")
    lengths = [
      [len(encoded[i]["token"]), *([longest(encoded[i])] if packing.teacher_length else [])]
      for i in own
    ]
    capacity = (packing.length, packing.teacher_length)[: 1 + bool(packing.teacher_length)]
    bins = first_fit(lengths, capacity) if own else []
    packed = deal(bins, [each[-1] for each in lengths], packing)
    # An empty mini-batch keeps one empty micro-batch, whose gradient is zero.
    first_m.append(first_m[-1] + max(1, -(-len(packed) // packing.rows)))
    rows += [[own[j] for j in items] for items in packed]
    rows += [[] for _ in range(first_m[-1] * packing.rows - len(rows))]
  return rows, np.asarray(first_m, np.int32)
