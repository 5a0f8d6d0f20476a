"""The text encoder against transformers, its batching and what it refuses."""

import json
import os
import pathlib
import subprocess
import sys

import cpu_devices
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import safetensors.numpy

from stratified.encoder import text_encoder as encoders
from stratified.encoder import weights
from stratified.encoder.text_encoder import Encoder
from tests import small_encoders
from tests.small_encoders import TEXTS

pytest.importorskip("torch", reason="needs torch, which the encoder is compared with")

MINILM = pathlib.Path(__file__).parents[1] / ".cache/models/all-minilm-l6-v2"


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
  """(directory, transformers' model, our encoder of it)."""
  directory = tmp_path_factory.mktemp("bert")
  model = small_encoders.save(directory)
  return directory, model, Encoder.load(directory, max_length=64)


###  Equal to transformers  ###


def test_equals_transformers_for_texts_of_all_lengths(bert):
  _, model, encoder = bert
  expected = small_encoders.reference(model, encoder.token_ids(TEXTS, "passage"))
  # Unit vectors in float32 after two layers: sums in another order differ by some 1e-6.
  np.testing.assert_allclose(encoder.encode(TEXTS, "passage"), expected, atol=1e-5)


def test_equals_transformers_where_positions_are_counted_behind_the_padding_id(tmp_path):
  model = small_encoders.save(tmp_path, "xlm-roberta")
  encoder = Encoder.load(tmp_path)
  assert encoder.max_length == 64  # 66 positions, two of them in front of the first token's
  expected = small_encoders.reference(model, encoder.token_ids(TEXTS, "query"))
  np.testing.assert_allclose(encoder.encode(TEXTS, "query"), expected, atol=1e-5)


@pytest.mark.parametrize(
  "kind, sizes",
  [
    (
      "bert",
      dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    ),
    (
      "bert",
      dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536),
    ),
    (
      "xlm-roberta",
      dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072),
    ),
  ],
  ids=["e5-base", "multilingual-e5-small", "multilingual-e5-base"],
)
def test_equals_transformers_at_e5s_shapes(tmp_path, kind, sizes):
  """The weights are random and the vocabulary is small; everything else is as in the released
  models."""
  directory = tmp_path / "my-e5-model"
  model = small_encoders.save(directory, kind, **sizes, max_position_embeddings=514)
  encoder = Encoder.load(directory)
  texts = TEXTS[:5]
  ids = encoder.token_ids(texts, "passage")
  assert ids[1] == encoder.tokenizer.encode("passage: ").ids
  np.testing.assert_allclose(
    encoder.encode(texts, "passage"), small_encoders.reference(model, ids), atol=1e-4
  )


def test_equals_transformers_on_the_real_minilm():
  if not MINILM.is_dir():
    pytest.skip("all-MiniLM-L6-v2 is not there; python third_party/minilm/fetch.py gets it")
  import transformers

  encoder = Encoder.load(MINILM)
  texts = [
    "Who wrote Hamlet?",
    "",
    "東京は日本の首都です。",
    "Paula von Preradović was an Austrian poet. " * 40,
    "\ud800 x",
  ]
  ids = encoder.token_ids(texts, "query")
  whole = transformers.AutoTokenizer.from_pretrained(MINILM)
  clean = [text.encode("utf-8", "replace").decode() for text in texts]
  assert (
    ids == whole(clean, truncation=True, max_length=256)["input_ids"] and max(map(len, ids)) == 256
  )
  model = transformers.AutoModel.from_pretrained(MINILM).eval()
  np.testing.assert_allclose(
    encoder.encode(texts, "query"), small_encoders.reference(model, ids), atol=1e-5
  )


def test_both_forms_of_attention_agree(bert):
  import dataclasses

  import jax

  _, _, encoder = bert
  token_rt = np.arange(2 * 16).reshape(2, 16) % 40
  length_r = np.array([16, 3])
  run = lambda form: jax.jit(encoders.embed, static_argnums=0)(
    dataclasses.replace(encoder.config, attention=form), encoder._params, token_rt, length_r
  )
  np.testing.assert_allclose(run("folded"), run("library"), atol=1e-6)


def test_bfloat16_keeps_the_direction(bert):
  directory, _, encoder = bert
  half = Encoder.load(directory, max_length=64, dtype="bfloat16").encode(TEXTS, "query")
  assert half.dtype == np.float32
  cosine = np.sum(half * encoder.encode(TEXTS, "query"), axis=1)
  # bfloat16 keeps 8 bits: errors of 2^-9 in each of some tens of roundings, against a direction of
  # length 1.
  assert cosine.min() > 0.999
  assert not np.array_equal(half, encoder.encode(TEXTS, "query"))


