"""experiments/train.py with a real server behind it: weights in step, log-probs as the
trainer's."""

import json
import os
import pathlib
import subprocess

import pytest
from test_train import command, ROOT

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_through_a_real_server_is_on_policy_to_rounding_and_says_which_weights_sampled(
  real_servers, tmp_path, staleness
):
  changes = {
    "sampler.name": "sglang",
    "sampler.urls": ",".join(server.url for server in real_servers),
    "rollout.max_staleness": staleness,
    "loss.old_log_probs": "sampler",
    "warm_start.num_steps": 0,
  }
  run = command(tmp_path / "run", **changes)
  # The servers' small model is the architecture that the run has to have: its weights are replaced
  # at the first load.
  sizes = {
    "width": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_width": 128,
    "rope_theta": 10000.0,
  }
  run = [
    flag for flag in run if not any(flag.startswith(f"--config.policy.{name}=") for name in sizes)
  ]
  run += [f"--config.policy.{name}={value}" for name, value in sizes.items()]
  done = subprocess.run(
    run,
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    timeout=500,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  trained = [
    row
    for row in map(
      json.loads, pathlib.Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )
    if "reward/mean" in row
  ]
  assert [row["rollout/staleness"] for row in trained] == (
    [0, 0, 0, 0] if staleness == 0 else [0, 1, 1, 1]
  )
  assert all(row["rollout/failed"] == 0 for row in trained)
  # 1e-4: the server's own tolerance against the trainer in float32; one step old, the gap is the
  # update's.
  assert trained[0]["policy/logp_gap_max"] < 1e-4
  if staleness == 0:
    assert max(row["policy/logp_gap_max"] for row in trained) < 1e-4
