"""The estimators against the float64 reference and by hand, their options, and the sentences that
refuse bad ones."""

import functools
import json
import os
import subprocess
import sys

import cpu_devices
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from stratified import advantages

STRATA = 4
OPTIONS = {
  "san": [
    {},
    dict(fallback="gn"),
    dict(fallback="shrink", kappa=2.0),
    dict(fallback="gn", fallback_on="constant"),
    dict(fallback="shrink", fallback_on="constant"),
  ],
  "blend": [dict(alpha=0.0), dict(alpha=0.3), dict(alpha=1.0), dict(kappa=2.0)],
  "shrunk": [dict(kappa=0.0), dict(kappa=1.5)],
  "two_term": [dict(lam=0.0), dict(lam=0.4), dict(lam=1.0)],
}
CASES = {
  name + "".join(f" {key}={value}" for key, value in options.items()): (name, options)
  for name in reference.GROUP
  for options in OPTIONS.get(name, [{}])
}


def every(reward, stratum, mask, eps=1e-6, ddof=0):
  """{case: advantages [Q, K]} of every estimator with each of its options.

  One compilation for a K and dtype: groups are filled up with empty ones, which change no other.
  """
  filled = [np.zeros((max(60, len(x)), *x.shape[1:]), x.dtype) for x in (reward, stratum, mask)]
  for whole, x in zip(filled, (reward, stratum, mask)):
    whole[: len(x)] = x
  found = compiled(*filled, float(eps), int(ddof))
  return {case: np.asarray(x)[: len(reward)] for case, x in found.items()}


@jax.jit
def compiled(reward, stratum, mask, eps, ddof):
  def of(name, options):
    kernel = getattr(advantages, name)
    return jax.vmap(
      lambda r, s, m: kernel(r, s, num_strata=STRATA, mask_k=m, eps=eps, ddof=ddof, **options)
    )(reward, stratum, mask)

  return {case: of(*choice) for case, choice in CASES.items()}


def groups(num, samples, seed=0, levels=4):
  """Rewards of few levels (ties, constant groups and strata), strata of uneven sizes, masks down to
  the empty group."""
  rng = np.random.default_rng(seed)
  reward = rng.integers(0, levels, (num, samples)) / 2
  reward[::5] = reward[::5, :1]
  stratum = rng.choice(STRATA, (num, samples), p=[0.5, 0.3, 0.15, 0.05]).astype(np.int32)
  stratum[::7] = stratum[::7, :1]
  mask = (rng.random((num, samples)) < rng.random((num, 1)) * 1.5).astype(np.float64)
  mask[:3] = 0
  mask[2, 1] = 1
  return reward, stratum, mask


def expected(case, reward, stratum, mask, **options):
  name, own = CASES[case]
  estimator = reference.GROUP[name]
  return np.array([estimator(*group, **own, **options) for group in zip(reward, stratum, mask)])


@pytest.mark.parametrize("samples", [8, 20])
def test_equals_the_reference_in_float64(samples):
  reward, stratum, mask = groups(60, samples)
  with jax.enable_x64(True):
    for ddof in (0, 1):
      for case, got in every(reward, stratum, mask, 1e-3, ddof).items():
        assert got.dtype == np.float64
        want = expected(case, reward, stratum, mask, eps=1e-3, ddof=ddof)
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-12, err_msg=case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_narrow_rewards_accumulate_in_float32(dtype):
  reward, stratum, mask = groups(60, 8, seed=1, levels=7)
  reward = jnp.asarray(reward).astype(dtype)
  exact = np.asarray(reward.astype(jnp.float32), np.float64)
  for case, got in every(reward, stratum, jnp.asarray(mask, jnp.float32)).items():
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
      got, expected(case, exact, stratum, mask), rtol=3e-6, atol=3e-6, err_msg=case
    )


