"""Workdirs of finished and unfinished runs: how they are found, read, named, and grouped by what
differs in them."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import glob
import json
import math
import os
import pathlib
import re
from typing import Any

from stratified import files

MAIN = "eval/exact_match"


@dataclasses.dataclass(frozen=True)
class Run:
  """What a workdir holds: its config with dotted keys, the rows of metrics.jsonl, and
  evaluation.json."""

  path: pathlib.Path
  config: Mapping[str, Any]
  rows: Sequence[Mapping[str, Any]]
  evaluation: Mapping[str, Any]

  @property
  def seed(self) -> Any:
    return self.config.get("seed")

  @property
  def planned(self) -> int | None:
    return self.config.get("num_steps")

  @property
  def last_step(self) -> int:
    """The newest training step, 0 before the first."""
    return max((row["step"] for row in self.rows if "reward/mean" in row), default=0)

  @property
  def finished(self) -> bool:
    """Whether the last planned step is trained and evaluated."""
    return (
      self.planned is not None
      and self.last_step >= self.planned
      and evaluated(self, self.last_step)
    )


def read(path: str | os.PathLike) -> Run:
  """Reads a workdir leniently: what is missing or broken is empty."""
  folder = pathlib.Path(path)
  rows, _ = files.read_rows(folder / "metrics.jsonl")
  rows = [row for row in rows if isinstance(row.get("step", row.get("warm_start/step")), int)]
  return Run(
    folder,
    files.flatten(_object(folder / "config.json")),
    rows,
    _object(folder / "evaluation.json"),
  )


def _object(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}


def find(arguments: Iterable[str]) -> tuple[list[tuple[str | None, pathlib.Path]], list[str]]:
  """([(label or None, workdir)], notes) of `path` and `label=path`, where a path may be a glob or a
  folder of runs.

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
  """Dotted key -> the shortest name that tells it apart: its last part, or what stands before
  `.name`."""
  last = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
  return {key: name if list(last.values()).count(name) == 1 else key for key, name in last.items()}


def show(value: Any) -> str:
  return (
    f"{value:g}"
    if isinstance(value, float)
    else value
    if isinstance(value, str)
    else json.dumps(value)
  )


def differing(runs: Sequence[Run]) -> list[str]:
  """The config keys in which runs differ, apart from those in which runs of a group may; absent
  counts as a value."""
  from stratified.runs import settings  # brings jax, which a page of one run has no use for

  ignore = settings.within_group()
  keys = sorted({key for run in runs for key in run.config})
  known = [run for run in runs if run.config]
  return [
    key
    for key in keys
    if key not in ignore
    and len({json.dumps(run.config.get(key), sort_keys=True) for run in known}) > 1
  ]


def grouped(runs: Sequence[tuple[str | None, Run]]) -> tuple[dict[str, list[Run]], list[str]]:
  """({label: runs}, notes): by the label given, else by the config keys that differ, in order of
  appearance."""
  unnamed = [run for label, run in runs if label is None]
  keys = differing(unnamed)
  names = short_keys(keys)
  groups: dict[str, list[Run]] = {}
  for label, run in runs:
    if label is None:
      label = ", ".join(f"{names[key]} {show(run.config.get(key))}" for key in keys) or "all runs"
    groups.setdefault(label, []).append(run)
  notes = []
  for label, members in groups.items():
    mixed = differing(members)
    if mixed:
      notes.append(f"{label} mixes runs that differ in {', '.join(mixed)}.")
    seeds = [run.seed for run in members if run.seed is not None]
    if len(set(seeds)) < len(seeds):
      notes.append(
        f"{label} holds several runs of one seed; its interval takes them for independent."
      )
  return groups, notes


def evaluated(run: Run, step: int) -> bool:
  return any(row.get("step") == step and is_number(row.get(MAIN)) for row in run.rows)


def problem(run: Run, step: int | None) -> str | None:
  """Why the run has no end result, in a sentence; None if it has one. `step` None is each run's
  planned end."""
  if not any("reward/mean" in row for row in run.rows):
    return f"{run.path} has no training step yet: it is left out."
  if step is not None:
    return (
      None
      if evaluated(run, step)
      else f"{run.path} is not evaluated at step {step}: in the curves only."
    )
  if run.planned is None:
    return f"{run.path} has no config.json that says its number of steps: in the curves only."
  if run.last_step < run.planned:
    return f"{run.path} stands at step {run.last_step} of {run.planned}: in the curves only."
  if not run.finished:
    return f"{run.path} is not evaluated at its last step {run.last_step}: in the curves only."
  return None


def is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)
