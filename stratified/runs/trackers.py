"""Sends a run's numbers to W&B, MLflow or trackio too, where `logging.tracker` names one.

The tracker works in a thread of its own, behind a queue: one that fails, or whose server hangs,
delays no step and never ends a run. WORKDIR/tracker.json keeps the name that the run has there, so
that a resumed run goes on in it.
"""

from collections.abc import Callable, Mapping
import importlib
import importlib.util
import pathlib
import queue
import sys
import threading
import time
from typing import Protocol
import uuid

from stratified import files
from stratified.config import read
from stratified.runs import workdir as workdirs
from stratified.runs.events import Backend
from stratified.runs.writer import LoggingSettings

FILE = "tracker.json"
MOST_WAITING = 10_000  # rows that may wait for a slow tracker; more are dropped and counted
CLOSE_S = 60.0  # how long a run waits at its end for rows that are not sent yet
MOST_FAILURES = 3  # in a row, after which nothing more is sent
AXES = {"train": "step", "warm_start": "warm_start/step"}  # curve's run -> what its rows count


class Tracker(Protocol):
  """A run in a tracker, made with (workdir, project, key, config).

  key: what an earlier process of this run got from `key`; None for a new run.
  """

  key: str

  def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
    """Sends a row's numbers; `axis` is the key that its step stands under."""

  def close(self) -> None: ...


class Wandb:
  """A run on Weights & Biases; its settings are those of that package (WANDB_MODE=offline, ...)."""

  def __init__(self, workdir: pathlib.Path, project: str, key: str | None, config: dict):
    wandb = importlib.import_module("wandb")
    self.key = key or uuid.uuid4().hex[:12]
    self._run = wandb.init(
      project=project,
      name=workdir.resolve().name,
      id=self.key,
      resume="allow",
      config=config,
      dir=str(workdir),
    )
    self._run.define_metric("*", step_metric=AXES["train"])
    self._run.define_metric("warm_start/*", step_metric=AXES["warm_start"])

  def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
    self._run.log({axis: step, **values})

  def close(self) -> None:
    self._run.finish()


class Mlflow:
  """A run on MLflow; MLFLOW_TRACKING_URI says where."""

  def __init__(self, workdir: pathlib.Path, project: str, key: str | None, config: dict):
    mlflow = importlib.import_module("mlflow")
    self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
    if key is not None:
      self.key = key
      self._client.update_run(key, status="RUNNING")
      return
    experiment = self._client.get_experiment_by_name(project)
    number = experiment.experiment_id if experiment else self._client.create_experiment(project)
    self.key = self._client.create_run(number, run_name=workdir.resolve().name).info.run_id
    params = [self._entities.Param(name, f"{value}"[:500]) for name, value in config.items()]
    for at in range(0, len(params), 100):  # as many as a call takes
      self._client.log_batch(self.key, params=params[at : at + 100])

  def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
    now = int(1000 * time.time())
    metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
    self._client.log_batch(self.key, metrics=metrics)

  def close(self) -> None:
    self._client.set_terminated(self.key)


class Trackio:
  """A run of trackio, which keeps it on this machine unless told otherwise."""

  def __init__(self, workdir: pathlib.Path, project: str, key: str | None, config: dict):
    self._trackio = importlib.import_module("trackio")
    self.key = key or f"{workdir.resolve().name}-{uuid.uuid4().hex[:6]}"
    self._trackio.init(project=project, name=self.key, resume="allow", config=config)

  def write(self, axis: str, step: int, values: Mapping[str, float]) -> None:
    own = {} if axis == AXES["train"] else {axis: step}  # trackio's steps are training's
    self._trackio.log({**values, **own}, step=step)

  def close(self) -> None:
    self._trackio.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}


def check(config) -> None:
  """Raises ValueError where the tracker of the config has no package here."""
  name = read(LoggingSettings, config).tracker
  if name != "none" and importlib.util.find_spec(name) is None:
    raise ValueError(
      f"logging.tracker={name!r} needs a package that is not installed: pip install "
      f"{name}, or leave the tracker out"
    )


def of(config) -> list[Callable[..., Backend]]:
  """The tracker of a config as a backend of the writer; nothing where it names none."""
  settings = read(LoggingSettings, config)
  if settings.tracker == "none":
    return []
  sent: list[Sender] = []

  def backend(workdir: pathlib.Path, run: str, first: int | None) -> "Curve":
    del first  # a step that is repeated stands twice: no tracker forgets what it has
    if not sent:
      sent.append(Sender(workdir, settings.tracker, settings.project))
    return Curve(sent[0], AXES[run])

  return [backend]


class Curve:
  """A backend of the writer: the rows of one axis."""

  def __init__(self, sender: "Sender", axis: str):
    self._sender, self._axis = sender, axis

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._sender.put(self._axis, step, values)

  def close(self) -> None:
    self._sender.close()


class Sender:
  """Hands rows to a tracker in a thread of its own; says what goes wrong, each time once."""

  def __init__(self, workdir: pathlib.Path, name: str, project: str):
    self._workdir, self._name, self._project = workdir, name, project
    self._waiting: queue.Queue = queue.Queue(MOST_WAITING)
    self._said: set[str] = set()
    self._over = False
    self._thread = threading.Thread(target=self._work, name=name, daemon=True)
    self._thread.start()

  def put(self, axis: str, step: int, values: Mapping[str, float]) -> None:
    """Queues a row; returns at once."""
    if self._over:
      return
    try:
      self._waiting.put_nowait((axis, step, dict(values)))
    except queue.Full:
      self._say(f"does not keep up; rows from {axis} {step} on are missing there")

  def close(self) -> None:
    """Waits for the rows that are not sent yet, up to CLOSE_S."""
    if self._thread.is_alive() and not self._over:
      self._over = True
      try:
        self._waiting.put(None, timeout=CLOSE_S)
      except queue.Full:
        pass
      self._thread.join(CLOSE_S)
      if self._thread.is_alive():
        self._say(f"has not taken every row within {CLOSE_S:.0f} s; the rest is missing there")

  def _work(self) -> None:
    try:
      tracker = self._open()
      failures = 0
      while (row := self._waiting.get()) is not None:
        try:
          tracker.write(*row)
          failures = 0
        except (Exception, SystemExit) as error:
          failures += 1
          self._say(f"did not take {row[0]} {row[1]}{_why(error)}", "row")
          if failures == MOST_FAILURES:
            raise
      tracker.close()
    except (Exception, SystemExit) as error:
      self._over = True
      self._say(f"gets nothing more of this run{_why(error)}")

  def _open(self) -> Tracker:
    path = self._workdir / FILE
    known = files.find_object(path) or {}
    config = files.flatten(workdirs.config_of(self._workdir) or {})
    tracker = TRACKERS[self._name](self._workdir, self._project, known.get(self._name), config)
    files.write_json(path, known | {self._name: tracker.key})
    return tracker

  def _say(self, text: str, kind: str = "") -> None:
    """Prints a sentence to stderr, of each kind the first alone."""
    if (kind or text) not in self._said:
      self._said.add(kind or text)
      print(f"{self._name} {text}; metrics.jsonl has everything", file=sys.stderr, flush=True)


def _why(error: BaseException) -> str:
  text = " ".join(f"{error}".split())[:300]
  return f" ({type(error).__name__}{': ' * bool(text)}{text})"