@pytest.mark.parametrize("samples", [8, 20])
@pytest.mark.parametrize(
  "scale,offset", [(1e-8, 0), (1e-4, 0), (1e4, 0), (1e8, 0), (1, 1e6), (1e8, -1e8)]
)
def test_scales_and_offsets(samples, scale, offset):
  reward, stratum, mask = groups(60, samples, seed=2, levels=5)
  spread = np.random.default_rng(3).normal(size=reward.shape) * (reward > 0)
  reward = (spread * scale + offset).astype(np.float32)
  for case, got in every(reward, stratum, mask.astype(np.float32)).items():
    want = expected(case, reward.astype(np.float64), stratum, mask)
    # Relative to the group's own advantages: two-pass sums of differences lose nothing to the
    # offset.
    size = np.maximum(np.abs(want).max(axis=1, keepdims=True), 1e-30)
    assert np.abs((got - want) / size).max() < 1e-5, case


@pytest.mark.parametrize("samples", [7, 8, 23])
def test_constant_rewards_give_exactly_zero(samples):
  # 0.1 in float32: the mean of seven of them is not 0.1.
  values = np.array([0.1, 1 / 3, 1e-8, 16777217.3, -7e7], np.float32)
  reward = np.repeat(values[:, None], samples, axis=1)
  stratum = np.random.default_rng(0).integers(0, STRATA, reward.shape)
  for eps in (0.0, 1e-6):
    for case, got in every(reward, stratum, np.ones_like(reward), eps).items():
      np.testing.assert_array_equal(
        np.asarray(got), reward if case == "reinforce" else 0, err_msg=case
      )


def test_a_group_of_one_gets_zero_and_not_its_reward():
  for mask in (np.ones((1, 1), np.float32), np.eye(1, 8, dtype=np.float32)):
    for case, got in every(np.ones_like(mask), np.zeros_like(mask, dtype=np.int32), mask).items():
      np.testing.assert_array_equal(
        np.asarray(got), mask if case == "reinforce" else 0, err_msg=case
      )


def test_singletons_are_zero_and_never_nan():
  # arXiv 2510.06214, Definition 1 with n_k = 1: the numerator is 0, a sample deviation would be 0 /
  # 0.
  reward, stratum = np.array([1.0, 0.0, 1.0, 0.0], np.float32), np.array([0, 1, 2, 2], np.int32)
  for ddof, tail in ((0, 1.0), (1, 2**-0.5)):
    got = advantages.san(reward, stratum, num_strata=3, ddof=ddof, eps=0.0)
    np.testing.assert_allclose(np.asarray(got), [0, 0, tail, -tail], rtol=1e-6)


def test_a_stratum_of_ddof_rollouts_gets_zero():
  reward, stratum = (
    np.array([1.0, 0.0, 1.0, 0.0, 1.0], np.float32),
    np.array([0, 0, 1, 1, 1], np.int32),
  )
  got = np.asarray(advantages.san(reward, stratum, num_strata=2, ddof=2))
  np.testing.assert_array_equal(got[:2], 0)
  assert np.all(got[2:] != 0)


