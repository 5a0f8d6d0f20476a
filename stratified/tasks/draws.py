"""Draws at random by (seed, step, ...) alone, holds shares to within one, splits by a hash."""

from collections.abc import Sequence
import hashlib

import numpy as np

TRAINING, HELD_OUT, DEMONSTRATION = 1, 2, 3  # tags of random streams
HELD_OUT_SHARE = 0.1  # of a generated task's questions, which training never asks


def generator(*key: int) -> np.random.Generator:
  """A counter-based generator whose stream is a function of the key (seed, step, ...) alone."""
  if min(key) < 0:
    raise ValueError(
      f"the random key {key} has a negative part: seeds, steps and samples count from 0"
    )
  return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def spread(shares: Sequence[float], count: int, rng: np.random.Generator) -> list[int]:
  """Draws `count` numbers 0, 1, ... with given shares, in random order (systematic sampling)."""
  points = (np.arange(count) + rng.random()) / count
  edges = np.cumsum(shares)[:-1]
  return rng.permutation(np.searchsorted(edges, points, side="right")).tolist()


def is_held_out(id: str, share: float = HELD_OUT_SHARE) -> bool:
  """Whether training never asks the question of this id, by a stable hash of it."""
  digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") < share * 2**64


def check_mixture(mixture: Sequence[float], max_turns: int) -> None:
  """Raises ValueError where a mixture is no distribution, or asks for too many calls."""
  if not mixture or min(mixture) < 0 or not abs(sum(mixture) - 1) < 1e-6:
    raise ValueError(
      f"warm_start.mixture={tuple(mixture)} must be shares of at least 0 that sum to 1"
    )
  if len(mixture) - 1 > max_turns:
    raise ValueError(
      f"warm_start.mixture={tuple(mixture)} asks for up to {len(mixture) - 1} calls, but "
      f"rollout.max_turns is {max_turns}: shorten the mixture or raise max_turns"
    )
