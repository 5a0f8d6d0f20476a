"""The propositions and theorems of arXiv 2510.06214 on the library's kernels, the closed forms, and
the diagnostics."""

import types

import jax
import numpy as np
import pytest
import reference
import theorem_checks

from stratified import advantages
from stratified.advantages import theory

KERNELS = types.SimpleNamespace(advantages=advantages, theory=theory)
diagnostics = jax.jit(theory.diagnostics, static_argnames="num_strata")


@pytest.mark.parametrize("name", theorem_checks.CHECKS)
def test_holds(name):
  theorem_checks.CHECKS[name](KERNELS)


# Probabilities of the strata, success rates inside, and the zero-advantage shares of SAN and GN at
# K = 8, to two digits; singletons are 6 to 13 % there.
SETTINGS = {
  "three equal strata": ([1 / 3] * 3, [0.3] * 3, 0.38, 0.06),
  "four equal strata": ([0.25] * 4, [0.3] * 4, 0.48, 0.06),
  "uneven strata": ([0.1, 0.5, 0.3, 0.1], [0.1, 0.3, 0.4, 0.3], 0.39, 0.05),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_expected_shares_are_what_simulated_groups_show(setting):
  p_s, q_s, san_share, gn_share = SETTINGS[setting]
  rng = np.random.default_rng(0)
  questions = 20_000
  stratum = rng.choice(len(p_s), (questions, 8), p=p_s).astype(np.int32)
  reward = (rng.random((questions, 8)) < np.array(q_s)[stratum]).astype(np.float32)
  ones = np.ones_like(reward)
  for name, share in (("san", san_share), ("gn", gn_share)):
    expected = theory.expected_zero_share(name, p_s, q_s, 8)
    assert abs(expected - share) < 0.01
    advantage = advantages.make(name, num_strata=4)(reward, stratum, ones, 0)
    stats = diagnostics(reward, stratum, ones, advantage, num_strata=4)
    # 5 standard errors: the shares of 20,000 independent questions deviate by at most 1/2 each.
    assert abs(float(stats["advantage/zero_share"]) - expected) < 5 * 0.5 / np.sqrt(questions)
  singletons = theory.expected_singleton_share(p_s, 8)
  assert 0.055 < singletons < 0.135
  assert abs(float(stats["strata/singleton_share"]) - singletons) < 5 * 0.5 / np.sqrt(questions)


def test_attenuation_at_eight_rollouts():
  for name, p, q, factor in (
    ("stratified", 0.1, None, 0.29),
    ("stratified", 1 / 3, None, 0.64),
    ("stratified", 1.0, None, 0.875),
    ("stratified_loo", 0.1, None, 0.52),
    ("san", 0.1, 0.3, 0.27),
    ("san", 0.1, 0.05, 0.13),
  ):
    assert abs(theory.attenuation(name, p, 8, q) - factor) < 0.006, (name, p, q)
  with pytest.raises(ValueError, match="'gn'"):
    theory.attenuation("gn", 0.1, 8)
  with pytest.raises(ValueError, match="'loo'"):
    theory.expected_zero_share("loo", [1.0], [0.5], 8)


def test_moments_of_each_stratum():
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    for samples in (8, 20):
      reward, stratum = rng.normal(size=samples) + 1e6, rng.integers(0, 3, samples).astype(np.int32)
      mask = (rng.random(samples) < 0.7).astype(float)
      got = jax.jit(theory.moments, static_argnames="num_strata")(
        reward, stratum, num_strata=5, mask_k=mask
      )
      table = reference.statistics(reward, stratum, mask)[2]
      want = np.array([table.get(k, (0, 0, 0)) for k in range(5)]).T
      np.testing.assert_allclose(np.array(got), want, rtol=1e-9, atol=1e-9)


def test_san_pushes_no_stratum_when_every_token_weighs_the_same():
  rng = np.random.default_rng(0)
  reward = rng.integers(0, 2, (50, 8)).astype(float)
  stratum, length = (
    rng.integers(0, 3, (50, 8)).astype(np.int32),
    rng.integers(5, 50, (50, 8)).astype(float),
  )
  with jax.enable_x64(True):
    push = {}
    for name in ("san", "gn"):
      advantage = advantages.make(name, num_strata=3)(reward, stratum, np.ones_like(reward), 0)
      for weighing, weight in (("unit", np.ones_like(length)), ("per length", 1 / length)):
        by_hand = [np.sum((np.asarray(advantage) * weight)[stratum == k]) for k in range(3)]
        got = theory.advantage_by_stratum(advantage, stratum, weight, num_strata=3)
        np.testing.assert_allclose(np.asarray(got), by_hand, atol=1e-12)
        push[name, weighing] = np.asarray(got)
  assert np.abs(push["san", "unit"]).max() < 1e-9
  assert (
    np.abs(push["san", "per length"]).max() > 0.01
  )  # averaging each sequence by its length breaks it
  assert np.abs(push["gn", "unit"]).max() > 1


def _diagnostics_by_hand(reward, stratum, mask, advantage, num_strata, eps):
  valid = mask > 0
  questions = [
    (r, s, m, reference.statistics(r, s, m)) for r, s, m in zip(reward, stratum, mask) if m.any()
  ]
  terms = []
  for r, s, m, (r_g, s_g, table) in questions:
    n = m.sum()
    between = sum(n_k * (r_k - r_g) ** 2 for n_k, r_k, _ in table.values()) / n
    term_b = sum(n_k * s_k**2 * (1 - 1 / (s_k + eps) ** 2) for n_k, _, s_k in table.values()) / n
    lone = sum(n_k == 1 for n_k, _, _ in table.values())
    terms.append((between, term_b, np.sqrt(between) / (s_g + eps), len(table), lone))
  between, term_b, offset, count, alone = np.array(terms).T
  parts = [
    (reference.stratified(r, s, m), reference.centered(r, s, m) - reference.stratified(r, s, m))
    for r, s, m in zip(reward, stratum, mask)
  ]
  within, bias = (np.array(x)[valid] for x in zip(*parts))
  rms = lambda x: np.sqrt(np.mean(x**2))
  return {
    "advantage/zero_share": np.mean(advantage[valid] == 0),
    "advantage/rms": rms(advantage[valid]),
    "advantage/within_rms": rms(within),
    "advantage/between_rms": rms(bias),
    "strata/count": count.mean(),
    "strata/singleton_share": alone.sum() / valid.sum(),
    **{f"strata/share_{k}": np.mean(stratum[valid] == k) for k in range(num_strata)},
    "theory/between_stratum_variance": between.mean(),
    "theory/normalization_effect": term_b.mean(),
    "theory/cross_stratum_offset_rms": offset.mean(),
  }


@pytest.mark.parametrize("samples", [5, 8, 20])
def test_diagnostics_equal_the_reference(samples):
  rng = np.random.default_rng(1)
  shape = (12, samples)
  reward, stratum = (
    rng.integers(0, 2, shape).astype(float),
    rng.integers(0, 4, shape).astype(np.int32),
  )
  mask = (rng.random(shape) < 0.7).astype(float)
  mask[0] = 0
  reward[1] = 1
  with jax.enable_x64(True):
    advantage = advantages.make("san", num_strata=4)(reward, stratum, mask, 0)
    got = diagnostics(reward, stratum, mask, advantage, num_strata=4, eps=1e-3)
    want = _diagnostics_by_hand(reward, stratum, mask, np.asarray(advantage), 4, 1e-3)
  assert got.keys() == want.keys()
  for key in want:
    np.testing.assert_allclose(float(got[key]), want[key], rtol=1e-9, atol=1e-9, err_msg=key)


def test_diagnostics_are_finite_when_nothing_is_valid_and_read_no_lost_rollout():
  zeros = np.zeros((3, 8), np.float32)
  nothing = diagnostics(zeros + np.nan, zeros.astype(int), zeros, zeros, num_strata=2)
  assert all(float(value) == 0 for value in nothing.values()), nothing
  one = zeros.copy()
  one[0, :4] = 1
  reward = np.where(one > 0, [[1, 0, 1, 0, 1, 0, 1, 0]], np.nan).astype(np.float32)
  stats = diagnostics(reward, zeros.astype(int), one, one, num_strata=2)
  assert all(np.isfinite(float(value)) for value in stats.values()), stats
  assert float(stats["strata/count"]) == 1
  np.testing.assert_allclose(float(stats["theory/normalization_effect"]), 0.25 - 1, rtol=1e-4)
