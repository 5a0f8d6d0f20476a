"""The optimizer chain: how far each update goes, what decays, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_rollouts import decoder_config, parameters

from stratified.learner import optimizer
from stratified.policy import weights


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
  np.testing.assert_allclose(
    [float(u["w"]) for u in moves(chain, {"w": jnp.float32(2.0)}, 3)], [-1.0] * 3, rtol=1e-6
  )


def test_the_cosine_starts_after_the_warm_up_and_falls_to_a_tenth():
  chain = optimizer.make(
    name="sgd", learning_rate=1.0, warmup_steps=2, decay_steps=4, clip_norm=1e9
  )
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
  spared = {
    "attention_norm",
    "mlp_norm",
    "final_norm",
    "q_norm",
    "k_norm",
    "q_bias",
    "k_bias",
    "v_bias",
  }
  assert {name for name, decays in optimizer.decayed(params).items() if not decays} == spared
  chain = optimizer.make(learning_rate=0.1, weight_decay=0.5)
  zeros = jax.tree.map(np.zeros_like, params)
  update, _ = jax.jit(chain.update)(zeros, chain.init(params), params)
  for name, value in update.items():
    np.testing.assert_allclose(
      value, 0 * params[name] if name in spared else -0.05 * params[name], rtol=1e-5, atol=1e-9
    )


def as_matrices(name, x):
  """[L, in..., out...] -> [L, rows, columns]: width x (heads head_dim) of q, k, v; the other way
  round of o."""
  return (
    np.asarray(x).reshape(
      x.shape[0], -1 if name == "o" else x.shape[1], x.shape[-1] if name == "o" else -1
    )
    if name in ("q", "k", "v", "o")
    else np.asarray(x)
  )


def test_muon_moves_each_layers_matrix_along_its_orthogonal_factor_and_the_rest_as_adamw_does():
  params = parameters(decoder_config(num_kv_heads=2, tied_embeddings=False))
  gradient = parameters(decoder_config(num_kv_heads=2, tied_embeddings=False), seed=2)
  muon, adamw = (
    optimizer.make(name=name, learning_rate=0.1, clip_norm=1e9) for name in ("muon", "adamw")
  )
  found, expected = (
    jax.jit(chain.update)(gradient, chain.init(params), params)[0] for chain in (muon, adamw)
  )
  assert set(weights.linear_layers()) <= set(params)
  for name, update in found.items():
    if name not in weights.linear_layers():
      np.testing.assert_allclose(update, expected[name], rtol=1e-6)
      continue
    for g, moved in zip(as_matrices(name, gradient[name]), as_matrices(name, update)):
      u, s, vt = np.linalg.svd(np.float64(g), full_matrices=False)
      # In the gradient's own axes the update is diagonal: minus the rate, the scale, and singular
      # values near 1. The quintic takes 0.02 and more of the largest to between 0.68 and 1.21 in
      # five rounds.
      inner = u.T @ moved @ vt.T / (-0.1 * 0.2 * np.sqrt(max(g.shape)))
      kept = s > 0.1 * np.linalg.norm(s)
      assert kept.sum() > 3
      values = np.diag(inner)[kept]
      assert (values > 0.6).all() and (values < 1.25).all(), name
      np.testing.assert_allclose(inner - np.diag(np.diag(inner)), 0, atol=2e-3)


def test_all_but_matrices_move_by_a_share_of_muons_rate():
  params = parameters(decoder_config())
  gradient = parameters(decoder_config(), seed=2)
  whole, slower = (
    optimizer.make(name="muon", learning_rate=0.1, embedding_rate=share) for share in (1.0, 0.25)
  )
  found, expected = (
    chain.update(gradient, chain.init(params), params)[0] for chain in (slower, whole)
  )
  for name, update in found.items():
    share = 1.0 if name in weights.linear_layers() else 0.25
    np.testing.assert_allclose(update, share * expected[name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
  "changes, sentence",
  [
    (dict(learning_rate=0.0), "learning_rate=0.0 must be above 0"),
    (dict(learning_rate=-1e-3), "learning_rate=-0.001 must be above 0"),
    (dict(learning_rate=float("nan")), "learning_rate=nan must be above 0"),
    (dict(warmup_steps=-1), "warmup_steps=-1"),
    (dict(decay_steps=-2), "decay_steps=-2"),
    (dict(b1=1.0), "b1=1.0 must be at least 0 and at most 0.999999"),
    (dict(b2=-0.1), "b2=-0.1 must be at least 0 and at most 0.999999"),
    (dict(weight_decay=-0.1), "weight_decay=-0.1"),
    (dict(clip_norm=0.0), "clip_norm=0.0"),
    (dict(clip_norm=-1.0), "clip_norm=-1.0"),
    (dict(embedding_rate=0.0), "embedding_rate=0.0 must be above 0"),
    (dict(name="adamax"), "optimizer='adamax' is unknown; choose one of adamw, muon, sgd"),
  ],
)
def test_settings_out_of_range_are_refused_in_words(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    optimizer.make(**dict(learning_rate=1e-3) | changes)


@pytest.mark.parametrize("decay", [optimizer.LARGEST_DECAY, 1 - 1e-8])
def test_the_largest_decay_is_one_that_float32_tells_from_1(decay):
  """Adam divides by 1 - decay; beyond the bound, its update is not finite."""
  params = {"gate": jnp.ones((1, 3, 4))}
  chain = optax.adamw(1e-3, b1=decay, b2=decay)
  moves, _ = chain.update(params, chain.init(params), params)
  assert np.isfinite(moves["gate"]).all() == (decay == optimizer.LARGEST_DECAY)
