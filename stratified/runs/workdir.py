"""Reads workdirs: what a run's files hold, and how runs are found and named.

    config.json                       the run's config
    run.json                          when it began, by which command, of how many parameters
    metrics.jsonl                     a row a step, and rows of evaluations and of the warm start
    evaluation.json                   the newest scores by question set
    trajectories/step_NNNNNN.jsonl    the rollouts of a step, one a line

Of two equal runs, or of one that was resumed and one that was not, only what the clock measures
differs in metrics.jsonl: time/* and *tokens_per_second.

Other modules read these files through this one; beside it only what writes them (`writer`,
`checkpoint`) opens them. `read` is lenient: what is missing or broken is empty and named in the
notes. `config_of` and `evaluation_of` are strict.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import datetime
import glob
import json
import math
import os
import pathlib
import re
from typing import Any

from stratified import files

MAIN = "eval/exact_match"

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
  """What a workdir holds.

  Its config with dotted keys, the rows of metrics.jsonl, evaluation.json, the files of its rollouts
  by step, run.json, when metrics.jsonl was last written, and sentences on what is missing or could
  not be read.
  """

  path: pathlib.Path
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rows: Sequence[Row] = ()
  evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  trajectories: Mapping[int, pathlib.Path] = dataclasses.field(default_factory=dict)
  notes: Sequence[str] = ()
  start: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  written: str = ""

  @property
  def seed(self) -> Any:
    return self.config.get("seed")

  @property
  def planned(self) -> int | None:
    """The steps that the config asks for."""
    steps = self.config.get("num_steps")
    return steps if isinstance(steps, int) else None

  @property
  def steps(self) -> list[Row]:
    """The rows of training steps."""
    return [row for row in self.rows if "reward/mean" in row and isinstance(row.get("step"), int)]

  @property
  def updates(self) -> list[Row]:
    """The rows of training steps of every kind: those on pairs have no reward."""
    named = [row for row in self.rows if {"reward/mean", "stage"} & row.keys()]
    return [row for row in named if isinstance(row.get("step"), int)]

  @property
  def last_step(self) -> int:
    """The newest training step, 0 before the first."""
    return max((row["step"] for row in self.updates), default=0)

  @property
  def trained(self) -> bool:
    """Whether the last planned step is trained, or the run ended at a plateau before."""
    ended = any(row.get("run/ended") for row in self.rows)
    return self.planned is not None and (ended or self.last_step >= self.planned)

  @property
  def finished(self) -> bool:
    """Whether the last planned step is trained and evaluated."""
    return self.trained and evaluated(self, self.last_step)

  def rollouts(self, step: int) -> list[Row]:
    """The records of a step's rollouts, those lines that can be read."""
    return files.read_rows(self.trajectories[step])[0] if step in self.trajectories else []


def read(path: str | os.PathLike) -> Run:
  """Reads a workdir leniently: what is missing or broken is empty, and a note."""
  folder, notes = pathlib.Path(path), []
  config = _object(folder / "config.json", notes)
  notes += ["config.json is missing."] * (not (folder / "config.json").exists())
  evaluation = _object(folder / "evaluation.json", notes)
  rows, unreadable = files.read_rows(folder / "metrics.jsonl")
  notes += [f"Lines of metrics.jsonl that could not be read: {unreadable}."] * bool(unreadable)
  rows = [row for row in rows if _is_step(row.get("step", row.get("warm_start/step")))]
  trajectories = {
    int(name[1]): file
    for file in sorted((folder / "trajectories").glob("*"))
    if (name := re.fullmatch(r"step_(\d+)\.jsonl", file.name))
  }
  start = _object(folder / "run.json", notes)
  written = _written(folder / "metrics.jsonl")
  return Run(folder, config, rows, evaluation, trajectories, notes, start, written)


def _written(path: pathlib.Path) -> str:
  """When a file was last written, as `2026-01-31 09:30 UTC`; nothing where there is none."""
  try:
    return moment(path.stat().st_mtime)
  except (OSError, ValueError, OverflowError):
    return ""


