"""A run that trains adapters, end to end: what it keeps, that a stop changes nothing, and what
comes out of it."""

import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import test_train

from experiments import export
from stratified.learner import state as states
from stratified.policy import decoder
from stratified.policy.files import hugging_face
from stratified.runs import build, checkpoint, settings, stage_parts
from stratified.runs.weights import of_stage

# Without a warm start's rows test_train's settings are a run of four steps, evaluated after the
# second and the fourth.
LORA = {
  "lora.rank": 4,
  "lora.alpha": 8.0,
  "optimizer.name": "adamw",
  "optimizer.learning_rate": 1e-2,
  # One update a step, so that the first row's KL is that of the very first parameters.
  "update.epochs": 1,
  "update.mini_batches": 1,
}


def stored(workdir, step):
  """Every array of a checkpoint, by its dotted name, with nothing assumed about what is there."""
  path = workdir / "checkpoints" / str(step)
  manager = ocp.CheckpointManager(path.parent, item_handlers=ocp.StandardCheckpointHandler())
  tree = manager.restore(step, args=ocp.args.StandardRestore())
  manager.close()
  return {
    jax.tree_util.keystr(at, simple=True, separator="."): np.asarray(x)
    for at, x in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def loaded(workdir):
  config = settings.read_workdir(workdir)
  made = build.assemble(config, build.mesh_of(config), build.model_config(config))
  return of_stage(made, made.last, workdir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The workdir of a run that nothing interrupted."""
  workdir = tmp_path_factory.mktemp("runs") / "whole"
  done = test_train.run(workdir, **LORA)
  assert done.returncode == 0, done.stderr[-3000:]
  return workdir


def test_training_starts_at_the_reference_and_samples_from_merged_weights(whole):
  training = [row for row in test_train.rows(whole) if "reward/mean" in row]
  assert [row["step"] for row in training] == [1, 2, 3, 4]
  # The same function of the same weights; the compiler may round its two passes otherwise, in k3
  # squared: (1e-7)^2.
  assert 0 <= training[0]["loss/kl"] < 1e-12 < training[3]["loss/kl"]
  for row in training:
    assert set(test_train.KEYS) <= row.keys() and row["update/skipped"] == 0
    assert row["policy/logp_gap_max"] < 1e-4  # the sampler adds A B to W, the trainer to x W


def test_a_checkpoint_holds_adapters_their_moments_and_a_fingerprint(whole):
  arrays = stored(whole, 4)
  table = decoder.weights(loaded(whole).model)
  assert arrays["reference"].shape == (len(table), 2)
  trained = sum(x.size for name, x in arrays.items() if name.startswith("params."))
  # width 16, one layer of 2 heads of 8 and one key-value head, MLP 16; rank 4
  assert trained == 4 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 16))
  assert sum(x.size for name, x in arrays.items()) < 3 * trained + arrays["reference"].size + 10
  assert all(
    shape[0] < 100 for shape in (x.shape for x in arrays.values()) if shape
  )  # nothing of vocabulary's size


def test_a_run_stopped_half_way_goes_on_bit_for_bit(whole, tmp_path):
  workdir = tmp_path / "stopped"
  # A row of the warm start each, the evaluation at step 0, then a row a step: the second row of
  # training is the fifth.
  done = test_train.asked_to_stop(workdir, 5, **LORA)
  assert done.returncode == 0 and "saved; the same command goes on" in done.stdout, done.stderr
  done = test_train.run(workdir, **LORA)
  assert done.returncode == 0 and "going on from step" in done.stdout, done.stderr[-3000:]
  assert test_train.without_times(test_train.rows(workdir)) == test_train.without_times(
    test_train.rows(whole)
  )
  jax.tree.map(np.testing.assert_array_equal, stored(workdir, 4), stored(whole, 4))


def test_a_run_on_another_warm_start_is_refused_at_once_by_name(whole, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole, workdir)
  weights = loaded(workdir)
  path = workdir / "warm_start"
  chain = stage_parts.optimizer(weights.config, warm_start=True)
  like = states.abstract_state(weights.mesh, weights.model, chain, with_reference=False)
  with checkpoint.Checkpointer(path, every=1) as checkpointer:
    state, step = checkpointer.restore_latest(like)
  shutil.rmtree(path)
  with checkpoint.Checkpointer(path, every=1) as checkpointer:
    checkpointer.save(
      step, state._replace(params=state.params | {"final_norm": state.params["final_norm"] * 1.001})
    )
  done = test_train.run(workdir, **LORA, num_steps=5)
  assert done.returncode == 1 and "Traceback" not in done.stderr
  assert (
    f"{path} has changed since these adapters were trained beside it (final_norm)" in done.stderr
  )


def test_its_export_is_the_policy_that_it_evaluated(whole, tmp_path):
  weights = loaded(whole)
  export.export(weights.config, tmp_path / "out", workdir=whole)
  policy, step = weights.restore_policy(whole)
  assert step == 4
  found = hugging_face.load_params(tmp_path / "out", weights.model)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), found, dict(policy))
  earlier, _ = weights.restore_policy(whole, step=2)
  assert any(
    (np.asarray(earlier[name]) != np.asarray(value)).any() for name, value in policy.items()
  )


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"lora.rank": -1}, r"lora\.rank=-1 must be at least 0"),
    (
      {"lora.rank": 4, "lora.alpha": 0.0, "optimizer.name": "adamw"},
      r"lora\.alpha=0\.0 must be above 0",
    ),
    (
      {"lora.rank": 4, "lora.targets": "q,lm_head", "optimizer.name": "adamw"},
      r"lora\.targets='q,lm_head' must name",
    ),
    ({"lora.rank": 8, "optimizer.name": "adamw"}, r"lora\.rank=8 must be below 8, the rank of k"),
    (
      {"lora.rank": 4, "memory.reference": "host", "optimizer.name": "adamw"},
      r"memory\.reference='host' must be 'device'",
    ),
    (
      {"lora.rank": 4, "optimizer.name": "muon"},
      r"optimizer\.name='muon' .* --config\.optimizer\.name=adamw",
    ),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_adapters_that_can_not_be_trained_are_refused_in_words(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    build.build(test_train.config(**changes), task=False)
