"""The per-token losses: values worked out by hand, expectations taken exactly over a small
categorical."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratified import losses

# Provenance: by hand. Ratios 1.5, 0.5, 1.1, 1 with advantages of both signs and a clip of 0.2:
#   A = +2: min(1.5 x 2, 1.2 x 2) = 2.4, held     A = -2: min(1.5 x -2, 1.2 x -2) = -3.0, free
#   A = +2: min(0.5 x 2, 0.8 x 2) = 1.0, free     A = -2: min(0.5 x -2, 0.8 x -2) = -1.6, held
#   within the clip both terms agree; an advantage of 0 is never held.
CLIP_CASES = [
  # ratio, advantage, loss, clipped, d loss / d logp (ratio x advantage where free, 0 where held)
  (1.5, 2.0, -2.4, 1, 0.0),
  (1.5, -2.0, 3.0, 0, 3.0),
  (0.5, 2.0, -1.0, 0, -1.0),
  (0.5, -2.0, 1.6, 1, 0.0),
  (1.1, 2.0, -2.2, 0, -2.2),
  (1.1, -2.0, 2.2, 0, 2.2),
  (1.0, 2.0, -2.0, 0, -2.0),
  (3.0, 0.0, 0.0, 0, 0.0),
]


@pytest.mark.parametrize("ratio, advantage, loss, clipped, slope", CLIP_CASES)
def test_the_clip_holds_back_only_moves_that_went_too_far_in_the_right_direction(
  ratio, advantage, loss, clipped, slope
):
  old = jnp.float32(-1.25)
  surrogate = lambda logp: losses.clipped_surrogate(
    logp, old, jnp.float32(advantage), clip_ratio=0.2
  )
  (found, held), gradient = jax.value_and_grad(surrogate, has_aux=True)(
    old + jnp.log(jnp.float32(ratio))
  )
  np.testing.assert_allclose(found, loss, rtol=1e-6, atol=1e-7)
  assert held == clipped
  np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-7)


def test_at_a_ratio_of_one_the_surrogates_gradient_is_that_of_the_policy_gradient():
  logp, advantage = jnp.float32([-0.3, -2.0, -7.5]), jnp.float32([1.5, -0.5, 0.0])
  loss = lambda x: losses.clipped_surrogate(x, jax.lax.stop_gradient(x), advantage, clip_ratio=0.2)[
    0
  ].sum()
  np.testing.assert_array_equal(jax.grad(loss)(logp), -advantage)


def test_kl_estimates_of_one_token():
  # x = reference - policy = ln 2, -ln 2, 0. Provenance: k1 = -x, k2 = x^2 / 2 = 0.2402265, k3 = e^x
  # - 1 - x by hand.
  logp = jnp.float32([-2.0, -2.0, -2.0])
  reference = logp + jnp.float32([np.log(2), -np.log(2), 0.0])
  expected = {
    "k1": [-0.6931472, 0.6931472, 0],
    "k2": [0.2402265, 0.2402265, 0],
    "k3": [1 - 0.6931472, -0.5 + 0.6931472, 0],
  }
  for name, values in expected.items():
    np.testing.assert_allclose(
      losses.kl_estimate(logp, reference, estimator=name), values, rtol=1e-6, atol=1e-6
    )


def categorical(seed):
  """Logits of a policy and log-probs of a reference over five outcomes."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(0, 1, 5), jnp.float32), jax.nn.log_softmax(
    jnp.asarray(rng.normal(0, 1, 5), jnp.float32)
  )


