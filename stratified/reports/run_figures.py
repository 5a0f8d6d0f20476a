"""Chooses the curves of a run from the rows of metrics.jsonl, and says what each of them tells."""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

from stratified.reports.alarms import Alarm
from stratified.reports.plots import ORDERED, PALETTE, Panel, Series
from stratified.runs.workdir import number

Rows = Sequence[Mapping[str, Any]]

# By card: title, percent, (key, name) of each curve, what the plot tells.
_CARDS = {
  "Learning signal": (
    (
      "Rollouts with zero advantage",
      True,
      (("advantage/zero_share", "share"),),
      "These teach nothing. Near 100 % the run stands still.",
    ),
    (
      "Advantage, root mean square",
      False,
      (("advantage/rms", "rms"),),
      "The size of the push. Runs are only comparable at like sizes.",
    ),
    (
      "Gradient norm before clipping",
      False,
      (("grad/norm", "norm"),),
      "Steady is good; a jump to ten times its usual size is an alarm.",
    ),
    (
      "Policy loss",
      False,
      (("loss/policy", "loss"),),
      "Its level means little in policy gradient; look for jumps.",
    ),
    (
      "Value loss",
      False,
      (("value/loss", "loss"),),
      "How far the critic is from the returns; it should fall.",
    ),
    (
      "Variance explained by the critic",
      True,
      (("value/explained_variance", "share"),),
      "100 % is a perfect critic, 0 no better than the mean.",
    ),
    (
      "Likelihood loss",
      False,
      (("loss/likelihood", "loss"),),
      "What keeps correct rollouts from becoming less likely.",
    ),
    (
      "Distillation loss",
      False,
      (("distillation/loss", "loss"),),
      "The distance of the student from the teacher; it should fall.",
    ),
    (
      "Distillation KL",
      False,
      (("distillation/kl", "KL"),),
      "The same without clipping, nats a token.",
    ),
  ),
  "Policy": (
    (
      "Policy entropy, nats a token",
      False,
      (("policy/entropy", "entropy"),),
      "Falls slowly while the policy learns; near 0 it no longer explores.",
    ),
    (
      "KL to the reference, nats a token",
      False,
      (("loss/kl", "KL"),),
      "How far the policy has moved from its start.",
    ),
    (
      "Clipped tokens",
      True,
      (("policy/clip_share", "share"),),
      "Zero with a single update a batch; with several, a few percent is usual.",
    ),
    (
      "Mean |log-prob gap|",
      False,
      (("policy/logp_gap_mean", "mean"),),
      "Sampler against trainer. About 0 is on-policy; growth is an alarm.",
    ),
    (
      "Largest |log-prob gap|",
      False,
      (("policy/logp_gap_max", "max"),),
      "The same at the worst token of a step.",
    ),
  ),
  "Strata": (
    (
      "Strata a question",
      False,
      (("strata/count", "strata"),),
      "With one stratum a question the stratified estimators are the group one.",
    ),
    (
      "Rollouts alone in their stratum",
      True,
      (("strata/singleton_share", "share"),),
      "A rollout alone has nothing to be compared with inside its stratum.",
    ),
    (
      "Offset between strata, rms",
      False,
      (("theory/cross_stratum_offset_rms", "rms"),),
      "The bias that a global baseline adds to a rollout for its stratum alone.",
    ),
    (
      "Reward variance between strata",
      False,
      (("theory/between_stratum_variance", "variance"),),
      "What stratification removes from the advantage.",
    ),
    (
      "Normalisation effect",
      False,
      (("theory/normalization_effect", "effect"),),
      "How dividing by the spread of each stratum shifts the variance.",
    ),
  ),
  "Rollouts": (
    (
      "Invalid actions a rollout",
      False,
      (("rollout/invalid_actions", "actions"),),
      "Turns that were neither a call nor an answer; should go to 0.",
    ),
    (
      "Lost rollouts",
      False,
      (("rollout/failed", "rollouts"),),
      "Lost to faults of a server or a tool, and masked out.",
    ),
    (
      "Staleness of the rollouts, steps",
      False,
      (("rollout/staleness", "steps"),),
      "How many updates older than the trainer's the sampler's weights were.",
    ),
  ),
  "Speed": (
    (
      "Tokens a second",
      False,
      (("rollout/tokens_per_second", "rollout"), ("update/tokens_per_second", "update")),
      "Sampled tokens of the rollouts, and tokens of the update.",
    ),
    (
      "Padding in the update",
      True,
      (("update/padding_share", "share"),),
      "Computed for nothing; other sizes of packing.* may lower it.",
    ),
  ),
}
_ESSENTIAL = (
  "advantage/zero_share",
  "policy/entropy",
  "loss/kl",
  "grad/norm",
  "policy/logp_gap_mean",
)
_STRATA_MEANING = (
  "How the policy's strategies change; one colour alone means that it uses only one."
)


