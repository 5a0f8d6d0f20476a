"""Intervals and tests for scores of an evaluation, and for results of several runs.

For an evaluation the questions are the sample, each drawn with all its rollouts. Every function
draws from a fixed seed, so the same scores give the same interval and p value. scipy.stats is
imported where it is used: it takes 1.2 s, which no start of a training run should pay.

Bootstrap and sign flips are written here. scipy's draw every index and every sign: 0.33 s and 1.3 s
for 3,610 scores of zero and one. Drawing how often each distinct score occurs takes 1.5 ms and 1 ms
for the same numbers, and an evaluation has dozens of them. scipy also refuses a single question.
"""

from collections.abc import Mapping, Sequence
import math

import numpy as np

RESAMPLES = 10_000


def interval(sets: Mapping[str, Sequence[float]], *, seed: int = 0) -> tuple[float, float]:
  """The 95 % interval of the average over sets of the mean over a set's questions.

  Where every score is 0 or 1 it is Wilson's of each set, combined by squares and additions (Zou and
  Donner, Statistics in Medicine 27, 2008): 0 of 16 is 0 to 19 %, not 0 to 0. Otherwise it is the
  percentile bootstrap. With one set it is the interval of that set's mean.
  """
  arrays = _arrays(sets)
  if not all(_is_binary(values) for values in arrays.values()):
    return bootstrap_interval(sets, seed=seed)
  middle = _average(arrays)
  ends = [wilson(values.mean(), len(values)) for values in arrays.values()]
  means = [values.mean() for values in arrays.values()]
  below = math.hypot(*(mean - low for mean, (low, _) in zip(means, ends))) / len(arrays)
  above = math.hypot(*(high - mean for mean, (_, high) in zip(means, ends))) / len(arrays)
  return max(0.0, middle - below), min(1.0, middle + above)


def wilson(share: float, count: int) -> tuple[float, float]:
  """Wilson's 95 % interval of a share of `count` questions: within [0, 1], and never empty."""
  from scipy import stats

  found = stats.binomtest(round(share * count), count).proportion_ci(method="wilson")
  return float(found.low), float(found.high)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
  """Student's 95 % interval of the mean of independent values; None for fewer than two."""
  from scipy import stats

  values = np.asarray(values, np.float64)
  if len(values) < 2:
    return None
  if _is_constant(values):
    return (float(values.mean()),) * 2
  found = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
  return float(found.low), float(found.high)


def difference_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
  """Welch's 95 % interval of mean(a) - mean(b), unpaired; None where either has fewer than two."""
  from scipy import stats

  if min(len(a), len(b)) < 2:
    return None
  if _is_constant(a) and _is_constant(b):
    return (float(np.mean(a) - np.mean(b)),) * 2
  found = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
  return float(found.low), float(found.high)


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
  sizes = [{name: len(scores) for name, scores in run.items()} for run in (a, b)]
  if sizes[0] != sizes[1]:
    raise ValueError(
      "a paired comparison needs the same sets and numbers of questions on both sides, not "
      f"{sizes[0]} and {sizes[1]}"
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
  if _is_binary(np.concatenate([*first.values(), *second.values()])):
    pooled = np.concatenate(list(differences.values()))
    only_a, only_b = int((pooled > 0).sum()), int((pooled < 0).sum())
    result |= {"only_a": only_a, "only_b": only_b, "p_mcnemar": mcnemar_p(only_a, only_b)}
  return result


def mcnemar_p(only_a: int, only_b: int) -> float:
  """McNemar's exact two-sided p, the binomial test of only_a in only_a + only_b; 1 for 0 and 0."""
  from scipy import stats

  count = only_a + only_b
  return float(stats.binomtest(only_a, count).pvalue) if count else 1.0


def sign_flip_p(
  differences: Mapping[str, Sequence[float]], *, seed: int = 0, resamples: int = RESAMPLES
) -> float:
  """Two-sided p of the average over sets of mean differences, each difference's sign a coin's toss.

  Monte Carlo: (1 + as large ones) / (1 + resamples), so never 0.
  """
  arrays, rng = _arrays(differences), np.random.default_rng(seed)
  total = np.zeros(resamples)
  for values in arrays.values():
    sizes, counts = np.unique(np.abs(values[values != 0]), return_counts=True)
    # equal differences are tossed together
    heads = rng.binomial(counts, 0.5, (resamples, len(counts)))
    total += (2 * heads - counts) @ sizes / (len(values) * len(arrays))
  # Rounding must not make the observed split itself look smaller than it is.
  return float((1 + np.sum(np.abs(total) >= abs(_average(arrays)) - 1e-12)) / (1 + resamples))


def _resampled(
  arrays: Mapping[str, np.ndarray], rng: np.random.Generator, resamples: int
) -> np.ndarray:
  """Draws [resamples] bootstrap averages: multinomial counts of each distinct score, no indices."""
  total = np.zeros(resamples)
  for values in arrays.values():
    levels, counts = np.unique(values, return_counts=True)
    drawn = rng.multinomial(len(values), counts / len(values), resamples)
    total += drawn @ levels / len(values)
  return total / len(arrays)


def _is_binary(values: np.ndarray) -> bool:
  return bool(np.isin(values, (0.0, 1.0)).all())


def _is_constant(values: Sequence[float]) -> bool:
  """Whether values differ by rounding alone; scipy warns of what it makes of those."""
  return float(np.ptp(values)) <= 1e-12 * float(np.abs(values).max())


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