def kl_float64(p_logits, q_logp):
  p = np.exp(np.float64(p_logits) - np.float64(p_logits).max())
  p /= p.sum()
  return float((p * (np.log(p) - np.float64(q_logp))).sum())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_are_unbiased_for_the_kl(seed, estimator):
  logits, reference = categorical(seed)
  logp = jax.nn.log_softmax(logits)
  mean = (jnp.exp(logp) * losses.kl_estimate(logp, reference, estimator=estimator)).sum()
  np.testing.assert_allclose(mean, kl_float64(logits, reference), rtol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_what_each_estimator_pulls_towards_when_its_gradient_is_averaged_over_samples(seed):
  """With samples from the policy held fixed: k1 pulls nowhere, k2 down KL(p || q), k3 down KL(q ||
  p)."""
  logits, reference = categorical(seed)
  p, q = jax.nn.softmax(logits), jnp.exp(reference)
  expected_loss = lambda name: (
    lambda z: (p * losses.kl_estimate(jax.nn.log_softmax(z), reference, estimator=name)).sum()
  )
  found = {name: jax.grad(expected_loss(name))(logits) for name in losses.KL_ESTIMATORS}
  # By hand, for softmax logits z: d KL(p || q) / dz = p (log p/q - KL), d KL(q || p) / dz = p - q.
  difference = jnp.log(p) - reference
  np.testing.assert_allclose(found["k1"], jnp.zeros(5), atol=1e-6)
  np.testing.assert_allclose(found["k2"], p * (difference - (p * difference).sum()), atol=1e-6)
  np.testing.assert_allclose(found["k3"], p - q, atol=1e-6)


def test_k2_and_k3_are_never_negative_and_stay_finite_however_far_the_two_policies_are_apart():
  logp = -jnp.geomspace(1e-6, 200, 50)[:, None] * jnp.ones((1, 50))
  for name in ("k2", "k3"):
    value = losses.kl_estimate(logp, logp.T, estimator=name)
    assert (value >= 0).all() and jnp.isfinite(value).all()


def test_a_segments_sum_stands_at_each_of_its_tokens():
  position = np.array([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
  x = np.random.default_rng(0).standard_normal(position.shape).astype(np.float32)
  found = jax.jit(losses.segment_sum)(x, position)
  for row, cuts in enumerate(([0, 3, 5, 6, 7], [0, 7])):
    for start, end in zip(cuts, cuts[1:]):
      np.testing.assert_allclose(
        found[row, start:end], np.full(end - start, np.float64(x[row, start:end]).sum()), atol=1e-6
      )


def test_a_sequences_weight_is_the_product_of_its_tokens_ratios_up_to_the_cap():
  position = jnp.array([[0, 1, 2, 0, 1]])
  gap = jnp.log(jnp.array([[2.0, 3.0, 0.5, 0.5, 0.25]]))
  weigh = lambda cap: losses.importance_weight(
    gap, jnp.zeros_like(gap), cap=cap, position_rt=position
  )
  np.testing.assert_allclose(weigh(10.0), [[3, 3, 3, 0.125, 0.125]], rtol=1e-6)
  np.testing.assert_allclose(weigh(2.0), [[2, 2, 2, 0.125, 0.125]], rtol=1e-6)


def test_an_importance_weight_of_any_gap_is_finite():
  far = jnp.array([[-1e6, 1e6, 50.0]])
  assert np.isfinite(losses.importance_weight(far, jnp.zeros_like(far), cap=1e30)).all()


def test_importance_weights_are_the_ratio_up_to_the_cap():
  found = losses.importance_weight(
    jnp.float32([-1, -1, -1]), jnp.float32([-1, -1 + np.log(2), -1 - np.log(4)]), cap=2.0
  )
  np.testing.assert_allclose(found, [1.0, 0.5, 2.0], rtol=1e-6)


# Three rollouts of 4, 2 and 3 policy tokens; the second is lost. Rows: token, with two context
# tokens at the end.
LENGTH = np.float32([4] * 4 + [2] * 2 + [3] * 3 + [4, 2])
MASK = np.float32([1] * 9 + [0, 0])
VALID = np.float32([1] * 4 + [0] * 2 + [1] * 3 + [1, 0])


def weights(aggregation, max_tokens=10):
  return np.asarray(
    losses.token_weights(
      jnp.asarray(MASK),
      jnp.asarray(VALID),
      jnp.asarray(LENGTH),
      aggregation=aggregation,
      tokens=jnp.float32(7),
      trajectories=jnp.float32(2),
      max_tokens=max_tokens,
    )
  )


@pytest.mark.parametrize(
  "aggregation, first, third, total",
  [
    ("token_mean", 1 / 7, 1 / 7, 1.0),  # 7 tokens that count
    ("sequence_mean", 1 / 8, 1 / 6, 1.0),  # 1 / (2 rollouts x 4), 1 / (2 x 3)
    ("constant", 1 / 20, 1 / 20, 7 / 20),  # 1 / (2 rollouts x 10)
  ],
)
def test_token_weights_of_each_aggregation(aggregation, first, third, total):
  found = weights(aggregation)
  np.testing.assert_allclose(found, [first] * 4 + [0, 0] + [third] * 3 + [0, 0], rtol=1e-6)
  np.testing.assert_allclose(found.sum(), total, rtol=1e-6)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_a_batch_without_anything_valid_has_finite_weights_of_zero(aggregation):
  zero = jnp.zeros(4)
  found = losses.token_weights(
    jnp.ones(4),
    zero,
    zero,
    aggregation=aggregation,
    tokens=jnp.float32(0),
    trajectories=jnp.float32(0),
    max_tokens=10,
  )
  np.testing.assert_array_equal(found, np.zeros(4))


@pytest.mark.parametrize(
  "call",
  [
    lambda a, b: losses.clipped_surrogate(a, b, a, clip_ratio=0.2),
    lambda a, b: losses.kl_estimate(a, b, estimator="k3"),
    lambda a, b: losses.importance_weight(a, b, cap=2.0),
    lambda a, b: losses.token_weights(
      a, b, a, aggregation="constant", tokens=1.0, trajectories=1.0, max_tokens=1
    ),
  ],
)
def test_shapes_that_differ_are_refused(call):
  with pytest.raises(AssertionError, match="shape"):
    call(jnp.zeros(3), jnp.zeros((3, 1)))
