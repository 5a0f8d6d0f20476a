"""Groups runs by what differs between them: the runs of one group are the same but for the seed."""

from collections.abc import Sequence
import json

from stratified.runs import workdir
from stratified.runs.workdir import Run


def differing(runs: Sequence[Run]) -> list[str]:
  """Config keys in which runs differ, but for those in which a group's may; absent is a value."""
  from stratified.runs import settings  # brings jax, which a program that groups nothing need not

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
  """Groups runs by the label given, else by the config keys that differ: ({label: runs}, notes)."""
  unnamed = [run for label, run in runs if label is None]
  keys = differing(unnamed)
  names = workdir.short_keys(keys)
  groups: dict[str, list[Run]] = {}
  for label, run in runs:
    if label is None:
      label = (
        ", ".join(f"{names[key]} {workdir.show(run.config.get(key))}" for key in keys) or "all runs"
      )
    groups.setdefault(label, []).append(run)
  notes = []
  for label, members in groups.items():
    mixed = differing(members)
    if mixed:
      notes.append(f"{label} mixes runs that differ in {', '.join(mixed)}.")
    seeds = [json.dumps(run.seed) for run in members if run.seed is not None]
    if len(set(seeds)) < len(seeds):
      notes.append(
        f"{label} holds several runs of one seed; its interval takes them for independent."
      )
  return groups, notes
