"""The decoder computes what transformers computes: packed rows, gradients, key-value cache, each
family."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from small_models import torch  # skips this file where torch is absent

from stratified.policy import decoder, log_probs
from stratified.policy.files import hugging_face

TOLERANCE = 1e-5  # of the logits' scale; 1e-4 is the project's bound, float32 leaves about 1e-6
FAMILIES = sorted(small_models.FAMILIES)

# Lengths of the segments of each packed row; what is left of ROW_LENGTH is padding.
ROWS = ((7, 1, 9), (20,), (5, 12, 3), (24,))
ROW_LENGTH = 24


@functools.cache
def loaded(family, **overrides):
  directory = small_models.directory(family)
  config = hugging_face.load_config(directory, **overrides)
  return config, hugging_face.load_params(directory, config)


def packed_rows(lengths=ROWS, length=ROW_LENGTH, vocab=97, seed=0):
  """Tokens, positions and segments [R, T] of random segments, and where each segment lies."""
  rng = np.random.default_rng(seed)
  token = rng.integers(0, vocab, (len(lengths), length))
  position, segment, spans = np.zeros_like(token), np.zeros_like(token), []
  for row, parts in enumerate(lengths):
    start = 0
    for number, size in enumerate(parts, 1):
      position[row, start : start + size] = np.arange(size)
      segment[row, start : start + size] = number
      spans.append((row, slice(start, start + size)))
      start += size
  return token, position, segment, spans


def assert_close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@functools.partial(jax.jit, static_argnums=0)
def packed_logits(config, params, token, position, segment):
  return decoder.logits(config, params, decoder.hidden(config, params, token, position, segment))


@pytest.mark.parametrize(
  "family,implementation",
  [(family, "library") for family in FAMILIES] + [(family, "folded") for family in FAMILIES],
)
def test_each_packed_segment_has_the_logits_that_transformers_gives_it_alone(
  family, implementation
):
  config, params = loaded(family, attention=implementation)
  token, position, segment, spans = packed_rows()
  found = np.asarray(packed_logits(config, params, token, position, segment))
  assert found.dtype == np.float32 and np.isfinite(found).all()
  for row, span in spans:
    assert_close(
      found[row, span], small_models.logits(small_models.model(family), token[row, span])
    )


def test_the_llama3_checkpoint_uses_all_three_bands_of_its_rotary_scaling():
  config, _ = loaded("llama3")
  factor, low, high, original = config.rope_scaling
  wavelength = 2 * np.pi * config.rope_theta ** (np.arange(8) / 8)
  kept, divided = wavelength < original / high, wavelength > original / low
  assert factor == 4 and kept.any() and divided.any() and (~kept & ~divided).any()


@pytest.mark.parametrize("implementation", ["library", "folded"])
def test_a_hidden_state_depends_on_the_earlier_tokens_of_its_own_segment_and_on_no_other(
  implementation,
):
  """d hidden[r, t] / d embedding is exactly zero but at s <= t of the same segment, and not zero
  there."""
  config, params = loaded("qwen3", attention=implementation)
  _, position, segment, _ = packed_rows(ROWS[:1] + ROWS[2:3])
  token = np.arange(segment.size).reshape(segment.shape)  # a token of its own at each place
  weight = np.random.default_rng(1).normal(size=config.width).astype(np.float32)

  @jax.jit
  def influence(embed):
    out = lambda embed: (
      decoder.hidden(config, params | {"embed": embed}, token, position, segment) @ weight
    )
    _, pull = jax.vjp(out, embed)
    one_hot = jnp.eye(token.size).reshape(-1, *token.shape)
    # Not vmap: on CPU, jaxlib 0.10.2 fuses this vmapped backward pass wrongly, by half its size.
    return jax.lax.map(lambda g: jnp.abs(pull(g)[0]).sum(-1), one_hot)

  found = np.asarray(influence(params["embed"]))[:, : token.size]
  row, t = (x.ravel() for x in np.indices(token.shape))
  flat = segment.ravel()
  allowed = (row[:, None] == row) & (flat[:, None] == flat) & (t[:, None] >= t)
  real = flat > 0
  np.testing.assert_array_equal(found[real] > 0, allowed[real])


@pytest.mark.parametrize(
  "family,implementation",
  [
    ("qwen2", "library"),
    ("qwen3-tied", "folded"),
    ("qwen3-yarn", "folded"),
    ("ministral", "folded"),
    ("mistral", "library"),
    ("gemma3", "library"),
    ("olmo2", "folded"),
  ],
)
def test_gradients_of_the_mean_log_prob_equal_transformers(family, implementation):
  config, params = loaded(family, attention=implementation)
  token = np.random.default_rng(2).integers(0, 97, 15)

  @jax.jit
  def gradient(params):
    def loss(params):
      row, position = jnp.asarray(token)[None], jnp.arange(15)[None]
      hidden = decoder.hidden(config, params, row, position, jnp.ones_like(row))
      return log_probs.token_log_probs(config, params, hidden, row, chunk=5)[0][0, 1:].mean()

    return jax.grad(loss)(params)

  net = small_models.model(family)
  net.zero_grad()
  logp = net(torch.tensor(token)[None]).logits[0, :-1].log_softmax(-1)
  logp.gather(1, torch.tensor(token)[1:, None]).mean().backward()
  theirs = {name: value.grad.numpy() for name, value in net.named_parameters()}
  ours = dict(hugging_face.stored_tensors(config, gradient(params), "float32"))
  assert set(ours) == set(theirs)
  for name, value in theirs.items():
    assert np.linalg.norm(ours[name] - value) <= 1e-4 * np.linalg.norm(value), name


def test_remat_changes_memory_and_not_gradients():
  token, position, segment, _ = packed_rows()

  def gradient(remat):
    config, params = loaded("llama-tied", remat=remat)
    loss = lambda params: jnp.square(
      decoder.hidden(config, params, token, position, segment)
    ).mean()
    return jax.jit(jax.grad(loss))(params)

  plain = gradient("none")
  for remat in ("dots", "full"):
    for name, value in gradient(remat).items():
      np.testing.assert_allclose(
        value, plain[name], rtol=1e-4, atol=1e-6, err_msg=f"{remat} {name}"
      )


def test_bfloat16_computes_near_float32_and_returns_float32_logits():
  token, position, segment, spans = packed_rows()
  config, params = loaded("qwen3", dtype="bfloat16")
  found = packed_logits(config, params, token, position, segment)
  exact = np.asarray(packed_logits(*loaded("qwen3"), token, position, segment))
  assert found.dtype == jnp.float32
  for row, span in spans:
    error = np.asarray(found)[row, span] - exact[row, span]
    assert 0 < np.sqrt(np.mean(error**2)) < 0.05 * np.std(exact)


# The cache. Sequences of uneven lengths live in lanes of one cache; what `extend` says of each new
# token must be what the packed path says of it.

LENGTH = 20  # of the cache
PROMPTS = (13, 6, 17, 9)


@functools.partial(jax.jit, static_argnums=0)
def extended(config, layers, token, position, cache, lane=None):
  hidden, cache = decoder.extend(config, layers, token, position, cache, lane)
  return decoder.logits(config, layers, hidden), cache


@functools.cache
def lanes_and_truth(family):
  config, params = loaded(family)
  token, position, segment, _ = packed_rows([(n + 3,) for n in PROMPTS], seed=3)
  truth = np.asarray(packed_logits(config, params, token, position, segment))[:, :LENGTH]
  return config, decoder.unstack(config, params), token[:, :LENGTH], truth


def feed(config, layers, cache, token, begin, end, width, lane=None):
  """Extends row i with tokens begin[i]:end[i]; the rest of `width` is padding. Returns logits and
  cache."""
  position = np.full((len(begin), width), LENGTH)
  block = np.zeros((len(begin), width), int)
  for i, (a, b) in enumerate(zip(begin, end, strict=True)):
    position[i, : b - a], block[i, : b - a] = np.arange(a, b), token[i, a:b]
  return extended(config, layers, block, position, cache, lane)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks_then_single_tokens_gives_the_logits_of_the_packed_path(family):
  config, layers, token, truth = lanes_and_truth(family)
  cache, at = decoder.empty_cache(config, 4, LENGTH), np.zeros(4, int)
  while (at < PROMPTS).any():  # lanes that are done ride along as padding
    end = np.minimum(at + 5, PROMPTS)
    found, cache = feed(config, layers, cache, token, at, end, 5)
    for i in range(4):
      if end[i] > at[i]:
        assert_close(found[i, : end[i] - at[i]], truth[i, at[i] : end[i]])
    at = end
  for _ in range(3):
    found, cache = feed(config, layers, cache, token, at, at + 1, 1)
    assert_close(found[:, 0], truth[np.arange(4), at])
    at += 1
  assert at.max() == LENGTH, "the longest lane fills the cache to its last place"


@pytest.mark.parametrize(
  "family", ["qwen3-yarn", "mistral", "ministral", "gemma3", "olmo2", "qwen2-window"]
)
def test_greedy_tokens_are_those_that_transformers_generates(family):
  """Prompts longer than the window, so that it moves; by the cache, one token at a time."""
  config, layers, token, _ = lanes_and_truth(family)
  prompt = token[:1, :9]
  lanes = np.repeat(token[:1], 4, axis=0)  # four alike, as the test above has compiled them
  net = small_models.model(family)
  expected = net.generate(
    torch.tensor(prompt), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
  ).numpy()[0, 9:]
  cache = decoder.empty_cache(config, 4, LENGTH)
  for begin, end in ((0, 5), (5, 9)):
    found, cache = feed(config, layers, cache, lanes, [begin] * 4, [end] * 4, 5)
  tokens = [int(found[0, 3].argmax())]
  for at in range(9, 18):
    lanes[:, at] = tokens[-1]
    found, cache = feed(config, layers, cache, lanes, [at] * 4, [at + 1] * 4, 1)
    tokens.append(int(found[0, 0].argmax()))
  assert tokens == expected.tolist()


def test_in_a_window_of_six_a_token_sees_six_and_a_layer_above_it_eleven():
  """Mistral has the window in both layers: information travels five tokens back in each."""
  config, params = loaded("mistral")
  token = np.arange(20)[None]
  of = jax.jit(
    lambda embed: decoder.hidden(
      config, params | {"embed": embed}, token, np.arange(20)[None], np.ones_like(token)
    )[0, 15].sum()
  )
  reached = np.abs(jax.grad(of)(params["embed"])).sum(-1)[:20] > 0
  assert np.flatnonzero(reached).tolist() == list(range(5, 16))


def test_a_subset_of_lanes_extends_alone_and_leaves_the_others_bit_for_bit():
  config, layers, token, truth = lanes_and_truth("qwen2-tied")
  empty = decoder.empty_cache(config, 4, LENGTH)
  _, before = feed(config, layers, empty, token, [0] * 4, [4, 6, 5, 3], 6)
  lane = np.array([2, 0])
  found, after = feed(config, layers, before, token[lane], [5, 4], [8, 6], 4, lane)
  assert_close(found[0, :3], truth[2, 5:8])
  assert_close(found[1, :2], truth[0, 4:6])
  position_third = lambda cache: (
    [np.swapaxes(np.asarray(keys), 2, 3) for keys in cache.keys]
    + [np.asarray(x) for x in cache.values]
  )
  for old, new in zip(position_third(before), position_third(after), strict=True):
    np.testing.assert_array_equal(new[[1, 3]], old[[1, 3]])
    np.testing.assert_array_equal(new[2, :, 8:], old[2, :, 8:])
    assert (new[2, :, 5:8] != old[2, :, 5:8]).all() and (new[0, :, 4:6] != old[0, :, 4:6]).all()


def test_padding_is_written_nowhere():
  config, layers, token, _ = lanes_and_truth("qwen3")
  _, before = feed(
    config, layers, decoder.empty_cache(config, 4, LENGTH), token, [0] * 4, PROMPTS, 17
  )
  nowhere = np.tile([LENGTH, LENGTH + 1, 10**6], (4, 1))
  found, after = extended(config, layers, token[:, :3], nowhere, before)
  assert np.isfinite(found).all()
  jax.tree.map(np.testing.assert_array_equal, before, after)


def test_what_an_earlier_rollout_left_in_a_lane_is_not_seen():
  config, layers, token, truth = lanes_and_truth("qwen3")
  junk = jax.tree.map(lambda x: x + 1e3, decoder.empty_cache(config, 4, LENGTH))
  found, _ = feed(config, layers, junk, token, [0] * 4, PROMPTS, 17)
  for i, size in enumerate(PROMPTS):
    assert_close(found[i, :size], truth[i, :size])


def test_settings_that_fit_no_decoder_are_refused_by_name():
  sizes = dict(
    vocab_size=8, width=8, num_layers=1, num_heads=3, num_kv_heads=2, head_dim=4, mlp_width=8
  )
  with pytest.raises(ValueError, match="num_heads=3 is no multiple of num_kv_heads=2"):
    decoder.DecoderConfig(**sizes)
  with pytest.raises(ValueError, match="remat='some' is unknown"):
    decoder.DecoderConfig(**sizes | dict(num_heads=4, remat="some"))
  sizes |= dict(num_heads=4)
  for changes, sentence in [
    (dict(activation="tanh"), "activation='tanh' is unknown; choose one of .*gelu_tanh.*silu"),
    (dict(window=-1), "window=-1 with local=()"),
    (dict(local=(True,)), "window=0 with local=(True,)"),
    (dict(window=2, local=(True, False)), "local must name all num_layers=1"),
    (dict(pre_norms=False), "pre_norms=False needs post_norms=True"),
  ]:
    with pytest.raises(ValueError, match=re.escape(sentence) if "(" in sentence else sentence):
      decoder.DecoderConfig(**sizes | changes)