@dataclasses.dataclass(frozen=True)
class Timeline:
  """A run's rows, each with its place `x` on one axis.

  x is the step. Rows with `stage` are placed one stage behind the other, in the order in which
  they were written; a stage that counts its own steps is moved to where the last one ended. stages:
  (name, x of its beginning), empty where no row names one.
  """

  rows: Rows
  stages: tuple[tuple[str, int], ...]

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


def timeline(rows: Rows) -> Timeline:
  """Places rows of metrics.jsonl on one axis."""
  if not any(isinstance(row.get("stage"), str) for row in rows):
    return Timeline([row | {"x": row["step"]} if "step" in row else row for row in rows], ())
  placed, stages, current, shift, last = [], [], None, 0, 0
  for row in rows:
    step, own = row.get("step"), "step" not in row
    step = row.get("warm_start/step", 0) if own else step
    named = row.get("stage"), row.get("cycle")
    if named[0] is not None and named != current:
      if current is not None and step + shift < last:
        shift = last - step
      current = named
      stages.append((_stage_name(*named), step + shift))
    last = max(last, step + shift)
    placed.append(row | {"x": step + shift})
  return Timeline(placed, tuple(stages))


def _stage_name(stage: Any, cycle: Any) -> str:
  return str(stage).replace("_", " ") + (f" {cycle}" if cycle is not None else "")


def first_panels(line: Timeline, alarms: Sequence[Alarm] = ()) -> list[Panel]:
  """Reward and searches a question, side by side: shows an agent that learns to skip the tool."""
  reward = [_series(line.train, "reward/mean", "training reward", 0, "noisy")]
  for key, name, color in (
    ("eval/exact_match", "held-out exact match", 2),
    ("eval/second_encyclopedia/exact_match", "second encyclopedia", 3),
  ):
    held_out = _series(line.rows, key, name, color, "dots")
    reward += [held_out] if held_out.x else []
  searches = _series(line.train, "rollout/searches_mean", "searches", 1, "noisy")
  return [
    Panel(
      "Reward a rollout", tuple(reward), alarms=_steps(alarms, "reward/mean"), stages=line.stages
    ),
    Panel(
      "Searches a question",
      (searches, *_calls(line)),
      alarms=_steps(alarms, "rollout/searches_mean"),
      stages=line.stages,
    ),
  ]


