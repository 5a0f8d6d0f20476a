"""report.html: one self-contained page about a run, written from whatever its workdir holds so
far."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import re
from typing import Any

from stratified import files
from stratified.progress import duration
from stratified.reports import alarms as alarm_rules
from stratified.reports import charts, run_figures, score_table, transcripts
from stratified.reports.charts import chart_svg
from stratified.reports.transcripts import visible

_SHOWN = 6  # rollouts of the first and of the last step
_SUMMARY = (
  ("policy.name", "policy"),
  ("policy.checkpoint", "policy"),
  ("advantage.name", "advantage"),
  ("advantage.alpha", "alpha"),
  ("strata.name", "strata"),
  ("data.questions_per_step", "questions a step"),
  ("rollout.samples_per_question", "rollouts a question"),
  ("rollout.max_turns", "search turns"),
  ("optimizer.learning_rate", "learning rate"),
  ("loss.kl_coefficient", "KL coefficient"),
  ("loss.clip_ratio", "clip"),
  ("sampler.name", "sampler"),
  ("retriever.name", "retriever"),
  ("seed", "seed"),
)
_COUNTS = (
  "searches",
  "executed_searches",
  "search_count",
  "num_searches",
  "capped_searches",
  "capped_count",
)
STYLE = (
  charts.STYLE
  + transcripts.STYLE
  + """
