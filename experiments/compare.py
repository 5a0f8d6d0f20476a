"""Draws several runs together: the curves of arXiv 2510.06214's Figure 1 and the end results of its
Table 2.

    python experiments/compare.py --out=runs/table/comparison runs/table
    python experiments/compare.py --out=/tmp/c 'GRPO=runs/gn-seed-*' 'SAN=runs/san-seed-*'
    --reference=GRPO

Each argument is a workdir, a glob (in quotes where it follows a label), or a folder of workdirs, as
a sweep leaves it. `label=` names a group; without it runs are grouped by the config keys in which
they differ, the seed apart. Writes comparison.html, comparison.md and comparison.json into --out,
and comparison.svg, the first figure alone.
"""

from collections.abc import Sequence
import json
import pathlib
import sys

from absl import flags

from stratified import files
from stratified.reports import band_charts, comparison_page, run_page
from stratified.reports.comparison_page import Comparison
from stratified.reports.transcripts import visible
from stratified.runs import command_line
from stratified.runs import workdir as workdirs

_OUT = flags.DEFINE_string("out", "comparison", "The folder that the comparison is written to.")
_REFERENCE = flags.DEFINE_string(
  "reference", None, "The group that others are measured against; the first if none."
)
_STEP = flags.DEFINE_integer(
  "step", None, "Take end results at this step, not at each run's last.", lower_bound=1
)

# Title, key of metrics.jsonl, percent, whether it is recorded at few steps only.
FIRST = (
  ("Reward a rollout", "reward/mean", False, False),
  ("Searches a question", "rollout/searches_mean", False, False),
)
MORE = (
  ("Held-out exact match", "eval/exact_match", True, True),
  ("Rollouts with zero advantage", "advantage/zero_share", True, False),
  ("Advantage, root mean square", "advantage/rms", False, False),
  ("Policy entropy, nats a token", "policy/entropy", False, False),
  ("KL to the reference, nats a token", "loss/kl", False, False),
  ("Gradient norm before clipping", "grad/norm", False, False),
)
STYLE = (
  run_page.STYLE.replace(band_charts.charts.STYLE, band_charts.STYLE)
  + """
.results td{white-space:nowrap}.results td small{display:block;color:var(--soft);font-size:12px}
.results tbody th{padding-left:12px;white-space:normal;min-width:92px}.results tr.reference th{font-weight:600}
.pathlist{overflow-wrap:anywhere;font-size:13.5px}
"""
)


def plots(
  made: Comparison, chosen: Sequence[tuple[str, str, bool, bool]]
) -> list[band_charts.Plot]:
  """Those of the chosen curves that any run has recorded."""
  longest = max((run.last_step for runs in made.groups.values() for run in runs), default=0)
  window = 1 if longest < 24 else 2 * (longest // 48) + 1
  result = []
  for title, key, percent, rare in chosen:
    curves = {
      label: comparison_page.curve(runs, key, 1 if rare else window)
      for label, runs in made.groups.items()
    }
    drawn = tuple(
      band_charts.Band(label, c.x, c.mean, c.low, c.high) for label, c in curves.items() if c.x
    )
    result += [band_charts.Plot(title, drawn, percent, rare)] * bool(drawn)
  return result


def colors(made: Comparison) -> dict[str, int]:
  """Shades in order where one number alone tells the groups apart, else colours."""
  every = [run for runs in made.groups.values() for run in runs]
  keys = workdirs.differing(every)
  ordered = len(keys) == 1 and all(
    workdirs.is_number(run.config.get(keys[0])) for run in every if run.config
  )
  return band_charts.colors(list(made.groups), ordered)


def picture(made: Comparison) -> str:
  """The first figure as an SVG file."""
  return band_charts.figure_svg(
    plots(made, FIRST), colors(made), width=400, height=260, columns=2, standalone=True
  )


def page(made: Comparison) -> str:
  """The comparison as one HTML page that needs nothing beside it."""
  count = sum(map(len, made.groups.values()))
  notes = "".join(f"<li>{visible(note)}</li>" for note in made.notes)
  policy = "default-src 'none'; style-src 'unsafe-inline'"
  title = f"{len(made.groups)} settings, {count} runs" if len(made.groups) > 1 else f"{count} runs"
  sections = [
    f"<h1>{title}</h1>",
    _first(made),
    f'<h2>End results</h2>{_table(made)}<p class="soft">{visible(comparison_page.legend(made))}</p>',
    f'<div class="note"><ul>{notes}</ul></div>' if notes else "",
    _more(made),
    _paths(made),
  ]
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    f"<title>{title}</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
  )


