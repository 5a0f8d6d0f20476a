"""LoRA: the thin products are the merged weights, their gradient the dense one projected, and
nothing else is trained."""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import collate, decoder_config, family, parameters, random_groups

from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.policy import decoder, lora

# Sizes that all differ, so that a product is known by its shape.
CONFIG = decoder_config(width=20, num_heads=3, num_kv_heads=1, head_dim=6, mlp_width=28)
EVERY = dict(qkv_bias=True, qk_norm=True, tied_embeddings=False)
LORA = lora.LoraConfig(rank=4, alpha=6.0)
LOSS = dict(clip_ratio=0.2, kl_coefficient=0.3, kl_estimator="k3")
PROGRAM = pathlib.Path(__file__).with_name("sharded_adapters.py")


def adapters_of(config=CONFIG, adapter=LORA, seed=2):
  """Adapters as training might leave them: neither factor zero."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal(w.shape).astype(np.float32) * np.float32(0.3)
    for name, w in lora.weights(config, adapter).items()
  }


def packed(config, seed=0):
  rng = np.random.default_rng(seed)
  token = rng.integers(0, config.vocab_size, (2, 12))
  return token, np.tile(np.r_[:7, :5], (2, 1)), np.tile(np.r_[[1] * 7, [2] * 5], (2, 1))


# --- The same function in both forms ---


@pytest.mark.parametrize("targets", [LORA.targets, ("v", "o"), ("down",)], ids=",".join)
@pytest.mark.parametrize("switches", [{}, EVERY], ids=["plain", "biases and norms"])
def test_thin_products_beside_the_weights_equal_merged_weights(switches, targets):
  config, adapter = (
    dataclasses.replace(CONFIG, **switches),
    dataclasses.replace(LORA, targets=targets),
  )
  frozen, adapters = parameters(config), adapters_of(config, adapter)
  hidden = jax.jit(functools.partial(decoder.hidden, config))
  merged = lora.merge(config, adapter, frozen, adapters)
  expected, plain = hidden(merged, *packed(config)), hidden(frozen, *packed(config))
  found = hidden(lora.join(adapter, frozen, adapters), *packed(config))
  assert np.abs(expected - plain).max() > 0.1
  np.testing.assert_allclose(
    found, expected, atol=2e-5
  )  # float32: two thin products round otherwise than one


def test_merging_adds_alpha_over_rank_times_a_b():
  frozen, adapters = parameters(CONFIG), adapters_of()
  merged = lora.merge(CONFIG, LORA, frozen, adapters)
  assert set(merged) == set(frozen)
  for name, value in frozen.items():
    expected = np.float64(value)
    if name in LORA.targets:
      inputs = {"o": 18, "down": 28}.get(name, 20)
      a, b = np.float64(adapters[f"{name}_a"]), np.float64(adapters[f"{name}_b"])
      expected = expected + 1.5 * (a.reshape(2, inputs, 4) @ b.reshape(2, 4, -1)).reshape(
        value.shape
      )
    np.testing.assert_allclose(merged[name], expected, atol=1e-6, err_msg=name)


def test_the_sampler_takes_either_form():
  frozen, adapters = parameters(CONFIG), adapters_of()
  token, position = np.arange(6)[None] % 32, np.arange(6)[None]
  run = jax.jit(
    lambda params: decoder.extend(
      CONFIG, decoder.unstack(CONFIG, params), token, position, decoder.empty_cache(CONFIG, 1, 8)
    )[0]
  )
  np.testing.assert_allclose(
    run(lora.join(LORA, frozen, adapters)),
    run(lora.merge(CONFIG, LORA, frozen, adapters)),
    atol=2e-5,
  )


def test_new_adapters_change_no_bit():
  frozen, adapters = parameters(CONFIG), lora.init(CONFIG, LORA, jax.random.key(0))
  assert all(
    (np.asarray(value) == 0).all() == name.endswith("_b") for name, value in adapters.items()
  )
  for name, value in lora.merge(CONFIG, LORA, frozen, adapters).items():
    np.testing.assert_array_equal(value, frozen[name])
  hidden = jax.jit(functools.partial(decoder.hidden, CONFIG))
  np.testing.assert_array_equal(
    hidden(lora.join(LORA, frozen, adapters), *packed(CONFIG)), hidden(frozen, *packed(CONFIG))
  )


def test_a_layers_start_does_not_depend_on_which_others_have_adapters():
  key = jax.random.key(3)
  every, one = (
    lora.init(CONFIG, dataclasses.replace(LORA, targets=t), key) for t in (LORA.targets, ("o",))
  )
  np.testing.assert_array_equal(every["o_a"], one["o_a"])
  assert np.std(every["o_a"]) == pytest.approx(
    18**-0.5, rel=0.3
  )  # variance 1 / inputs, of 144 draws


def test_frozen_weights_in_bfloat16_take_float32_adapters():
  config = dataclasses.replace(CONFIG, dtype="bfloat16")
  frozen = {name: jnp.bfloat16(value) for name, value in parameters(config).items()}
  adapters = adapters_of()
  joined = lora.join(LORA, frozen, adapters)
  assert joined["q_a"].dtype == jnp.float32 and joined["q"].dtype == jnp.bfloat16
  hidden = jax.jit(functools.partial(decoder.hidden, config))
  found, merged = (
    hidden(params, *packed(config))
    for params in (joined, lora.merge(config, LORA, frozen, adapters))
  )
  assert (
    found.dtype == jnp.bfloat16
    and lora.merge(config, LORA, frozen, adapters)["q"].dtype == jnp.bfloat16
  )
  wide = {name: np.float32(value) for name, value in frozen.items()}
  exact = jax.jit(functools.partial(decoder.hidden, CONFIG))(
    lora.join(LORA, wide, adapters), *packed(CONFIG)
  )
  error = lambda x: np.sqrt(np.mean(np.square(np.float32(x) - exact)))
  # Thin products round no worse than merged weights do: about 2^-8 of values near 1, over two
  # layers.
  assert 1e-3 < error(found) < 0.05 and error(found) < 1.5 * error(merged)


# --- Gradients ---


def test_the_gradient_is_the_dense_one_projected():
  """L(W + s A B): dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW, in float64 from the gradient at the
  merged weights."""
  frozen, adapters = parameters(CONFIG), adapters_of()
  target = np.random.default_rng(5).standard_normal((2, 12, 20)).astype(np.float32)
  loss = lambda params: (decoder.hidden(CONFIG, params, *packed(CONFIG)) * target).sum()
  found = jax.jit(jax.grad(lambda x: loss(lora.join(LORA, frozen, x))))(adapters)
  dense = jax.jit(jax.grad(loss))(lora.merge(CONFIG, LORA, frozen, adapters))
  for name in LORA.targets:
    a, b = np.float64(adapters[f"{name}_a"]), np.float64(adapters[f"{name}_b"])
    a2, b2 = a.reshape(2, -1, 4), b.reshape(2, 4, -1)
    g = np.float64(dense[name]).reshape(2, a2.shape[1], b2.shape[2])
    for part, expected in ("a", 1.5 * g @ b2.swapaxes(1, 2)), ("b", 1.5 * a2.swapaxes(1, 2) @ g):
      value = np.float64(found[f"{name}_{part}"]).reshape(expected.shape)
      # float32 sums over 24 tokens and up to 28 inputs
      assert np.linalg.norm(value - expected) < 1e-5 * np.linalg.norm(expected), (name, part)


def test_the_gradient_is_the_slope_of_the_loss():
  frozen, adapters = parameters(CONFIG), adapters_of()
  target = np.random.default_rng(5).standard_normal((2, 12, 20)).astype(np.float32)
  loss = jax.jit(
    lambda x: (decoder.hidden(CONFIG, lora.join(LORA, frozen, x), *packed(CONFIG)) * target).sum()
  )
  way = adapters_of(seed=9)
  slope = sum((np.float64(g) * way[name]).sum() for name, g in jax.grad(loss)(adapters).items())
  at = lambda step: float(
    loss({name: value + np.float32(step) * way[name] for name, value in adapters.items()})
  )
  # A central difference's relative error grows with the step squared (4 % at 1e-2), float32's
  # rounding with its inverse.
  assert (at(1e-3) - at(-1e-3)) / 2e-3 == pytest.approx(slope, rel=2e-3)


def test_no_product_of_the_whole_weights_size_is_made_in_the_compiled_gradient():
  """Neither A B nor the frozen weights' own gradient: a training step's memory and time are those
  of thin products."""
  frozen, adapters = parameters(CONFIG), adapters_of()
  loss = lambda x, frozen: decoder.hidden(CONFIG, lora.join(LORA, frozen, x), *packed(CONFIG)).sum()

  def made(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = {
      tuple(map(int, found.split(","))) for found in re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
    }
    return {tuple(sorted(s for s in shape if s > 1)) for shape in shapes} & {
      (20, 28),
      (18, 20),
      (3, 6, 20),
      (6, 20),
    }

  assert made(
    jax.grad(lambda w, x: loss(x, w)), frozen, adapters
  )  # the search finds what it looks for
  assert not made(jax.grad(loss), adapters, frozen)


# --- The training step ---


@functools.cache
def step_of(mesh):
  chain = optimizer.make(learning_rate=1e-2)
  return chain, update.make_update(mesh, CONFIG, chain, family(**LOSS), adapter=LORA)


def start(mesh):
  chain, step = step_of(mesh)
  state = states.init_state(
    mesh, CONFIG, parameters(CONFIG), chain, with_reference=True, adapter=LORA, seed=7
  )
  batch = batching.place(
    mesh, collate(random_groups(3, 3), rewards=np.float32([[1, 0, 0], [0, 1, 1], [1, 1, 0]]))
  )
  return step, state, batch


def test_the_policy_starts_at_its_reference_and_only_adapters_move(mesh, caplog):
  step, state, batch = start(mesh)
  before = jax.device_get(state.params)
  with jax.log_compiles():
    state, stats = step(state, batch)
  # Equal weights: what is left is rounding, (1e-7)^2 in k3, where the two passes are compiled
  # differently.
  assert 0 <= float(stats["loss/kl"]) < 1e-12 and stats["grad/norm"] > 0
  after = jax.device_get(state.params)
  assert all(
    (before[name] != after[name]).any() == name.endswith("_b") for name in before
  )  # dL/dA = 0 while B = 0
  with jax.log_compiles():
    state, stats = step(state, batch)
  assert float(stats["loss/kl"]) > 0
  assert all((before[name] != value).any() for name, value in jax.device_get(state.params).items())
  for name, value in parameters(CONFIG).items():
    np.testing.assert_array_equal(state.reference[name], value, err_msg=name)
  compiled = [record.message for record in caplog.records if "Finished XLA" in record.message]
  assert sum("jit(step)" in message for message in compiled) == 1


def test_the_optimizer_and_the_checkpoint_know_adapters_alone(mesh):
  _, state, _ = start(mesh)
  abstract = states.abstract_state(
    mesh, CONFIG, step_of(mesh)[0], with_reference=True, adapter=LORA
  )
  kept = state._replace(reference=lora.fingerprint(state.reference))
  describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert jax.tree.structure(kept) == jax.tree.structure(abstract) and describe(kept) == describe(
    abstract
  )
  adapters = sum(x.size for x in jax.tree.leaves(state.params))
  # 2 layers, rank 4: inputs + outputs of q, k, v, o, gate, up, down
  assert adapters == 2 * 4 * ((20 + 18) + 2 * (20 + 6) + (18 + 20) + 2 * (20 + 28) + (28 + 20))
  moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
  assert moments == 2 * adapters < sum(x.size for x in jax.tree.leaves(state.reference))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
  """Arrays by "mesh/part/name" and facts by mesh of one process that runs every mesh."""
  path = tmp_path_factory.mktemp("sharded") / "adapters.npz"
  done = subprocess.run([sys.executable, str(PROGRAM), str(path)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  arrays = dict(np.load(path))
  return arrays, json.loads(str(arrays.pop("facts")))


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["1x8x1", "2x2x2"])
def test_a_step_on_eight_devices_equals_one(sharded, sizes):
  arrays, facts = sharded
  for part in ("params", "gradient", "policy"):
    keys = sorted(key.split("/", 1)[1] for key in arrays if key.startswith(f"1x1x1/{part}/"))
    found, expected = (
      np.concatenate([np.float64(arrays[f"{where}/{key}"]).ravel() for key in keys])
      for where in (sizes, "1x1x1")
    )
    assert np.linalg.norm(expected) > 1e-3
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected), part
  for name in ("loss/policy", "loss/kl", "grad/norm"):
    np.testing.assert_allclose(
      arrays[f"{sizes}/stats/{name}"], arrays[f"1x1x1/stats/{name}"], rtol=2e-5
    )
  np.testing.assert_array_equal(arrays[f"{sizes}/fingerprint"], arrays["1x1x1/fingerprint"])
  assert facts[sizes] == {"compilations": 1, "as_abstract": True, "merged_in_place": True}


# --- Fingerprints ---


def test_a_fingerprint_sees_one_bit_two_exchanged_values_and_another_dtype():
  params = {name: jnp.asarray(value) for name, value in parameters(CONFIG).items()}
  same = np.asarray(lora.fingerprint(params))
  assert same.shape == (len(params), 2) and same.dtype == np.uint32
  lora.check_fingerprint(dict(reversed(params.items())), same, "the model")
  q = params["q"]
  changes = [
    q.at[1, 2, 0, 3].set(jnp.nextafter(q[1, 2, 0, 3], 9.0)),
    q.at[0].set(q[1]).at[1].set(q[0]),
    q.at[0, :, 0, 0].set(q[0, ::-1, 0, 0]),
    q.astype(jnp.bfloat16),
    -q,
  ]
  for changed in changes:
    with pytest.raises(
      ValueError, match=r"^the model has changed since these adapters .* \(q\); bring the old"
    ):
      lora.check_fingerprint(params | {"q": changed}, same, "the model")


# --- Refused in words ---


@pytest.mark.parametrize(
  "changes, sentence",
  [
    (dict(rank=0), r"lora\.rank=0 must be at least 1; 0 in a run's config trains all"),
    (dict(alpha=0.0), r"lora\.alpha=0\.0 must be above 0, and finite"),
    (dict(alpha=float("inf")), r"lora\.alpha=inf must be above 0, and finite"),
    (
      dict(targets=("q", "embed")),
      r"lora\.targets='q,embed' must name each layer once.*q,k,v,o,gate,up,down",
    ),
    (dict(targets=()), r"lora\.targets='' must name each layer once, one at least"),
    (dict(targets=("q", "q")), r"lora\.targets='q,q' must name each layer once"),
  ],
)
def test_settings_out_of_range_are_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(LORA, **changes)


def test_a_rank_that_saves_nothing_is_refused():
  with pytest.raises(
    ValueError,
    match=r"lora\.rank=6 must be below 6, the rank of k; lower it, or leave k out of lora",
  ):
    lora.weights(CONFIG, lora.LoraConfig(6, 1.0))
  assert lora.weights(CONFIG, lora.LoraConfig(6, 1.0, ("up",)))