def moment(seconds: float) -> str:
  """A time as pages name it."""
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _is_step(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _object(path: pathlib.Path, notes: list[str]) -> dict[str, Any]:
  """The file's object; of config.json with dotted keys."""
  if not path.exists():
    return {}
  try:
    value = files.parse_object(path.read_text(encoding="utf-8"))
    if value is not None:
      json.dumps(value)  # what is nested too deeply to be shown is not taken
      return files.flatten(value) if path.name == "config.json" else value
  except (OSError, ValueError, RecursionError):
    pass
  notes.append(f"{path.name} is no JSON object.")
  return {}


def config_of(path: str | os.PathLike) -> dict[str, Any] | None:
  """Reads the nested config of a workdir's run; None without one, ValueError where damaged."""
  file = pathlib.Path(path) / "config.json"
  return files.read_object(file) if file.exists() else None


def evaluation_of(path: str | os.PathLike) -> dict[str, Any]:
  """Reads evaluation.json of a workdir; {} without one, ValueError where damaged."""
  file = pathlib.Path(path) / "evaluation.json"
  return files.read_object(file) if file.exists() else {}


def find(arguments: Iterable[str]) -> tuple[list[tuple[str | None, pathlib.Path]], list[str]]:
  """Finds the runs of `path` and `label=path`, a path, glob or folder: ([(label, workdir)], notes).

  Names with numbers come in the order of the numbers. A path without a run is named in the notes.
  """
  found, notes = [], []
  for argument in arguments:
    label, path = None, argument
    if "=" in argument and not os.path.exists(argument):
      label, _, path = argument.partition("=")
    folders = [
      folder for match in sorted(glob.glob(path), key=natural) for folder in _workdirs(match)
    ]
    found += [(label, folder) for folder in folders if all(folder != known for _, known in found)]
    if not folders:
      notes.append(f"{path} holds no run: there is no config.json or metrics.jsonl.")
  return found, notes


def _workdirs(path: str) -> list[pathlib.Path]:
  is_run = lambda folder: any(
    (folder / name).is_file() for name in ("config.json", "metrics.jsonl")
  )
  folder = pathlib.Path(path)
  if is_run(folder):
    return [folder]
  inside = sorted(folder.iterdir(), key=natural) if folder.is_dir() else []
  return [one for one in inside if one.is_dir() and is_run(one)]


def natural(name: Any) -> list:
  """Sorts `alpha-0.2` before `alpha-0.10` and `seed-9` before `seed-10`."""
  parts = re.split(r"(\d+(?:\.\d+)?)", str(name))
  return [(float(part), "") if i % 2 else (math.inf, part) for i, part in enumerate(parts)]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
  """Maps dotted keys to short names that tell them apart: a last part, or what precedes `.name`."""
  last = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
  return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def show(value: Any) -> str:
  """A config's value as a person writes it."""
  return (
    f"{value:g}"
    if isinstance(value, float)
    else value
    if isinstance(value, str)
    else json.dumps(value)
  )


def evaluated(run: Run, step: int) -> bool:
  return any(row.get("step") == step and is_number(row.get(MAIN)) for row in run.rows)


def problem(run: Run, step: int | None) -> str | None:
  """Says why the run has no end result at `step` (None: its planned end); None if it has one."""
  if not run.steps:
    return f"{run.path} has no training step yet: it is left out."
  if step is not None:
    return (
      None
      if evaluated(run, step)
      else f"{run.path} is not evaluated at step {step}: in the curves only."
    )
  if run.planned is None:
    return f"{run.path} has no config.json that says its number of steps: in the curves only."
  if not run.trained:
    return f"{run.path} stands at step {run.last_step} of {run.planned}: in the curves only."
  if not run.finished:
    return f"{run.path} is not evaluated at its last step {run.last_step}: in the curves only."
  return None


def is_number(value: Any) -> bool:
  """Whether a value can be drawn and averaged: an int or float, finite, no bool, below 1e300."""
  return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def number(row: Row, key: str) -> float | None:
  """A row's number, None where it has none."""
  value = row.get(key)
  return value if is_number(value) else None
