"""One row of the table of weights is all that a weight needs: each part that treats weights follows
it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_rollouts import decoder_config, parameters

from stratified.learner import optimizer
from stratified.learner import state as states
from stratified.planning import costs
from stratified.policy import decoder, lora, weights
from stratified.policy.files import hugging_face, peft

CONFIG = decoder_config(width=16, mlp_width=24, dtype="bfloat16")
STORED = "model.layers.{n}.extra.wide_proj.weight"


@pytest.fixture
def rows(monkeypatch):
  """A linear layer of two input axes and a norm more than the decoder has."""
  axes = ("layers", "width", "head_dim", "mlp")
  wide = weights.Row(axes, "matrix", weights.ROWS["up"].start, 2, STORED)
  norm = weights.ROWS["attention_norm"]._replace(stored="model.layers.{n}.wide_norm.weight")
  monkeypatch.setitem(weights.ROWS, "wide", wide)
  monkeypatch.setitem(weights.ROWS, "wide_norm", norm)


def test_a_row_reaches_shapes_shardings_and_initial_parameters(rows, mesh):
  table = decoder.weights(CONFIG)
  assert table["wide"].shape == (2, 16, 8, 24) and table["wide_norm"].shape == (2, 16)
  assert decoder.logical_axes(CONFIG)["wide"] == ("layers", "width", "head_dim", "mlp")
  params = decoder.init(CONFIG, jax.random.key(0))
  assert np.std(params["wide"]) == pytest.approx(128**-0.5, rel=0.1)
  assert (params["wide_norm"] == 1).all()
  chain = optimizer.make(name="muon", learning_rate=0.1)
  state = states.init_state(mesh, CONFIG, params, chain, with_reference=True)
  abstract = states.abstract_state(mesh, CONFIG, chain, with_reference=True)
  for part in (state, abstract):
    assert part.params["wide"].shape == (2, 16, 8, 24)
    assert (part.reference["wide"].dtype, part.reference["wide_norm"].dtype) == (
      jnp.bfloat16,
      jnp.float32,
    )
  layer, _ = decoder.unstack(CONFIG, params)["layers"]
  assert layer["wide"].shape == (16, 8, 24) and layer["wide"].dtype == jnp.bfloat16


def test_a_row_reaches_weight_decay_and_muon(rows):
  params = parameters(CONFIG)
  decayed = optimizer.decayed(params)
  assert decayed["wide"] and not decayed["wide_norm"]
  state = optimizer.make(name="muon", learning_rate=0.1).init(params)
  momentum = next(
    x.momentum
    for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optimizer.MuonState))
    if isinstance(x, optimizer.MuonState)
  )
  assert isinstance(momentum["wide"], jax.Array) and not isinstance(momentum["embed"], jax.Array)
  assert not isinstance(momentum["wide_norm"], jax.Array)


def test_a_row_reaches_adapters_and_their_files(rows, tmp_path):
  adapter = lora.LoraConfig(rank=3, alpha=6.0)
  assert adapter.targets[-1] == "wide" and lora.LoraSettings(rank=3, targets="wide").adapter()
  table = lora.weights(CONFIG, adapter)
  assert (table["wide_a"].shape, table["wide_b"].shape) == ((2, 16, 8, 3), (2, 3, 24))
  assert table["wide_a"].axes == ("layers", "width", "head_dim", None)
  adapters = lora.init(CONFIG, adapter, jax.random.key(0))
  frozen = parameters(CONFIG)
  merged = lora.merge(CONFIG, adapter, frozen, adapters | {"wide_b": jnp.ones((2, 3, 24))})
  expected = frozen["wide"] + 2.0 * np.asarray(adapters["wide_a"]).sum(-1, keepdims=True)
  np.testing.assert_allclose(merged["wide"], expected, atol=1e-5)
  peft.save(tmp_path, CONFIG, adapter, adapters, base="base")
  assert "wide_proj" in json.loads((tmp_path / peft.CONFIG).read_text())["target_modules"]
  found = safetensors.numpy.load_file(tmp_path / peft.TENSORS)
  name = "base_model.model.model.layers.1.extra.wide_proj.lora_A.weight"
  np.testing.assert_array_equal(found[name], np.asarray(adapters["wide_a"])[1].reshape(128, 3).T)


def test_a_row_reaches_import_and_export(rows, tmp_path):
  config = dataclasses.replace(CONFIG, dtype="float32")
  params = parameters(config)
  hugging_face.save(tmp_path, config, params)
  found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  np.testing.assert_array_equal(found[STORED.format(n=1)], params["wide"][1].reshape(128, 24).T)
  again = hugging_face.load_params(tmp_path, hugging_face.load_config(tmp_path))
  assert set(again) == set(params)
  jax.tree.map(np.testing.assert_array_equal, again, dict(params))


def test_a_row_reaches_counts_of_parameters_and_flops(rows, monkeypatch):
  parameters, flops = costs.num_parameters(CONFIG), costs.forward_flops(CONFIG, 5, 0)
  monkeypatch.delitem(weights.ROWS, "wide")
  assert parameters - costs.num_parameters(CONFIG) == 2 * 128 * 24
  assert flops - costs.forward_flops(CONFIG, 5, 0) == 2 * 5 * 2 * 128 * 24


def test_no_module_lists_weights_beside_the_table():
  """Names of more than two weights in one literal are a second table."""
  import ast
  import pathlib

  root = pathlib.Path(weights.__file__).parents[1]
  names = set(weights.ROWS) - {"up", "head", "embed"} | {"up"}
  found = []
  for path in sorted(root.rglob("*.py")):
    if path.name == "weights.py" and path.parent.name == "policy" or path.parent.name == "encoder":
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, (ast.Dict, ast.List, ast.Tuple, ast.Set)):
        parts = node.keys if isinstance(node, ast.Dict) else node.elts
        listed = {part.value for part in parts if isinstance(part, ast.Constant)} & names
        if len(listed) > 3:
          found.append((str(path.relative_to(root)), sorted(listed)))
  assert found == []