def _first(made: Comparison) -> str:
  """Drawn wide and narrow, so that its text keeps its size on a phone; the style shows one of
  them."""
  shown = plots(made, FIRST)
  if not shown:
    return ""
  wide = band_charts.figure_svg(shown, colors(made), width=600, height=290, columns=2)
  narrow = band_charts.figure_svg(shown, colors(made), width=370, height=220)
  spread = any(low is not None for plot in shown for band in plot.bands for low in band.low)
  said = "Lines: means over seeds, smoothed by a moving average. " + (
    "Bands: one standard deviation over seeds to either side." * spread
  )
  return (
    f'<div class="panel"><div class="wide">{wide}</div><div class="narrow">{narrow}</div></div>'
    f'<p class="soft">{said}</p>'
  )


def _more(made: Comparison) -> str:
  drawn = "".join(
    f'<div class="panel">{band_charts.figure_svg([plot], colors(made), width=390, height=200)}</div>'
    for plot in plots(made, MORE)
  )
  return f'<h2>Step by step</h2><div class="grid">{drawn}</div>' if drawn else ""


def _table(made: Comparison) -> str:
  head, *rows = comparison_page.table(made.groups, made.reference, made.step)
  top = "".join(f"<th>{visible(cell)}</th>" for cell in head)
  body = []
  for label, *cells in rows:
    shown = "".join(f"<td>{_cell(cell)}</td>" for cell in cells)
    mark = ' class="reference"' * (label == made.reference and len(rows) > 1)
    body.append(f"<tr{mark}><th>{visible(label)}</th>{shown}</tr>")
  return (
    f'<div class="scroll"><table class="results"><thead><tr>{top}</tr></thead>'
    f"<tbody>{''.join(body)}</tbody></table></div>"
  )


def _cell(text: str) -> str:
  value, bracket, interval = text.partition(" [")
  return visible(value) + (
    f"<small>{visible(bracket.strip() + interval)}</small>" if bracket else ""
  )


def _paths(made: Comparison) -> str:
  rows = "".join(
    f"<li>{visible(label)}: {visible(run.path)}, seed {visible(run.seed)}, "
    f"step {run.last_step} of {visible(run.planned)}</li>"
    for label, runs in made.groups.items()
    for run in runs
  )
  return (
    f'<details class="more"><summary>The runs</summary><ul class="pathlist">{rows}</ul></details>'
  )


def write(made: Comparison, folder: pathlib.Path) -> pathlib.Path:
  """Writes the four files and returns the page's path."""
  folder.mkdir(parents=True, exist_ok=True)
  parts = {
    "md": comparison_page.as_markdown(made),
    "json": json.dumps(comparison_page.as_json(made), indent=2) + "\n",
    "svg": picture(made),
    "html": page(made),
  }
  for kind, text in parts.items():
    files.write_atomic(folder / f"comparison.{kind}", text)
  return folder / "comparison.html"


def main(argv) -> None:
  try:
    made = comparison_page.of(argv[1:], _REFERENCE.value, _STEP.value)
  except ValueError as error:
    sys.exit(str(error))
  path = write(made, pathlib.Path(_OUT.value))
  print(comparison_page.as_markdown(made))
  print(f"comparison: {path}", flush=True)


if __name__ == "__main__":
  command_line.run(main, words=True)
