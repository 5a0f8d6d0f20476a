"""Writes report.html: a self-contained page about a run, from what its workdir holds so far."""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import re
from typing import Any

from stratified import files
from stratified.progress import duration
from stratified.reports import alarms as alarm_rules
from stratified.reports import (
  cycle_figures,
  filters,
  group_view,
  plots,
  run_figures,
  score_table,
  text,
  timelines,
  transcripts,
)
from stratified.runs import workdir as workdirs
from stratified.runs.workdir import Run

_STEPS, _ROLLOUTS, _GROUPS = 6, 12, 2  # steps shown where none is named; of each of them
_MORE_ROLLOUTS, _MORE_GROUPS, _MORE_STEPS = 24, 12, 20  # shown of steps that are named
_MOST_FIELDS, _MOST_NOTES = 400, 40
# Fields of the config that stand at the top, beside every `SECTION.name`. A test holds them against
# the presets.
SUMMARY = (
  "policy.checkpoint",
  "advantage.alpha",
  "data.questions_per_step",
  "rollout.samples_per_question",
  "rollout.max_turns",
  "optimizer.learning_rate",
  "loss.kl_coefficient",
  "loss.clip_ratio",
  "seed",
)
# Partitions whose stratum is a number of searches (under a cap, the last stands for that many and
# more).
COUNTS_SEARCHES = ("searches",)


def write(workdir: str | os.PathLike, steps: Sequence[int] = ()) -> pathlib.Path:
  """Writes workdir/report.html from what the workdir holds and returns its path.

  The page needs nothing beside it: no script, no font, no picture from elsewhere. What a run has
  not recorded yet is named on it.

  steps: whose rollouts are shown, more of each; without it six steps from the first to the last.

  Raises FileNotFoundError if there is no such folder, ValueError for a step without rollouts.
  """
  path, run = pathlib.Path(workdir) / "report.html", read(workdir)
  files.write_atomic(path, page(run, steps))
  return path


def picture(workdir: str | os.PathLike) -> str:
  """Draws the run as one SVG: reward and exact match, searches a question, rollouts by stratum."""
  run = read(workdir)
  line = timelines.make(run.rows)
  found = line.placed(alarm_rules.find(run.rows, _rollouts_per_step(run.config)))
  strata = run_figures.strata_panel(line, found, _by_searches(run.config))
  shown = [*run_figures.first_panels(line, found), strata]
  return plots.figure(
    shown, width=320, height=240, columns=3, x_label=line.x_label, standalone=True
  )


def read(workdir: str | os.PathLike) -> Run:
  """The run in a folder; raises FileNotFoundError where there is no such folder."""
  folder = pathlib.Path(workdir)
  if not folder.is_dir():
    raise FileNotFoundError(f"there is no workdir {folder}")
  return workdirs.read(folder.resolve())


def page(run: Run, named: Sequence[int] = ()) -> str:
  """The whole report as HTML; see `write`."""
  line = timelines.make(run.rows)
  alarms = alarm_rules.find(run.rows, _rollouts_per_step(run.config))
  scores = score_table.scores_of(run.rows, run.evaluation)
  cards, missing, zero = run_figures.cards(line, line.placed(alarms), _by_searches(run.config))
  steps = [(step, run.rollouts(step)) for step in _shown_steps(run, named)]
  found = filters.make(record for _, records in steps for record in records)
  table = score_table.table(scores, *_columns(run, scores))
  values = {
    "title": run.path.name,
    "facts": _facts(run),
    "chips": _chips(run.config),
    "standing": _standing(run),
    "num_steps": len(run.updates),
    "alarms": alarms,
    "notes": _notes(run, steps, scores, missing),
    "tiles": _tiles(run, scores),
    "first": _first_cards(line, line.placed(alarms)),
    "table": table,
    "forced": bool(scores.forced),
    "cards": [(name, [_card(line, panel) for panel in panels]) for name, panels in cards.items()],
    "warm": _warm_start(line),
    "phases": cycle_figures.phase_table(line),
    "legend": _phases(line),
    "zero": zero,
    "filters": found,
    "steps": [_step(step, records, found, bool(named)) for step, records in steps if records],
    "count": len(run.trajectories),
    "config": _config_rows(run.config),
  }
  return text.render("report.html", values)


