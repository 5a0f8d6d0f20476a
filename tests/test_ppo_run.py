"""A smallest run of PPO with a critic of its own: its statistics live, a stop changes nothing."""

import shutil

import pytest
import test_train
from test_train import rows, without_times

PPO = {
  "algorithm.name": "ppo",
  "ppo.body": "own",
  "ppo.by_calls": True,
  "ppo.alone_steps": 1,
  "ppo.learning_rate": 0.01,
  "loss.kl_in": "reward",
  "loss.kl_coefficient": 0.1,
  "num_steps": 4,
  "checkpoint.every": 2,
  "eval.questions": 1,
  "eval.every": 0,
}


def run(workdir):
  done = test_train.run(workdir, **PPO)
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("ppo") / "whole"
  run(workdir)
  return workdir


def test_every_statistic_of_ppo_is_alive(whole):
  training = [row for row in rows(whole) if "reward/mean" in row]
  assert [row["step"] for row in training] == [1, 2, 3, 4]
  for row in training:
    assert row["value/loss"] > 0 and row["value/grad_norm"] > 0 and row["update/skipped"] == 0
    assert row["grad/norm"] > 0 and row["advantage/rms"] > 0
  first, second, *rest = training
  # Zero heads explain nothing; while the critic learns alone the policy does not move.
  assert abs(first["value/explained_variance"]) < 1e-6 and first["policy/clip_share"] == 0
  assert abs(second["value/explained_variance"]) > 1e-6
  assert first["reward/kl_penalty"] == second["reward/kl_penalty"] == 0
  for row in rest:
    assert row["policy/clip_share"] > 0 and row["reward/kl_penalty"] != 0


def test_a_run_that_goes_on_from_a_checkpoint_repeats_it_bit_for_bit(whole, tmp_path):
  again = tmp_path / "again"
  shutil.copytree(whole, again)
  shutil.rmtree(again / "checkpoints" / "4")
  (again / "evaluation.json").unlink()
  assert "going on from step 2" in run(again)
  assert without_times(rows(again)) == without_times(rows(whole))
