"""Hugging Face directories: what is read equals what transformers reads, what is written it reads
back."""

import contextlib
import copy
import dataclasses
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tracemalloc

import cpu_devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import small_models
from small_models import torch  # skips this file where torch is absent
import transformers

from stratified.policy import decoder
from stratified.policy.files import hugging_face
from stratified.policy.files import safetensors as tensor_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / ".cache/models/smollm2-135m-instruct"
FAMILIES = sorted(small_models.FAMILIES)
BASIC = dict(
  architectures=["LlamaForCausalLM"],
  model_type="llama",
  vocab_size=97,
  hidden_size=24,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
)


def written(folder, **keys):
  """A directory with nothing but a config.json of BASIC and `keys`; None takes a key out."""
  raw = {key: value for key, value in (BASIC | keys).items() if value is not None}
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(raw))
  return folder


def random_params(config):
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=w.shape).astype(np.float32) for name, w in decoder.weights(config).items()
  }


def stored(directory):
  """Name -> tensor of every safetensors file of a directory."""
  return {
    name: value
    for path in sorted(directory.glob("*.safetensors"))
    for name, value in safetensors.numpy.load_file(path).items()
  }


@pytest.fixture
def model_copy(tmp_path):
  return pathlib.Path(shutil.copytree(small_models.directory("qwen2"), tmp_path / "copy"))


def edit_config(directory, **keys):
  path = directory / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | keys))


# config.json


def test_what_transformers_5_writes_is_read():
  found = hugging_face.load_config(small_models.directory("llama3"), dtype="bfloat16")
  assert found == decoder.DecoderConfig(
    vocab_size=97,
    width=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=40,
    rope_theta=50.0,
    rope_scaling=(4.0, 1.0, 4.0, 32.0),
    norm_eps=1e-3,
    tied_embeddings=False,
    dtype="bfloat16",
    family="llama",
  )
  for family, switches in {
    "qwen2": (True, False, False),
    "qwen3-tied": (False, True, True),
  }.items():
    found = hugging_face.load_config(small_models.directory(family))
    assert (found.qkv_bias, found.qk_norm, found.tied_embeddings) == switches


def test_what_transformers_4_writes_is_read(tmp_path):
  scaling = dict(
    rope_type="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
  )
  found = hugging_face.load_config(
    written(tmp_path / "a", rope_theta=500000.0, rope_scaling=scaling)
  )
  assert (found.rope_theta, found.rope_scaling) == (500000.0, (32.0, 1.0, 4.0, 8192.0))
  older = hugging_face.load_config(
    written(
      tmp_path / "b", architectures=None, num_key_value_heads=None, rope_scaling={"type": "default"}
    )
  )
  assert (older.rope_theta, older.rope_scaling, older.num_kv_heads, older.head_dim) == (
    10000.0,
    None,
    4,
    6,
  )
  assert not older.tied_embeddings
  qwen2 = written(
    tmp_path / "c",
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    use_sliding_window=False,
    sliding_window=32768,
    max_window_layers=1,
    attention_bias=True,
  )
  assert hugging_face.load_config(qwen2).qkv_bias
  qwen3 = written(tmp_path / "d", model_type="qwen3", architectures=None)
  assert hugging_face.load_config(qwen3).head_dim == 128