:root{color-scheme:light dark;--page:#f5f6f8}
@media (prefers-color-scheme:dark){:root{--page:#111317}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:24px;margin:6px 0 4px;overflow-wrap:anywhere;line-height:1.25}
h2{font-size:18px;margin:34px 0 10px}
p{margin:6px 0}.soft,.said{color:var(--soft)}.said{font-size:13.5px;margin-top:6px}.said b{color:var(--ink)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(158px,1fr));gap:10px;margin:16px 0}
.tile,.panel{background:var(--card);border:1px solid var(--grid);border-radius:12px}
.tile{padding:12px 14px}.tile span{display:block;color:var(--soft);font-size:12.5px}
.tile b{display:block;font-size:21px;line-height:1.4;font-variant-numeric:tabular-nums;white-space:nowrap}
.panel{padding:8px 6px 6px}.panel svg{display:block;width:100%;height:auto}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px}
.note{border-left:4px solid var(--c7);background:var(--card);border-radius:6px;padding:8px 12px;margin:10px 0}
.note.alarm{border-color:var(--c4)}.note.fine{border-color:var(--c2)}.note ul{margin:4px 0;padding-left:20px}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--grid);border-radius:12px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--grid)}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:12.5px}th:first-child{text-align:left}
tbody th{font-weight:400;padding-left:26px}.set th,.set td{font-weight:600}.set th{padding-left:12px}
td.trained{background:linear-gradient(90deg,
color-mix(in srgb,var(--c2) 28%,transparent) var(--share),transparent 0)}
td.best{text-decoration:underline;text-underline-offset:3px}
.config td{text-align:left;white-space:normal;overflow-wrap:anywhere;
font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12.5px}
.narrow{display:none}
@media (max-width:700px){.wide{display:none}.narrow{display:block}th,td{padding:7px 8px}
tbody th{white-space:normal;padding-left:18px}
.set th{padding-left:10px}}
.more{margin-top:14px}.more>summary{cursor:pointer}
"""
)


@dataclasses.dataclass(frozen=True)
class Run:
  """What a workdir says: flat config, rows of metrics.jsonl, evaluation.json, rollouts of two
  steps.

  `rollouts` are those of the first and of the last step that has any; `notes` name in whole
  sentences what is missing or could not be read.
  """

  name: str
  config: Mapping[str, Any]
  rows: Sequence[Mapping[str, Any]]
  evaluation: Mapping[str, Any]
  rollouts: Sequence[tuple[int, Sequence[Mapping[str, Any]]]]
  notes: Sequence[str]


def write(workdir: str | os.PathLike) -> pathlib.Path:
  """Writes workdir/report.html from what the workdir holds and returns its path.

  The page needs nothing beside it: no script, no font, no picture from elsewhere. What a run has
  not recorded yet is named on it. Raises FileNotFoundError if there is no such folder.
  """
  run = read(workdir)
  path = pathlib.Path(workdir) / "report.html"
  files.write_atomic(path, page(run))
  return path


def picture(workdir: str | os.PathLike) -> str:
  """The run as one SVG file: reward and held-out exact match, searches a question, rollouts by
  stratum."""
  run = read(workdir)
  found = alarm_rules.find(run.rows, _rollouts_per_step(run.config))
  strata = run_figures.strata_panel(run.rows, found, _by_searches(run.config))
  shown = [*run_figures.first_panels(run.rows, found), strata]
  return chart_svg(shown, width=300, height=230, columns=3, standalone=True)


def read(workdir: str | os.PathLike) -> Run:
  """Reads a workdir, leniently: files that are absent or broken become notes."""
  folder = pathlib.Path(workdir)
  if not folder.is_dir():
    raise FileNotFoundError(f"there is no workdir {folder}")
  notes = []
  config = _object(folder / "config.json", notes)
  evaluation = _object(folder / "evaluation.json", notes)
  rows, unreadable = files.read_rows(folder / "metrics.jsonl")
  rows = [row for row in rows if isinstance(row.get("step", row.get("warm_start/step")), int)]
  if unreadable:
    notes.append(f"Lines of metrics.jsonl that could not be read: {unreadable}.")
  if not any("reward/mean" in row for row in rows):
    notes.append("metrics.jsonl has no training step yet.")
  by_step = {
    int(name[1]): path
    for path in sorted((folder / "trajectories").glob("*"))
    if (name := re.fullmatch(r"step_(\d+)\.jsonl", path.name))
  }
  steps = sorted({min(by_step), max(by_step)}) if by_step else []
  rollouts = [(step, files.read_rows(by_step[step])[0]) for step in steps]
  if not any(records for _, records in rollouts):
    notes.append("No trajectories are recorded yet.")
  return Run(folder.resolve().name, files.flatten(config), rows, evaluation, rollouts, notes)


def page(run: Run) -> str:
  """The whole report as HTML."""
  found = alarm_rules.find(run.rows, _rollouts_per_step(run.config))
  before, after = score_table.before_and_after(run.rows, run.evaluation)
  forced = score_table.forced(run.evaluation)
  drawn, missing, zero = run_figures.panels(run.rows, found, _by_searches(run.config))
  notes = list(run.notes)
  notes += [f"metrics.jsonl does not record {', '.join(missing)}."] * bool(missing)
  notes += ["The held-out questions have not been evaluated yet."] * (not after)
  table = score_table.table(before, after, forced)
  sections = [
    _header(run),
    _alarm_list(found, run.rows),
    _notes(notes),
    _tiles(run, before, after, forced),
    _first_figure(run, found),
    f"<h2>Held-out exact match × 100</h2>{table}{_table_legend(table, forced)}" if table else "",
    _curves(run, drawn, zero),
    _samples(run),
    _config_table(run),
  ]
  # even text that slipped through could do nothing
  policy = "default-src 'none'; style-src 'unsafe-inline'"
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    f"<title>{visible(run.name)}</title><style>{STYLE}</style></head>"
    f"<body><main>{''.join(sections)}</main></body></html>\n"
  )


def _object(path: pathlib.Path, notes: list[str]) -> dict[str, Any]:
  if not path.exists():
    notes.extend([f"{path.name} is missing."] * (path.name == "config.json"))
    return {}
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError:
    value = None
  if not isinstance(value, dict):
    notes.append(f"{path.name} is no JSON object.")
    return {}
  return value


def _header(run: Run) -> str:
  chips = [
    f'<span class="chip">{name} {visible(run.config[key])}</span>'
    for key, name in _SUMMARY
    if run.config.get(key) not in (None, "")
  ]
  return f'<h1>{visible(run.name)}</h1><div class="chips">{"".join(chips)}</div>'


def _alarm_list(found: Sequence[alarm_rules.Alarm], rows) -> str:
  steps = sum("reward/mean" in row for row in rows)
  if not steps:
    return ""
  if not found:
    return f'<div class="note fine">No alarm in {steps:,} step{"s" * (steps != 1)}.</div>'
  items = "".join(f"<li>Step {alarm.step}: {visible(alarm.message)}.</li>" for alarm in found)
  return f'<div class="note alarm"><b>Alarms</b><ul>{items}</ul></div>'


def _notes(notes: Sequence[str]) -> str:
  items = "".join(f"<li>{visible(note)}</li>" for note in notes)
  return f'<div class="note"><ul>{items}</ul></div>' if notes else ""


def _tiles(
  run: Run,
  before: score_table.Sets,
  after: score_table.Sets,
  forced: Mapping[str, score_table.Sets],
) -> str:
  """The numbers a reader comes for: (what, the number, what it is measured against)."""
  train = [row for row in run.rows if "reward/mean" in row]
  held, start = (
    score_table.value(after.get(score_table.HELD_OUT)),
    score_table.value(before.get(score_table.HELD_OUT)),
  )
  second, best = score_table.value(after.get(score_table.SECOND)), score_table.best_forced(forced)
  tiles = []
  if held is not None:
    known = start is not None
    tiles.append(
      (
        "Held-out exact match",
        f"{score_table.percent(start)} → " * known + score_table.percent(held),
        f"{100 * (held - start):+.1f} points" if known else "no evaluation before training",
      )
    )
  if best:
    tiles.append(
      ("Best fixed search count", score_table.percent(best[1]), f"warm start forced to {best[0]}")
    )
  if second is not None:
    tiles.append(
      (
        "Second encyclopedia",
        score_table.percent(second),
        "" if held is None else f"{100 * (second - held):+.1f} points to the first",
      )
    )
  for key, name in (
    ("reward/mean", "Training reward"),
    ("rollout/searches_mean", "Searches a question"),
  ):
    values = [row[key] for row in train if isinstance(row.get(key), (int, float))]
    if values:
      ends = " → ".join(f"{sum(part) / len(part):.2f}" for part in (values[:5], values[-5:]))
      tiles.append((name, ends, "first and last 5 steps"))
  if train:
    planned = run.config.get("num_steps")
    of = f"of {planned:,} " if isinstance(planned, int) else ""
    tiles.append(
      ("Steps", f"{train[-1]['step']:,}", f"{of}in {duration(sum(map(_seconds, train)))}")
    )
  shown = "".join(
    f'<div class="tile"><span>{visible(name)}</span><b>{visible(text)}</b>'
    f"<span>{visible(against)}</span></div>"
    for name, text, against in tiles
  )
  return f'<div class="tiles">{shown}</div>'


def _seconds(row: Mapping[str, Any]) -> float:
  times = {
    key: value
    for key, value in row.items()
    if re.fullmatch(r"time/\w+_s", key) and isinstance(value, (int, float))
  }
  return times.get("time/step_s", sum(times.values()))


def _first_figure(run: Run, found: Sequence[alarm_rules.Alarm]) -> str:
  """Drawn twice, wide and narrow, so that its text keeps its size on a phone; the style shows one
  of them."""
  shown = run_figures.first_panels(run.rows, found)
  if not any("reward/mean" in row for row in run.rows):
    return ""
  wide, narrow = (
    chart_svg(shown, width=600, height=250, columns=2),
    chart_svg(shown, width=380, height=200),
  )
  return (
    f'<div class="panel"><div class="wide">{wide}</div><div class="narrow">{narrow}</div></div>'
  )


def _curves(run: Run, drawn: Sequence[charts.Panel], zero: Sequence[str]) -> str:
  plots = "".join(_panel(panel) for panel in drawn) + _warm(run)
  never = (
    f'<p class="soft">Zero at every step: {", ".join(map(visible, zero))}.</p>' if zero else ""
  )
  return f'<h2>Step by step</h2><div class="grid">{plots}</div>{never}' if plots else ""


def _panel(panel: charts.Panel, x_label: str = "step") -> str:
  return f'<div class="panel">{chart_svg([panel], width=390, height=200, x_label=x_label)}</div>'


def _warm(run: Run) -> str:
  panel = run_figures.warm_start_panel(run.rows)
  return _panel(panel, "warm-start step") if panel.series[0].x else ""


def _table_legend(table: str, forced: Mapping[str, score_table.Sets]) -> str:
  text = (
    "“Forced to N”: the warm-started policy made to search exactly N times, the best underlined. "
  )
  text *= bool(forced)
  text += "Searches are means a question, before → after training." * ("<th>searches</th>" in table)
  return f'<p class="soft">{text}</p>' if text else ""


def _samples(run: Run) -> str:
  parts = []
  for i, (step, records) in enumerate(run.rollouts):
    chosen = transcripts.choose(records, _SHOWN)
    if chosen:
      rolls = "".join(
        transcripts.render(record, is_open=j == 0 and i == len(run.rollouts) - 1)
        for j, record in enumerate(chosen)
      )
      parts.append(
        f'<h2>Rollouts of step {step}</h2><p class="soft">{len(chosen)} of {len(records):,}, '
        f"unlike in stratum or success.</p>{rolls}"
      )
  return "".join(parts)


def _config_table(run: Run) -> str:
  rows = "".join(
    f"<tr><th>{visible(key)}</th><td>{visible(json.dumps(value))}</td></tr>"
    for key, value in sorted(run.config.items())
  )
  table = f'<div class="scroll"><table class="config">{rows}</table></div>'
  return (
    f'<details class="more"><summary>The whole config</summary>{table}</details>' if rows else ""
  )


def _rollouts_per_step(config: Mapping[str, Any]) -> int | None:
  sizes = config.get("data.questions_per_step"), config.get("rollout.samples_per_question")
  return sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else None


def _by_searches(config: Mapping[str, Any]) -> bool:
  """Whether a stratum's id is a number of searches (under a cap, the last stands for that many and
  more)."""
  return config.get("strata.name", "searches") in _COUNTS
