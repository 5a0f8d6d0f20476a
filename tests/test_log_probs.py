"""Log-probs and entropy against float64 numpy: values, gradients, chunks, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratified import sharding
from stratified.policy import decoder, log_probs

ROWS, LENGTH, WIDTH, VOCAB = 2, 12, 16, 211
CONFIG = decoder.DecoderConfig(
  vocab_size=VOCAB,
  width=WIDTH,
  num_layers=1,
  num_heads=1,
  num_kv_heads=1,
  head_dim=4,
  mlp_width=4,
  tied_embeddings=False,
)


def problem(seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  hidden = (scale * rng.normal(size=(ROWS, LENGTH, WIDTH))).astype(np.float32)
  head = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
  token = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
  return hidden, head, token


@functools.partial(jax.jit, static_argnames="chunk")
def computed(hidden, head, token, temperature=1.0, chunk=None):
  hidden = sharding.constrain(hidden, "row", None, None)
  head = sharding.constrain(head, "vocabulary", "width")
  return log_probs.token_log_probs(
    CONFIG, {"head": head}, hidden, token, temperature=temperature, chunk=chunk
  )


def softmax64(hidden, head, temperature):
  """log softmax of the logits [R, T, V] in float64."""
  z = hidden.astype(np.float64) @ head.astype(np.float64).T / temperature
  z -= z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.parametrize("chunk", [None, 1, 4, 12, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_log_probs_and_entropy_equal_log_softmax_in_float64(temperature, chunk):
  hidden, head, token = problem()
  logp, entropy = computed(hidden, head, token, temperature, chunk)
  everything = softmax64(hidden, head, temperature)
  expected = np.take_along_axis(everything[:, :-1], token[:, 1:, None], axis=-1)[..., 0]
  assert logp.dtype == entropy.dtype == jnp.float32
  np.testing.assert_allclose(logp[:, 1:], expected, rtol=2e-6, atol=2e-5)
  expected = -(np.exp(everything) * everything).sum(-1)[:, :-1]
  np.testing.assert_allclose(entropy[:, 1:], expected, rtol=1e-5, atol=2e-5)
  np.testing.assert_array_equal(logp[:, 0], 0)
  np.testing.assert_array_equal(entropy[:, 0], 0)


@pytest.mark.parametrize("chunk", [None, 3])
def test_gradients_are_one_hot_minus_softmax_in_float64(chunk):
  hidden, head, token = problem(1)
  weight = np.random.default_rng(2).normal(size=token.shape).astype(np.float32)
  temperature = 0.7
  loss = lambda hidden, head: (computed(hidden, head, token, temperature, chunk)[0] * weight).sum()
  found_hidden, found_head = jax.grad(loss, argnums=(0, 1))(hidden, head)
  d_logits = -np.exp(softmax64(hidden, head, temperature))[:, :-1]
  r, t = np.indices(d_logits.shape[:2])
  d_logits[r, t, token[:, 1:]] += 1
  d_logits *= weight[:, 1:, None] / temperature
  expected_hidden = np.zeros(hidden.shape)
  expected_hidden[:, :-1] = d_logits @ head
  np.testing.assert_allclose(
    found_hidden, expected_hidden, rtol=0, atol=1e-5 * np.abs(expected_hidden).max()
  )
  expected_head = np.einsum("rtv,rtd->vd", d_logits, hidden[:, :-1].astype(np.float64))
  np.testing.assert_allclose(
    found_head, expected_head, rtol=0, atol=1e-5 * np.abs(expected_head).max()
  )


@pytest.mark.parametrize("chunk", [None, 3])
def test_entropy_carries_no_gradient(chunk):
  hidden, head, token = problem(3)
  for gradient in jax.grad(lambda *x: computed(*x, token, 1.0, chunk)[1].sum(), argnums=(0, 1))(
    hidden, head
  ):
    np.testing.assert_array_equal(gradient, 0)


def test_huge_logits_stay_finite():
  hidden, head, token = problem(4, scale=1e4)
  logp, entropy = computed(hidden, head, token, 1.0, 4)
  expected = np.take_along_axis(softmax64(hidden, head, 1.0)[:, :-1], token[:, 1:, None], axis=-1)[
    ..., 0
  ]
  assert np.abs(expected).max() > 1e4
  np.testing.assert_allclose(logp[:, 1:], expected, rtol=1e-5, atol=0.1)
  assert np.isfinite(entropy).all() and (np.asarray(entropy) > -0.1).all()


def test_a_mesh_of_one_device_changes_nothing():
  hidden, head, token = problem(5)
  plain = computed(hidden, head, token, 0.8, 4)
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    meshed = computed(hidden, head, token, 0.8, 4)
  for a, b in zip(plain, meshed, strict=True):
    np.testing.assert_allclose(a, np.asarray(b), rtol=1e-6, atol=1e-6)


def test_no_array_of_tokens_by_vocabulary_is_held_forward_or_backward():
  rows, length, vocab = 2, 64, 8192
  shapes = [
    jax.ShapeDtypeStruct(s, d)
    for s, d in (
      ((rows, length, WIDTH), jnp.float32),
      ((vocab, WIDTH), jnp.float32),
      ((rows, length), jnp.int32),
    )
  ]

  def temporary(chunk):
    loss = lambda hidden, head, token: computed(hidden, head, token, 1.0, chunk)[0].sum()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  whole = rows * length * vocab * 4
  assert temporary(None) >= whole
  assert temporary(4) < whole / 2


def test_a_chunk_that_does_not_divide_the_row_is_refused():
  with pytest.raises(
    ValueError, match="chunk=5 does not divide the row length 12; choose a divisor"
  ):
    computed(*problem(), 1.0, 5)


@pytest.mark.parametrize("meshed", [False, True])
def test_the_entropys_gradient_is_that_of_float64(meshed):
  """dH / dz_v = -p_v (log p_v + H), through chunks, and over a mesh."""
  hidden, head, token = problem(6)

  def total(hidden, head):
    made = {"head": sharding.constrain(head, "vocabulary", "width")}
    hidden = sharding.constrain(hidden, "row", None, None)
    made = log_probs.token_log_probs(
      CONFIG, made, hidden, token, temperature=0.7, chunk=3, entropy_gradient=True
    )
    return made[1].sum()

  gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
  if meshed:
    with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
      found = gradient(hidden, head)
  else:
    found = gradient(hidden, head)
  logp = softmax64(hidden, head, 0.7)[:, :-1]
  entropy = -(np.exp(logp) * logp).sum(-1, keepdims=True)
  d_logits = -np.exp(logp) * (logp + entropy) / 0.7
  expected = np.zeros(hidden.shape)
  expected[:, :-1] = d_logits @ head
  np.testing.assert_allclose(found[0], expected, atol=2e-5 * np.abs(expected).max())
  expected = np.einsum("rtv,rtd->vd", d_logits, np.float64(hidden[:, :-1]))
  np.testing.assert_allclose(found[1], expected, atol=2e-5 * np.abs(expected).max())