@pytest.mark.parametrize(
  "keys,message",
  [
    (dict(architectures=["PhiForCausalLM"]), "'PhiForCausalLM' is not supported; what is: Llama"),
    (
      dict(use_sliding_window=True, sliding_window=9, max_window_layers=1),
      "type sliding_attention",
    ),
    (
      dict(layer_types=["full_attention", "chunked_attention"]),
      "a layer of type chunked_attention",
    ),
    (
      dict(rope_scaling=dict(rope_type="longrope", factor=4.0)),
      "scaling .*longrope.* what is: rope_type default, linear, llama3 or yarn",
    ),
    (dict(rope_parameters=dict(full_attention=dict(rope_theta=1.0))), "the same in every layer"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (
      dict(attention_bias=True),
      "attention_bias=true is not supported; what is: biases on q, k and v of Q",
    ),
    (dict(mlp_bias=True), "mlp_bias=true"),
    (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported; what is: silu"),
    (dict(quantization_config=dict(bits=4)), "quantization_config is not supported"),
    (dict(hidden_size=None), "config.json has no 'hidden_size'"),
    (dict(rms_norm_eps=math.nan), "rms_norm_eps=nan must be a number above 0, at most 0.1"),
    (dict(rms_norm_eps=0), "rms_norm_eps=0 must be a number above 0"),
    (dict(rms_norm_eps="1e-5"), "rms_norm_eps='1e-5' must be a number"),
    (dict(rope_theta=math.inf), "rope_theta=inf must be a number above 0"),
    (dict(rope_theta=10**400), "rope_theta=1000000000.* must be a number above 0"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be .* at most 10000"),
    (dict(vocab_size=10**12), "vocab_size=1000000000000 must be .* at most"),
    (dict(tie_word_embeddings="no"), "tie_word_embeddings='no' must be true or false"),
    (dict(architectures="LlamaForCausalLM"), "architectures='Llama.*' must be a list of texts"),
    (dict(layer_types=[1, 2]), r"layer_types=\[1, 2\] must be a list of texts"),
    (dict(rope_scaling="yarn"), "rope_scaling='yarn' must be an object or null"),
    (
      dict(rope_scaling=dict(rope_type="linear", factor="4")),
      "rope_scaling.factor='4' must be a number above 0",
    ),
    (dict(model_type=["llama"]), r"model_type=\['llama'\] must be a text"),
  ],
)
def test_what_the_decoder_does_not_implement_is_refused_by_name(tmp_path, keys, message):
  with pytest.raises(ValueError, match=message):
    hugging_face.load_config(written(tmp_path / "model", **keys))


def test_a_window_above_every_layer_is_not_in_use(tmp_path):
  keys = dict(use_sliding_window=True, sliding_window=512, max_window_layers=2)
  assert hugging_face.load_config(written(tmp_path / "model", **keys)).num_layers == 2


def test_a_directory_without_a_readable_config_says_so(tmp_path):
  with pytest.raises(
    FileNotFoundError, match="config.json does not exist; name a Hugging Face model"
  ):
    hugging_face.load_config(tmp_path)
  for content, message in {
    "[]": "holds a list, not an object",
    "3": "holds a int, not an object",
  }.items():
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(
      ValueError, match=f"config.json: {message} of settings; copy or download the file again"
    ):
      hugging_face.load_config(tmp_path)
  for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
    for value in (0, "12", 2.5, True):
      with pytest.raises(
        ValueError, match=f"config.json: {key}={value!r} must be a whole number above 0"
      ):
        hugging_face.load_config(written(tmp_path, **{key: value}))
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json: Expecting"):
    hugging_face.load_config(tmp_path)


# Weights in. That they are put in the right places is shown by test_decoder's equal logits.


def test_a_sharded_index_and_a_single_file_load_alike(tmp_path):
  directory = small_models.directory("qwen2")
  small_models.model("qwen2").save_pretrained(tmp_path, max_shard_size="10KB")
  assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
  config = hugging_face.load_config(directory)
  single, sharded = (hugging_face.load_params(path, config) for path in (directory, tmp_path))
  assert set(single) == set(decoder.weights(config))
  jax.tree.map(np.testing.assert_array_equal, single, sharded)
  next(tmp_path.glob("model-00002*")).unlink()
  with pytest.raises(
    FileNotFoundError, match="model-00002.* does not exist; copy or download it again"
  ):
    hugging_face.load_params(tmp_path, config)


def test_dtype_converts_and_none_keeps_the_directory_s(tmp_path):
  config = hugging_face.load_config(small_models.directory("qwen3"))
  exact = hugging_face.load_params(small_models.directory("qwen3"), config)
  hugging_face.save(tmp_path, config, exact, dtype="bfloat16")
  assert {x.dtype.name for x in exact.values()} == {"float32"}
  kept, wide = (
    hugging_face.load_params(tmp_path, config, dtype=dtype) for dtype in (None, "float32")
  )
  for name, value in exact.items():
    assert (kept[name].dtype, wide[name].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(wide[name], np.asarray(value.astype(jnp.bfloat16), np.float32))


def test_the_host_holds_one_stacked_weight_at_a_time(tmp_path):
  config = decoder.DecoderConfig(
    vocab_size=500, width=256, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=64, mlp_width=300
  )
  params = random_params(config)
  hugging_face.save(tmp_path, config, params)
  biggest = max(value.nbytes for value in params.values())
  total = sum(value.nbytes for value in params.values())

  def peak(function):
    """Bytes above what is left at the end; a result may be numpy's buffer or a copy that jax
    allocated."""
    tracemalloc.start()
    result = function()
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return peak - left

  one_layer = 3 * biggest / config.num_layers
  assert total > 5 * biggest
  assert peak(lambda: hugging_face.load_params(tmp_path, config)) < biggest + one_layer + 2**18
  assert peak(lambda: hugging_face.save(tmp_path, config, params)) < biggest + one_layer + 2**18


def test_a_missing_tensor_a_wrong_shape_and_a_stranger_are_refused_by_name(model_copy):
  config = hugging_face.load_config(model_copy)
  path = model_copy / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  name = "model.layers.1.mlp.up_proj.weight"

  def loading(tensors):
    safetensors.numpy.save_file(tensors, path)
    hugging_face.load_params(model_copy, config)

  with pytest.raises(ValueError, match=f"has no tensor {name}, the decoder's 'up'"):
    loading({key: value for key, value in tensors.items() if key != name})
  with pytest.raises(
    ValueError, match=rf"{name} in .* has shape \[24, 40\], its config.json says \[40,"
  ):
    loading(tensors | {name: np.ascontiguousarray(tensors[name].T)})
  with pytest.raises(ValueError, match="is stored as I8; only F32, BF16, F16 are read"):
    loading(tensors | {name: tensors[name].astype(np.int8)})
  with pytest.raises(
    ValueError, match="1 tensors without a place in this decoder, model.layers.0.self_attn"
  ):
    loading(tensors | {"model.layers.0.self_attn.q_norm.weight": np.ones(6, np.float32)})
  loading(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)})


def test_a_truncated_file_is_refused_by_name(model_copy):
  config = hugging_face.load_config(model_copy)
  path = model_copy / "model.safetensors"
  content = path.read_bytes()
  for size in (0, 4, 100, len(content) // 2, len(content) - 1):
    path.write_bytes(content[:size])
    with pytest.raises(
      ValueError, match="model.safetensors is damaged or cut short .* copy or download"
    ):
      hugging_face.load_params(model_copy, config)
  path.unlink()
  with pytest.raises(
    FileNotFoundError, match="neither model.safetensors nor model.safetensors.index.json"
  ):
    hugging_face.load_params(model_copy, config)


def test_a_tied_model_may_store_its_embedding_twice_but_not_another_head(model_copy):
  edit_config(model_copy, tie_word_embeddings=True)
  config = hugging_face.load_config(model_copy)
  with pytest.raises(
    ValueError, match="lm_head.weight other than its embedding, though .*=true; set it to"
  ):
    hugging_face.load_params(model_copy, config)
  tensors = stored(model_copy)
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  safetensors.numpy.save_file(tensors, model_copy / "model.safetensors")
  assert "head" not in hugging_face.load_params(model_copy, config)


ON_A_MESH = """
import sys, jax, numpy as np
from stratified import sharding
from stratified.policy import decoder
from stratified.policy.files import hugging_face
directory, output = sys.argv[1:]
config = hugging_face.load_config(directory)
axes, mesh = decoder.logical_axes(config), sharding.make_mesh(data=2, fsdp=2, tensor=2)
sharding_of = lambda name: sharding.named(mesh, axes[name])
placed = hugging_face.load_params(directory, config, sharding_of=sharding_of)
whole = hugging_face.load_params(directory, config)
for name, value in placed.items():
  assert value.sharding == sharding_of(name), name
  np.testing.assert_array_equal(value, whole[name])
assert placed["q"].addressable_shards[0].data.size * 4 == placed["q"].size
hugging_face.save(output, config, placed)
"""


def test_weights_load_onto_a_mesh_of_eight_devices_and_are_saved_from_it(tmp_path):
  directory = tmp_path / "even"
  config = hugging_face.load_config(small_models.directory("llama3"))
  config = dataclasses.replace(config, vocab_size=96)
  hugging_face.save(directory, config, random_params(config))
  flags = cpu_devices.flags(8)
  subprocess.run(
    [sys.executable, "-c", ON_A_MESH, directory, tmp_path / "out"],
    check=True,
    cwd=ROOT,
    timeout=300,
    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
  )
  assert (tmp_path / "out/model.safetensors").read_bytes() == (
    directory / "model.safetensors"
  ).read_bytes()


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3-tied", "olmo2"])
def test_any_rectangle_of_a_weight_is_read_alone(family):
  """Also one that cuts axes which the directory flattens together, and layers."""
  directory = small_models.directory(family)
  config = hugging_face.load_config(directory)
  whole = jax.device_get(hugging_face.load_params(directory, config))
  rng = np.random.default_rng(0)
  with contextlib.ExitStack() as stack:
    files = tensor_files.open_all(directory, stack)
    for name, weight in decoder.weights(config).items():
      for _ in range(8):
        ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in weight.shape]
        region = tuple(slice(int(start), int(stop)) for start, stop in ends)
        found = hugging_face._read(files, weight, None, region)
        np.testing.assert_array_equal(found, whole[name][region], err_msg=f"{name} {region}")


def test_a_process_holds_its_own_shards_and_at_most_one_stacked_weight_of_them_beside(tmp_path):
  """Two processes with four devices each, over which the weights are split: neither ever holds what
  is the other's."""
  config = decoder.DecoderConfig(
    vocab_size=4096,
    width=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    mlp_width=2048,
  )
  hugging_face.save(tmp_path, config, random_params(config))
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  command = [sys.executable, str(ROOT / "tests/loading_process.py"), str(tmp_path), address]
  # Freed blocks go back to the system at once, so that what is measured is what is held.
  processes = [
    subprocess.Popen(
      [*command, str(i)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    for i in range(2)
  ]
  try:
    results = [process.communicate(timeout=300) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (out, err) in zip(processes, results):
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.strip().splitlines()[-1])
    assert found["local"] < 0.51 * found["whole"] and found["whole"] > 100e6
    # 4 MB of slack: what the interpreter and the runtime allocate beside.
    assert found["peak"] < found["local"] + found["largest"] + 4 * 2**20, found


# Weights out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
  "family", ["llama3", "qwen2", "qwen3-tied", "ministral", "gemma3", "olmo2"]
)
def test_load_then_save_gives_back_every_tensor_bit_for_bit(tmp_path, family, dtype):
  source, target = tmp_path / "source", tmp_path / "target"
  copy.deepcopy(small_models.model(family)).to(getattr(torch, dtype)).save_pretrained(source)
  config = hugging_face.load_config(source)
  hugging_face.save(target, config, hugging_face.load_params(source, config), dtype=dtype)
  before, after = stored(source), stored(target)
  assert set(after) == set(before)
  for name, value in before.items():
    assert after[name].dtype == value.dtype and after[name].tobytes() == value.tobytes(), name
  assert hugging_face.load_config(target) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_is_saved_with_equal_logits(tmp_path, family):
  directory = small_models.directory(family)
  config = hugging_face.load_config(directory)
  hugging_face.save(tmp_path, config, hugging_face.load_params(directory, config))
  net, problems = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, attn_implementation="eager", output_loading_info=True
  )
  assert not any(problems.values()), problems
  assert type(net) is type(small_models.model(family)) and net.dtype == torch.float32
  tokens = np.arange(40) * 7 % 97
  expected = small_models.logits(small_models.model(family), tokens)
  np.testing.assert_array_equal(small_models.logits(net.eval(), tokens), expected)


def test_tokenizer_token_ids_and_longest_position_come_along(model_copy, tmp_path):
  (model_copy / "tokenizer.json").write_text("{}")
  (model_copy / "chat_template.jinja").write_text("template")
  edit_config(model_copy, eos_token_id=[5, 6], max_position_embeddings=77)
  config = hugging_face.load_config(model_copy)
  params = hugging_face.load_params(model_copy, config)
  whole, some = tmp_path / "whole", tmp_path / "some"
  hugging_face.save(whole, config, params, tokenizer_files=model_copy)
  files = [model_copy / "tokenizer.json"]
  hugging_face.save(some, config, params, tokenizer_files=files, extra={"bos_token_id": 3})
  assert (whole / "chat_template.jinja").read_text() == "template" and (
    whole / "tokenizer.json"
  ).is_file()
  raw = json.loads((whole / "config.json").read_text())
  assert (raw["eos_token_id"], raw["max_position_embeddings"]) == ([5, 6], 77)
  assert {path.name for path in some.iterdir()} == {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
  }
  assert json.loads((some / "config.json").read_text())["bos_token_id"] == 3
  hugging_face.save(model_copy, config, params, tokenizer_files=model_copy)  # onto itself
  with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
    hugging_face.save(some, config, params, tokenizer_files=tmp_path / "nowhere")


def test_what_can_not_be_saved_is_refused_and_leaves_the_old_file(tmp_path):
  directory = small_models.directory("qwen3-tied")
  config = hugging_face.load_config(directory)
  params = hugging_face.load_params(directory, config)
  hugging_face.save(tmp_path, config, params)
  old = (tmp_path / "model.safetensors").read_bytes()
  norm = params["mlp_norm"]
  for broken, dtype, message in [
    (
      params | {"mlp_norm": norm.at[1, 3].set(jnp.nan)},
      "float32",
      "layers.1.post_.*not finite in float32",
    ),
    (
      params | {"mlp_norm": norm.at[0, 3].set(1e6)},
      "float16",
      "layers.0.post_.*not finite in float16",
    ),
    (params | {"lora_a": norm}, "float32", "lora_a missing, unknown or .*; merge adapters first"),
    (params | {"q": params["q"][:1]}, "float32", "config: q missing, unknown or of another shape"),
    (params, "int8", "dtype='int8' can't be saved; choose one of float32, bfloat16, float16"),
  ]:
    with pytest.raises(ValueError, match=message):
      hugging_face.save(tmp_path, config, broken, dtype=dtype)
  both = dataclasses.replace(config, qkv_bias=True)
  with pytest.raises(
    ValueError,
    match="a decoder with qkv_bias=True is none that a config.json of Qwen3ForCausalLM can "
    "describe",
  ):
    hugging_face.save(tmp_path, both, random_params(both))
  assert {path.name: path.read_bytes() for path in tmp_path.glob("*model*")} == {
    "model.safetensors": old
  }


@pytest.mark.skipif(
  not SMOLLM2.is_dir(), reason=f"{SMOLLM2} is missing; python third_party/smollm2/fetch.py makes it"
)
def test_the_real_smollm2_has_the_logits_of_transformers():
  net = transformers.AutoModelForCausalLM.from_pretrained(
    SMOLLM2, attn_implementation="eager"
  ).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
  tokens = tokenizer("The capital of France is the city of")["input_ids"]
  expected = small_models.logits(net, tokens)
  del net
  config = hugging_face.load_config(SMOLLM2)
  params = hugging_face.load_params(SMOLLM2, config)
  row = np.array(tokens)[None]
  compute = jax.jit(
    lambda params, *x: decoder.logits(config, params, decoder.hidden(config, params, *x))
  )
  found = np.asarray(compute(params, row, np.arange(row.size)[None], np.ones_like(row)))[0]
  assert np.abs(expected).max() > 10
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
  assert (found.argmax(-1) == expected.argmax(-1)).all()


def test_values_that_are_not_finite_are_refused_by_name(model_copy):
  from safetensors.numpy import load_file, save_file

  path = model_copy / "model.safetensors"
  tensors = load_file(path)
  tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.nan
  save_file(tensors, path)
  with pytest.raises(
    ValueError, match="model.norm.weight holds values that are not finite.*another copy"
  ):
    hugging_face.load_params(model_copy, hugging_face.load_config(model_copy))
