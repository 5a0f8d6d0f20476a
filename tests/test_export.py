"""experiments/export.py: transformers and PEFT compute with what it writes what the run computed;
nothing else is touched."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import safetensors.numpy
import small_models
from small_models import torch  # skips this file where torch is absent
import transformers

from configs import search_r1
from experiments import export
from stratified.data import tokenizer as tokenizers
from stratified.policy import decoder, lora
from stratified.policy.files import hugging_face
from stratified.policy.files import safetensors as tensor_files
from stratified.runs import build, checkpoint, claim, settings, stage_parts
from stratified.runs.weights import of_stage
from stratified.tasks.encyclopedia import vocabulary

TINY = {
  "policy.width": 16,
  "policy.num_layers": 2,
  "policy.num_heads": 2,
  "policy.num_kv_heads": 1,
  "policy.mlp_width": 24,
  "warm_start.num_steps": 0,
}
LORA = {"lora.rank": 4, "lora.alpha": 6.0, "optimizer.name": "adamw"}
TOKENS = np.arange(40) * 7 % 97


def config_of(**changes):
  made = search_r1.get_config("tiny")
  made.update_from_flattened_dict(TINY | changes)
  return made


def weights_of(config, workdir=None):
  made = build.assemble(config, build.mesh_of(config), build.model_config(config))
  return of_stage(made, made.last, workdir)


def moved(tree, scale=0.2):
  """What training might have made of parameters: each a little elsewhere."""
  rng = np.random.default_rng(1)
  return {
    name: jax.device_put(
      np.asarray(x) + np.float32(scale) * rng.standard_normal(x.shape, np.float32), x.sharding
    )
    for name, x in sorted(tree.items())
  }


def run(workdir, config, steps=(2, 5)):
  """A workdir with checkpoints as train.py writes them; the state of the last step."""
  claim.check_config(workdir, json.loads(config.to_json()), settings.rules())
  weights = weights_of(config)
  state = weights.begin(
    build.initial_params(config, weights.model, weights.mesh, dtype=weights.start_dtype)
  )
  with checkpoint.Checkpointer(workdir, every=1) as checkpointer:
    for step in steps:
      state = state._replace(params=moved(state.params))
      checkpointer.save(step, weights.at_rest(state))
  return state


def model_directory(folder, family="qwen2", dtype="float32"):
  """A random model of a family with something for a tokenizer."""
  config = hugging_face.load_config(small_models.directory(family))
  params = hugging_face.load_params(small_models.directory(family), config)
  hugging_face.save(folder, config, params, dtype=dtype)
  (folder / "tokenizer.json").write_text("{}")
  return folder


def ours(model, params):
  """The decoder's logits of TOKENS."""
  row = TOKENS[None]
  compute = jax.jit(
    lambda params, *x: decoder.logits(model, params, decoder.hidden(model, params, *x))
  )
  return np.asarray(
    compute(jax.device_get(params), row, np.arange(row.size)[None], np.ones_like(row))
  )[0]


def theirs(folder):
  net, problems = transformers.AutoModelForCausalLM.from_pretrained(
    folder, attn_implementation="eager", output_loading_info=True
  )
  assert not any(problems.values()), problems
  return small_models.logits(net.float().eval(), TOKENS)


def assert_close(found, expected):
  # Logits of a few units in float32, sums in another order.
  assert np.abs(expected).max() > 0.5
  np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def stored(folder):
  return {
    name: value
    for path in sorted(folder.glob("*.safetensors"))
    for name, value in safetensors.numpy.load_file(path).items()
  }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """(workdir, state) of the tiny policy with every weight trained."""
  workdir = tmp_path_factory.mktemp("runs") / "tiny"
  return workdir, run(workdir, config_of())


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
  folder = tmp_path_factory.mktemp("exported") / "tiny"
  export.export(config_of(), folder, workdir=trained[0])
  return folder


# --- The whole policy ---


def test_transformers_has_the_logits_of_the_newest_checkpoint_or_of_the_one_named(
  trained, tmp_path
):
  workdir, state = trained
  config = config_of()
  assert export.export(config, tmp_path / "new", workdir=workdir) == 5
  assert export.export(config, tmp_path / "old", workdir=workdir, step=2) == 2
  model = build.model_config(config)
  assert_close(theirs(tmp_path / "new"), ours(model, state.params))
  assert np.abs(theirs(tmp_path / "old") - ours(model, state.params)).max() > 0.1
  assert json.loads((tmp_path / "old" / "export.json").read_text())["step"] == 2


