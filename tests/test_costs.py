"""Counted FLOPs against XLA's own count of an unrolled model, parameters and caches against real
arrays, limits by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from stratified.planning import costs
from stratified.policy import decoder, log_probs, sizes

CONFIG = decoder.DecoderConfig(
  vocab_size=512,
  width=256,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  mlp_width=640,
  unroll=3,
)
ROWS, LENGTH = 2, 128


def flops_of(function, *args) -> float:
  return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.fixture(scope="module")
def arguments():
  params = jax.eval_shape(lambda: decoder.init(CONFIG, jax.random.key(0)))
  return params, jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)


def loss(config, params, token):
  x = decoder.hidden(
    config,
    params,
    token,
    jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH)),
    jnp.ones_like(token),
  )
  return log_probs.token_log_probs(config, params, x, token)[0].sum()


def test_forward_flops_equal_the_compilers_where_layers_are_unrolled(arguments):
  """The compiler also counts norms, softmax and rotations: 4 % at this width, falling as
  1/width."""
  counted = costs.forward_flops(CONFIG, ROWS * LENGTH, LENGTH)
  assert 1.0 <= flops_of(lambda p, t: loss(CONFIG, p, t), *arguments) / counted < 1.06


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradient_flops_equal_the_compilers_where_layers_are_unrolled(arguments, remat):
  config = dataclasses.replace(CONFIG, remat=remat)
  counted = costs.update_flops(config, ROWS * LENGTH, LENGTH, reference=False, chunked=False)
  found = flops_of(jax.grad(lambda p, t: loss(config, p, t)), *arguments)
  # With remat the last product of a layer is not made again: nothing after it in the layer needs
  # it.
  assert 0.94 < found / counted < 1.08


def test_a_scanned_model_is_what_the_compiler_undercounts(arguments):
  config = dataclasses.replace(CONFIG, unroll=1)
  assert flops_of(lambda p, t: loss(config, p, t), *arguments) < 0.6 * costs.forward_flops(
    config, ROWS * LENGTH, LENGTH
  )


def test_parameters_and_cache_are_those_of_the_arrays(arguments):
  assert costs.num_parameters(CONFIG) == sum(math.prod(x.shape) for x in arguments[0].values())
  cache = jax.eval_shape(lambda: decoder.empty_cache(CONFIG, 5, 96))
  assert costs.cache_size(CONFIG, 5, 96) == sum(math.prod(x.shape) for x in jax.tree.leaves(cache))


@pytest.mark.parametrize(
  "name, billions",
  [
    ("Qwen2.5-3B", 3.086),
    ("Qwen2.5-1.5B", 1.544),
    ("Qwen2.5-0.5B", 0.494),
    ("Qwen2.5-7B", 7.616),
    ("SmolLM2-135M", 0.1345),
    ("Qwen3-1.7B", 1.721),
    ("Qwen3-4B", 4.022),
  ],
)
def test_known_sizes_have_the_published_number_of_parameters(name, billions):
  """Model cards state 3.09B, 1.54B, 0.49B, 7.61B, 135M, 1.7B and 4.0B."""
  assert costs.num_parameters(sizes.decoder_of(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_sizes_are_found_by_a_directorys_name_and_unknown_ones_refused():
  assert sizes.decoder_of("checkpoints/Qwen2.5-3B-Instruct/") == sizes.decoder_of("qwen2.5-3b")
  with pytest.raises(ValueError, match="policy.checkpoint='x/Foo-1B'.*config.json.*Qwen2.5-3B"):
    sizes.decoder_of("x/Foo-1B")


def test_a_local_layer_attends_to_no_more_than_its_window():
  attention = lambda **window: (
    costs.forward_flops(dataclasses.replace(CONFIG, **window), 10, 100)
    - costs.forward_flops(CONFIG, 10, 0)
  )
  assert attention() == 4 * 10 * 256 * (100 + 100 + 100)
  assert attention(window=40) == 4 * 10 * 256 * (40 + 40 + 40)
  assert attention(window=40, local=(True, False, True)) == 4 * 10 * 256 * (40 + 100 + 40)
  assert attention(window=400) == attention()


def test_the_roofline_names_what_binds():
  device = costs.Device("d", 1e9, flops=1e12, bandwidth=1e9, link=1e8)
  assert costs.roofline(device, flops=2e12, moved=1e9) == (2.0, "compute")
  assert costs.roofline(device, flops=1e12, moved=3e9, sent=2e8) == (3.0, "memory")
  assert costs.roofline(device, flops=1e12, moved=1e9, sent=4e8) == (4.0, "links")
