"""Chooses the curves of a run from the rows of metrics.jsonl, and says what each of them tells."""

from collections.abc import Sequence
import re

from stratified.reports import cycle_figures
from stratified.reports.alarms import Alarm
from stratified.reports.metric_cards import CARDS, ESSENTIAL
from stratified.reports.plots import ORDERED, PALETTE, Panel, Series
from stratified.reports.timelines import breaks, Timeline
from stratified.runs.workdir import number

_STRATA_MEANING = (
  "How the policy's strategies change; one colour alone means that it uses only one."
)


def first_panels(line: Timeline, alarms: Sequence[Alarm] = ()) -> list[Panel]:
  """Reward, held-out exact match, searches a question: an agent that learns to skip the tool."""
  reward = line.series("reward/mean", "reward", 0, "noisy", rows=line.train)
  held_out = [
    line.series(key, name, color, "dots")
    for key, name, color in (
      ("eval/exact_match", "held out", 2),
      ("eval/second_encyclopedia/exact_match", "second encyclopedia", 3),
    )
  ]
  held_out = [one for one in held_out if one.x]
  searches = line.series("rollout/searches_mean", "searches", 1, "noisy", rows=line.train)
  calls = _calls(line)
  panels = [
    line.panel(
      "Reward a training rollout",
      [reward],
      alarms=_steps(alarms, "reward/mean"),
      meaning="Should rise and then level off. A fall by half is an alarm.",
    ),
    line.panel(
      "Held-out exact match",
      held_out,
      percent=True,
      meaning="Questions that training never sees, greedy. This is the result.",
    ),
    line.panel(
      "Calls of tools a question" if calls else "Searches a question",
      (searches, *calls),
      alarms=_steps(alarms, "rollout/searches_mean"),
      meaning="Good is what the questions need. At 0 the agent has learnt to skip the tool.",
    ),
  ]
  return [panel for panel in panels if panel.series]


def _calls(line: Timeline) -> list[Series]:
  """Calls of tools other than search, where a run records them by tool."""
  pattern = re.compile(r"rollout/calls_(\w+?)(?:_mean)?")
  keys = sorted({key for row in line.train for key in row if pattern.fullmatch(key)})
  names = {key: pattern.fullmatch(key)[1] for key in keys}
  return [
    line.series(key, names[key], 4 + i % 4, "noisy", rows=line.train)
    for i, key in enumerate(key for key in keys if names[key] != "search")
  ]


def strata_panel(line: Timeline, alarms: Sequence[Alarm] = (), by_searches: bool = True) -> Panel:
  """Shares of the rollouts by stratum, stacked; strata that count searches darken with the number.

  The smallest strata are drawn together where there are more than a reader can tell apart.
  """
  train = line.train
  keys = {key for row in train for key in row if re.fullmatch(r"strata/share_\d{1,9}", key)}
  totals = {
    key: sum(number(row, key) or 0.0 for row in train) for key in sorted(keys, key=_last_number)
  }
  seen = [key for key, total in totals.items() if total > 0]
  count = ORDERED if len(seen) <= ORDERED else ORDERED - 1
  largest = sorted(seen, key=totals.get, reverse=True)[:count]
  x, parted = [row["x"] for row in train], breaks(train)
  series = []
  for i, key in enumerate(key for key in seen if key in largest):
    name, color = f"stratum {_last_number(key)}", i
    if by_searches:
      name, color = str(_last_number(key)), PALETTE + min(_last_number(key), ORDERED - 1)
    series.append(Series(name, x, [number(row, key) for row in train], color, breaks=parted))
  if len(largest) < len(seen):
    rest = [sum(number(row, key) or 0.0 for key in seen if key not in largest) for row in train]
    series.append(Series("other", x, rest, 7, breaks=parted))
  marks = tuple(alarm.step for alarm in alarms if alarm.key.startswith("strata/"))
  title = "Rollouts by number of searches" if by_searches else "Rollouts by stratum"
  return line.panel(
    title,
    series,
    stacked=True,
    percent=True,
    limits=(0.0, 1.0),
    alarms=marks,
    meaning=_STRATA_MEANING,
  )


