"""Heads that start looking a fixed number of tokens back, against attention in float64 NumPy."""

import jax
import numpy as np
import pytest

from stratified.policy import decoder, look_back
from stratified.policy.config import DecoderConfig

LENGTH = 40
CONFIG = DecoderConfig(
  vocab_size=600,
  width=128,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  mlp_width=64,
  rope_theta=100.0,
)


@pytest.fixture(scope="module")
def random():
  return decoder.init(CONFIG, jax.random.key(0))


def attention_of_the_first_layer(params):
  """[H, T, T]: rotations as complex numbers, one for each pair of dimensions."""
  tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, LENGTH)
  x = np.float64(params["embed"])[tokens]
  x /= np.sqrt((x**2).mean(-1, keepdims=True))
  turn = np.exp(1j * np.arange(LENGTH)[:, None, None] * 100.0 ** (-np.arange(16) / 16))

  def turned(name):
    y = np.einsum("td,dhk->thk", x, np.float64(params[name][0]))
    return (y[..., :16] + 1j * y[..., 16:]) * turn

  keys = np.repeat(turned("k"), 2, axis=1)
  scores = np.einsum("thf,shf->hts", turned("q"), keys.conj()).real / np.sqrt(32)
  weights = np.exp(np.where(np.tril(np.ones((LENGTH, LENGTH))), scores, -np.inf))
  return weights / weights.sum(-1, keepdims=True)


def mean_at(weights_hts, back):
  """The mean weight of the token `back` before, by head."""
  return np.diagonal(weights_hts, -back, 1, 2)[:, 4:].mean(-1)


def test_each_head_looks_most_at_its_own_offset(random):
  found = attention_of_the_first_layer(look_back.start(CONFIG, random, (1, 2, 3, 0)))
  by_offset = np.stack([mean_at(found, back) for back in range(8)])
  assert by_offset.argmax(0).tolist() == [1, 2, 3, 0]
  assert (by_offset.max(0) > 0.5).all()
  assert (mean_at(attention_of_the_first_layer(random), 1) < 0.2).all()


@pytest.mark.parametrize(
  "offsets, of_heads", [((1, 3), [1, 3, 1, 3]), ((2, 0, 1, 3, 5, 6), [2, 0, 1, 3])]
)
def test_heads_take_the_offsets_in_turn(random, offsets, of_heads):
  found = attention_of_the_first_layer(look_back.start(CONFIG, random, offsets))
  by_offset = np.stack([mean_at(found, back) for back in range(8)])
  assert by_offset.argmax(0).tolist() == of_heads


def test_nothing_but_embeddings_and_the_first_layers_queries_and_keys_changes(random):
  found = look_back.start(CONFIG, random, (1,))
  changed = {name for name in random if not np.array_equal(found[name], random[name])}
  assert changed == {"embed", "q", "k"}
  for name in ("q", "k"):
    np.testing.assert_array_equal(found[name][1:], random[name][1:])
  shift = np.asarray(found["embed"] - random["embed"])
  np.testing.assert_allclose(shift, shift[:1, :1] * np.ones_like(shift), atol=1e-7)
  np.testing.assert_allclose(np.linalg.norm(shift, axis=-1), 1, rtol=1e-5)
