"""Intervals and tests against exact enumeration, closed forms and scipy."""

import itertools
import math

from hypothesis import given, settings, strategies
import numpy as np
import pytest
import scipy.stats

from stratified.evaluation import intervals


def test_bootstrap_interval_of_binary_scores_is_the_binomials():
  # Resampling n zeros and ones of mean p: the mean is Binomial(n, p) / n exactly.
  scores = [1.0] * 30 + [0.0] * 70
  low, high = intervals.bootstrap_interval({"nq": scores}, resamples=40_000)
  expected = scipy.stats.binom(100, 0.3).ppf([0.025, 0.975]) / 100
  assert (low, high) == pytest.approx(
    tuple(expected), abs=0.011
  )  # the two quantiles lie on a grid of 0.01


def test_bootstrap_interval_against_drawing_indices():
  rng = np.random.default_rng(3)
  sets = {"a": rng.random(40).round(1), "b": rng.random(7)}
  drawn = (
    sum(
      values[rng.integers(0, len(values), (40_000, len(values)))].mean(1)
      for values in sets.values()
    )
    / 2
  )
  expected = np.quantile(drawn, [0.05, 0.95])
  # Monte Carlo error of a quantile here: about 0.1 / sqrt(40,000) / density = 0.002
  assert intervals.bootstrap_interval(sets, level=0.9, resamples=40_000) == pytest.approx(
    tuple(expected), abs=0.004
  )


def test_bootstrap_interval_covers_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for trial in range(400):
    low, high = intervals.bootstrap_interval({"x": rng.random(60) < 0.4}, seed=trial, resamples=500)
    covered += low <= 0.4 <= high
  assert (
    0.90 <= covered / 400 <= 0.99
  )  # 95 %; three standard errors of 400 trials are 0.033, discreteness the rest


def test_the_average_over_sets_weighs_sets_and_not_questions():
  low, high = intervals.bootstrap_interval({"large": [1.0] * 1000, "small": [0.0] * 2})
  assert (low, high) == (0.5, 0.5)


@pytest.mark.parametrize(
  "only_a, only_b", [(0, 0), (1, 0), (5, 5), (3, 9), (40, 11), (700, 650), (0, 2000)]
)
def test_mcnemar_is_the_exact_binomial_test(only_a, only_b):
  expected = scipy.stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
  assert intervals.mcnemar_p(only_a, only_b) == pytest.approx(expected, rel=1e-9)


def test_sign_flips_agree_with_all_of_them():
  differences = {"a": [0.5, -0.25, 1.0, 0.0, 0.5], "b": [0.25, 0.75, -0.5, 1.0]}
  observed = abs(np.mean([np.mean(values) for values in differences.values()]))
  count = as_large = 0
  for signs in itertools.product((1, -1), repeat=9):
    flipped = [
      np.mean(np.array(differences["a"]) * signs[:5]),
      np.mean(np.array(differences["b"]) * signs[5:]),
    ]
    count, as_large = count + 1, as_large + (abs(np.mean(flipped)) >= observed - 1e-12)
  p = intervals.sign_flip_p(differences, resamples=100_000)
  assert p == pytest.approx(
    as_large / count, abs=0.006
  )  # four standard errors of 100,000 draws at p = 0.2


def test_paired_difference_of_binary_scores():
  a, b = {"nq": [1, 1, 1, 0, 1, 0, 1, 1]}, {"nq": [0, 1, 0, 0, 1, 1, 0, 0]}
  found = intervals.paired_difference(a, b)
  assert found["difference"] == pytest.approx(3 / 8) and (found["only_a"], found["only_b"]) == (
    4,
    1,
  )
  assert found["p_mcnemar"] == pytest.approx(scipy.stats.binomtest(1, 5).pvalue)
  assert found["p_permutation"] == pytest.approx(
    found["p_mcnemar"], abs=0.02
  )  # the same test, by Monte Carlo
  assert found["low"] < found["difference"] < found["high"]


def test_paired_difference_of_shares_has_no_mcnemar():
  found = intervals.paired_difference({"nq": [0.5, 1.0]}, {"nq": [0.25, 1.0]})
  assert "p_mcnemar" not in found and found["difference"] == 0.125


def test_a_run_against_itself_shows_nothing():
  scores = {"nq": [0.0, 1.0, 1.0], "popqa": [1.0, 0.0]}
  found = intervals.paired_difference(scores, scores)
  assert (found["difference"], found["low"], found["high"]) == (0, 0, 0)
  assert found["p_mcnemar"] == found["p_permutation"] == 1.0


def test_the_same_scores_give_the_same_numbers():
  scores = {"nq": list(np.random.default_rng(0).random(50))}
  assert intervals.bootstrap_interval(scores) == intervals.bootstrap_interval(scores)
  assert intervals.bootstrap_interval(scores) != intervals.bootstrap_interval(scores, seed=1)


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30))
def test_an_interval_lies_around_the_mean_and_inside_the_scores(values):
  low, high = intervals.bootstrap_interval({"x": values}, resamples=400)
  assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
  assert low - 1e-9 <= np.mean(values) + 0.25 and math.isfinite(low)
  if min(values) == max(values):
    assert low == pytest.approx(high)


def test_what_cannot_be_compared_is_refused():
  with pytest.raises(ValueError, match="there are no scores: evaluate at least one question"):
    intervals.bootstrap_interval({})
  with pytest.raises(ValueError, match="there are no scores of popqa"):
    intervals.bootstrap_interval({"nq": [1.0], "popqa": []})
  with pytest.raises(ValueError, match="needs the same sets and numbers of questions"):
    intervals.paired_difference({"nq": [1.0]}, {"nq": [1.0, 0.0]})


def test_nothing_of_sixteen_is_not_nothing_to_nothing():
  # Wilson: upper end z^2 / (n + z^2) = 3.8415 / 19.8415
  assert intervals.interval({"nq": [0.0] * 16}) == pytest.approx((0, 0.193607), abs=1e-5)
  assert intervals.interval({"nq": [1.0] * 16}) == pytest.approx((0.806393, 1), abs=1e-5)
  low, high = intervals.interval({"nq": [1.0] * 120 + [0.0] * 280})
  expected = scipy.stats.binomtest(120, 400).proportion_ci(method="wilson")
  assert (low, high) == pytest.approx((expected.low, expected.high))


def test_shares_and_f1_keep_the_bootstrap():
  scores = {"nq": [0.0, 0.5, 1.0, 0.25] * 5}
  assert intervals.interval(scores) == intervals.bootstrap_interval(scores)


def test_the_interval_of_an_average_over_sets_covers_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for _ in range(300):
    sets = {"rare": (rng.random(20) < 0.05) * 1.0, "even": (rng.random(60) < 0.5) * 1.0}
    low, high = intervals.interval(sets)
    covered += low <= 0.275 <= high
  assert 0.91 <= covered / 300 <= 0.99  # three standard errors of 300 trials are 0.038


def test_intervals_of_means_are_students_and_welchs():
  # t(0.975, 2) = 4.302653; mean 7/3, s = sqrt(7/3)
  half = 4.302653 * math.sqrt(7 / 3) / math.sqrt(3)
  assert intervals.mean_interval([1, 2, 4]) == pytest.approx((7 / 3 - half, 7 / 3 + half))
  assert intervals.mean_interval([0.3]) is None
  assert intervals.mean_interval([0.1, 0.1, 0.1]) == pytest.approx((0.1, 0.1))
  assert intervals.difference_interval([1.0], [2.0, 3.0]) is None
  assert intervals.difference_interval([1.0, 1.0], [2.0, 2.0]) == pytest.approx((-1.0, -1.0))