def test_golden_group():
  # By hand: R_g = s_g = 1/2; stratum 0 is (1, 0, 0), mean 1/3, deviation sqrt(2)/3; stratum 1 (1,
  # 1, 0).
  reward, stratum = np.array([1, 0, 0, 1, 1, 0], np.float32), np.array([0, 0, 0, 1, 1, 1], np.int32)
  root2 = 2**0.5

  def run(name, **options):
    return np.asarray(getattr(advantages, name)(reward, stratum, num_strata=2, eps=0.0, **options))

  np.testing.assert_allclose(run("gn"), [1, -1, -1, 1, 1, -1], rtol=1e-6)
  np.testing.assert_allclose(run("san"), np.array([2, -1, -1, 1, 1, -2]) * root2 / 2, rtol=1e-6)
  np.testing.assert_allclose(run("loo"), [0.6, -0.6, -0.6, 0.6, 0.6, -0.6], rtol=1e-6)
  np.testing.assert_allclose(run("stratified_loo"), [1, -0.5, -0.5, 0.5, 0.5, -1], rtol=1e-6)
  np.testing.assert_allclose(
    run("two_term", lam=3.0), np.array([1, -5, -5, 5, 5, -1]) / 6, rtol=1e-5
  )
  np.testing.assert_allclose(
    run("shrunk", kappa=3.0), run("stratified") / 2 + run("centered") / 2, rtol=1e-6
  )


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(
  st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8),
  st.lists(st.integers(0, STRATA - 1), min_size=8, max_size=8),
  st.lists(st.booleans(), min_size=8, max_size=8),
  st.permutations(range(8)),
)
def test_masked_rewards_are_never_read_and_order_does_not_matter(reward, stratum, mask, order):
  r, s, m = (
    np.array([reward], np.float32),
    np.array([stratum], np.int32),
    np.array([mask], np.float32),
  )
  poisoned = np.where(m > 0, r, np.nan).astype(np.float32)
  clean, read = every(r, s, m), every(poisoned, np.where(m > 0, s, 0).astype(np.int32), m)
  shuffled = every(r[:, order], s[:, order], m[:, order])
  for case, got in clean.items():
    got = np.asarray(got)
    np.testing.assert_array_equal(got, np.asarray(read[case]), err_msg=case)
    np.testing.assert_array_equal(got[m == 0], 0, err_msg=case)
    np.testing.assert_allclose(
      np.asarray(shuffled[case]),
      got[:, order],
      rtol=1e-3,
      atol=1e-3 * (1 + np.abs(got).max()),
      err_msg=case,
    )


def test_san_matched_to_gn_has_its_root_mean_square():
  reward, stratum, mask = groups(60, 8, seed=4, levels=2)
  rms = lambda x: np.sqrt(np.sum(np.asarray(x) ** 2, axis=-1))
  advantage = every(reward, stratum, mask)
  san, gn, matched = (advantage[name] for name in ("san", "gn", "san_rms"))
  some = rms(san) > 0
  np.testing.assert_allclose(rms(matched)[some], rms(gn)[some], rtol=1e-5)
  np.testing.assert_array_equal(rms(matched)[~some], 0)
  whole = advantages.make("san", num_strata=STRATA, match_rms="batch")(reward, stratum, mask, 0)
  np.testing.assert_allclose(rms(np.ravel(whole)), rms(np.ravel(gn)), rtol=1e-5)
  assert np.corrcoef(np.ravel(whole), np.ravel(san))[0, 1] > 0.999999


@pytest.mark.parametrize("name", reference.GROUP)
def test_over_the_batch_is_one_large_group(name):
  reward, stratum, mask = groups(12, 8, seed=5)
  with jax.enable_x64(True):
    got = advantages.make(name, num_strata=STRATA, over="batch")(reward, stratum, mask, 0)
    want = reference.over_batch(reference.GROUP[name], reward, stratum, mask)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-12)


def test_batch_kernels():
  reward, stratum, mask = groups(12, 8, seed=6)
  with jax.enable_x64(True):
    for ddof in (0, 1):
      make = lambda name: advantages.make(name, num_strata=STRATA, ddof=ddof)
      call = lambda name: np.asarray(make(name)(reward, stratum, mask, 0))
      want = reference.over_batch(reference.gn, reward, stratum, mask, ddof=ddof)
      np.testing.assert_allclose(call("reinforce_batch"), want, rtol=1e-12, atol=1e-12)
      np.testing.assert_allclose(
        call("gn_batch"),
        reference.gn_batch(reward, stratum, mask, ddof=ddof),
        rtol=1e-12,
        atol=1e-12,
      )


def test_gae_steps_over_observations_and_stops_at_the_trajectory():
  rng = np.random.default_rng(0)
  trajectory = np.array([3] * 9 + [5] * 12 + [0] * 4, np.int32)  # two trajectories, then padding
  mask = (rng.random(25) < 0.6) * (trajectory > 0)
  reward, value = rng.normal(size=(2, 25))
  with jax.enable_x64(True):
    for gamma, lam in ((1.0, 1.0), (0.9, 0.95), (1.0, 0.0)):
      got, returns = advantages.gae(reward, value, trajectory, mask, gamma=gamma, lam=lam)
      want = reference.gae(reward, value, trajectory, mask, gamma, lam)
      np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-12)
      np.testing.assert_allclose(
        np.asarray(returns), np.where(mask, want + value, 0), rtol=1e-12, atol=1e-12
      )