def cards(
  line: Timeline, alarms: Sequence[Alarm] = (), by_searches: bool = True
) -> tuple[dict[str, list[Panel]], list[str], list[str]]:
  """({card: plots that show something}, keys that are missing, keys that are always zero)."""
  drawn: dict[str, list[Panel]] = {"Cycles": cycle_figures.panels(line)}
  zero: list[str] = []
  for card, plots in CARDS.items():
    drawn[card] = []
    for title, percent, curves, meaning in plots:
      found = [
        (key, line.series(key, name, color, "noisy")) for color, (key, name) in enumerate(curves)
      ]
      found = [(key, one) for key, one in found if any(value is not None for value in one.y)]
      zero += [key for key, one in found if not any(one.y)]
      series = tuple(one for _, one in found if any(one.y))
      if series:
        marks = tuple(alarm.step for alarm in alarms if alarm.key in dict(curves))
        panel = line.panel(title, series, percent=percent, alarms=marks, meaning=meaning)
        drawn[card].append(panel)
  strata = strata_panel(line, alarms, by_searches)
  drawn["Strata"] = [strata] * bool(strata.series) + drawn["Strata"]
  drawn["Rollouts"] += [panel for panel in [_hops_panel(line)] if panel.series]
  drawn["Speed"] += [panel for panel in [_time_panel(line)] if panel.series]
  train = line.train
  missing = [
    key for key in ESSENTIAL if train and not any(number(row, key) is not None for row in train)
  ]
  missing += ["strata/share_K"] if train and not strata.series else []
  return {card: plots for card, plots in drawn.items() if plots}, missing, zero


def warm_start_panel(line: Timeline) -> Panel:
  """The warm start's loss, by its own step unless the run's stages stand on one axis."""
  rows = [row for row in line.rows if "warm_start/step" in row]
  x = "x" if line.stages else "warm_start/step"
  loss = line.series("warm_start/loss", "loss", 0, "noisy", rows=rows, x=x)
  title = "Warm start: loss" + " by its own step" * (not line.stages)
  return Panel(
    title, (loss,), stages=line.stages, meaning="Cross-entropy of the demonstrations, nats a token."
  )


def _hops_panel(line: Timeline) -> Panel:
  series = [one for one in cycle_figures.by_hops(line, "eval/exact_match") if len(one.x) > 1]
  return line.panel(
    "Held-out exact match by hops",
    series,
    percent=True,
    meaning="Questions of more hops need more searches, and are learnt last.",
  )


def _time_panel(line: Timeline) -> Panel:
  """Shares of a step's time; time/step_s, where recorded, is the whole, with its rest drawn."""
  train = line.train
  keys = sorted(
    {key for row in train for key in row if re.fullmatch(r"time/\w+_s", key)} - {"time/step_s"}
  )
  keys.sort(key=lambda key: ("rollout" not in key, "retrieval" not in key, "update" not in key))
  shares = {key: [] for key in keys + ["else"]}
  for row in train:
    parts = {key: max(0.0, number(row, key) or 0.0) for key in keys}
    parts["else"] = max(0.0, (number(row, "time/step_s") or 0.0) - sum(parts.values()))
    whole = sum(parts.values())
    for key, value in parts.items():
      shares[key].append(value / whole if whole else None)
  x = [row["x"] for row in train]
  names = {key: key.removeprefix("time/").removesuffix("_s") for key in keys}
  names |= {"else": "everything else"}
  series = tuple(
    Series(names[key], x, y, color % PALETTE, breaks=breaks(train))
    for color, (key, y) in enumerate(shares.items())
    if any(value for value in y)
  )
  return line.panel(
    "Where a step's time goes",
    series,
    stacked=True,
    percent=True,
    limits=(0.0, 1.0),
    meaning="The largest part is where tuning pays.",
  )


def _last_number(key: str) -> int:
  return int(key.rpartition("_")[2])


def _steps(alarms: Sequence[Alarm], key: str) -> tuple[int, ...]:
  return tuple(alarm.step for alarm in alarms if alarm.key == key)