@pytest.mark.parametrize(
  "text",
  [
    "Question: Who is the mother of Velna Torin?\n",
    "<think>a</think><search>Velna Torin</search>",
    "  two  spaces\tand\r\nlines ",
    "naïve — 日本語 \U0001f9ea \x00 e\u0301nd",
    "",
    "Doc 1(Title: X) <answer>no</answer>",
  ],
)
def test_the_encyclopedias_tokenizer_comes_along_token_for_token(exported, text):
  folder, loaded, built = (
    exported,
    transformers.AutoTokenizer.from_pretrained(exported),
    vocabulary.build(),
  )
  ids = loaded(text)["input_ids"]
  assert ids == built.encode(text)
  assert loaded.decode(ids, clean_up_tokenization_spaces=False) == built.decode(ids) == text
  assert (loaded.eos_token_id, len(loaded), loaded.is_fast) == (
    built.eos_id,
    built.vocab_size,
    True,
  )
  again = tokenizers.Tokenizer.from_file(folder / "tokenizer.json")
  assert (again.encode(text), again.eos_id) == (ids, built.eos_id)
  raw = json.loads((folder / "config.json").read_text())
  assert raw["eos_token_id"] == built.eos_id and raw["vocab_size"] == built.vocab_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_exporting_what_was_imported_gives_back_every_byte(tmp_path, dtype):
  source = model_directory(tmp_path / "source", dtype=dtype)
  export.export(config_of(**{"policy.checkpoint": str(source)}), tmp_path / "out")
  before, after = stored(source), stored(tmp_path / "out")
  assert set(before) == set(after)
  for name, value in before.items():
    assert after[name].dtype == value.dtype and after[name].tobytes() == value.tobytes(), name
  assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_directory_of_mixed_dtypes_gives_back_every_byte_and_one_dtype_on_request(tmp_path):
  config = hugging_face.load_config(small_models.directory("llama3"))
  names = hugging_face.stored_dtypes(small_models.directory("llama3"))
  mixed = {
    name: "float32" if "norm" in name or "layers.1" in name else "bfloat16" for name in names
  }
  source = model_directory(tmp_path / "source", "llama3", mixed)
  export.export(config_of(**{"policy.checkpoint": str(source)}), tmp_path / "out")
  assert hugging_face.stored_dtypes(tmp_path / "out") == mixed
  assert {name: x.tobytes() for name, x in stored(tmp_path / "out").items()} == {
    name: x.tobytes() for name, x in stored(source).items()
  }
  export.export(config_of(**{"policy.checkpoint": str(source)}), tmp_path / "half", dtype="float16")
  assert set(hugging_face.stored_dtypes(tmp_path / "half").values()) == {"float16"}
  assert hugging_face.load_config(tmp_path / "half") == config


def test_weights_go_into_several_files_of_a_given_size_and_back_into_one(tmp_path, trained):
  workdir, state = trained
  export.export(config_of(), tmp_path / "out", workdir=workdir, shard_bytes=4_000)
  files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
  assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
  model = build.model_config(config_of())
  assert_close(theirs(tmp_path / "out"), ours(model, state.params))
  found = hugging_face.load_params(tmp_path / "out", model)
  jax.tree.map(np.testing.assert_array_equal, found, dict(state.params))
  hugging_face.save(tmp_path / "out", model, found)
  assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
  jax.tree.map(
    np.testing.assert_array_equal, hugging_face.load_params(tmp_path / "out", model), found
  )