def test_gae_with_lambda_one_is_the_return_minus_the_value():
  reward = jnp.array([0.0, 0, 0, 1, 0, 2], jnp.bfloat16)
  value = jnp.array([0.5, 9, 0.25, 0.5, 1, 1], jnp.float32)
  got, returns = advantages.gae(
    reward, value, jnp.array([1, 1, 1, 1, 2, 2]), jnp.array([1, 0, 1, 1, 1, 1])
  )
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, [0.5, 0, 0.75, 0.5, 1, 1])
  np.testing.assert_allclose(returns, [1, 0, 1, 1, 2, 2])


def test_whitened_entries_have_mean_0_and_variance_1():
  x, mask = (
    np.random.default_rng(0).normal(5, 3, (4, 30)),
    np.random.default_rng(1).random((4, 30)) < 0.7,
  )
  white = np.asarray(advantages.whiten(jnp.asarray(x, jnp.float32), mask))
  np.testing.assert_allclose([white[mask].mean(), white[mask].var()], [0, 1], atol=1e-5)
  np.testing.assert_array_equal(white[~mask], 0)


@pytest.mark.parametrize("normalize", [True, False])
def test_gigpo_equals_the_reference(normalize):
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    for samples, turns in ((5, 4), (3, 3), (1, 4)):
      reward = rng.integers(0, 3, (samples, turns)) / 2
      state = rng.integers(0, 4, (samples, turns)).astype(np.int32)
      mask = np.arange(turns) < rng.integers(0, turns + 1, (samples, 1))
      got = advantages.gigpo(reward, state, mask, gamma=0.9, omega=0.7, normalize=normalize)
      want = reference.gigpo(reward, state, mask, 0.9, 0.7, normalize=normalize)
      np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-12)


def test_gigpo_without_repeated_states_is_gn_on_every_turn():
  reward = jnp.array([[0.0, 1], [0, 0], [0, 1]])
  got = advantages.gigpo(reward, jnp.arange(6).reshape(3, 2), jnp.ones((3, 2)))
  gn = advantages.gn(reward.sum(axis=1), jnp.zeros(3, int), num_strata=1)
  np.testing.assert_allclose(got, jnp.stack([gn, gn], axis=1), rtol=1e-6)


