"""comparison.html: several runs in one page, as curves with bands and as tables."""

from collections.abc import Sequence
import pathlib
from typing import Any

from stratified import files
from stratified.reports import comparison, plots, text
from stratified.reports.comparison import Comparison
from stratified.runs import groups
from stratified.runs import workdir as workdirs

# Title, key of metrics.jsonl, percent, whether it is recorded at few steps only, what it tells.
FIRST = (
  (
    "Reward a rollout",
    "reward/mean",
    False,
    False,
    "Comparable where groups have the same reward; then higher, and sooner, is better.",
  ),
  (
    "Searches a question",
    "rollout/searches_mean",
    False,
    False,
    "Good is what the questions need; near 0 a group has learnt to skip the tool.",
  ),
)
MORE = (
  ("Held-out exact match", "eval/exact_match", True, True, "What the groups are compared by."),
  (
    "Rollouts with zero advantage",
    "advantage/zero_share",
    True,
    False,
    "These teach nothing; an estimator that leaves fewer learns from more.",
  ),
  (
    "Advantage, root mean square",
    "advantage/rms",
    False,
    False,
    "Groups of unlike size also differ in the size of their steps.",
  ),
  (
    "Policy entropy, nats a token",
    "policy/entropy",
    False,
    False,
    "Near 0 the policy no longer explores.",
  ),
  (
    "KL to the reference, nats a token",
    "loss/kl",
    False,
    False,
    "How far the policy has moved from its start.",
  ),
  (
    "Gradient norm before clipping",
    "grad/norm",
    False,
    False,
    "Jumps to many times the usual size come before a collapse.",
  ),
)
# Kinds of columns, and the heading of their table.
_TABLES = {"scores": "", "hops": "Exact match × 100 by hops", "training": "How the agent searched"}


def panels(made: Comparison, chosen: Sequence[tuple]) -> list[plots.Panel]:
  """Those of the chosen curves that any run has recorded."""
  longest = max((run.last_step for runs in made.groups.values() for run in runs), default=0)
  window = 1 if longest < 24 else 2 * (longest // 48) + 1
  looks, result = looks_of(made), []
  for title, key, percent, rare, meaning in chosen:
    curves = {
      label: comparison.curve(runs, key, 1 if rare else window)
      for label, runs in made.groups.items()
    }
    style = "dots" if rare else "line"
    drawn = tuple(
      plots.Series(label, c.x, c.mean, looks[label][0], style, c.low, c.high, looks[label][1])
      for label, c in curves.items()
      if c.x
    )
    result += [plots.Panel(title, drawn, percent=percent, meaning=meaning)] * bool(drawn)
  return result


def looks_of(made: Comparison) -> dict[str, tuple[int, bool]]:
  """{label: (color, dashed)}: ordered shades where one number tells groups apart, else colours."""
  every = [run for runs in made.groups.values() for run in runs]
  keys = groups.differing(every)
  ordered = len(keys) == 1 and all(
    workdirs.is_number(run.config.get(keys[0])) for run in every if run.config
  )
  return plots.colors(list(made.groups), ordered)


def _legend(made: Comparison) -> list[tuple[str, int, bool]]:
  return [(label, *look) for label, look in looks_of(made).items()]


def picture(made: Comparison) -> str:
  """The first figure as an SVG file."""
  return plots.figure(
    panels(made, FIRST), width=400, height=260, columns=2, legend=_legend(made), standalone=True
  )


def page(made: Comparison) -> str:
  """The comparison as one HTML page that needs nothing beside it."""
  count = sum(map(len, made.groups.values()))
  first, legend = panels(made, FIRST), _legend(made)
  more = [
    (plots.figure([panel], width=390, height=200, legend=legend), panel.meaning)
    for panel in panels(made, MORE)
  ]
  values = {
    "title": f"{len(made.groups)} settings, {count} runs"
    if len(made.groups) > 1
    else f"{count} runs",
    "first": first
    and (
      plots.figure(first, width=600, height=290, columns=2, legend=legend),
      plots.figure(first, width=360, height=220, legend=legend),
    ),
    "meanings": [(panel.title, panel.meaning) for panel in first],
    "has_bands": any(v is not None for panel in first for one in panel.series for v in one.low),
    "tables": _tables(made),
    "reference": made.reference if len(made.groups) > 1 else None,
    "legend": comparison.legend(made),
    "notes": made.notes,
    "more": more,
    "runs": [(label, run) for label, runs in made.groups.items() for run in runs],
  }
  return text.render("comparison.html", values)


def _tables(made: Comparison) -> list[tuple[str, list[str], list[tuple[str, list]]]]:
  """(heading, head, [(label, [(value, interval)])]), a table for columns that belong together."""
  columns = comparison.table_columns(made.groups, made.reference, made.step)
  labels, counts = columns[:2]
  found = []
  for kind, heading in _TABLES.items():
    chosen = [column for column in columns if column.kind == kind]
    if not chosen and kind != "scores":
      continue
    chosen = [counts] * (kind == "scores") + chosen
    head = [labels.title, *(column.title for column in chosen)]
    rows = [
      (label, [_split(column.cells[i]) for column in chosen])
      for i, label in enumerate(labels.cells)
    ]
    found.append((heading, head, rows))
  return found


def _split(cell: str) -> tuple[str, str]:
  value, bracket, interval = cell.partition(" [")
  return value, f"[{interval}" if bracket else ""


def write(made: Comparison, folder: pathlib.Path) -> pathlib.Path:
  """Writes comparison.html, .md, .json and .svg, and returns the page's path."""
  folder.mkdir(parents=True, exist_ok=True)
  parts: dict[str, Any] = {
    "md": comparison.as_markdown(made),
    "svg": picture(made),
    "html": page(made),
  }
  for kind, content in parts.items():
    files.write_atomic(folder / f"comparison.{kind}", content)
  files.write_json(folder / "comparison.json", comparison.as_json(made))
  return folder / "comparison.html"