def test_a_damaged_index_is_refused_and_can_not_lead_out_of_its_directory(tmp_path, trained):
  export.export(config_of(), tmp_path / "out", workdir=trained[0], shard_bytes=4_000)
  index, model = tmp_path / "out" / tensor_files.INDEX, build.model_config(config_of())
  outside = json.loads(index.read_text())
  outside["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
  for content in ("{", "[]", '{"metadata": {}}', '{"weight_map": {"a": 3}}', json.dumps(outside)):
    index.write_text(content)
    with pytest.raises(
      ValueError, match=r"index\.json is damaged or cut short .*; copy or download it again"
    ):
      hugging_face.load_params(tmp_path / "out", model)


# --- Adapters ---


@pytest.fixture(
  scope="module",
  params=[{}, {"lora.targets": "v,down"}, {"policy.dtype": "bfloat16"}],
  ids=["every layer", "two layers", "bfloat16"],
)
def adapted(request, tmp_path_factory):
  """(config, workdir, state) of adapters trained beside a Qwen2 model directory."""
  folder = tmp_path_factory.mktemp("adapted")
  dtype = request.param.get("policy.dtype", "float32")
  config = config_of(
    **LORA,
    **request.param,
    **{"policy.checkpoint": str(model_directory(folder / "base", dtype=dtype))},
  )
  return config, folder / "run", run(folder / "run", config)


def in_float32(config, state):
  """(model, frozen, adapters) for a float32 computation."""
  plain = config.copy_and_resolve_references()
  plain.policy.dtype = "float32"
  return (
    build.model_config(plain),
    {name: x.astype(jnp.float32) for name, x in state.reference.items()},
    state.params,
  )


def test_transformers_computes_with_the_merged_policy_what_the_run_did(adapted, tmp_path):
  config, workdir, state = adapted
  model, frozen, adapters = in_float32(config, state)
  expected = ours(model, lora.join(stage_parts.adapter(config), frozen, adapters))
  assert np.abs(ours(model, frozen) - expected).max() > 0.1
  export.export(config, tmp_path / "out", workdir=workdir, dtype="float32")
  assert_close(theirs(tmp_path / "out"), expected)
  export.export(config, tmp_path / "out", workdir=workdir)
  assert set(hugging_face.stored_dtypes(tmp_path / "out").values()) == {config.policy.dtype}


def test_peft_computes_with_the_adapters_what_the_run_did(adapted, tmp_path):
  peft = pytest.importorskip("peft", reason="needs peft, whose layout it is")
  config, workdir, state = adapted
  model, frozen, adapters = in_float32(config, state)
  export.export(config, tmp_path / "out", workdir=workdir, adapters=True)
  assert {path.name for path in (tmp_path / "out").iterdir()} == {
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "export.json",
  }
  settings = peft.PeftConfig.from_pretrained(tmp_path / "out")
  assert (settings.r, settings.lora_alpha, settings.base_model_name_or_path) == (
    4,
    6,
    config.policy.checkpoint,
  )
  net = transformers.AutoModelForCausalLM.from_pretrained(
    settings.base_model_name_or_path, attn_implementation="eager", dtype=torch.float32
  )
  net = peft.PeftModel.from_pretrained(net, tmp_path / "out").float().eval()
  theirs_ = {name: x.numpy() for name, x in peft.get_peft_model_state_dict(net).items()}
  assert {name: x.shape for name, x in theirs_.items()} == {
    name: x.shape for name, x in stored(tmp_path / "out").items()
  }
  assert_close(
    small_models.logits(net, TOKENS),
    ours(model, lora.join(stage_parts.adapter(config), frozen, adapters)),
  )


def test_adapters_beside_a_policy_built_here_bring_that_policy_along(tmp_path):
  config = config_of(**LORA)
  state = run(tmp_path / "run", config)
  export.export(config, tmp_path / "out", workdir=tmp_path / "run", adapters=True)
  settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
  assert settings["base_model_name_or_path"] == str(tmp_path / "out" / "base")
  model = build.model_config(config)
  jax.tree.map(
    np.testing.assert_array_equal,
    hugging_face.load_params(tmp_path / "out" / "base", model),
    dict(state.reference),
  )


def test_other_frozen_weights_than_those_trained_beside_are_refused_by_name(tmp_path):
  base = model_directory(tmp_path / "base")
  config = config_of(**LORA, **{"policy.checkpoint": str(base)})
  state = run(tmp_path / "run", config)
  weights = weights_of(config)

  def resumed():
    with checkpoint.Checkpointer(tmp_path / "run", every=1) as checkpointer:
      return weights.resume(checkpointer.restore_latest(weights.abstract()))

  again, step = resumed()
  assert step == 5
  jax.tree.map(np.testing.assert_array_equal, again, state)
  tensors = safetensors.numpy.load_file(base / "model.safetensors")
  tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3
  safetensors.numpy.save_file(tensors, base / "model.safetensors")
  for use in (resumed, lambda: export.export(config, tmp_path / "out", workdir=tmp_path / "run")):
    with pytest.raises(
      ValueError,
      match=rf"{base} has changed since these adapters were trained beside it \(up\); bring",
    ):
      use()
  assert not (tmp_path / "out").exists()


def test_adapters_without_their_warm_start_say_where_it_was(tmp_path):
  config = config_of(**LORA)
  run(tmp_path / "run", config)
  config.warm_start.num_steps = 3
  with pytest.raises(
    ValueError, match=r"warm_start holds no checkpoint any more, .*gone; bring it back, or train"
  ):
    export.export(config, tmp_path / "out", workdir=tmp_path / "run")


# --- What is refused, and what stays ---


def test_what_is_no_export_is_left_alone_and_an_export_is_replaced_whole(trained, tmp_path):
  workdir, _ = trained
  mine = tmp_path / "mine"
  mine.mkdir()
  (mine / "notes.txt").write_text("mine")
  with pytest.raises(
    ValueError, match=r"mine holds files that are no export \(no export\.json\); name another"
  ):
    export.export(config_of(), mine, workdir=workdir)
  with pytest.raises(ValueError, match=r"notes\.txt is a file; name a directory"):
    export.export(config_of(), mine / "notes.txt", workdir=workdir)
  assert [path.name for path in mine.iterdir()] == ["notes.txt"]
  out = tmp_path / "out"
  out.mkdir()  # an empty one may be used
  export.export(config_of(), out, workdir=workdir)
  (out / "left-over.bin").write_text("of the export before")
  export.export(config_of(), out, workdir=workdir)
  assert not (out / "left-over.bin").exists() and (out / "model.safetensors").exists()
  assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_an_export_that_fails_leaves_the_one_before(trained, tmp_path):
  workdir, state = trained
  export.export(config_of(), tmp_path / "out", workdir=workdir)
  before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
  weights = weights_of(config_of())
  broken = tmp_path / "broken"
  claim.check_config(broken, json.loads(config_of().to_json()), settings.rules())
  with checkpoint.Checkpointer(broken, every=1) as checkpointer:
    checkpointer.save(
      1,
      weights.at_rest(
        state._replace(params=state.params | {"down": state.params["down"] * np.nan})
      ),
    )
  with pytest.raises(ValueError, match="params.down holds values that are not finite"):
    export.export(config_of(), tmp_path / "out", workdir=broken)
  assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
  assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "out"]


