"""What every family's decoder and a head compute on a mesh of eight devices is what one gives."""

import json
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("sharded_families.py")


@pytest.fixture(scope="module")
def found():
  done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma", "olmo", "mistral"])
def test_a_mesh_changes_neither_the_loss_nor_a_gradient(found, name):
  (alone, spread), size, error = (found[name][key] for key in ("loss", "size", "error"))
  assert abs(alone) > 1 and spread == pytest.approx(alone, rel=1e-5)
  assert {"value", "value_bias", "embed"} < set(size)
  for weight, norm in size.items():
    assert norm > 1e-3 and error[weight] < 2e-5 * norm, weight
