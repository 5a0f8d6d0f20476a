"""Compares groups of runs that differ in more than the seed: means, spreads, intervals, tables.

A group holds the runs of one setting, usually one a seed. Intervals are 95 %: Student's t over the
runs of a group; a run that is alone in its group has no spread over seeds, and its exact match gets
Wilson's interval over its questions instead. Differences between two groups are paired by seed
wherever both have that seed.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import re
import statistics
from typing import Any, Literal

from stratified.evaluation import intervals
from stratified.reports import axes, score_table
from stratified.reports.text import fixed
from stratified.runs.groups import differing, grouped
from stratified.runs.workdir import find, is_number, MAIN, natural, problem, read, Run

LAST = 10  # training steps that the end of a noisy curve is read from
_START = "start/exact_match"
# (key, title) of the columns that are no exact match; `end_values` says what they hold.
_COLUMNS = (
  ("eval/searches_mean", "searches"),
  ("train/reward", "training reward"),
  ("train/searches", "training searches"),
  ("train/zero_share", "zero advantage"),
  ("train/rms", "advantage rms"),
)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A mean with its 95 % interval (`low` and `high`, None without one), and what that is over."""

  mean: float
  low: float | None
  high: float | None
  spread: float | None  # standard deviation over runs, divisor n - 1
  count: int
  over: Literal["seeds", "questions", "pairs", "groups"]


@dataclasses.dataclass(frozen=True)
class Curve:
  """Mean over runs by step, and a standard deviation below and above (None for a single run)."""

  x: list[int]
  mean: list[float]
  low: list[float | None]
  high: list[float | None]


@dataclasses.dataclass(frozen=True)
class Column:
  """A column of the end results: a cell for each group."""

  title: str
  kind: Literal["label", "scores", "hops", "training"]
  cells: list[str]


def end_values(run: Run, step: int | None = None) -> dict[str, float]:
  """A run's end result: eval/* at its last step (or at `step`), and what training was like.

  start/exact_match is the evaluation before the first step; train/reward and train/searches are
  means of the last 10 training steps, train/zero_share and train/rms (of the advantages) of all.
  Empty where `problem` has a reason.
  """
  if problem(run, step):
    return {}
  step = run.last_step if step is None else step
  values = {}
  for row in run.rows:
    if row.get("step") == step:
      values |= {
        key: value for key, value in row.items() if key.startswith("eval/") and is_number(value)
      }
    if row.get("step") == 0 and is_number(row.get(MAIN)):
      values[_START] = row[MAIN]
  train = [row for row in run.steps if row["step"] <= step]
  for name, key, part in (
    ("train/reward", "reward/mean", train[-LAST:]),
    ("train/searches", "rollout/searches_mean", train[-LAST:]),
    ("train/zero_share", "advantage/zero_share", train),
    ("train/rms", "advantage/rms", train),
  ):
    known = [row[key] for row in part if is_number(row.get(key))]
    if known:
      values[name] = sum(known) / len(known)
  return values


def estimate(values: Sequence[float], over: str = "seeds") -> Estimate:
  """Mean and Student's t interval of independent values; no interval for one value."""
  mean, ends = statistics.fmean(values), intervals.mean_interval(values)
  if ends is None:
    return Estimate(mean, None, None, None, len(values), over)
  return Estimate(mean, *ends, statistics.stdev(values), len(values), over)


def summary(runs: Sequence[Run], step: int | None = None) -> dict[str, Estimate]:
  """The group's end result: an estimate of each value that its finished runs have."""
  ends = [(run, end_values(run, step)) for run in runs]
  ends = [(run, end) for run, end in ends if end]
  result = {}
  for key in sorted({key for _, end in ends for key in end}):
    found = estimate([end[key] for _, end in ends if key in end])
    count = _questions(ends[0][0], key, step) if len(ends) == 1 else None
    if count:
      low, high = intervals.wilson(found.mean, count)
      found = dataclasses.replace(found, low=low, high=high, over="questions")
    result[key] = found
  return result


