"""The optimizer chain: how far each update goes, what decays, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from small_rollouts import decoder_config, parameters
from stratified import optimizer


def moves(chain, gradient, count):
  """The updates of `count` equal gradients."""
  params = jax.tree.map(jnp.ones_like, gradient)
  state, found = chain.init(params), []
  for _ in range(count):
    update, state = chain.update(gradient, state, params)
    found.append(update)
  return found


def test_the_warm_up_starts_moving_at_once_and_reaches_the_rate_in_its_last_step():
  chain = optimizer.make(name="sgd", learning_rate=0.8, warmup_steps=4, clip_norm=1e9)
  found = [float(u["w"][0]) for u in moves(chain, {"w": jnp.float32([1.0])}, 7)]
  np.testing.assert_allclose(found, [-0.2, -0.4, -0.6, -0.8, -0.8, -0.8, -0.8], rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_without_a_warm_up_the_rate_is_constant(warmup_steps):
  chain = optimizer.make(name="sgd", learning_rate=0.5, warmup_steps=warmup_steps, clip_norm=1e9)
  np.testing.assert_allclose([float(u["w"]) for u in moves(chain, {"w": jnp.float32(2.0)}, 3)], [-1.0] * 3, rtol=1e-6)


def test_the_cosine_starts_after_the_warm_up_and_falls_to_a_tenth():
  chain = optimizer.make(name="sgd", learning_rate=1.0, warmup_steps=2, decay_steps=4, clip_norm=1e9)
  found = [-float(u["w"]) for u in moves(chain, {"w": jnp.float32(1.0)}, 8)]
  # 0.1 + 0.9 x (1 + cos(pi i / 4)) / 2 for i = 0 to 4, after 1/2 and 1.
  cosine = [0.1 + 0.45 * (1 + np.cos(np.pi * i / 4)) for i in range(5)]
  np.testing.assert_allclose(found, [0.5, 1.0, *cosine, 0.1], rtol=1e-6)


def test_adams_first_update_goes_the_first_share_of_the_rate_in_each_coordinate():
  chain = optimizer.make(learning_rate=1e-2, warmup_steps=5)
  first = moves(chain, {"w": jnp.float32([0.03, -0.4, 0.0])}, 1)[0]["w"]
  np.testing.assert_allclose(first, [-2e-3, 2e-3, 0.0], rtol=1e-5)


@pytest.mark.parametrize("size, expected", [(10.0, 2.0), (1.5, 1.5)])
def test_the_gradient_is_clipped_by_its_norm_over_all_weights(size, expected):
  gradient = {"a": jnp.float32([3.0, 0.0]) * size / 5, "b": jnp.float32([[4.0]]) * size / 5}
  found = moves(optimizer.make(name="sgd", learning_rate=1.0, clip_norm=2.0), gradient, 1)[0]
  np.testing.assert_allclose(optax.global_norm(found), expected, rtol=1e-6)
  np.testing.assert_allclose(found["a"][0] / found["b"][0, 0], 0.75, rtol=1e-6)


def test_weight_decay_pulls_matrices_and_spares_norms_and_biases():
  params = parameters(decoder_config(qkv_bias=True, qk_norm=True, tied_embeddings=False))
  spared = {"attention_norm", "mlp_norm", "final_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias"}
  assert {name for name, decays in optimizer.decayed(params).items() if not decays} == spared
  chain = optimizer.make(learning_rate=0.1, weight_decay=0.5)
  update, _ = chain.update(jax.tree.map(jnp.zeros_like, params), chain.init(params), params)
  for name, value in update.items():
    np.testing.assert_allclose(value, 0 * params[name] if name in spared else -0.05 * params[name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("changes, sentence", [
    (dict(learning_rate=0.0), "learning_rate=0.0 must be positive"),
    (dict(learning_rate=-1e-3), "learning_rate=-0.001 must be positive"),
    (dict(learning_rate=float("nan")), "learning_rate=nan must be positive"),
    (dict(warmup_steps=-1), "warmup_steps=-1"),
    (dict(decay_steps=-2), "decay_steps=-2"),
    (dict(weight_decay=-0.1), "weight_decay=-0.1"),
    (dict(clip_norm=0.0), "clip_norm=0.0"),
    (dict(clip_norm=-1.0), "clip_norm=-1.0"),
    (dict(name="adamax"), r"optimizer 'adamax' is unknown; choose one of \['adamw', 'sgd'\]"),
])
def test_settings_out_of_range_are_refused_in_words(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    optimizer.make(**dict(learning_rate=1e-3) | changes)