@pytest.mark.parametrize(
  "options, sentence",
  [
    (dict(step=3), r"checkpoints has no checkpoint of step 3; it has 2, 5"),
    (dict(dtype="int8"), r"dtype='int8' can't be saved; choose one of float32, bfloat16, float16"),
    (
      dict(adapters=True),
      r"--adapters: there are none, since the run trained every weight \(lora\.rank=0\)",
    ),
    (
      dict(adapters=True, workdir=None),
      r"--adapters: there are none, since no --workdir names a run",
    ),
    (dict(workdir=pathlib.Path("/nonexistent")), r"/nonexistent holds no checkpoint yet"),
  ],
)
def test_what_can_not_be_exported_is_refused_in_words(trained, tmp_path, options, sentence):
  with pytest.raises(ValueError, match=sentence):
    export.export(config_of(), tmp_path / "out", **dict(workdir=trained[0]) | options)
  assert not list(tmp_path.iterdir())


def test_the_command_writes_and_refuses_in_one_line(trained, tmp_path):
  flags = [f"--workdir={trained[0]}", f"--output={tmp_path / 'out'}"]
  done = programs.run("experiments/export.py", *flags)
  assert (done.returncode, done.stdout) == (
    0,
    f"{tmp_path / 'out'} holds the policy of step 5\n",
  ), done.stderr[-2000:]
  done = programs.run("experiments/export.py", *flags, "--step=4")
  assert done.returncode == 1 and done.stderr.strip().endswith(
    "has no checkpoint of step 4; it has 2, 5"
  )
  assert "Traceback" not in done.stderr
