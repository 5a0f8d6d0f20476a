"""Figures of a run whose stages alternate: searches around each phase, and pairs of each cycle."""

from collections.abc import Mapping, Sequence
import re
from typing import Any

from stratified.reports import text
from stratified.reports.plots import PALETTE, Panel, Series
from stratified.reports.timelines import Timeline
from stratified.runs.workdir import number

_PAIRS = (
  ("count", "Pairs", False, "What a distillation learns from, as its rollouts gave them."),
  (
    "skipped_all_wrong",
    "Questions without a right rollout",
    True,
    "Skipped: nothing to learn from, where it is needed most.",
  ),
  (
    "all_right",
    "Questions with right rollouts alone",
    True,
    "Not skipped, but they can teach efficiency only.",
  ),
)


def by_hops(line: Timeline, prefix: str) -> list[Series]:
  """The curves of keys PREFIX_hops_H, named by the number of hops."""
  pattern = re.compile(rf"{re.escape(prefix)}_hops_(\d{{1,9}})")
  found = {int(m[1]) for row in line.rows for key in row if (m := pattern.fullmatch(key))}
  return [
    line.series(f"{prefix}_hops_{hops}", f"{hops} hop" + "s" * (hops != 1), color % PALETTE, "dots")
    for color, hops in enumerate(sorted(found))
  ]


def _hops(number_of: int) -> str:
  return f"{number_of} hop" + "s" * (number_of != 1)


def panels(line: Timeline) -> list[Panel]:
  """Searches by hops at each phase's border, and of each cycle the pairs and what gave none."""
  found = []
  searches = [one for one in by_hops(line, "eval/searches") if len(one.x) > 1]
  if line.cycles and searches:
    found.append(
      line.panel(
        "Held-out searches a question, by hops",
        searches,
        meaning="Measured where a phase ends. A reference of few searches can pull them down.",
      )
    )
  mined = [row for row in line.rows if "pairs/skipped_all_wrong" in row]
  for name, title, percent, meaning in _PAIRS:
    key = f"pairs/{name}"
    curves = [line.series(key, "all", 7, "dots", rows=mined), *by_hops(line, key)]
    if curves[0].x:
      found.append(line.panel(title, curves, percent=percent, meaning=meaning))
  return found


def phase_table(line: Timeline) -> dict[str, Any] | None:
  """Searches by hops before and after each phase: {head, rows: (phase, cells)}; None without."""
  scored = [row for row in line.rows if "eval/searches_mean" in row]
  stages = [stage for stage in line.stages if stage.shade is not None]
  keys = sorted(
    {key for row in scored for key in row if re.fullmatch(r"eval/searches_hops_\d{1,9}", key)},
    key=lambda key: int(key.rpartition("_")[2]),
  )
  if not line.cycles or not scored or not keys:
    return None
  head = ["phase", "all", *(_hops(int(key.rpartition("_")[2])) for key in keys)]
  rows = []
  for before, after in zip([None, *stages], stages):
    first = before.last if before else after.begin
    pair = _last(scored, first), _last(scored, after.last, first)
    rows.append((after.name, [_change(pair, key) for key in ("eval/searches_mean", *keys)]))
  return {"head": head, "rows": rows}


def _last(scored: Sequence[Mapping], most: float, above: float = float("-inf")) -> Mapping:
  """The last evaluation at no more than x = most, and after x = above; empty without."""
  return next((row for row in reversed(scored) if above < row["x"] <= most), {})


def _change(pair: tuple[Mapping, Mapping], key: str) -> str:
  return " → ".join(text.fixed(number(row, key), 2) for row in pair)