def test_alpha_schedules():
  reward, stratum, mask = groups(12, 8, seed=7)
  make = lambda **options: jax.jit(advantages.make("blend", num_strata=STRATA, **options))
  at = lambda step, **options: np.asarray(make(**options)(reward, stratum, mask, step))
  annealed = make(alpha=1.0, alpha_end=0.0, alpha_steps=10)
  function = make(alpha=lambda step: 1 - jnp.minimum(step, 10) / 10)
  for step, alpha in ((0, 1.0), (4, 0.6), (10, 0.0), (99, 0.0)):
    constant = np.array(
      [reference.blend(*group, alpha=alpha) for group in zip(reward, stratum, mask)]
    )
    np.testing.assert_allclose(
      annealed(reward, stratum, mask, step), constant, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
      function(reward, stratum, mask, step), constant, rtol=1e-5, atol=1e-5
    )
  advantage = every(reward, stratum, mask)
  np.testing.assert_allclose(at(0, alpha=1.0), advantage["san"], rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(at(0, alpha=0.0), advantage["gn"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
  "name,options,words",
  [
    ("grpo", {}, ["'grpo'", "choose one of", "gn", "blend"]),
    ("gae", {}, ["'gae'", "work on turns or tokens"]),
    ("blend", dict(alpha=1.5), ["advantage.alpha", "1.5", "at least 0 and at most 1"]),
    ("blend", dict(alpha=-0.1), ["advantage.alpha", "-0.1", "at least 0 and at most 1"]),
    ("blend", dict(alpha=float("nan")), ["advantage.alpha", "nan"]),
    ("blend", dict(alpha="0.5"), ["advantage.alpha", "'0.5'"]),
    ("gn", dict(alpha=2.0), ["advantage.alpha", "2.0"]),
    ("san", dict(ddof=8), ["advantage.ddof", "8", "samples_per_question"]),
    ("san", dict(ddof=0.5), ["advantage.ddof", "0.5", "whole number"]),
    ("san", dict(eps=-1e-9), ["advantage.eps", "-1e-09", "at least 0"]),
    ("san", dict(fallback="mean"), ["advantage.fallback", "'mean'", "shrink"]),
    ("gn", dict(kappa=1.0), ["advantage.kappa", "gn has no such option"]),
    ("shrunk", dict(kappa=-1.0), ["advantage.kappa", "-1.0"]),
    ("two_term", dict(lam=float("inf")), ["advantage.lam", "inf"]),
    ("gn", dict(over="step"), ["advantage.over", "'step'"]),
    ("gn_batch", dict(over="batch"), ["advantage.over", "no such option"]),
    ("blend", dict(alpha_end=0.0), ["alpha_end", "alpha_steps", "both"]),
    ("blend", dict(alpha_end=0.0, alpha_steps=0), ["alpha_steps", "0", "at least 1"]),
    (
      "blend",
      dict(alpha=lambda step: step, alpha_end=0.0, alpha_steps=5),
      ["function of the step"],
    ),
  ],
)
def test_a_bad_choice_is_one_clear_sentence(name, options, words):
  with pytest.raises(ValueError) as caught:
    advantages.make(name, num_strata=STRATA, samples_per_question=8, **options)
  message = str(caught.value)
  assert all(word in message for word in words), message
  assert "\n" not in message and not message.endswith(".") and len(message) < 400


def test_good_choices_pass():
  make = functools.partial(advantages.make, num_strata=STRATA)
  make("blend", samples_per_question=8, alpha=0.6, eps=0.0, ddof=7, kappa=None)
  make("gn", samples_per_question=8, alpha=0.6, over="batch", match_rms="question")
  for name in [*reference.GROUP, "reinforce_batch", "gn_batch"]:
    make(name, samples_per_question=2, alpha=0.6, eps=1e-6, ddof=0)


def test_a_batch_without_vmap_is_refused():
  with pytest.raises(AssertionError):
    advantages.san(np.zeros((4, 8)), np.zeros((4, 8), int), num_strata=2)
  with pytest.raises(AssertionError):
    advantages.san(np.zeros(8), np.zeros(7, int), num_strata=2)


_SHARDED = """
import json, re
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from stratified import advantages
from stratified.advantages import theory
import reference

rng = np.random.default_rng(0)
make = lambda name, **options: advantages.make(name, num_strata=4, **options)
group = {name: make(name) for name in reference.GROUP}
over_batch = ("san", "stratified_loo", "blend")
batch = {"reinforce_batch": make("reinforce_batch"), "gn_batch": make("gn_batch")}
batch |= {f"{name} over batch": make(name, over="batch") for name in over_batch}
group_run = lambda r, s, m: {name: estimate(r, s, m, 0) for name, estimate in group.items()}
def whole_run(r, s, m):
  san = group["san"](r, s, m, 0)
  return (group_run(r, s, m), {name: estimate(r, s, m, 0) for name, estimate in batch.items()},
          theory.diagnostics(r, s, m, san, num_strata=4))
def collectives(run, arrays):
  text = jax.jit(run).lower(*arrays).compile().as_text()
  ops = re.findall(r"= .*? ([a-z-]+)\\(", text)
  return [op for op in ops if re.match("all-|collective|reduce-scatter|send|recv", op)]

report = dict(errors=[], group=[], batch={}, devices=[])
for axis_type, samples in ((AxisType.Auto, 20), (AxisType.Explicit, 8)):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
  shape = (16, samples)
  arrays = (rng.integers(0, 3, shape).astype("float32"), rng.integers(0, 4, shape).astype("int32"),
            (rng.random(shape) < 0.8).astype("float32"))
  alone = jax.jit(whole_run)(*arrays)
  with jax.set_mesh(mesh):
    split = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arrays]
    together = jax.jit(whole_run)(*split)
    report["devices"].append(len(together[0]["san"].sharding.device_set))
    report["group"] += collectives(group_run, split)
    for name, estimate in batch.items():
      found = collectives(lambda r, s, m: estimate(r, s, m, 0), split)
      report["batch"][f"{axis_type.name} {samples} {name}"] = found
  report["errors"] += [float(np.abs(np.asarray(a) - np.asarray(b)).max())
                       for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together))]
print(json.dumps(report))
"""


def test_sharded_questions_equal_one_device_without_a_collective():
  environment = dict(
    os.environ,
    XLA_FLAGS=cpu_devices.flags(8),
    JAX_PLATFORMS="cpu",
    PYTHONPATH=os.pathsep.join([os.path.dirname(__file__), *sys.path]),
  )
  result = subprocess.run(
    [sys.executable, "-c", _SHARDED], env=environment, capture_output=True, text=True
  )
  assert result.returncode == 0, result.stderr[-3000:]
  report = json.loads(result.stdout.splitlines()[-1])
  assert report["devices"] == [8, 8]
  assert len(report["errors"]) > 50 and max(report["errors"]) < 2e-6
  assert not report["group"]
  assert len(report["batch"]) == 10
  for choice, collectives in report["batch"].items():
    # At most one for each pass: counts and minima, sums, squared deviations. Never a gather of the
    # samples.
    assert set(collectives) == {"all-reduce"}, (choice, collectives)
    assert len(collectives) <= 4, (choice, collectives)


def test_opo_weighs_its_baseline_by_length():
  """By hand: R = 1 0 0, lengths 2 1 1: the baseline is 0.5; a masked rollout counts nothing."""
  of = functools.partial(advantages.opo, num_strata=1)
  reward, stratum = jnp.float32([1, 0, 0, 9]), jnp.zeros(4, jnp.int32)
  mask, length = np.float32([1, 1, 1, 0]), np.float32([2, 1, 1, 50])
  found = of(reward, stratum, mask_k=mask, length_k=length)
  np.testing.assert_allclose(found, [0.5, -0.5, -0.5, 0])
  expected = reference.opo(reward, stratum, mask, length=length)
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  estimate = advantages.make("opo", num_strata=1)
  rows = [x[None] for x in (reward, stratum, mask)]
  np.testing.assert_allclose(estimate(*rows, 0, length[None])[0], expected, rtol=1e-6)


def test_gdpo_is_a_loop_over_parts_and_hears_the_small_one():
  rng = np.random.default_rng(0)
  reward = rng.choice([0.0, 1.0], (3, 4, 2)).astype(np.float32) * np.float32([1, 0.01])
  mask = np.ones((3, 4), np.float32)
  mask[1, 2] = 0
  found = advantages.gdpo(reward, mask)
  np.testing.assert_allclose(found, reference.gdpo(reward, mask), rtol=2e-5, atol=2e-5)
  moved = reward.copy()
  moved[0, 0, 1] = 0.01 - moved[0, 0, 1]
  assert np.abs(advantages.gdpo(moved, mask) - found).max() > 0.3


@pytest.mark.parametrize("size", [4, 20])  # pairs, and sums over segments
@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_stratum_out_of_range_is_refused_or_nan_but_never_zero(size, wrong):
  reward, stratum = np.arange(size, dtype=np.float32), np.arange(size) % 3
  stratum[1] = wrong
  with pytest.raises(ValueError, match=rf"stratum {wrong} is none of num_strata=3; .* 0 to 2"):
    advantages.san(reward, stratum, num_strata=3)
  kernel = lambda *arrays: advantages.san(*arrays[:2], num_strata=3, mask_k=arrays[2])
  mask = np.ones(size, bool)
  found = jax.jit(kernel)(reward, stratum, mask)
  assert np.isnan(found[1]) and np.isfinite(np.delete(found, 1)).all()
  mask[1] = False  # nobody asks what a lost rollout's is
  np.testing.assert_array_equal(kernel(reward, stratum, mask)[1], 0)