def _questions(run: Run, key: str, step: int | None) -> int | None:
  """How many questions an exact match is a mean of, where evaluation.json is of the same step."""
  name = re.fullmatch(r"eval/(?:(?P<set>\w+)/)?exact_match(?:_hops_(?P<hops>\d+))?", key)
  if name is None or run.evaluation.get("step") != (run.last_step if step is None else step):
    return None
  score = score_table.sets_of(run.evaluation).get(name["set"] or score_table.HELD_OUT)
  return score_table.value(score, "count", name["hops"])


def difference(
  runs: Sequence[Run], reference: Sequence[Run], step: int | None = None, key: str = MAIN
) -> Estimate | None:
  """The group's mean minus the reference's, paired by seed where they share seeds, else Welch's.

  None if either has no finished run.
  """
  ours, theirs = (
    {run.seed: end_values(run, step)[key] for run in group if key in end_values(run, step)}
    for group in (runs, reference)
  )
  if not ours or not theirs:
    return None
  shared = [seed for seed in ours if seed is not None and seed in theirs]
  if shared:
    return estimate([ours[seed] - theirs[seed] for seed in shared], "pairs")
  a, b = list(ours.values()), list(theirs.values())
  mean = statistics.fmean(a) - statistics.fmean(b)
  ends = intervals.difference_interval(a, b) or (None, None)
  return Estimate(mean, *ends, None, min(len(a), len(b)), "groups")


def curve(runs: Sequence[Run], key: str, window: int = 1) -> Curve:
  """`key` by step: each run smoothed over `window` of its points, then averaged."""
  series = []
  for run in runs:
    points = {
      row["step"]: row[key] for row in run.rows if "step" in row and is_number(row.get(key))
    }
    steps = sorted(points)
    series.append(dict(zip(steps, axes.smooth([points[step] for step in steps], window))))
  x = sorted({step for one in series for step in one})
  at = [[one[step] for one in series if step in one] for step in x]
  mean = [statistics.fmean(values) for values in at]
  half = [statistics.stdev(values) if len(values) > 1 else None for values in at]
  return Curve(
    x,
    mean,
    [None if h is None else m - h for m, h in zip(mean, half)],
    [None if h is None else m + h for m, h in zip(mean, half)],
  )


def columns(summaries: Iterable[Mapping[str, Estimate]]) -> list[tuple[str, str]]:
  """(key, title) of what was measured: exact match by set and hops, then how the agent searched."""
  measured = {key for one in summaries for key in one}
  sets = sorted(key for key in measured if re.fullmatch(r"eval/\w+/exact_match", key))
  hops = sorted(
    (key for key in measured if re.fullmatch(r"eval/exact_match_hops_\d+", key)), key=natural
  )
  named = [(MAIN, "held-out"), (_START, "warm start")]
  named += [(key, key.split("/")[1].replace("_", " ")) for key in sets]
  named += [(key, f"{key.rpartition('_')[2]} hop{'s' * (not key.endswith('_1'))}") for key in hops]
  return [(key, title) for key, title in (*named, *_COLUMNS) if key in measured]


def text(found: Estimate | None, key: str, signed: bool = False) -> str:
  """`61.2 [58.0, 64.4]`: exact matches, rewards and shares x 100, counts as they are."""
  if found is None:
    return "–"
  percent = any(word in key for word in ("exact_match", "reward", "share"))
  scale, digits = (100, 1) if percent else (1, 2)
  form = lambda value: fixed(scale * value, digits, signed)
  return form(found.mean) + (
    f" [{form(found.low)}, {form(found.high)}]" if found.low is not None else ""
  )


def table_columns(
  groups: Mapping[str, Sequence[Run]], reference: str, step: int | None = None
) -> list[Column]:
  """The end results as columns: label, runs, what was measured, the difference to `reference`."""
  found = {label: summary(runs, step) for label, runs in groups.items()}
  done = {label: sum(bool(end_values(run, step)) for run in runs) for label, runs in groups.items()}
  counts = [
    str(done[label]) if done[label] == len(runs) else f"{done[label]} of {len(runs)}"
    for label, runs in groups.items()
  ]
  made = [
    Column(title, _kind(key), [text(one.get(key), key) for one in found.values()])
    for key, title in columns(found.values())
  ]
  if len(groups) > 1 and made:
    gains = [
      None if label == reference else difference(runs, groups[reference], step)
      for label, runs in groups.items()
    ]
    cells = [text(gain, MAIN, signed=True) for gain in gains]
    made.insert(1, Column(f"against {reference}", "scores", cells))
  return [Column("group", "label", list(groups)), Column("runs", "label", counts), *made]