def _shown_steps(run: Run, named: Sequence[int]) -> list[int]:
  steps = sorted(run.trajectories)
  missing = [step for step in named if step not in run.trajectories]
  if missing:
    has = f"it has {len(steps)} from {steps[0]} to {steps[-1]}" if steps else "it has none"
    raise ValueError(f"{run.path} has no rollouts of step {missing[0]}; {has}")
  if named:
    return sorted(set(named))[:_MORE_STEPS]
  parts = [round(i * (len(steps) - 1) / (_STEPS - 1)) for i in range(_STEPS)] if steps else []
  return [steps[i] for i in sorted(set(parts))]


def _facts(run: Run) -> list[tuple[str, str]]:
  """(what, value): when, of which size, by which command, as far as the run says it."""
  start = run.start
  size = start.get("parameters")
  shown = [
    ("began", start.get("began")),
    ("last written", run.written),
    ("policy", f"{text.number(size)} parameters" if workdirs.is_number(size) else None),
    ("on", start.get("devices")),
    ("version", start.get("version")),
    ("command", start.get("command")),
  ]
  return [(what, text.without_secrets(text.cut(value, 1_000))) for what, value in shown if value]


def _chips(config: Mapping[str, Any]) -> list[str]:
  keys = [key for key in sorted(config) if key.endswith(".name")]
  keys += [key for key in SUMMARY if key in config]
  names = workdirs.short_keys(keys)
  shown = [(names[key], config[key]) for key in keys if config[key] not in (None, "")]
  return [
    text.without_secrets(text.cut(f"{name.replace('_', ' ')} {workdirs.show(value)}", 120))
    for name, value in shown[:40]
  ]


def _standing(run: Run) -> str:
  """Where a run that has not ended stands; nothing for one that has."""
  if not run.updates or run.planned is None or run.trained:
    return ""
  return f"This run stands at step {run.last_step:,} of {run.planned:,}."


def _notes(run: Run, steps, scores: score_table.Scores, missing: Sequence[str]) -> list[str]:
  notes = list(run.notes)
  notes += ["metrics.jsonl has no training step yet."] * (not run.updates)
  notes += ["No trajectories are recorded yet."] * (not any(records for _, records in steps))
  notes += [f"metrics.jsonl does not record {', '.join(missing)}."] * bool(missing)
  if not scores.after:
    since = " since training began" * bool(scores.before)
    notes.append(f"The held-out questions have not been evaluated yet{since}.")
  return notes[:_MOST_NOTES]


def _columns(run: Run, scores: score_table.Scores) -> tuple[str, str]:
  """What the table calls the scores before and after."""
  before = "before" if run.config.get("warm_start.num_steps") == 0 else "warm start"
  ended = run.trained or run.planned is None
  return before, "trained" if ended or scores.step is None else f"step {scores.step:,}"


