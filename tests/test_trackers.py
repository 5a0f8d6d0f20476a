"""W&B, MLflow and trackio beside TensorBoard: the same rows, the same run after a resume, and no
fault of theirs that ends a run. The packages are stand-ins with the calls that theirs document."""

import json
import sys
import threading
import types

import pytest

from configs import search_r1
from stratified.runs import trackers
from stratified.runs.writer import Writer

TRAIN = {"step": 3, "reward/mean": 0.5, "stage": "reinforcement"}
WARM = {"warm_start/step": 7, "warm_start/loss": 2.0}


def config(name):
  made = search_r1.get_config("smoke")
  made.logging.tracker, made.logging.project = name, "searching"
  return made


def write(folder, name, rows=(WARM, TRAIN), **resumed):
  """Writes rows as a process of a run does, to its end."""
  (folder / "config.json").write_text('{"seed": 1, "loss": {"clip_ratio": 0.2}}')
  with Writer(folder, backends=trackers.of(config(name)), **resumed) as writer:
    for row in rows:
      writer.write(row)


class Wandb(types.SimpleNamespace):
  """Keeps what `init`, `log` and `finish` were given; `fault` is raised by every `log`."""

  def __init__(self, fault=None):
    super().__init__(calls=[], fault=fault)

  def init(self, **options):
    self.calls.append(("init", options))
    return self

  def define_metric(self, name, step_metric):
    self.calls.append(("axis", name, step_metric))

  def log(self, values):
    if self.fault:
      raise self.fault
    self.calls.append(("log", values))

  def finish(self):
    self.calls.append(("finish",))


def test_a_run_without_a_tracker_has_none():
  assert trackers.of(search_r1.get_config("tiny")) == []
  trackers.check(search_r1.get_config("tiny"))


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_package_that_is_missing_is_said_in_one_sentence(name, monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ValueError, match=f"'{name}' needs a package that is not installed: pip inst"):
    trackers.check(config(name))
  monkeypatch.setattr("importlib.util.find_spec", lambda name: "found")
  trackers.check(config(name))


def test_wandb_gets_each_row_on_its_axis_and_the_same_run_after_a_resume(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", module := Wandb())
  write(tmp_path, "wandb")
  (_, options), *rest = module.calls
  assert options["project"] == "searching" and options["name"] == tmp_path.name
  assert options["config"] == {"seed": 1, "loss.clip_ratio": 0.2} and options["resume"] == "allow"
  assert rest == [
    ("axis", "*", "step"),
    ("axis", "warm_start/*", "warm_start/step"),
    ("log", {"warm_start/step": 7, "warm_start/loss": 2.0}),
    ("log", {"step": 3, "reward/mean": 0.5}),
    ("finish",),
  ]
  module.calls.clear()
  write(tmp_path, "wandb", [TRAIN | {"step": 4}], resume_step=3)
  assert module.calls[0][1]["id"] == options["id"]
  assert [call for call in module.calls if call[0] == "log"] == [
    ("log", {"step": 4, "reward/mean": 0.5})
  ]


def test_mlflow_gets_the_config_once_and_each_number_at_its_step(tmp_path, monkeypatch):
  calls = []

  class Client:
    def get_experiment_by_name(self, name):
      calls.append(("experiment", name))

    def create_experiment(self, name):
      return "7"

    def create_run(self, experiment, run_name):
      calls.append(("run", experiment, run_name))
      return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def update_run(self, key, status):
      calls.append((key, status))

    def log_batch(self, key, metrics=(), params=()):
      calls.append((key, [(one[0], one[1], *one[3:]) for one in metrics], list(params)))

    def set_terminated(self, key):
      calls.append((key, "terminated"))

  entities = types.SimpleNamespace(Metric=lambda *of: of, Param=lambda *of: of)
  fake = types.SimpleNamespace(MlflowClient=Client, entities=entities)
  monkeypatch.setitem(sys.modules, "mlflow", fake)
  write(tmp_path, "mlflow")
  assert calls == [
    ("experiment", "searching"),
    ("run", "7", tmp_path.name),
    ("r1", [], [("seed", "1"), ("loss.clip_ratio", "0.2")]),
    ("r1", [("warm_start/loss", 2.0, 7)], []),
    ("r1", [("reward/mean", 0.5, 3)], []),
    ("r1", "terminated"),
  ]
  calls.clear()
  write(tmp_path, "mlflow", [TRAIN], resume_step=2)
  assert calls == [("r1", "RUNNING"), ("r1", [("reward/mean", 0.5, 3)], []), ("r1", "terminated")]


def test_trackio_keeps_its_name_and_two_trackers_of_a_run_keep_theirs(tmp_path, monkeypatch):
  calls = []
  fake = types.SimpleNamespace(
    init=lambda **options: calls.append(options),
    log=lambda values, step: calls.append((values, step)),
    finish=lambda: calls.append("finish"),
  )
  monkeypatch.setitem(sys.modules, "trackio", fake)
  (tmp_path / trackers.FILE).write_text('{"wandb": "w"}')
  write(tmp_path, "trackio", [TRAIN])
  options, row, end = calls
  assert options["name"].startswith(tmp_path.name) and options["resume"] == "allow"
  assert row == ({"reward/mean": 0.5}, 3) and end == "finish"
  kept = json.loads((tmp_path / trackers.FILE).read_text())
  assert kept == {"wandb": "w", "trackio": options["name"]}


@pytest.mark.parametrize(
  "module, sentences",
  [
    (
      Wandb(fault=OSError("no route\nto host")),
      ["did not take step 1 (OSError: no route to host)"],
    ),
    (None, []),
  ],
)
def test_a_fault_is_told_and_the_run_goes_on(tmp_path, monkeypatch, capsys, module, sentences):
  monkeypatch.setitem(sys.modules, "wandb", module)  # None can't be imported
  write(tmp_path, "wandb", [TRAIN | {"step": step} for step in range(1, 9)])
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == len(sentences) + 1 and "gets nothing more of this run" in lines[-1]
  for line, said in zip(lines, sentences):
    assert said in line and line.endswith("metrics.jsonl has everything")


def test_a_tracker_that_hangs_delays_no_step_and_not_the_end(tmp_path, monkeypatch, capsys):
  hangs = threading.Event()
  module = Wandb()
  module.log = lambda values: hangs.wait()
  monkeypatch.setitem(sys.modules, "wandb", module)
  monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
  monkeypatch.setattr(trackers, "MOST_WAITING", 3)
  write(tmp_path, "wandb", [TRAIN | {"step": step} for step in range(1, 20)])
  hangs.set()
  said = capsys.readouterr().err
  assert "does not keep up" in said and "has not taken every row within" in said
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 19
