"""Extra heads: a linear layer on the hidden states, trained beside the policy, in no exported
model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_rollouts import decoder_config, parameters

from stratified.learner import optimizer
from stratified.policy import decoder, heads, lora
from stratified.policy.files import hugging_face

CONFIG = decoder_config(heads=("value",), qkv_bias=True)
TOKENS = np.arange(10).reshape(1, 10) % 7


def filled(config=CONFIG):
  """Parameters whose head is not zero."""
  params = parameters(config)
  rng = np.random.default_rng(4)
  return params | {
    "value": rng.standard_normal((16, 1)).astype(np.float32),
    "value_bias": np.float32([0.7]),
  }


def hidden(config, params):
  return decoder.hidden(config, params, TOKENS, np.arange(10)[None], np.ones_like(TOKENS))


def test_values_start_at_zero_and_are_a_linear_layer_of_the_hidden_states():
  start = decoder.init(CONFIG, jax.random.key(0))
  assert (start["value"].shape, start["value_bias"].shape) == ((16, 1), (1,))
  assert not heads.values(CONFIG, start, hidden(CONFIG, start)).any()
  params = filled()
  x = hidden(CONFIG, params)
  found = heads.values(CONFIG, params, x)
  assert found.shape == (1, 10) and found.dtype == jnp.float32
  expected = np.asarray(x, np.float64) @ params["value"][:, 0].astype(np.float64) + 0.7
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_head_computes_in_float32_on_bfloat16_hidden_states():
  config = dataclasses.replace(CONFIG, dtype="bfloat16")
  assert (
    decoder.seen_dtype(config, "value") == decoder.seen_dtype(config, "value_bias") == "float32"
  )
  x = jnp.full((1, 1, 16), 1.0, jnp.bfloat16)
  params = {"value": jnp.full((16, 1), 1 + 2**-12), "value_bias": jnp.zeros(1)}
  assert float(heads.values(config, params, x)[0, 0]) == 16 * (1 + 2**-12)


def test_its_gradient_is_the_slope_and_reaches_the_body():
  params, target = filled(), np.linspace(-1, 1, 10, dtype=np.float32)
  loss = lambda params: jnp.square(
    heads.values(CONFIG, params, hidden(CONFIG, params)) - target
  ).sum()
  gradient = jax.jit(jax.grad(loss))(params)
  error = 2 * (np.asarray(heads.values(CONFIG, params, hidden(CONFIG, params))) - target)
  np.testing.assert_allclose(gradient["value_bias"], [error.sum()], rtol=1e-4)
  np.testing.assert_allclose(
    gradient["value"][:, 0], error[0] @ np.asarray(hidden(CONFIG, params))[0], rtol=1e-3, atol=1e-4
  )
  assert np.abs(gradient["down"]).max() > 0


def test_the_weight_decays_and_the_bias_does_not_and_muon_leaves_both_to_adam():
  params = filled()
  decayed = optimizer.decayed(params)
  assert decayed["value"] and not decayed["value_bias"]
  chains = [optimizer.make(name=name, learning_rate=0.1) for name in ("muon", "adamw")]
  found, expected = (chain.update(params, chain.init(params), params)[0] for chain in chains)
  np.testing.assert_allclose(found["value"], expected["value"], rtol=1e-6)


def test_the_sampler_carries_no_head():
  layers = decoder.unstack(CONFIG, filled())
  assert not {"value", "value_bias"} & set(layers)
  assert not {"value", "value_bias"} & set(layers["layers"][0])


def test_export_leaves_it_out_and_import_starts_it_anew(tmp_path):
  params = filled()
  hugging_face.save(tmp_path, CONFIG, params)
  names = set(safetensors.numpy.load_file(tmp_path / "model.safetensors"))
  assert "model.norm.weight" in names and not [name for name in names if "value" in name]
  assert "value" not in json.loads((tmp_path / "config.json").read_text())
  config = hugging_face.load_config(tmp_path, heads=("value",))
  again = hugging_face.load_params(tmp_path, config)
  assert set(again) == set(params) and again["value"].dtype == jnp.float32
  assert not again["value"].any() and not again["value_bias"].any()
  np.testing.assert_array_equal(again["down"], params["down"])
  without = {name: value for name, value in params.items() if not name.startswith("value")}
  hugging_face.save(tmp_path, CONFIG, without)  # a policy that the sampler gave back


def test_adapters_hold_the_head_as_it_is_and_train_it_whole():
  adapter = lora.LoraConfig(rank=2, alpha=6.0, targets=("q", "down"))
  adapters = lora.init(CONFIG, adapter, jax.random.key(0))
  assert set(adapters) == {"q_a", "q_b", "down_a", "down_b", "value", "value_bias"}
  assert not adapters["value"].any()
  trained = adapters | {name: filled()[name] for name in ("value", "value_bias")}
  frozen = parameters(CONFIG)
  for params in (lora.join(adapter, frozen, trained), lora.merge(CONFIG, adapter, frozen, trained)):
    np.testing.assert_array_equal(params["value"], trained["value"])
    found = heads.values(CONFIG, params, hidden(CONFIG, params))
    np.testing.assert_allclose(
      found, heads.values(CONFIG, filled(), hidden(CONFIG, frozen)), atol=1e-5
    )
  loss = lambda x: heads.values(
    CONFIG, lora.join(adapter, frozen, x), hidden(CONFIG, lora.join(adapter, frozen, x))
  ).sum()
  gradient = jax.jit(jax.grad(loss))(trained)
  assert float(gradient["value_bias"][0]) == 10.0 and np.abs(gradient["value"]).max() > 0


def test_a_head_that_the_decoder_does_not_have_is_refused():
  plain = decoder_config()
  with pytest.raises(ValueError, match="the decoder has no head 'value'; its config says heads=()"):
    heads.values(plain, filled(), hidden(plain, parameters(plain)))
  with pytest.raises(ValueError, match="must name each head once"):
    dataclasses.replace(plain, heads=("value", "value"))
