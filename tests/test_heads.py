"""Extra heads and the critic: weights beside the policy, with an optimizer of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import decoder_config, parameters

from stratified.algorithms.base import Critic
from stratified.learner import optimizer
from stratified.learner import state as states
from stratified.policy import decoder, heads, lora

CONFIG = decoder_config(qkv_bias=True)
TOKENS = np.arange(10).reshape(1, 10) % 7
OWN, SHARED = (Critic({"value": 2}, {"learning_rate": 0.1}, body) for body in ("own", "policy"))
RNG = np.random.default_rng(4)
HEAD = {"value": RNG.standard_normal((16, 1)).astype(np.float32), "value_bias": np.float32([0.7])}


def hidden(params):
  return decoder.hidden(CONFIG, params, TOKENS, np.arange(10)[None], np.ones_like(TOKENS))


def values(head, params):
  return heads.outputs(head, "value", hidden(params))[..., 0]


def test_a_head_is_a_linear_layer_of_the_hidden_states():
  table = heads.weights(CONFIG, {"value": 1, "outcome": 3})
  assert {name: w.shape for name, w in table.items()} == {
    "value": (16, 1), "value_bias": (1,), "outcome": (16, 3), "outcome_bias": (3,)
  }  # fmt: skip
  x = hidden(parameters(CONFIG))
  found = heads.outputs(HEAD, "value", x)
  assert found.shape == (1, 10, 1) and found.dtype == jnp.float32
  expected = np.asarray(x, np.float64) @ HEAD["value"].astype(np.float64) + 0.7
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_head_computes_in_float32_on_bfloat16_hidden_states():
  x = jnp.full((1, 1, 16), 1.0, jnp.bfloat16)
  params = {"value": jnp.full((16, 1), 1 + 2**-12), "value_bias": jnp.zeros(1)}
  assert float(heads.outputs(params, "value", x)[0, 0, 0]) == 16 * (1 + 2**-12)


def test_its_gradient_is_the_slope_and_reaches_the_body():
  params, target = parameters(CONFIG), np.linspace(-1, 1, 10, dtype=np.float32)
  loss = lambda head, params: jnp.square(values(head, params) - target).sum()
  of_head, of_body = jax.jit(jax.grad(loss, argnums=(0, 1)))(HEAD, params)
  error = 2 * (np.asarray(values(HEAD, params)) - target)
  np.testing.assert_allclose(of_head["value_bias"], [error.sum()], rtol=1e-4)
  expected = error[0] @ np.asarray(hidden(params))[0]
  np.testing.assert_allclose(of_head["value"][:, 0], expected, rtol=1e-3, atol=1e-4)
  assert np.abs(of_body["down"]).max() > 0


def test_the_weight_decays_and_the_bias_does_not_and_muon_leaves_both_to_adam():
  decayed = optimizer.decayed(HEAD)
  assert decayed["value"] and not decayed["value_bias"]
  chains = [optimizer.make(name=name, learning_rate=0.1) for name in ("muon", "adamw")]
  found, expected = (chain.update(HEAD, chain.init(HEAD), HEAD)[0] for chain in chains)
  np.testing.assert_allclose(found["value"], expected["value"], rtol=1e-6)


@pytest.mark.parametrize("sizes", [{}, {"value": 0}, {"down": 1}, {"a b": 1}, ("value",)])
def test_heads_that_can_not_be_are_refused(sizes):
  with pytest.raises(ValueError, match="how many numbers of each token"):
    heads.check(sizes)


###  The critic in the state  ###


def test_two_optimizers_beside_each_other_clip_and_count_alone():
  policy, critic = (optimizer.make(learning_rate=rate, clip_norm=1e-3) for rate in (1.0, 0.25))
  both = optimizer.beside(policy, critic)
  trained = {"policy": {"gate": jnp.ones((1, 3, 4))}, "critic": {"value": jnp.ones((4, 1))}}
  updates, state = both.update(trained, both.init(trained), trained)
  for name, chain in (("policy", policy), ("critic", critic)):
    alone, _ = chain.update(trained[name], chain.init(trained[name]), trained[name])
    jax.tree.map(np.testing.assert_array_equal, updates[name], alone)
  assert set(state) == {"policy", "critic"}


@pytest.mark.parametrize("adapter", [None, lora.LoraConfig(2, 6.0, ("q", "down"))], ids=str)
@pytest.mark.parametrize("critic", [OWN, SHARED], ids=["own", "policy"])
def test_the_state_holds_the_critic_as_it_is_described(mesh, critic, adapter):
  chain = optimizer.beside(*(optimizer.make(**critic.optimizer),) * 2)
  params = parameters(CONFIG)
  how = dict(with_reference=True, adapter=adapter, critic=critic)
  state = states.init_state(mesh, CONFIG, dict(params), chain, **how)
  assert not {"value", "value_bias"} & (set(state.params) | set(state.reference))
  assert not state.critic["value"].any() and state.critic["value"].shape == (16, 2)
  body = {name: x for name, x in state.critic.items() if not name.startswith("value")}
  assert set(body) == (set(params) if critic is OWN else set())
  for name, value in body.items():
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(value, params[name])
  moments = [x for x in jax.tree.leaves(state.opt_state["critic"]) if x.ndim]
  assert sum(x.size for x in moments) == 2 * sum(x.size for x in state.critic.values())
  described = states.abstract_state(mesh, CONFIG, chain, **how)
  described = described._replace(reference=state.reference)  # with adapters it is a fingerprint
  same = lambda x, y: (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
  assert jax.tree.all(jax.tree.map(same, state, described))


def test_a_critics_body_is_split_as_the_policys(mesh):
  table = states.critic_weights(CONFIG, OWN)
  for name, weight in decoder.weights(CONFIG).items():
    assert table[name] == weight
  assert table["value"].axes == ("width", None)
  assert set(states.critic_weights(CONFIG, SHARED)) == {"value", "value_bias"}
  assert dataclasses.asdict(CONFIG).get("heads") is None  # the policy knows of none
