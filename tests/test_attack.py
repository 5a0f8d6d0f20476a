"""A sample of experiments/benchmarks/attack.py, and that it sees what is not held."""

import json
import types

import programs
import pytest

from experiments.benchmarks.attacks import checkpoints, clients, count, damage, outputs


def test_fuzzed_outputs_are_held_by_every_protocol():
  found = outputs.attack(20 * len(outputs.everyone()), seed=7)
  assert found.failed == [] and found.held == found.tried and found.notes["rollouts"] > 15


@pytest.mark.parametrize(
  "parse, problem",
  [
    (lambda text: 1 / 0, "ZeroDivisionError"),
    (lambda text: types.SimpleNamespace(kind="call", calls=(("rm", ""),)), "called"),
  ],
)
def test_a_parser_that_fails_is_counted(parse, problem):
  broken = types.SimpleNamespace(parse=parse)
  found = count.Count()
  found.add(outputs._parsed("broken", broken, "<search>"))
  assert found.held == 0 and problem in found.failed[0]


def test_damaged_files_are_read_or_named_in_one_sentence():
  found = damage.attack(12 * len(damage.READERS), seed=7)
  assert found.failed == [] and found.tried == 12 * len(damage.READERS)


# Orbax leaves its other reads unawaited when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_flipped_bit_is_loaded_silently():
  found = checkpoints.flips(4, seed=7)
  assert found.failed == [] and found.tried == 4


@pytest.mark.parametrize("loaded", [(1, 2), (2, 1)])
def test_values_of_another_step_would_be_counted(monkeypatch, tmp_path, loaded):
  values, step = loaded
  restored = lambda *_: (checkpoints.state_of(values), step)
  monkeypatch.setattr(checkpoints.checkpoint.Checkpointer, "restore_latest", restored)
  assert checkpoints._restored(tmp_path)[1] == "wrong values were loaded"


def test_hostile_clients_neither_end_the_server_nor_starve_the_others():
  found = clients.attack(16, seed=7)
  assert found.failed == [] and found.notes["honest"] == 4


def test_the_command_prints_a_line_of_counts_for_what_it_attacks():
  done = programs.run("experiments/benchmarks/attack.py", "--what=outputs", "--count=40")
  assert done.returncode == 0, done.stderr[-2000:]
  row = json.loads(done.stdout)
  assert (row["what"], row["tried"], row["held"], row["failed"]) == ("outputs", 40, 40, 0)
