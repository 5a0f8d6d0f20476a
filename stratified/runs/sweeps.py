"""Runs the runs of a sweep, one subprocess after another; shares warm starts between them."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from stratified import files
from stratified.config import changed
from stratified.progress import duration
from stratified.runs import settings
from stratified.runs import workdir as workdirs

TRAIN = (sys.executable, str(pathlib.Path(__file__).parents[2] / "experiments" / "train.py"))


@dataclasses.dataclass(frozen=True)
class Job:
  """One run: folder, setting (its name without the seed), flags, whole config."""

  name: str
  setting: str
  workdir: pathlib.Path
  flags: tuple[str, ...]
  config: Mapping[str, Any]  # with dotted keys, as JSON gives it back


class Relay:
  """Passes Ctrl-C and SIGTERM on to the run at work as SIGTERM; a second Ctrl-C interrupts it.

  A run is in a session of its own: the terminal's Ctrl-C would otherwise reach it twice.
  """

  def __init__(self):
    self.asked = self.interrupted = False
    self.process: subprocess.Popen | None = None
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._ask)

  def _ask(self, number, frame):
    again, self.asked = self.asked, True
    self.interrupted |= number == signal.SIGINT
    if self.process is not None:
      self.process.send_signal(
        signal.SIGINT if again and number == signal.SIGINT else signal.SIGTERM
      )

  def attach(self, process: subprocess.Popen) -> None:
    self.process = process
    if self.asked:  # the signal came while the process was being started
      process.send_signal(signal.SIGTERM)


def finished(job: Job) -> bool:
  """Whether the folder holds this very run, trained and evaluated to its last step."""
  run = workdirs.read(job.workdir)
  return run.finished and not changed(run.config, job.config, settings.free())


def where(job: Job) -> str:
  """`finished`, `not started`, how far the run is, or that the folder is another config's."""
  run = workdirs.read(job.workdir)
  if finished(job):
    return "finished"
  if run.config and changed(run.config, job.config, (*settings.free(), "num_steps")):
    return "another config"
  if not run.rows:
    return "not started"
  return (
    f"step {run.last_step} of {job.config['num_steps']}" if run.last_step else "in its warm start"
  )


def share_warm_start(job: Job) -> pathlib.Path | None:
  """Copies a finished warm start of the sweep to a run that has not begun; returns whose, if any.

  The other run's config must agree in the seed and in everything that a warm start depends on;
  then, on the same machine, its parameters are bit for bit those that this run would reach itself.
  Its checkpoint, its rows of metrics.jsonl and its TensorBoard events are copied, so that the run
  looks like one that did its own.
  """
  steps = job.config.get("warm_start.num_steps")
  if not steps or (job.workdir / "warm_start").exists() or (job.workdir / "metrics.jsonl").exists():
    return None
  for other in sorted(job.workdir.parent.glob("*/config.json"), key=workdirs.natural):
    donor = workdirs.read(other.parent)
    # Orbax gives this name to a whole one only
    checkpoint = donor.path / "warm_start" / "checkpoints" / str(steps)
    rows = [row for row in donor.rows if "warm_start/step" in row]
    whole = checkpoint.is_dir() and [row["warm_start/step"] for row in rows] == list(
      range(1, steps + 1)
    )
    if not whole or changed(donor.config, job.config, settings.not_in_warm_start()):
      continue
    job.workdir.mkdir(parents=True, exist_ok=True)
    # The checkpoint comes last: rows of a warm start that has none are dropped by the run.
    with files.replacing_folder(job.workdir / "warm_start") as part:
      shutil.copytree(checkpoint, part / "checkpoints" / str(steps))
      events = donor.path / "tensorboard" / "warm_start"
      if events.is_dir():
        shutil.copytree(events, job.workdir / "tensorboard" / "warm_start", dirs_exist_ok=True)
      with files.replacing(job.workdir / "metrics.jsonl") as metrics:
        metrics.write_bytes(b"".join(map(files.json_line, rows)))
    return donor.path
  return None


def run_all(
  jobs: Sequence[Job], relay: Relay, *, share: bool = False, train: Sequence[str] = TRAIN
) -> dict[str, str]:
  """Runs what is not finished, in order, until the relay is asked: {name: why it failed}."""
  failed, taken = {}, []
  waiting = [job for job in jobs if not finished(job)]
  if len(waiting) < len(jobs):
    print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished already", flush=True)
  for number, job in enumerate(waiting):
    if relay.asked:
      break
    left = (
      f", about {duration(sum(taken) / len(taken) * (len(waiting) - number))} left" if taken else ""
    )
    print(f"=== run {number + 1} of {len(waiting)}: {job.name} ({where(job)}{left})", flush=True)
    donor = share_warm_start(job) if share else None
    if donor:
      print(f"warm start taken from {donor}", flush=True)
    start = time.monotonic()
    status, said = _run(job, relay, train)
    taken.append(time.monotonic() - start)
    if not relay.asked and not finished(job):
      why = f"ended with status {status}" if status else "ended before its last step"
      failed[job.name] = f"{why}; {job.workdir / 'train.log'} ends: {said}"
      print(f"{job.name} {failed[job.name]}", flush=True)
  return failed


def _run(job: Job, relay: Relay, train: Sequence[str]) -> tuple[int, str]:
  """Runs one: (exit status, last line said); all it says goes to the terminal and train.log."""
  job.workdir.mkdir(parents=True, exist_ok=True)
  command = [*train, *job.flags, f"--workdir={job.workdir}"]
  said = "nothing"
  with (
    (job.workdir / "train.log").open("a", encoding="utf-8") as log,
    subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      errors="replace",
      start_new_session=True,
    ) as process,
  ):
    relay.attach(process)
    for line in process.stdout:
      log.write(line)
      log.flush()
      sys.stdout.write(line)
      sys.stdout.flush()
      said = line.strip() or said
    status = process.wait()
    relay.process = None
  return status, said
