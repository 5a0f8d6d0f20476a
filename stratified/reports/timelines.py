"""Puts the rows of a run, whatever its stages and cycles, on one axis, and takes curves of them."""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

from stratified.reports.alarms import Alarm
from stratified.reports.curves import Series
from stratified.reports.plots import Panel, Stage
from stratified.runs.workdir import number

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Timeline:
  """A run's rows, each with its place `x` on one axis and the number of its stage, `part`.

  x is the step. Rows with `stage` are placed one stage behind the other, in the order in which
  they were written; a stage that counts its own steps is moved to where the last one ended. stages:
  empty where no row names one. cycles: whether stages alternate, so that they are told apart by
  shade.
  """

  rows: Rows
  stages: tuple[Stage, ...] = ()
  cycles: bool = False

  @property
  def train(self) -> list[Mapping[str, Any]]:
    return [row for row in self.rows if "reward/mean" in row and "x" in row]

  def placed(self, alarms: Sequence[Alarm]) -> list[Alarm]:
    """The alarms with their places on the axis for their steps."""
    x = {row["step"]: row["x"] for row in self.train}
    return [dataclasses.replace(alarm, step=x.get(alarm.step, alarm.step)) for alarm in alarms]

  @property
  def x_label(self) -> str:
    return "step of the run, stage by stage" if self.stages else "step"

  def panel(self, title: str, series: Sequence[Series], **fields: Any) -> Panel:
    """A plot with the stages behind it, over all cycles where there are any."""
    shaded = [stage for stage in self.stages if stage.shade is not None]
    x_limits = (shaded[0].begin, shaded[-1].end) if self.cycles else ()
    return Panel(title, tuple(series), stages=self.stages, x_limits=x_limits, **fields)

  def series(
    self, key: str, name: str, color: int, style: str, *, rows: Rows | None = None, x: str = "x"
  ) -> Series:
    """A metric of the rows that have it.

    It is broken between the stages of cycles, but for rare values ("dots"), which are measured at
    a stage's end.
    """
    found = self.rows if rows is None else rows
    found = [row for row in found if key in row and isinstance(row.get(x), int)]
    xs, ys = [row[x] for row in found], [number(row, key) for row in found]
    return Series(name, xs, ys, color, style, breaks=() if style == "dots" else breaks(found))


def breaks(rows: Rows) -> tuple[int, ...]:
  """The positions of rows that are of another stage of a cycle, or beyond a stage between them."""
  pairs = ((before.get("part", 0), row.get("part", 0), row) for before, row in zip(rows, rows[1:]))
  return tuple(i for i, (a, b, row) in enumerate(pairs, 1) if b - a > (0 if "cycle" in row else 1))


def make(rows: Rows) -> Timeline:
  """Places rows of metrics.jsonl on one axis."""
  if not any(isinstance(row.get("stage"), str) for row in rows):
    return Timeline([row | {"x": row["step"]} if "step" in row else row for row in rows])
  placed, begins, current, shift, last = [], [], None, 0, 0
  for row in rows:
    step, own = row.get("step"), "step" not in row
    step = row.get("warm_start/step", 0) if own else step
    named = row.get("stage"), row.get("cycle")
    if named[0] is not None and named != current:
      if current is not None and step + shift < last:
        shift = last - step
      current = named
      begins.append((row, step + shift))
    # What is measured after a stage with a count of its own stands at that stage's end.
    last = max(last, step + shift)
    placed.append(row | {"x": step + shift if own or "stage" in row else last, "part": len(begins)})
  return Timeline(placed, _stages(begins, placed), any("cycle" in row for row, _ in begins))


def _stages(begins: Sequence[tuple[Mapping, int]], placed: Rows) -> tuple[Stage, ...]:
  """The stages in order; those of cycles have the shade of their phase."""
  lasts = {row["part"]: row["x"] for row in placed}
  ends = [begin for _, begin in begins[1:]] + [lasts[len(begins)]]
  phases = dict.fromkeys(_phase(row) for row, _ in begins if "cycle" in row)
  shades = {phase: i for i, phase in enumerate(phases)}
  return tuple(
    Stage(_name(row), begin, lasts[i], end, shades.get(_phase(row)), _phase(row))
    for i, ((row, begin), end) in enumerate(zip(begins, ends), 1)
  )


def _phase(row: Mapping[str, Any]) -> str:
  """What a stage does, without the number of its cycle."""
  return re.sub(r"_\d+$", "", str(row.get("phase", row["stage"]))).replace("_", " ")


def _name(row: Mapping[str, Any]) -> str:
  cycle = row.get("cycle")
  return f"{_phase(row)} {cycle}" if cycle is not None else str(row["stage"]).replace("_", " ")
