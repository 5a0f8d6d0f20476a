"""Intervals and tests for scores of an evaluation; the questions are the sample, each drawn with
all its rollouts.

NumPy in float64. Every function draws from a fixed seed, so the same scores give the same interval
and p value.
"""

from collections.abc import Mapping, Sequence
import math

import numpy as np

RESAMPLES = 10_000


def bootstrap_interval(
  sets: Mapping[str, Sequence[float]],
  *,
  level: float = 0.95,
  seed: int = 0,
  resamples: int = RESAMPLES,
) -> tuple[float, float]:
  """The percentile bootstrap interval of the average over sets of the mean over a set's questions.

  sets: {name: one score a question}; questions are drawn with replacement inside each set (a set's
    size is part of the benchmark, not of chance). With one set it is the interval of that set's
    mean.
  level: how much of the bootstrap distribution lies between the two ends.
  Raises ValueError where there is no set, or one without a question.
  """
  means = _resampled(_arrays(sets), np.random.default_rng(seed), resamples)
  low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
  return float(low), float(high)


def paired_difference(
  a: Mapping[str, Sequence[float]],
  b: Mapping[str, Sequence[float]],
  *,
  level: float = 0.95,
  seed: int = 0,
  resamples: int = RESAMPLES,
) -> dict[str, float]:
  """Compares two runs on the same questions: a - b.

  a, b: {set: one score a question}, the same sets and questions in the same order.

  Returns {"difference", "low", "high", "p_permutation"} and, where every score is 0 or 1,
  {"only_a", "only_b", "p_mcnemar"}: difference of the averages over sets and its paired bootstrap
  interval; p of the sign-flip permutation test of that average; the questions that one run alone
  answered, and McNemar's exact p (two-sided, pooled over sets). Raises ValueError where the two are
  not the same questions.
  """
  if {name: len(scores) for name, scores in a.items()} != {
    name: len(scores) for name, scores in b.items()
  }:
    raise ValueError(
      "a paired comparison needs the same sets and numbers of questions on both sides, not "
      f"{ {name: len(scores) for name, scores in a.items()} } and "
      f"{ {name: len(scores) for name, scores in b.items()} }"
    )
  first, second = _arrays(a), _arrays(b)
  differences = {name: first[name] - second[name] for name in first}
  low, high = bootstrap_interval(differences, level=level, seed=seed, resamples=resamples)
  result = {
    "difference": _average(differences),
    "low": low,
    "high": high,
    "p_permutation": sign_flip_p(differences, seed=seed, resamples=resamples),
  }
  scores = np.concatenate([*first.values(), *second.values()])
  if np.isin(scores, (0.0, 1.0)).all():
    pooled = np.concatenate(list(differences.values()))
    only_a, only_b = int((pooled > 0).sum()), int((pooled < 0).sum())
    result |= {"only_a": only_a, "only_b": only_b, "p_mcnemar": mcnemar_p(only_a, only_b)}
  return result


def mcnemar_p(only_a: int, only_b: int) -> float:
  """McNemar's exact two-sided p: min(1, 2 P[Binomial(a + b, 1/2) <= min(a, b)]); 1 where no pair
  differs."""
  count, least = only_a + only_b, min(only_a, only_b)
  # Whole numbers until the last division: 2 ** count overflows a float from 1,024 pairs on.
  below = sum(math.comb(count, k) for k in range(least + 1))
  return min(1.0, 2 * below / 2**count)


def sign_flip_p(
  differences: Mapping[str, Sequence[float]], *, seed: int = 0, resamples: int = RESAMPLES
) -> float:
  """Two-sided p of the average over sets of mean differences when each difference's sign is a
  coin's toss.

  Monte Carlo, (1 + as large ones) / (1 + resamples), so never 0.
  """
  arrays, rng = _arrays(differences), np.random.default_rng(seed)
  total = np.zeros(resamples)
  for values in arrays.values():
    sizes, counts = np.unique(np.abs(values[values != 0]), return_counts=True)
    heads = rng.binomial(
      counts, 0.5, (resamples, len(counts))
    )  # equal differences are tossed together
    total += (2 * heads - counts) @ sizes / (len(values) * len(arrays))
  # Rounding must not make the observed split itself look smaller than it is.
  return float((1 + np.sum(np.abs(total) >= abs(_average(arrays)) - 1e-12)) / (1 + resamples))


def _resampled(
  arrays: Mapping[str, np.ndarray], rng: np.random.Generator, resamples: int
) -> np.ndarray:
  """[resamples] bootstrap averages. How often each distinct score is drawn is multinomial: no index
  is stored."""
  total = np.zeros(resamples)
  for values in arrays.values():
    levels, counts = np.unique(values, return_counts=True)
    drawn = rng.multinomial(len(values), counts / len(values), resamples)
    total += drawn @ levels / len(values)
  return total / len(arrays)


def _average(arrays: Mapping[str, np.ndarray]) -> float:
  return float(np.mean([values.mean() for values in arrays.values()]))


def _arrays(sets: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
  arrays = {name: np.asarray(scores, np.float64) for name, scores in sets.items()}
  empty = [name for name, scores in arrays.items() if not scores.size]
  if not arrays or empty:
    raise ValueError(
      f"there are no scores{' of ' + ', '.join(empty) if empty else ''}: evaluate at least one "
      "question"
    )
  return arrays
