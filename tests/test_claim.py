"""One run writes a workdir at a time: the second is told who does, a killed one blocks nothing."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest
from test_train import command, ROOT

from stratified.runs import claim

HOLD = """
import sys, time
from stratified.runs import claim
with claim.Claim() as held:
  held.take(sys.argv[1])
  print("held", flush=True)
  time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
  """Another process that writes tmp_path."""
  process = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
  )
  assert process.stdout.readline() == "held\n"
  yield process
  process.kill()
  process.wait()


def test_the_second_is_told_who_writes_and_the_way_out(holder, tmp_path):
  with pytest.raises(ValueError) as caught, claim.Claim() as mine:
    mine.take(tmp_path)
  said = str(caught.value)
  assert f"process {holder.pid} on {os.uname().nodename}, since 20" in said
  assert "wait for that run or stop it" in said and "another --workdir" in said


def test_a_killed_writer_blocks_nothing(holder, tmp_path):
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  with claim.Claim() as mine:
    mine.take(tmp_path)
    assert f'"pid": {os.getpid()}' in (tmp_path / claim.NAME).read_text()


def test_a_writer_that_ends_frees_its_workdir_and_holds_no_other(holder, tmp_path):
  with claim.Claim() as mine:
    mine.take(tmp_path / "other")
  for _ in range(2):
    with claim.Claim() as again:
      again.take(tmp_path / "other")


def test_a_child_process_does_not_keep_the_lock(tmp_path):
  with claim.Claim() as mine:
    mine.take(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
  try:
    with claim.Claim() as again:
      again.take(tmp_path)
  finally:
    child.kill()
    child.wait()


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch, capsys):
  def none(*unused):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", none)
  with claim.Claim() as mine:
    mine.take(tmp_path)
  assert "has no locks (No locks available)" in capsys.readouterr().out


def test_of_two_runs_started_together_one_trains_and_the_other_is_refused(tmp_path):
  workdir = tmp_path / "run"
  runs = [
    subprocess.Popen(
      command(workdir, num_steps=40), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    for _ in range(2)
  ]
  try:
    give_up = time.monotonic() + 300
    while all(run.poll() is None for run in runs):
      assert time.monotonic() < give_up, "neither of two runs of one workdir ended"
      time.sleep(0.1)
    ended, other = sorted(runs, key=lambda run: run.poll() is None)
    assert ended.returncode == 1 and other.poll() is None
    said = ended.stderr.read().decode()
    assert f"is being written by process {other.pid} on" in said and "Traceback" not in said
    while not (workdir / "metrics.jsonl").exists():  # before it works, a signal ends it at once
      assert time.monotonic() < give_up and other.poll() is None
      time.sleep(0.1)
    other.send_signal(signal.SIGTERM)
    assert other.wait(timeout=120) == 0
  finally:
    for run in runs:
      run.kill()
      run.wait()
  steps = [line for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert len(steps) == len(set(steps)), "a row stands twice"