def _kind(key: str) -> Literal["scores", "hops", "training"]:
  if "_hops_" in key:
    return "hops"
  return "training" if key in dict(_COLUMNS) else "scores"


def table(
  groups: Mapping[str, Sequence[Run]], reference: str, step: int | None = None
) -> list[list[str]]:
  """Head and rows of the end results, in text."""
  made = table_columns(groups, reference, step)
  return [[column.title for column in made], *map(list, zip(*(column.cells for column in made)))]


def markdown(cells: Sequence[Sequence[str]]) -> str:
  """Rows of text, the first of them the head, as a table in Markdown."""
  lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
  return "\n".join([lines[0], "|" + "---|" + "---:|" * (len(cells[0]) - 1), *lines[1:]]) + "\n"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Groups of runs, the reference among them, the step of the end results, notes on the runs."""

  groups: Mapping[str, Sequence[Run]]
  reference: str
  step: int | None
  notes: Sequence[str]


def of(
  arguments: Sequence[str], reference: str | None = None, step: int | None = None
) -> Comparison:
  """Reads and groups the runs. Raises ValueError, one sentence, where nothing can be compared."""
  found, notes = find(arguments)
  groups, more = grouped([(label, read(path)) for label, path in found])
  if not groups:
    raise ValueError(
      f"there is no run in {', '.join(map(repr, arguments)) or 'no argument'}; "
      "name workdirs, globs of them, or the folder of a sweep"
    )
  reference = next(iter(groups)) if reference is None else reference
  if reference not in groups:
    raise ValueError(
      f"--reference={reference!r} is no group; choose one of {', '.join(map(repr, groups))}"
    )
  every = [run for runs in groups.values() for run in runs]
  notes += more + [said for run in every if (said := problem(run, step))]
  keys = differing(every)
  notes += [f"The groups differ in {', '.join(keys)}."] * (len(groups) > 1 and bool(keys))
  return Comparison(groups, reference, step, notes)


def as_json(made: Comparison) -> dict[str, Any]:
  """Everything that the tables are made of, in full precision."""
  every = [run for runs in made.groups.values() for run in runs]
  keys = differing(every)
  groups = {}
  for label, runs in made.groups.items():
    gain = (
      None if label == made.reference else difference(runs, made.groups[made.reference], made.step)
    )
    groups[label] = {
      "config": {key: runs[0].config.get(key) for key in keys},
      "runs": [
        {
          "workdir": str(run.path),
          "seed": run.seed,
          "step": run.last_step,
          "of": run.planned,
          "end": end_values(run, made.step),
        }
        for run in runs
      ],
      "end": {key: dataclasses.asdict(one) for key, one in summary(runs, made.step).items()},
      "against_reference": gain and dataclasses.asdict(gain),
    }
  return {
    "reference": made.reference,
    "step": made.step,
    "notes": list(made.notes),
    "groups": groups,
  }


def as_markdown(made: Comparison) -> str:
  results = markdown(table(made.groups, made.reference, made.step))
  notes = "".join(f"- {note}\n" for note in made.notes)
  return f"{results}\n{legend(made)}\n" + f"\n{notes}" * bool(notes)


def legend(made: Comparison) -> str:
  """What the numbers of the table are, in words."""
  alone = any(
    sum(bool(end_values(run, made.step)) for run in runs) == 1 for runs in made.groups.values()
  )
  lone = "; of a single run, over its questions (Wilson), which says nothing of other seeds"
  when = "the end of training" if made.step is None else f"step {made.step}"
  said = [
    f"Exact match, rewards and shares x 100, at {when}.",
    f"Brackets: 95 % intervals over seeds (Student's t){lone * alone}.",
  ]
  if len(made.groups) > 1:
    said.append("Differences are paired by seed where both groups have it.")
  return " ".join(said)
