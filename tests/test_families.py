"""config.json of each family: read as transformers reads it, written so that it reads back, and
refused in a sentence where the decoder would compute otherwise."""

import dataclasses
import json

import numpy as np
import pytest
from test_hugging_face import BASIC, written  # skips this file where torch is absent
import transformers

from stratified.policy import decoder, families, rotary
from stratified.policy.families import common
from stratified.policy.files import hugging_face

LOCAL, GLOBAL = "sliding_attention", "full_attention"
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)


def of(architecture, **keys):
  return BASIC | dict(architectures=[architecture], model_type=None) | keys


def load(tmp_path, **keys):
  return hugging_face.load_config(written(tmp_path / "model", **keys))


# Rotary positions


@pytest.mark.parametrize(
  "keys",
  [
    {},
    dict(attention_factor=1.3, beta_fast=8.0, beta_slow=2.0, truncate=False),
    dict(mscale=1.0, mscale_all_dim=0.5),
    dict(factor=1.0),
  ],
)
def test_yarns_frequencies_and_factor_are_those_of_transformers(tmp_path, keys):
  rope = YARN | dict(original_max_position_embeddings=64, rope_theta=1e4) | keys
  found = load(tmp_path, **of("Qwen3ForCausalLM", head_dim=32, rope_scaling=rope))
  theirs = transformers.Qwen3Config(head_dim=32, rope_parameters=rope)
  frequency, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
  sin, cos = rotary.rotary(np.float32([[1.0]]), 32, found.rope_theta, found.rope_scaling)
  np.testing.assert_allclose(sin[0, 0], np.sin(frequency) * factor, rtol=2e-6)
  np.testing.assert_allclose(cos[0, 0], np.cos(frequency) * factor, rtol=2e-6)


def test_yarn_as_qwen3_states_it(tmp_path):
  found = load(tmp_path, **of("Qwen3ForCausalLM", rope_theta=1e6, rope_scaling=YARN))
  assert found.rope_scaling == rotary.Yarn(4.0, 32768.0, 0.1 * np.log(4.0) + 1.0)
  raw = hugging_face.config_json(found, "bfloat16")
  assert raw["rope_scaling"] == YARN and raw["max_position_embeddings"] == 131072


def test_a_scaling_of_type_default_does_not_hide_the_base_beside_it(tmp_path):
  for old in (dict(type="default"), dict(rope_type="default")):
    for new in (dict(rope_theta=1e6), dict(rope_theta=1e6, rope_type="default")):
      assert load(tmp_path, rope_scaling=old, rope_parameters=new).rope_theta == 1e6
  found = load(tmp_path, rope_scaling=YARN, rope_parameters=dict(rope_theta=1e6))
  assert found.rope_theta == 1e6 and found.rope_scaling.factor == 4.0


@pytest.mark.parametrize(
  "keys, sentence",
  [
    (
      dict(rope_scaling=dict(type="default"), rope_parameters=YARN),
      "rope_type='default' in rope_scaling and rope_type='yarn' in rope_parameters; leave out",
    ),
    (
      dict(rope_theta=1e4, rope_parameters=dict(rope_theta=1e6)),
      "rope_theta=10000.0 in rope_theta and rope_theta=1000000.0 in rope_parameters; leave out",
    ),
  ],
)
def test_two_places_that_say_two_things_are_refused(tmp_path, keys, sentence):
  with pytest.raises(ValueError, match=sentence):
    load(tmp_path, **keys)


# Windows


def test_mistrals_window_is_in_every_layer_4096_where_nothing_is_said_and_none_where_null(tmp_path):
  found = load(tmp_path, **of("MistralForCausalLM", sliding_window=77))
  assert (found.window, found.local, found.layer_is_local) == (77, (), (True, True))
  assert load(tmp_path, **of("MistralForCausalLM")).window == 4096
  raw = of("MistralForCausalLM") | {"sliding_window": None}
  (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
  found = hugging_face.load_config(tmp_path / "model")
  assert found.window == 0 and found.layer_is_local == (False, False)


def test_a_layers_own_kind_is_read_and_written_back(tmp_path):
  keys = dict(sliding_window=9, layer_types=[GLOBAL, LOCAL])
  for architecture, more in (
    ("MinistralForCausalLM", {}),
    ("Qwen2ForCausalLM", dict(use_sliding_window=True)),
  ):
    found = load(tmp_path, **of(architecture, **keys, **more))
    assert (found.window, found.local) == (9, (False, True))
    raw = hugging_face.config_json(found, "float32")
    assert raw["layer_types"] == [GLOBAL, LOCAL] and raw["sliding_window"] == 9
    assert raw["architectures"] == [architecture]
  older = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)
  found = load(tmp_path, **of("Qwen3ForCausalLM", **older))
  assert (found.window, found.local) == (9, (False, True))
  unused = older | dict(use_sliding_window=False)
  assert load(tmp_path, **of("Qwen3ForCausalLM", **unused)).window == 0


