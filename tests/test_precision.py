"""bfloat16 is what is stored and multiplied; sums, logits and rotations are float32."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from stratified.advantages import theory
from stratified.learner import update
from stratified.policy import attention, log_probs, rotary
from stratified.types import TrainState

RNG = np.random.default_rng(0)


def bfloat16(*shape):
  return jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)


def test_the_trainer_s_logits_are_not_rounded_to_bfloat16():
  hidden, weight = bfloat16(1, 3, 64), bfloat16(11, 64)
  found = log_probs.scores(hidden, weight)
  exact = np.einsum("rtd,vd->rtv", np.float64(hidden), np.float64(weight))
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, exact, atol=1e-4)  # in bfloat16 they are 0.03 off


def test_a_rotation_of_bfloat16_is_rounded_once():
  x, position = bfloat16(1, 64, 2, 8), jnp.arange(1000, 1064)[None]
  sin, cos = rotary.rotary(position, 8, 10000.0)
  found = rotary.rotate(x, sin, cos)
  a, b = np.split(np.float64(x), 2, axis=-1)
  s, c = np.float64(sin)[:, :, None], np.float64(cos)[:, :, None]
  exact = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_less(np.abs(np.float64(found) - exact), np.abs(exact) * 2**-8 + 1e-6)


def test_the_cache_s_sums_over_many_tokens_are_float32():
  """259 equal weights on 35 threes and 224 ones: 329 / 259 is 1.2734 in bfloat16.

  With either of the sums rounded to bfloat16 (328, 260) it is 1.2656 or less.
  """
  length, threes = 259, 35
  query, key = jnp.zeros((1, 1, 1, 2), jnp.bfloat16), jnp.zeros((1, 1, 2, length), jnp.bfloat16)
  value = jnp.ones((1, 1, length, 2), jnp.bfloat16).at[:, :, :threes].set(3)
  found = attention.cached(query, key, value, jnp.full((1, 1), length - 1))
  np.testing.assert_array_equal(np.float32(found).ravel(), [1.2734375, 1.2734375])


def test_an_update_whose_loss_alone_is_not_finite_changes_nothing():
  chain, params = optax.adam(0.1), {"w": jnp.ones(3)}
  state = TrainState(jnp.int32(4), params, chain.init(params), None, jnp.int32(1))
  for loss, skips in ((jnp.nan, 1.0), (jnp.inf, 1.0), (0.5, 0.0)):
    after, skipped = update._apply_if_finite(chain, state, {"w": jnp.ones(3)}, jnp.float32(loss))
    assert skipped == skips and after.skipped_in_a_row == (2 if skips else 0)
    same = jax.tree.map(
      lambda a, b: bool((a == b).all()),
      (after.params, after.opt_state),
      (state.params, state.opt_state),
    )
    assert jax.tree.all(same) == bool(skips)


def test_the_diagnostics_of_an_update_use_its_eps():
  batch = types.SimpleNamespace(
    reward_qk=jnp.float32([[0, 1, 1, 0.5]]),
    stratum_qk=jnp.int32([[0, 0, 1, 1]]),
    valid_qk=jnp.ones((1, 4)),
  )
  own = (batch.reward_qk, batch.stratum_qk, batch.valid_qk, jnp.ones((1, 4)))
  found = update._diagnostics(batch, own[3], 2, 0.5)
  for name, value in theory.diagnostics(*own, num_strata=2, eps=0.5).items():
    np.testing.assert_array_equal(found[name], value)
  # An offset of the stratum's mean from the group's, 0.125, over the group's deviation and eps.
  deviation = float(np.std([0, 1, 1, 0.5]))
  np.testing.assert_allclose(
    found["theory/cross_stratum_offset_rms"], 0.125 / (deviation + 0.5), rtol=1e-5
  )