def _calls(line: Timeline) -> list[Series]:
  """Calls of tools other than search, where a run records them by tool."""
  pattern = re.compile(r"rollout/calls_(\w+?)(?:_mean)?")
  keys = sorted({key for row in line.train for key in row if pattern.fullmatch(key)})
  names = {key: pattern.fullmatch(key)[1] for key in keys}
  return [
    _series(line.train, key, names[key], 4 + i % 4, "noisy")
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
  x = [row["x"] for row in train]
  series = []
  for i, key in enumerate(key for key in seen if key in largest):
    name, color = f"stratum {_last_number(key)}", i
    if by_searches:
      name, color = str(_last_number(key)), PALETTE + min(_last_number(key), ORDERED - 1)
    series.append(Series(name, x, [number(row, key) for row in train], color))
  if len(largest) < len(seen):
    rest = [sum(number(row, key) or 0.0 for key in seen if key not in largest) for row in train]
    series.append(Series("other", x, rest, 7))
  marks = tuple(alarm.step for alarm in alarms if alarm.key.startswith("strata/"))
  title = "Rollouts by number of searches" if by_searches else "Rollouts by stratum"
  return Panel(
    title,
    tuple(series),
    stacked=True,
    percent=True,
    limits=(0.0, 1.0),
    alarms=marks,
    stages=line.stages,
    meaning=_STRATA_MEANING,
  )


def cards(
  line: Timeline, alarms: Sequence[Alarm] = (), by_searches: bool = True
) -> tuple[dict[str, list[Panel]], list[str], list[str]]:
  """({card: plots that show something}, keys that are missing, keys that are always zero)."""
  drawn: dict[str, list[Panel]] = {}
  zero: list[str] = []
  for card, plots in _CARDS.items():
    drawn[card] = []
    for title, percent, curves, meaning in plots:
      found = [
        (key, _series(line.rows, key, name, color, "noisy"))
        for color, (key, name) in enumerate(curves)
      ]
      found = [(key, one) for key, one in found if any(value is not None for value in one.y)]
      zero += [key for key, one in found if not any(one.y)]
      series = tuple(one for _, one in found if any(one.y))
      if series:
        marks = tuple(alarm.step for alarm in alarms if alarm.key in dict(curves))
        panel = Panel(title, series, percent=percent, alarms=marks, meaning=meaning)
        drawn[card].append(dataclasses.replace(panel, stages=line.stages))
  strata = strata_panel(line, alarms, by_searches)
  drawn["Strata"] = [strata] * bool(strata.series) + drawn["Strata"]
  drawn["Rollouts"] += [panel for panel in [_hops_panel(line)] if panel.series]
  drawn["Speed"] += [panel for panel in [_time_panel(line)] if panel.series]
  train = line.train
  missing = [
    key for key in _ESSENTIAL if train and not any(number(row, key) is not None for row in train)
  ]
  missing += ["strata/share_K"] if train and not strata.series else []
  return {card: plots for card, plots in drawn.items() if plots}, missing, zero


def warm_start_panel(line: Timeline) -> Panel:
  """The warm start's loss, by its own step unless the run's stages stand on one axis."""
  rows = [row for row in line.rows if "warm_start/step" in row]
  key = "x" if line.stages else "warm_start/step"
  loss = _series(rows, "warm_start/loss", "loss", 0, "noisy", key)
  title = "Warm start: loss" + " by its own step" * (not line.stages)
  return Panel(
    title, (loss,), stages=line.stages, meaning="Cross-entropy of the demonstrations, nats a token."
  )


def _hops_panel(line: Timeline) -> Panel:
  keys = {
    key for row in line.rows for key in row if re.fullmatch(r"eval/exact_match_hops_\d+", key)
  }
  keys = sorted(keys)
  names = {key: f"{_last_number(key)} hop" + "s" * (_last_number(key) != 1) for key in keys}
  series = [
    _series(line.rows, key, names[key], color % PALETTE, "dots") for color, key in enumerate(keys)
  ]
  return Panel(
    "Held-out exact match by hops",
    tuple(one for one in series if len(one.x) > 1),
    percent=True,
    stages=line.stages,
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
    Series(names[key], x, y, color % PALETTE)
    for color, (key, y) in enumerate(shares.items())
    if any(value for value in y)
  )
  return Panel(
    "Where a step's time goes",
    series,
    stacked=True,
    percent=True,
    limits=(0.0, 1.0),
    stages=line.stages,
    meaning="The largest part is where tuning pays.",
  )


def _series(rows: Rows, key: str, name: str, color: int, style: str, x_key: str = "x") -> Series:
  rows = [row for row in rows if key in row and isinstance(row.get(x_key), int)]
  return Series(
    name, [row[x_key] for row in rows], [number(row, key) for row in rows], color, style
  )


def _steps(alarms: Sequence[Alarm], key: str) -> tuple[int, ...]:
  return tuple(alarm.step for alarm in alarms if alarm.key == key)


def _last_number(key: str) -> int:
  return int(key.rpartition("_")[2])
