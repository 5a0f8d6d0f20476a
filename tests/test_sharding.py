"""The mesh and its rules; one update on eight devices equals the same update on one."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from stratified import sharding

PROGRAM = pathlib.Path(__file__).with_name("sharded_steps.py")
MESHES = ["tied 8x1x1", "tied 1x8x1", "tied 2x2x2", "tied 1x2x4", "untied 2x2x2"]
OPTIMIZED = ["tied 1x8x1", "tied 2x2x2"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
  """What one process that runs every mesh found: arrays by "model mesh/part/name", facts by "model
  mesh", of programs, of samplers, of adapters."""
  path = tmp_path_factory.mktemp("sharded") / "steps.npz"
  done = subprocess.run([sys.executable, str(PROGRAM), str(path)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  arrays = dict(np.load(path))
  return (
    arrays,
    json.loads(str(arrays.pop("facts"))),
    json.loads(str(arrays.pop("programs"))),
    json.loads(str(arrays.pop("samplers"))),
    json.loads(str(arrays.pop("adapters"))),
  )


def part(steps, label, name):
  """One part of a mesh's results and the same of one device, as two flat float64 vectors."""
  arrays, single = steps[0], label.split()[0] + " 1x1x1"
  keys = sorted(key.split("/", 1)[1] for key in arrays if key.startswith(f"{label}/{name}/"))
  assert keys
  return [
    np.concatenate([np.float64(arrays[f"{where}/{key}"]).ravel() for key in keys])
    for where in (label, single)
  ]


def distance(found, expected):
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("label", MESHES)
def test_loss_and_statistics_equal_one_device(steps, label):
  arrays, facts = steps[:2]
  single = label.split()[0] + " 1x1x1"
  assert facts[label]["num_micro"] == facts[single]["num_micro"] > 1
  names = [key.split("/", 1)[1] for key in arrays if key.startswith(f"{single}/stats/")]
  assert {
    "stats/loss/policy",
    "stats/loss/kl",
    "stats/policy/entropy",
    "stats/advantage_qk",
  } <= set(names)
  for name in names:
    np.testing.assert_allclose(
      arrays[f"{label}/{name}"], arrays[f"{single}/{name}"], rtol=2e-5, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize("label", MESHES)
def test_gradients_equal_one_device_by_relative_norm(steps, label):
  found, expected = part(steps, label, "gradient")
  assert np.linalg.norm(expected) > 1e-3
  assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("label", MESHES)
def test_parameters_after_plain_sgd_equal_one_device(steps, label):
  assert distance(*part(steps, label, "params")) < 1e-5


@pytest.mark.parametrize("label", OPTIMIZED)
def test_adamws_update_equals_one_device_where_the_gradient_is_more_than_rounding(steps, label):
  """Adam's first update is rate x g / (|g| + eps), the sign of g: of a gradient that is itself
  rounding noise it is noise of full size. So coordinates must agree where |g| is far above the
  difference between the two gradients, and no coordinate may move further than the rate."""
  gradient, single_gradient = part(steps, label, "gradient")
  update, expected = part(steps, label, "adamw")
  assert np.abs(update).max() <= 1e-3 * (1 + 1e-5)
  noise = np.abs(gradient - single_gradient).max()
  clear = np.abs(single_gradient) > 100 * noise
  assert clear.mean() > 0.95
  np.testing.assert_allclose(update[clear], expected[clear], rtol=1e-3)
  assert (update[single_gradient == 0] == 0).all()


@pytest.mark.parametrize("label", OPTIMIZED)
def test_muons_update_equals_one_device(steps, label):
  """Its iteration multiplies a small singular value by up to 3.4445 each of five times, and the
  rounding there with it: 485 times the gradients' tolerance of 1e-5."""
  assert distance(*part(steps, label, "muon")) < 485e-5


@pytest.mark.parametrize("label", MESHES)
def test_weights_are_split_as_the_rules_say_and_stay_where_a_checkpoint_would_put_them(
  steps, label
):
  facts = steps[1][label]
  _, fsdp, tensor = map(int, label.split()[1].split("x"))
  assert facts["as_abstract"]
  for name in ("embed", "q", "k", "v", "o", "gate", "up", "down"):
    assert facts["largest_share"][name] == pytest.approx(1 / (fsdp * tensor)), name
  assert facts["largest_share"]["final_norm"] == 1


@pytest.mark.parametrize("label", MESHES)
def test_the_sampler_takes_sharded_parameters(steps, label):
  arrays, single = steps[0], label.split()[0] + " 1x1x1"
  np.testing.assert_array_equal(arrays[f"{label}/sampled"], arrays[f"{single}/sampled"])
  assert len(set(arrays[f"{single}/sampled"].tolist())) > 2


def test_a_sampler_on_four_devices_draws_what_one_on_one_device_draws(steps):
  (one, stats), (four, spread) = steps[3]["1"], steps[3]["4"]
  assert [tokens for tokens, _ in four] == [tokens for tokens, _ in one]
  assert len({tuple(tokens) for tokens, _ in one}) > 20, "the samples differ"
  for (_, found), (_, expected) in zip(four, one):
    np.testing.assert_allclose(found, expected, atol=1e-5)
  assert spread["decoded"] == stats["decoded"]


def test_a_second_sharded_step_compiles_nothing(steps):
  assert {facts["compilations"] for facts in steps[1].values()} == {1}


def test_the_compiled_update_never_holds_all_logits_nor_gathers_them_or_a_whole_state(steps):
  assert steps[2]["chunk 6"]["unexpected"] == []


def test_what_is_looked_for_is_found_where_logits_are_not_in_chunks(steps):
  assert any("logits of all local tokens" in fault for fault in steps[2]["chunk 0"]["unexpected"])


def test_collectives_of_the_update_are_the_expected_ones(steps):
  """Weights are gathered layer by layer along `fsdp` (width 32) and gradients summed; nothing else
  is large."""
  sent = steps[2]["chunk 6"]["sent"]
  gathered = {array for kind, array, _, _ in sent if kind == "all-gather"}
  # q and k, v (whole width, half the heads), gate and up, down: each device's `tensor` part, whole
  # along `fsdp`
  for weight in ("f32[32,2,8]", "f32[32,32]"):
    assert any(array.replace("f32[1,", "f32[") == weight for array in gathered), (weight, gathered)
  sizes = {
    (kind, array): np.prod([int(n) for n in array.split("[")[1][:-1].split(",") if n] or [1])
    for kind, array, _, _ in sent
  }
  assert max(size for (kind, _), size in sizes.items() if kind == "all-gather") <= 208 * 32
  assert any(
    kind in ("all-reduce", "reduce-scatter") and sizes[kind, array] >= 32 * 32 // 4
    for kind, array, _, _ in sent
  )
  assert any(kind == "all-to-all" for kind, *_ in sent), (
    "the embedding's rows are exchanged for columns"
  )


def test_the_output_weights_gradient_is_summed_once_a_micro_batch_and_not_once_a_chunk(steps):
  """Each device has 52 of the 208 rows; a row of 24 tokens is 4 chunks of 6."""
  sums = [
    count
    for kind, array, group, count in steps[2]["chunk 6"]["sent"]
    if (kind, array, group) == ("all-reduce", "f32[52,32]", 2)
  ]
  assert sum(sums) == 3, sums


def test_factors_of_adapters_are_split_where_their_weight_is_and_never_along_the_rank(steps):
  share, fsdp, tensor = steps[4], 4, 2
  for target in ("q", "k", "v", "gate", "up"):
    assert (share[f"{target}_a"], share[f"{target}_b"]) == (1 / fsdp, 1 / tensor), target
  for target in ("o", "down"):
    assert (share[f"{target}_a"], share[f"{target}_b"]) == (1 / tensor, 1 / fsdp), target


# --- The mesh and the table ---


def test_a_mesh_has_three_explicit_axes_and_minus_one_takes_what_is_left():
  mesh = sharding.make_mesh(1, -1, 1, devices=jax.devices()[:1])
  assert mesh.axis_names == ("data", "fsdp", "tensor") and dict(mesh.shape) == {
    "data": 1,
    "fsdp": 1,
    "tensor": 1,
  }
  assert all(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)


@pytest.mark.parametrize(
  "sizes, sentence",
  [
    ((0, 1, 1), r"mesh.data=0, mesh.fsdp=1 and mesh.tensor=1 must each be at least 1"),
    ((-1, -1, 1), r"one of them may be -1"),
    ((1, -2, 1), r"at least 1"),
    (
      (2, 3, 1),
      r"mesh.data=2 x mesh.fsdp=3 x mesh.tensor=1 needs 6 devices, 1 are here.*"
      r"--config\.mesh.*device_count",
    ),
    ((2, -1, 1), r"needs 2 devices, 1 are here"),
  ],
)
def test_a_mesh_that_cannot_be_is_refused_in_words(sizes, sentence):
  with pytest.raises(ValueError, match=sentence):
    sharding.make_mesh(*sizes, devices=jax.devices()[:1])


def test_specs_follow_the_table_and_leave_out_an_axis_on_request():
  P = jax.P
  assert sharding.spec("row", None) == P(("data", "fsdp"), None)
  assert sharding.spec("vocabulary", "width") == P("tensor", "fsdp")
  assert sharding.spec("vocabulary", "width", without="fsdp") == P("tensor", None)
  assert sharding.spec("row", without="fsdp") == P(("data",))


def test_without_a_mesh_nothing_is_resharded():
  x = jax.numpy.arange(4.0)
  assert sharding.constrain(x, "row") is x
  assert float(sharding.take(x, jax.numpy.array(2), None)) == 2.0


class EightDevices:
  """What check_divisible reads of a mesh."""

  shape = {"data": 2, "fsdp": 2, "tensor": 2}


def test_sizes_that_the_mesh_cannot_split_are_refused_with_the_divisor():
  sharding.check_divisible(
    EightDevices, {"rows": ("row", 8), "heads": ("heads", 2), "head": (None, 3)}
  )
  with pytest.raises(
    ValueError,
    match=r"packing\.rows=6 can't be split over 4 devices.*multiple of 4.*--config\.mesh",
  ):
    sharding.check_divisible(EightDevices, {"packing.rows": ("row", 6)})
  with pytest.raises(ValueError, match=r"num_kv_heads=1 can't be split over 2 devices.*tensor"):
    sharding.check_divisible(EightDevices, {"num_kv_heads": ("kv_heads", 1)})


@pytest.mark.long
def test_methods_and_several_updates_equal_one_device(tmp_path):
  """PPO with its critic and GiGPO with its turns, two updates a batch each."""
  program, path = PROGRAM.with_name("sharded_methods.py"), tmp_path / "methods.npz"
  done = subprocess.run([sys.executable, str(program), str(path)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  arrays = dict(np.load(path))
  alone = [key for key in arrays if " 1x1x1|" in key]
  assert len(alone) == len(arrays) / 2
  for key in alone:
    found, expected = arrays[key.replace("1x1x1", "2x2x2")], arrays[key]
    # Two updates, the second from rounded parameters: 1e-5 was seen. A head of zeros explains 0.
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected) + 2e-6, key