@pytest.mark.parametrize(
  "keys, sentence",
  [
    (
      of("MistralForCausalLM", sliding_window=9, layer_types=[GLOBAL, LOCAL]),
      "layer_types other than sliding_window=9 in every layer is not supported; .*Ministral",
    ),
    (
      of("MinistralForCausalLM", layer_types=[LOCAL]),
      "layer_types names 1 layers and num_hidden_layers=2",
    ),
    (of("MistralForCausalLM", sliding_window=0), "sliding_window=0 must be a whole number above 0"),
    (of("Olmo2ForCausalLM", layer_types=[LOCAL, LOCAL]), "a layer of type sliding_attention"),
    (
      of("Gemma3ForCausalLM", final_logit_softcapping=30.0),
      "final_logit_softcapping=30.0 is not supported; what is: no cap",
    ),
    (of("Gemma3ForCausalLM", use_bidirectional_attention=True), "use_bidirectional_attention"),
    (of("Gemma3ForCausalLM", hidden_activation="silu"), "hidden_activation='silu'"),
    (
      of("Gemma3ForCausalLM", rope_parameters=dict(rope_theta=5.0)),
      "rope_parameters of rope_theta is not supported; what is: one for each layer type",
    ),
    (
      of("Gemma3ForCausalLM", rope_parameters={LOCAL: YARN}),
      "rotary scaling .*yarn.* of local layers is not supported",
    ),
    (of("Gemma3ForConditionalGeneration"), "'Gemma3ForConditionalGeneration' is not supported"),
  ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(tmp_path, keys, sentence):
  with pytest.raises(ValueError, match=sentence):
    load(tmp_path, **keys)


# Gemma 3


def test_gemma_3_in_the_form_that_transformers_4_wrote(tmp_path):
  """The keys of google/gemma-3-1b-it with small sizes: what it leaves out is Gemma's default."""
  keys = of(
    "Gemma3ForCausalLM",
    num_hidden_layers=7,
    hidden_size=25,
    query_pre_attn_scalar=144,
    rope_theta=1000000,
    rope_local_base_freq=10000,
    sliding_window=512,
    sliding_window_pattern=3,
  )
  found = load(tmp_path, **keys)
  assert found.tied_embeddings and found.head_dim == 256
  assert found.local == (True, True, False, True, True, False, True) and found.window == 512
  assert (found.rope_theta, found.rope_theta_local) == (1e6, 1e4)
  assert (found.attention_scale, found.embedding_scale) == (1 / 12, 5.0)
  raw = hugging_face.config_json(found, "bfloat16")
  assert raw["sliding_window_pattern"] == 3 and raw["rope_local_base_freq"] == 1e4
  assert raw["query_pre_attn_scalar"] == 144


# Which family


def test_a_decoder_of_no_known_origin_takes_the_first_family_that_fits():
  sizes = dict(vocab_size=8, width=8, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=8)
  sizes = dict(sizes, head_dim=4)
  kinds = {
    "llama": {},
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "mistral": dict(window=3),
    "ministral": dict(window=3, local=(True, False)),
    "olmo2": dict(pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over_heads=True),
  }
  for kind, switches in kinds.items():
    config = decoder.DecoderConfig(**sizes, **switches)
    assert families.resolve(config) == dataclasses.replace(config, family=kind)
  gemma = dict(
    post_norms=True,
    zero_centered_norms=True,
    qk_norm=True,
    attention_scale=0.5,
    embedding_scale=8**0.5,
    activation="gelu_tanh",
  )
  config = decoder.DecoderConfig(**sizes, **gemma)
  assert families.resolve(config).family == "gemma3_text"
  assert "pre_feedforward" in decoder.weights(config)["mlp_norm"].stored
  config = decoder.DecoderConfig(**sizes, window=3, qkv_bias=True, qk_norm=True)
  with pytest.raises(ValueError, match="a decoder with qk_norm=True is none .* Qwen2ForCausalLM"):
    families.resolve(config)
  with pytest.raises(ValueError, match="a decoder with window=3 is none .* of LlamaForCausalLM"):
    families.resolve(decoder.DecoderConfig(**sizes, window=3, family="llama"))


def test_every_module_of_the_room_is_in_the_list():
  import pathlib

  modules = {path.stem for path in pathlib.Path(families.__file__).parent.glob("*.py")}
  listed = {family.read.__module__.rpartition(".")[2] for family in families.FAMILIES.values()}
  assert modules - {"__init__", "common", "values"} == listed
  for family in families.FAMILIES.values():
    assert isinstance(family, common.Family)


def test_what_a_server_computes_otherwise_is_refused(tmp_path):
  mistral = load(tmp_path, **of("MistralForCausalLM", sliding_window=77))
  families.check_served(mistral, 77)
  with pytest.raises(ValueError, match="rollout.max_tokens=78 is more than the window of 77 .*jax"):
    families.check_served(mistral, 78)
  families.check_served(load(tmp_path, **of("Qwen3ForCausalLM", rope_scaling=YARN)), 78)
  gemma = load(tmp_path, **of("Gemma3ForCausalLM", sliding_window=9))
  families.check_served(gemma, 78)
  gemma = dataclasses.replace(gemma, rope_scaling=rotary.Linear(8.0))
  with pytest.raises(ValueError, match="Gemma3ForCausalLM without its rotary scaling Linear"):
    families.check_served(gemma, 78)
