"""The attention of packed rows by each implementation that can run here, against a float64 loop
over tokens."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratified.policy import attention


@functools.cache
def inputs(length=256, heads=4, groups=2, dim=128, rows=2):
  rng = np.random.default_rng(0)
  q, k, v = (
    rng.standard_normal((rows, length, n, dim)).astype(np.float32) for n in (heads, groups, groups)
  )
  segment = np.zeros((rows, length), np.int32)
  segment[0, :100], segment[0, 100:230] = 1, 2  # the rest is padding
  segment[1] = 1
  return q, k, v, segment


@functools.cache
def by_hand(window=0, scale=128**-0.5):
  """For each token a softmax over the earlier tokens of its segment, the last `window` of them
  where it is not 0, in float64."""
  q, k, v, segment = inputs()
  out = np.zeros(q.shape)
  each = q.shape[2] // k.shape[2]
  for r in range(q.shape[0]):
    for t in range(q.shape[1]):
      first = max(0, t + 1 - window) if window else 0
      seen = [s for s in range(first, t + 1) if segment[r, s] == segment[r, t]]
      for h in range(q.shape[2]):
        score = k[r, seen, h // each].astype(np.float64) @ q[r, t, h].astype(np.float64) * scale
        weight = np.exp(score - score.max())
        out[r, t, h] = weight / weight.sum() @ v[r, seen, h // each].astype(np.float64)
  return out


def attend(name, q, k, v, segment):
  function = attention.IMPLEMENTATIONS[name]
  if name == "splash":  # the TPU kernel, interpreted
    function = functools.partial(function, interpret=True)
  return function(q, k, v, attention.context(segment, name))


WINDOW = 37


def attend_near(name, q, k, v, segment, local=None, **options):
  """As a layer calls it: `local` None where all layers have the window."""
  interpreted = {"splash": functools.partial(attention._splash, interpret=True)}
  with mock.patch.dict(attention.IMPLEMENTATIONS, interpreted):
    context = attention.context(segment, name, WINDOW if local is None else 0)
    return attention.packed(q, k, v, context, name, window=WINDOW, local=local, **options)


@pytest.mark.parametrize("name", ["library", "folded", "splash"])
def test_a_window_ends_what_a_token_sees_in_all_layers_or_in_those_that_say_so(name):
  q, k, v, segment = inputs()
  used = segment > 0
  run = jax.jit(functools.partial(attend_near, name), static_argnames="scale")
  for local, window in ((None, WINDOW), (jnp.array(True), WINDOW), (jnp.array(False), 0)):
    out = np.asarray(run(q, k, v, segment, local))
    np.testing.assert_allclose(out[used], by_hand(window)[used], atol=2e-6)
  out = np.asarray(run(q, k, v, segment, scale=0.3))
  np.testing.assert_allclose(out[used], by_hand(WINDOW, 0.3)[used], atol=2e-5)


def test_the_kernels_gradients_in_a_window_are_the_librarys():
  q, k, v, segment = inputs()
  weight = np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
  weight *= (segment > 0)[..., None, None]

  def of(name, local):
    loss = lambda *x: (attend_near(name, *x, segment, local) * weight).sum()
    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

  for local in (None, jnp.array(True), jnp.array(False)):
    for found, expected in zip(of("splash", local), of("library", local)):
      np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["library", "folded", "splash"])
def test_every_implementation_is_the_softmax_over_earlier_tokens_of_the_segment(name):
  """2e-6: float32 sums of up to 256 products of size 1."""
  q, k, v, segment = inputs()
  out = np.asarray(jax.jit(functools.partial(attend, name))(q, k, v, segment))
  used = segment > 0
  np.testing.assert_allclose(out[used], by_hand()[used], atol=2e-6)


def test_the_kernels_gradients_are_the_librarys():
  q, k, v, segment = inputs()
  weight = (
    np.random.default_rng(1).standard_normal(q.shape).astype(np.float32)
    * (segment > 0)[..., None, None]
  )
  of = lambda name: jax.jit(
    jax.grad(lambda *x: (attend(name, *x, segment) * weight).sum(), (0, 1, 2))
  )(q, k, v)
  for found, expected in zip(of("splash"), of("library")):
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
  "platform, dtype, head_dim, length, name",
  [
    ("cpu", "float32", 32, 192, "folded"),
    ("gpu", "bfloat16", 128, 4096, "cudnn"),
    ("gpu", "float32", 128, 4096, "library"),
    ("tpu", "bfloat16", 128, 4096, "splash"),
    ("tpu", "bfloat16", 64, 4096, "library"),
    ("tpu", "bfloat16", 128, 200, "library"),
  ],
)
def test_the_fastest_implementation_whose_conditions_hold_is_taken(
  platform, dtype, head_dim, length, name
):
  assert attention.best_for(platform, dtype, head_dim, length) == name


def test_a_token_of_another_segment_or_later_has_no_weight():
  q, k, v, segment = (jnp.asarray(x) for x in inputs())
  changed = v.at[0, 150].add(100.0)
  for name in ("library", "folded", "splash"):
    before, after = (attend(name, q, k, value, segment) for value in (v, changed))
    moved = np.abs(np.asarray(after - before)).max((2, 3))[0] > 1e-4
    assert moved[150:230].all() and not moved[:150].any() and not moved[230:].any(), name