###  Batching  ###


def test_a_text_gets_its_vector_whatever_else_is_in_the_call(bert):
  _, _, encoder = bert
  together = encoder.encode(TEXTS, "passage")
  for row, text in enumerate(TEXTS):
    np.testing.assert_allclose(encoder.encode([text], "passage")[0], together[row], atol=1e-6)
  many = encoder.encode(TEXTS[::-1] * 40, "passage").reshape(40, len(TEXTS), -1)
  np.testing.assert_allclose(many, np.broadcast_to(together[::-1], many.shape), atol=1e-6)


def test_vectors_have_length_one_and_no_text_gives_no_vector(bert):
  _, _, encoder = bert
  np.testing.assert_allclose(np.linalg.norm(encoder.encode(TEXTS, "query"), axis=1), 1, atol=1e-6)
  assert encoder.encode([], "query").shape == (0, 32)


@given(st.integers(1, 514), st.sampled_from([64, 512, 514]))
@settings(max_examples=60, deadline=None)
def test_a_text_fits_its_bucket(length, most):
  length = min(length, most)
  assert length <= encoders.bucket(length, most) <= most
  assert encoders.bucket(length, most) - length < (
    16 if length <= 128 else 32 if length <= 256 else 64
  )


@given(
  st.sampled_from([16, 160, 512]),
  st.integers(1, 5000),
  st.sampled_from([256, 2048, 65536]),
  st.integers(1, 8),
)
@settings(max_examples=80, deadline=None)
def test_batches_are_few_shapes_and_no_larger_than_needed(t, left, tokens, devices):
  rows = encoders.batch_rows(t, left, tokens, devices)
  each = rows // devices
  assert rows % devices == 0 and each & (each - 1) == 0
  assert each == 1 or (each * t <= tokens and each < 2 * -(-left // devices))


def test_padding_and_truncation_of_the_tokenizers_file_do_not_count(tmp_path):
  small_encoders.save(tmp_path, tokenizer=small_encoders.wordpiece(max_length_in_file=8))
  encoder = Encoder.load(tmp_path)
  short, long = encoder.token_ids(["the king", "the king " * 20], "query")
  assert len(short) == 4 and len(long) == 42
  assert len(Encoder.load(tmp_path, max_length=10).token_ids(["the king " * 20], "query")[0]) == 10


def test_texts_that_are_no_unicode_are_encoded_all_the_same(bert):
  _, _, encoder = bert
  np.testing.assert_allclose(
    encoder.encode(["\ud800 king"], "query"), encoder.encode(["? king"], "query"), atol=1e-6
  )


def test_split_over_eight_devices_equals_one(bert):
  directory, _, _ = bert
  program = (
    "import sys, jax, numpy as np\n"
    "from stratified.encoder.text_encoder import Encoder\n"
    "from tests.small_encoders import TEXTS\n"
    "assert len(jax.devices()) == 8\n"
    "many = Encoder.load(sys.argv[1], max_length=64)\n"
    "one = Encoder.load(sys.argv[1], max_length=64, devices=jax.devices()[:1])\n"
    "np.testing.assert_allclose(many.encode(TEXTS * 5, 'query'), one.encode(TEXTS * 5, 'query'), "
    "atol=1e-6)\n"
    "args = jax.device_put((np.ones((8, 16), np.int32), np.full(8, 16, np.int32)), "
    "many._placement)\n"
    "text = many._embed.lower(many._params, *args).compile().as_text()\n"
    "print(sorted(word for word in ('all-gather', 'all-reduce', 'all-to-all', 'collective') if "
    "word in text))\n"
  )
  environment = os.environ | {"XLA_FLAGS": cpu_devices.flags(8), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-c", program, str(directory)],
    capture_output=True,
    text=True,
    env=environment,
    cwd=pathlib.Path(__file__).parents[1],
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.strip() == "[]"


def test_warm_queries_compile_nothing(bert):
  directory, _, _ = bert
  encoder = Encoder.load(directory, max_length=32)
  encoder.warm_up(rows=5, length=20)
  compiled = encoder._embed._cache_size()
  assert compiled == 2 * 4  # 16 and 32 tokens; 1, 2, 4 and 8 rows
  for rows in range(1, 6):
    encoder.encode(["king"] * rows, "query")
    encoder.encode(["the king of the river in the city"] * rows, "query")
  assert encoder._embed._cache_size() == compiled


###  Prefixes and what an encoder is  ###


@pytest.mark.parametrize(
  "name, prefixed",
  [
    ("e5-base-v2", True),
    ("multilingual-e5-small", True),
    ("intfloat_e5-large", True),
    ("E5", True),
    ("all-minilm-l6-v2", False),
    ("core5-x", False),
    ("me5x", False),
  ],
)
def test_e5_is_known_by_its_name(tmp_path, name, prefixed):
  directory = tmp_path / name
  directory.mkdir()
  (directory / "config.json").write_text("{}")
  expected = (
    {"query": "query: ", "passage": "passage: "} if prefixed else {"query": "", "passage": ""}
  )
  assert weights.prefixes_of(directory) == expected
  (directory / "config.json").write_text(json.dumps({"_name_or_path": "intfloat/e5-small-v2"}))
  assert weights.prefixes_of(directory)["query"] == "query: "


@pytest.mark.parametrize(
  "name, prompts, expected",
  [
    ("multilingual-e5-large-instruct", None, (weights.INSTRUCTION, "")),
    ("e5-base-v2", {"query": "q: ", "document": "d: "}, ("q: ", "d: ")),
    ("encoder", {"query": "ask: ", "passage": "told: ", "document": "no"}, ("ask: ", "told: ")),
    ("encoder", {"query": "ask: "}, ("ask: ", "")),
    ("e5-base-v2", {"query": "", "document": ""}, ("query: ", "passage: ")),
    ("e5-base-v2", {"clustering": "c: "}, ("query: ", "passage: ")),
    ("e5-base-v2", {}, ("query: ", "passage: ")),
  ],
)
def test_what_the_directory_says_of_prefixes_counts(tmp_path, name, prompts, expected):
  directory = tmp_path / name
  directory.mkdir()
  (directory / "config.json").write_text("{}")
  if prompts is not None:
    stored = directory / "config_sentence_transformers.json"
    stored.write_text(json.dumps({"prompts": prompts}))
  assert weights.prefixes_of(directory) == dict(zip(("query", "passage"), expected))


def test_an_encoder_that_does_not_say_how_it_pools_is_refused_or_named(tmp_path, capsys):
  for name in ("bge-base-en", "some-encoder", "e5-small"):
    small_encoders.save(tmp_path / name)
  with pytest.raises(ValueError, match="bge-base-en has no 1_Pooling.* first token"):
    weights.load_config(tmp_path / "bge-base-en")
  weights.load_config(tmp_path / "some-encoder")
  assert "some-encoder does not say how it pools" in capsys.readouterr().err
  weights.load_config(tmp_path / "e5-small")
  assert not capsys.readouterr().out


def test_prefixes_stand_in_front_by_role_and_in_the_manifest(bert):
  directory, _, plain = bert
  encoder = Encoder.load(
    directory, max_length=64, prefixes={"query": "query ", "passage": "passage "}
  )
  assert encoder.token_ids(["king"], "query") == plain.token_ids(["query king"], "passage")
  np.testing.assert_allclose(
    encoder.encode(["king"], "passage"), plain.encode(["passage king"], "query"), atol=1e-6
  )
  assert encoder.manifest["prefixes"] == {"query": "query ", "passage": "passage "}
  assert encoder.manifest["sha256"] == plain.manifest["sha256"]


def test_other_weights_have_another_fingerprint(bert, tmp_path):
  small_encoders.save(tmp_path, seed=1)
  assert weights.fingerprint(tmp_path) != weights.fingerprint(bert[0])


###  Weights  ###


def rewritten(directory, target, change):
  """A copy of a model directory whose tensors went through `change`."""
  target.mkdir()
  for name in ("config.json", "tokenizer.json"):
    (target / name).write_bytes((directory / name).read_bytes())
  safetensors.numpy.save_file(
    change(safetensors.numpy.load_file(directory / "model.safetensors")),
    target / "model.safetensors",
  )
  return target


def test_names_of_other_checkpoints_of_the_family_are_read(bert, tmp_path):
  directory, _, encoder = bert

  def change(tensors):
    tensors = {f"bert.{name}": value for name, value in tensors.items() if "pooler" not in name}
    return tensors | {
      "cls.predictions.bias": np.zeros(4, np.float32),
      "bert.embeddings.position_ids": np.arange(66)[None],
    }

  other = Encoder.load(rewritten(directory, tmp_path / "other", change), max_length=64)
  np.testing.assert_array_equal(other.encode(TEXTS, "query"), encoder.encode(TEXTS, "query"))


def test_weights_in_shards_are_read(bert, tmp_path):
  directory, model, encoder = bert
  model.save_pretrained(tmp_path, max_shard_size="20KB")
  (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
  assert len(weights.shard_paths(tmp_path)) > 1
  np.testing.assert_array_equal(
    Encoder.load(tmp_path, max_length=64).encode(TEXTS, "query"), encoder.encode(TEXTS, "query")
  )
  index = tmp_path / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
  with pytest.raises(FileNotFoundError, match="no file beside it"):
    Encoder.load(tmp_path)


def dropped(name):
  return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
  "change, message",
  [
    (dropped("encoder.layer.1.output.dense.bias"), "no tensor encoder.layer.1.output.dense.bias"),
    (
      lambda t: t | {"encoder.layer.0.output.dense.weight": np.zeros((3, 4), np.float32)},
      r"has shape \[3, 4\].*\[32, 64\]",
    ),
    (
      lambda t: t | {"encoder.layer.0.output.dense.bias": np.zeros(32, np.int8)},
      "stored as I8.*F32, F16, BF16",
    ),
    (
      lambda t: t | {"encoder.layer.2.output.dense.bias": np.zeros(32, np.float32)},
      "without a place.*layer.2",
    ),
  ],
)
def test_weights_that_do_not_fit_are_refused(bert, tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    Encoder.load(rewritten(bert[0], tmp_path / "other", change))


def test_damaged_and_missing_files_are_refused(bert, tmp_path):
  other = rewritten(bert[0], tmp_path / "other", lambda tensors: tensors)
  whole = (other / "model.safetensors").read_bytes()
  (other / "model.safetensors").write_bytes(whole[:-100])
  with pytest.raises(ValueError, match="damaged or cut short"):
    Encoder.load(other)
  (other / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
    Encoder.load(other)
  (other / "tokenizer.json").write_text("{")
  with pytest.raises(ValueError, match="is no tokenizer"):
    Encoder.load(other)
  (other / "tokenizer.json").unlink()
  with pytest.raises(FileNotFoundError, match="tokenizer.json does not exist; save"):
    Encoder.load(other)
  (other / "config.json").write_text("[]")
  with pytest.raises(ValueError, match="holds a JSON list"):
    Encoder.load(other)
  with pytest.raises(FileNotFoundError, match="config.json does not exist"):
    Encoder.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"model_type": "llama"}, "model_type='llama' is not supported; what is: bert"),
    ({"hidden_act": "relu"}, "hidden_act='relu'"),
    ({"position_embedding_type": "relative_key"}, "relative_key.*absolute"),
    ({"hidden_size": None}, "no 'hidden_size'"),
    ({"num_attention_heads": 5}, "width=32 must be a multiple of num_heads=5"),
  ],
)
def test_what_would_be_computed_wrongly_is_refused(bert, tmp_path, changes, message):
  other = rewritten(bert[0], tmp_path / "other", lambda tensors: tensors)
  small_encoders.edit_config(other, **changes)
  with pytest.raises(ValueError, match=message):
    Encoder.load(other)


def test_a_pooling_other_than_the_mean_is_refused(bert, tmp_path):
  other = rewritten(bert[0], tmp_path / "other", lambda tensors: tensors)
  (other / "1_Pooling").mkdir()
  pooling = other / "1_Pooling/config.json"
  pooling.write_text(
    json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
  )
  with pytest.raises(ValueError, match="pooling_mode_cls_token; only mean pooling"):
    Encoder.load(other)
  pooling.write_text(
    json.dumps({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
  )
  assert Encoder.load(other).width == 32


def test_weights_that_are_not_finite_are_found_out(bert, tmp_path):
  broken = lambda t: (
    t
    | {
      "embeddings.word_embeddings.weight": np.full_like(
        t["embeddings.word_embeddings.weight"], np.nan
      )
    }
  )
  encoder = Encoder.load(rewritten(bert[0], tmp_path / "other", broken))
  with pytest.raises(FloatingPointError, match="not finite for 2 of 2 texts"):
    encoder.encode(["a", "b"], "query")


def test_calls_that_make_no_sense_are_refused(bert):
  directory, _, encoder = bert
  with pytest.raises(TypeError, match="sequence of texts"):
    encoder.encode("king", "query")
  with pytest.raises(ValueError, match="'document' is unknown; choose one of query, passage"):
    encoder.encode(["king"], "document")
  with pytest.raises(ValueError, match=r"max_length=2 must lie in \[3, 66\]"):
    Encoder.load(directory, max_length=2)
  with pytest.raises(ValueError, match="dtype='float8' is unknown"):
    Encoder.load(directory, dtype="float8")
  with pytest.raises(ValueError, match=r"given for \['query'\]"):
    Encoder.load(directory, prefixes={"query": ""})


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
  small_encoders.save(tmp_path, vocab_size=50)
  with pytest.raises(ValueError, match="the encoder embeds 50; they don't belong together"):
    Encoder.load(tmp_path)
