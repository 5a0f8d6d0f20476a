"""Two processes of four devices each train as one process of eight does, end together, and leave a
run that goes on."""

import os
import signal
import socket
import subprocess
import time

import cpu_devices
import programs
import pytest
from small_rollouts import random_groups, trajectory
from test_train import command, ROOT, rows, SETTINGS

from stratified.learner import processes

# Plain SGD: without a reward the gradient is rounding alone, which Muon and Adam would scale up to
# a full step.
RUN = SETTINGS | {
  "optimizer.name": "sgd",
  "num_steps": 8,
  "mesh.data": 4,
  "mesh.fsdp": 2,
  "packing.rows": 8,
  "data.questions_per_step": 8,
  "eval.every": 0,
  "warm_start.demonstrations_per_step": 8,
  "sampler.lanes": 12,
}


def environment(count):
  return os.environ | {"XLA_FLAGS": cpu_devices.flags(count), "JAX_PLATFORMS": "cpu"}


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def started(workdir, count, logs):
  """`count` processes of one run, each with its standard error in logs/N."""
  address, running = f"127.0.0.1:{free_port()}", []
  for index in range(count):
    flags = (
      [f"--processes={count}", f"--process={index}", f"--coordinator={address}"]
      if count > 1
      else []
    )
    running.append(
      subprocess.Popen(
        command(workdir, **RUN) + flags,
        cwd=ROOT,
        env=environment(8 // count),
        stdout=subprocess.DEVNULL,
        stderr=(logs / f"{index}").open("w"),
      )
    )
  return running


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """The workdir of one process of eight devices."""
  folder = tmp_path_factory.mktemp("alone")
  (process,) = started(folder / "run", 1, folder)
  assert process.wait(timeout=300) == 0, (folder / "0").read_text()[-3000:]
  return folder / "run"


@pytest.mark.long
def test_a_killed_process_ends_the_other_and_one_process_goes_on_to_the_result_of_one_alone(
  alone, tmp_path
):
  workdir = tmp_path / "run"
  first, second = started(workdir, 2, tmp_path)
  try:
    give_up = time.monotonic() + 300
    while sum("reward/mean" in row for row in rows(workdir)) < 3:
      assert first.poll() is None and time.monotonic() < give_up, (tmp_path / "0").read_text()[
        -3000:
      ]
      time.sleep(0.05)
    second.send_signal(signal.SIGKILL)
    assert first.wait(timeout=60) != 0
  finally:
    for process in (first, second):
      process.kill()
      process.wait()
  said = (tmp_path / "0").read_text()
  assert "another process of this run" in said or "another task died" in said, said[-3000:]
  assert len(rows(workdir)) < len(rows(alone))

  (process,) = started(workdir, 1, tmp_path)
  assert process.wait(timeout=300) == 0, (tmp_path / "0").read_text()[-3000:]
  found, expected = rows(workdir), rows(alone)
  assert [row.get("step") for row in found] == [row.get("step") for row in expected]
  assert sum("warm_start/loss" in row for row in found) == 2 and found[0]["grad/norm"] > 0.1
  for one, other in zip(found, expected):
    assert one.get("stage") == other.get("stage")
    same = {
      key
      for key in other.keys() - {"stage"}
      if not key.startswith("time/") and not key.endswith("_per_second")
    }
    # Sums over devices are taken in another order between processes: float32 rounding of numbers of
    # size 1.
    assert {key: one[key] for key in same} == pytest.approx(
      {key: other[key] for key in same}, rel=1e-4, abs=2e-6
    )


def test_rollouts_are_exchanged_without_losing_a_bit():
  groups = random_groups(2, 3) + [
    [trajectory(("prompt", [1]), fault="lost: \u201cé\u201d \x00", stop="fault", answer=None)]
  ]
  assert processes.decoded(processes.encoded(groups)) == groups


def test_a_process_whose_first_one_is_not_there_says_so_in_time(monkeypatch, capsys):
  monkeypatch.setattr(processes, "START_S", 0)
  address = f"127.0.0.1:{free_port()}"
  with pytest.raises(
    ValueError, match=f"no first process answers at --coordinator={address}.*--process=0"
  ):
    processes.start(address, 2, 1)
  assert f"waiting for the first process at {address}" in capsys.readouterr().err


def test_one_process_takes_all_and_exchanges_nothing():
  groups = random_groups(2, 2)
  assert processes.mine(3) == [0, 1, 2]
  assert processes.exchange(groups, 2) == groups
  assert processes.any_of(True) and not processes.any_of(False) and processes.is_first()


@pytest.mark.parametrize(
  "flags, sentence",
  [
    (["--processes=2", "--process=0"], "--coordinator= must be HOST:PORT"),
    (
      ["--processes=2", "--process=2", "--coordinator=127.0.0.1:1"],
      "--process=2 must be at least 0 and below --processes=2",
    ),
  ],
)
def test_a_process_that_cannot_join_is_refused_in_words(flags, sentence, tmp_path):
  done = programs.run(*command(tmp_path / "run")[1:], *flags)
  assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()