def _tiles(run: Run, scores: score_table.Scores) -> list[tuple[str, str, str]]:
  """The numbers a reader comes for: (what, the number, what it is measured against)."""
  held = score_table.value(scores.after.get(score_table.HELD_OUT))
  start = score_table.value(scores.before.get(score_table.HELD_OUT))
  second = score_table.value(scores.after.get(score_table.SECOND))
  best, tiles = score_table.best_forced(scores), []
  if held is not None:
    said = "no evaluation before training"
    if start is not None:
      said = f"{text.percent(held - start, signed=True)} points"
    ends = [text.percent(score) for score in (start, held) if score is not None]
    tiles.append(("Held-out exact match", " → ".join(ends), said))
  elif start is not None:
    tiles.append(("Held-out exact match", text.percent(start), "before training"))
  if best:
    said = f"the policy before training forced to {text.cut(best[0], 20)}"
    tiles.append(("Best fixed search count", text.percent(best[1]), said))
  if second is not None:
    said = "" if held is None else f"{text.percent(second - held, signed=True)} points to the first"
    tiles.append(("Second encyclopedia", text.percent(second), said))
  for key, name in (
    ("reward/mean", "Training reward"),
    ("rollout/searches_mean", "Searches a question"),
  ):
    values = [value for row in run.steps if (value := workdirs.number(row, key)) is not None]
    if values:
      ends = [text.fixed(sum(part) / len(part), 2) for part in (values[:5], values[-5:])]
      tiles.append((name, " → ".join(ends), "first and last 5 steps"))
  if run.updates:
    of = "" if run.planned is None else f"of {run.planned:,} "
    took = f"{of}in {duration(sum(map(_seconds, run.updates)))}"
    tiles.append(("Steps", f"{run.last_step:,}", took))
  return tiles


def _seconds(row: Mapping[str, Any]) -> float:
  times = {
    key: min(value, 1e9)
    for key in row
    if re.fullmatch(r"time/\w+_s", key) and (value := workdirs.number(row, key)) is not None
  }
  return times.get("time/step_s", sum(times.values()))


def _first_cards(line: timelines.Timeline, alarms: Sequence[alarm_rules.Alarm]):
  """The curves that a reader looks at first, each with what it tells."""
  shown = run_figures.first_panels(line, alarms) if line.train else []
  return [_card(line, panel, height=230) for panel in shown]


def _card(line: timelines.Timeline, panel: plots.Panel, x_label: str = "", height: int = 200):
  """(drawing, what it tells)."""
  drawn = plots.figure([panel], width=390, height=height, x_label=x_label or line.x_label)
  return drawn, panel.meaning


def _phases(line: timelines.Timeline) -> list[tuple[int, str]]:
  """(shade, phase) of the bands behind the curves, for their legend."""
  shaded = [stage for stage in line.stages if stage.shade is not None]
  return sorted({(stage.shade % plots.SHADES, stage.phase) for stage in shaded})


def _warm_start(line: timelines.Timeline):
  panel = run_figures.warm_start_panel(line)
  if not panel.series[0].x:
    return None
  return _card(line, panel, "" if line.stages else "warm-start step")


def _step(step: int, records: Sequence[Mapping], found: filters.Filters, named: bool):
  """What is shown of a step's rollouts: its groups, and rollouts unlike each other."""
  most = (_MORE_GROUPS, _MORE_ROLLOUTS) if named else (_GROUPS, _ROLLOUTS)
  groups = group_view.choose(group_view.groups(records), most[0])
  chosen = transcripts.choose(records, most[1])
  right = sum(map(transcripts.succeeded, records))
  return {
    "step": step,
    "count": len(records),
    "right": right / len(records),
    "groups": [group_view.view(group, found.classes) for group in groups],
    "rollouts": [transcripts.view(one) | {"picks": found.classes(one)} for one in chosen],
  }


def _config_rows(config: Mapping[str, Any]) -> list[tuple[str, str]]:
  return [
    (text.cut(key, 120), text.without_secrets(text.cut(json.dumps(value), 500)))
    for key, value in sorted(config.items())[:_MOST_FIELDS]
  ]


def _rollouts_per_step(config: Mapping[str, Any]) -> int | None:
  sizes = config.get("data.questions_per_step"), config.get("rollout.samples_per_question")
  return sizes[0] * sizes[1] if all(isinstance(size, int) for size in sizes) else None


def _by_searches(config: Mapping[str, Any]) -> bool:
  """Whether a stratum's id is a number of searches."""
  return config.get("strata.name", COUNTS_SEARCHES[0]) in COUNTS_SEARCHES
