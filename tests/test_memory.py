"""Where the state lies, in which dtype, and what the update holds: none of it may change a number
but by its rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import collate, decoder_config, family, parameters, random_groups

from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.policy import layers, weights
from stratified.runs.checkpoint import Checkpointer

CONFIG = decoder_config(qkv_bias=True)
CHAIN = optimizer.make(learning_rate=1e-2)
LOSS = dict(clip_ratio=0.2, kl_coefficient=0.3, kl_estimator="k3")


def steps(mesh, config=CONFIG, host=(), count=2):
  """(state, stats) after `count` updates from the same parameters on the same rollouts."""
  learn = update.make_update(mesh, config, CHAIN, family("gn", **LOSS), host=host)
  state = states.init_state(
    mesh, config, parameters(config, scale=2.0), CHAIN, with_reference=True, host=host
  )
  batch = batching.place(mesh, collate(random_groups(3, 3, seed=2)))
  for _ in range(count):
    state, stats = learn(state, batch)
  return state, stats


@pytest.fixture(scope="module")
def on_device(mesh):
  return steps(mesh)


@pytest.mark.parametrize("host", [("opt_state",), ("reference",), states.HOST_PARTS])
def test_parts_of_the_state_in_the_hosts_memory_change_no_bit(mesh, on_device, host):
  state, stats = steps(mesh, host=host)
  for found, expected in zip(jax.tree.leaves((state, stats)), jax.tree.leaves(on_device)):
    np.testing.assert_array_equal(found, expected)
  for part in states.HOST_PARTS:
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(getattr(state, part)) if x.ndim}
    assert (kinds == {"pinned_host"}) == (part in host), part
  assert all(x.sharding.memory_kind != "pinned_host" for x in jax.tree.leaves(state.params))


def test_a_state_in_the_hosts_memory_is_restored_into_it(mesh, tmp_path):
  state, _ = steps(mesh, host=states.HOST_PARTS, count=1)
  abstract = states.abstract_state(mesh, CONFIG, CHAIN, with_reference=True, host=states.HOST_PARTS)
  with Checkpointer(tmp_path, 1) as checkpointer:
    checkpointer.save(1, state)
    restored, _ = checkpointer.restore_latest(abstract)
  for found, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state)):
    np.testing.assert_array_equal(found, expected)
    assert found.sharding.memory_kind == expected.sharding.memory_kind


def test_the_reference_is_kept_in_the_dtypes_that_a_forward_pass_reads(mesh):
  config = dataclasses.replace(CONFIG, dtype="bfloat16")
  state, stats = steps(mesh, config=config, count=1)
  for name, value in state.reference.items():
    assert value.dtype == ("float32" if name.endswith(("norm", "bias")) else "bfloat16"), name
  assert stats["loss/kl"] == 0.0  # before the first update it is the policy itself, to the last bit
  assert all(
    value.dtype == "float32"
    for value in jax.tree.leaves((state.params, state.opt_state))
    if value.ndim
  )


def test_a_bfloat16_weights_gradient_is_summed_in_float32():
  """4,096 tokens that each add 1 to a gradient of 4,096: in bfloat16 a sum by ones ends at 256."""
  x, w = jnp.ones((1, 4096, 1), jnp.bfloat16), jnp.full((1, 1), 0.5)
  gradient = jax.grad(lambda w: layers.linear(x, w, (None, None)).astype(jnp.float32).sum())(w)
  assert gradient.dtype == jnp.float32 and float(gradient[0, 0]) == 4096.0
  # and neither a product of 257 = 2^8 + 1 nor its sum is cut to bfloat16's 8 bits
  x = jnp.ones((1, 257, 1), jnp.bfloat16)
  gradient = jax.grad(lambda w: layers.linear(x, w, (None, None)).astype(jnp.float32).sum())(w)
  assert float(gradient[0, 0]) == 257.0


@pytest.mark.parametrize("name", ["q", "o", "down"])
def test_a_linear_layers_gradients_are_those_that_differentiation_gives(name):
  rng = np.random.default_rng(0)
  shape = {"q": (6, 2, 4), "o": (2, 4, 6), "down": (8, 6)}[name]
  weight = weights.weights(CONFIG)[name]
  inputs = shape[: weight.inputs]
  x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 5, *inputs), shape))
  plain = lambda x, w: jnp.tensordot(x, w, len(inputs))
  own = lambda x, w: layers.linear(x, w, weight.axes[1:])
  np.testing.assert_allclose(own(x, w), plain(x, w), atol=1e-5)
  for found, expected in zip(
    *(jax.grad(lambda *a: (jnp.sin(f(*a))).sum(), (0, 1))(x, w) for f in (own, plain))
  ):
    np.testing.assert_allclose(found, expected, atol=2e-5)
