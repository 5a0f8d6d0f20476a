"""experiments/compile_check.py: what it counts, and what it refuses before compiling."""

import json
import os
import subprocess
import sys

import programs
import pytest
from test_train import ROOT, SETTINGS


def command(*flags, **changes):
  settings = [
    f"--config.{name}={value}"
    for name, value in (SETTINGS | {"packing.rows": 4, "mesh.data": 2} | changes).items()
  ]
  return ["experiments/compile_check.py", "--config=configs/search_r1.py:tiny", *settings, *flags]


def check(*flags, **changes):
  """In a process of its own, which has as many devices as the topology."""
  return subprocess.run(
    [sys.executable, *command(*flags, **changes)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )


def test_a_report_names_memory_collectives_and_nothing_unexpected(tmp_path):
  done = check(
    "--topology=cpu:4",
    "--tokens=100",
    f"--json={tmp_path / 'found.json'}",
    **{"mesh.fsdp": 2, "policy.logit_chunk": 64, "data.questions_per_step": 4},
    **{"algorithm.name": "ppo", "ppo.body": "own"},
  )
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads((tmp_path / "found.json").read_text())
  assert found["mesh"] == {"data": 2, "fsdp": 2, "tensor": 1} and found["unexpected"] == []
  # float32 masters halved by fsdp, but for the norms, which every device holds; AdamW or Muon keeps
  # at least one moment.
  assert 2 * found["parameters"] <= found["memory"]["params"] < 2.2 * found["parameters"]
  memory = found["memory"]
  assert memory["params"] < memory["critic"] < 1.1 * memory["params"]  # a body and a head
  assert memory["optimizer"] >= memory["params"] + 2 * memory["critic"]  # its moments are AdamW's
  held = sum(memory[name] for name in ("params", "reference", "critic", "optimizer", "batch"))
  assert memory["update"] > held
  assert any(c["kind"] == "all-gather" and c["sent"] > 0 for c in found["collectives"])
  for text in ("mesh 2x2x1", "per device in the update", "collectives of an update"):
    assert text in done.stdout


@pytest.mark.parametrize(
  "flags, changes, sentence",
  [
    (["--topology=v9:2x2"], {}, "--topology=v9:2x2 is unknown; write v5e:4x4"),
    (["--topology=cpu:1"], {}, "needs 2 devices, 1 are here"),
    (
      ["--topology=cpu:1", "--tokens=4000"],
      {"mesh.data": 1},
      "--tokens=4000 is more than rollout.max_tokens=128",
    ),
    (["--topology=cpu:2"], {"policy.dtype": "int8"}, "policy.dtype='int8' is unknown"),
  ],
)
def test_what_can_not_run_is_refused_in_words_before_compiling(flags, changes, sentence):
  refused(programs.run(*command(*flags, **changes)), sentence)


def test_rows_that_two_devices_can_not_share_are_refused():
  done = check("--topology=cpu:2", **{"packing.rows": 3})
  refused(done, "packing.rows=3 can't be split over 2 devices")


def refused(done, sentence):
  assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr, (
    done.stderr[-2000:]
  )


def test_all_that_a_run_keeps_on_a_device_is_counted(tmp_path):
  """Live buffers at the moments of a run on eight devices: exactly the sum, not a byte more."""
  program = ROOT / "tests" / "live_buffers.py"
  done = subprocess.run(
    [sys.executable, str(program), str(tmp_path)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  for name, moments in json.loads(done.stdout.splitlines()[-1]).items():
    for moment in ("update", "rollouts"):
      found, counted = moments[moment]
      assert found == counted, (name, moment)
    found, counted = moments["load"]  # one weight at a time is whole beside the result
    assert found <= counted, name
