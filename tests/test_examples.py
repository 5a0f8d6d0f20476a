"""The files of examples/ through experiments/train.py, on the smallest sizes."""

import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import programs
import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))  # as PYTHONPATH does for the programs

import my_estimator

SMALL = {
  "num_steps": 2,
  "warm_start.num_steps": 2,
  "warm_start.demonstrations_per_step": 4,
  "policy.width": 16,
  "policy.num_layers": 1,
  "policy.num_heads": 2,
  "policy.num_kv_heads": 1,
  "policy.mlp_width": 16,
  "policy.unroll": 1,
  "data.entities": 60,
  "data.questions_per_step": 2,
  "rollout.samples_per_question": 3,
  "rollout.max_observation_tokens": 24,
  "rollout.max_tokens": 96,
  "packing.row_length": 96,
  "packing.rows": 2,
  "sampler.lanes": 6,
  "sampler.block": 6,
  "sampler.rows": 2,
  "eval.questions": 3,
  "eval.every": 0,
  "eval.forced": False,
  "logging.trajectories_every": 2,
}


def train(workdir: pathlib.Path, **changes):
  flags = [f"--config.{name}={value}" for name, value in (SMALL | changes).items()]
  config = "--config=configs/search_r1.py:tiny"
  return programs.run("experiments/train.py", config, f"--workdir={workdir}", *flags)


def trained(workdir: pathlib.Path, **changes):
  """(training rows, rollouts of the last step)."""
  done = train(workdir, **changes)
  assert done.returncode == 0, done.stderr[-3000:]
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  last = workdir / "trajectories" / "step_000002.jsonl"
  return [row for row in rows if "reward/mean" in row], [
    json.loads(line) for line in last.read_text().splitlines()
  ]


def test_a_reward_and_a_partition_of_ones_own(tmp_path):
  rows, rollouts = trained(
    tmp_path,
    **{
      "reward.name": "exact_match + 0.2*my_reward:brevity - 0.1*no_answer",
      "strata.name": "my_strata:repeats*searches",
      "strata.cap": 2,
    },
  )
  assert len(rows) == 2
  for row in rows:
    parts = row["reward/exact_match"], row["reward/brevity"], row["reward/no_answer"]
    assert row["reward/mean"] == pytest.approx(parts[0] + 0.2 * parts[1] - 0.1 * parts[2])
    assert "strata/share_8" in row and "strata/share_9" not in row
  for one in rollouts:
    said = [call["argument"] for turn in one["turns"] for call in turn["calls"]]
    repeated = min(len(said) - len(set(said)), 2)
    assert one["stratum"] == 3 * repeated + min(one["searches"], 2)


def test_a_task_and_a_tool_of_ones_own(tmp_path):
  rows, rollouts = trained(
    tmp_path,
    **{"task.name": "my_task:make", "strata.name": "calls_letters", "warm_start.num_steps": 20},
  )
  assert all("rollout/calls_mean_letters" in row for row in rows)
  assert all(row["rollout/searches_mean"] == 0 for row in rows)
  for one in rollouts:
    assert set(one["calls"]) == {"letters"} and one["stratum"] == min(one["calls"]["letters"], 3)
    assert one["source"] == "letters"
  evaluated = json.loads((tmp_path / "evaluation.json").read_text())
  assert "letters" in evaluated["sets"]["held_out"]["calls_mean"]


def test_an_estimator_of_ones_own(tmp_path):
  rows, rollouts = trained(
    tmp_path,
    **{
      "advantage.name": "my_estimator:pooled_san",
      "reward.name": "exact_match + tests.live_reward:varied",
    },
  )
  assert all(row["advantage/rms"] > 0 for row in rows)
  group = [one for one in rollouts if one["question_id"] == rollouts[0]["question_id"]]
  reward, stratum = (np.asarray([one[key] for one in group]) for key in ("reward", "stratum"))
  expected = my_estimator.pooled_san(
    jnp.float32(reward), stratum, num_strata=4, mask_k=np.ones(len(group)), eps=1e-6, ddof=0
  )
  np.testing.assert_allclose([one["advantage"] for one in group], expected, atol=1e-5)


def test_a_method_of_ones_own(tmp_path):
  rows, rollouts = trained(
    tmp_path,
    **{
      "algorithm.name": "my_algorithm:ReinforceAndImitate",
      "reward.name": "exact_match + tests.live_reward:varied",
    },
  )
  # Both components count, and what every method has is logged for it too.
  assert all({"loss/policy", "loss/imitate", "theory/between_stratum_variance"} <= set(row)
             for row in rows)  # fmt: skip
  assert any(one["reward"] == 1 for one in rollouts) == (rows[-1]["loss/imitate"] > 0)
  for row in {one["question_id"]: one for one in rollouts}.values():
    group = [one for one in rollouts if one["question_id"] == row["question_id"]]
    assert sum(one["advantage"] for one in group) == pytest.approx(0, abs=1e-5)


def test_a_tool_of_ones_own_beside_those_of_a_task(tmp_path):
  _, rollouts = trained(
    tmp_path, **{"tools": "search,my_tool:Letters", "strata.name": "tools", "num_steps": 2}
  )
  assert all(set(one["calls"]) == {"search", "letters"} for one in rollouts)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"reward.name": "os:getcwd"}, "reward.name is 'os:getcwd', whose signature is ()"),
    ({"reward.name": "builtins:str"}, "reward.name is 'builtins:str', which returned"),
    ({"strata.name": "sys:foo"}, "strata.name is 'sys:foo', but the module sys has no 'foo'"),
    ({"strata.name": "builtins:str"}, "a stratum is a whole number, 0 or more"),
    ({"advantage.name": "my_reward:brevity"}, "is called with reward_k, stratum_k, num_strata="),
    ({"algorithm.name": "my_reward:brevity"}, "whose signature is (trajectory"),
    ({"task.name": "os:getcwd"}, "task.name is 'os:getcwd', whose signature is ()"),
    ({"tools": "search,my_reward:brevity"}, "is no tool: it has no"),
  ],
)
def test_what_is_wrong_ends_in_one_sentence_before_any_work(tmp_path, changes, message):
  done = train(tmp_path / "run", **changes)
  assert done.returncode != 0 and "Traceback" not in done.stderr
  lines = [line for line in done.stderr.splitlines() if message in line]
  assert lines, done.stderr[-2000:]
  assert not (tmp_path / "run").exists()
