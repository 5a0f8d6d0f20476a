"""Which curves of a run are drawn, from the rows of metrics.jsonl."""

from collections.abc import Mapping, Sequence
import re
from typing import Any

from stratified.reports.alarms import Alarm
from stratified.reports.charts import ORDERED, PALETTE, Panel, Series

Rows = Sequence[Mapping[str, Any]]

# Title, percent, then (key, name) of each curve; a report's first plot is drawn apart (see
# `first_panels`).
_PANELS = (
  ("Rollouts with zero advantage", True, (("advantage/zero_share", "share"),)),
  ("Policy entropy, nats a token", False, (("policy/entropy", "entropy"),)),
  ("KL to the reference, nats a token", False, (("loss/kl", "KL"),)),
  ("Gradient norm before clipping", False, (("grad/norm", "norm"),)),
  ("Mean |log-prob gap|", False, (("policy/logp_gap_mean", "mean"),)),
  ("Largest |log-prob gap|", False, (("policy/logp_gap_max", "max"),)),
  ("Clipped tokens", True, (("policy/clip_share", "share"),)),
  ("Policy loss", False, (("loss/policy", "loss"),)),
  ("Advantage, root mean square", False, (("advantage/rms", "rms"),)),
  (
    "Bias between strata",
    False,
    (
      ("theory/cross_stratum_offset_rms", "offset rms"),
      ("theory/between_stratum_variance", "variance"),
      ("theory/normalization_effect", "normalisation"),
    ),
  ),
  ("Strata a question", False, (("strata/count", "strata"),)),
  ("Rollouts alone in their stratum", True, (("strata/singleton_share", "share"),)),
  (
    "Invalid actions and lost rollouts",
    False,
    (("rollout/invalid_actions", "invalid"), ("rollout/failed", "lost")),
  ),
  (
    "Tokens a second",
    False,
    (("rollout/tokens_per_second", "rollout"), ("update/tokens_per_second", "update")),
  ),
  ("Padding in the update", True, (("update/padding_share", "share"),)),
  ("Staleness of the rollouts, steps", False, (("rollout/staleness", "steps"),)),
)
_ESSENTIAL = (
  "advantage/zero_share",
  "policy/entropy",
  "loss/kl",
  "grad/norm",
  "policy/logp_gap_mean",
)


def first_panels(rows: Rows, alarms: Sequence[Alarm] = ()) -> list[Panel]:
  """Reward and searches a question, one above the other: an agent that learns to skip the tool
  shows here."""
  train = [row for row in rows if "reward/mean" in row]
  reward = [_series(train, "reward/mean", "training reward", 0, "noisy")]
  for key, name, color in (
    ("eval/exact_match", "held-out exact match", 2),
    ("eval/second_encyclopedia/exact_match", "second encyclopedia", 3),
  ):
    held_out = _series(rows, key, name, color, "dots")
    reward += [held_out] if held_out.x else []
  return [
    Panel("Reward a rollout", tuple(reward), alarms=_steps(alarms, "reward/mean")),
    Panel(
      "Searches a question",
      (_series(train, "rollout/searches_mean", "searches", 1, "noisy"),),
      alarms=_steps(alarms, "rollout/searches_mean"),
    ),
  ]


def strata_panel(rows: Rows, alarms: Sequence[Alarm] = (), by_searches: bool = True) -> Panel:
  """Shares of the rollouts in each stratum, stacked; strata that count searches get darker with
  their number.

  The smallest strata are drawn together where there are more than a reader can tell apart.
  """
  train = [row for row in rows if "reward/mean" in row]
  keys = {key for row in train for key in row if re.fullmatch(r"strata/share_\d+", key)}
  totals = {
    key: sum(_value(row, key) or 0.0 for row in train) for key in sorted(keys, key=_last_number)
  }
  seen = [key for key, total in totals.items() if total > 0]
  largest = sorted(seen, key=totals.get, reverse=True)[
    : ORDERED if len(seen) <= ORDERED else ORDERED - 1
  ]
  x = [row["step"] for row in train]
  series = []
  for i, key in enumerate(key for key in seen if key in largest):
    name, color = f"stratum {_last_number(key)}", i
    if by_searches:
      name, color = str(_last_number(key)), PALETTE + min(_last_number(key), ORDERED - 1)
    series.append(Series(name, x, [_value(row, key) for row in train], color))
  if len(largest) < len(seen):
    rest = [sum(_value(row, key) or 0.0 for key in seen if key not in largest) for row in train]
    series.append(Series("other", x, rest, 7))
  marks = tuple(alarm.step for alarm in alarms if alarm.key.startswith("strata/"))
  title = "Rollouts by number of searches" if by_searches else "Rollouts by stratum"
  return Panel(title, tuple(series), stacked=True, percent=True, limits=(0.0, 1.0), alarms=marks)


def panels(
  rows: Rows, alarms: Sequence[Alarm] = (), by_searches: bool = True
) -> tuple[list[Panel], list[str], list[str]]:
  """(every other plot that shows something, keys that a run should record and did not, keys always
  zero)."""
  train = [row for row in rows if "reward/mean" in row]
  drawn, zero = [strata_panel(rows, alarms, by_searches)], []
  for title, percent, curves in _PANELS:
    series = [
      (key, _series(train, key, name, color, "noisy")) for color, (key, name) in enumerate(curves)
    ]
    series = [(key, one) for key, one in series if any(value is not None for value in one.y)]
    zero += [key for key, one in series if not any(one.y)]
    series = tuple(one for _, one in series if any(one.y))
    if series:
      marks = tuple(alarm.step for alarm in alarms if alarm.key in dict(curves))
      drawn.append(Panel(title, series, percent=percent, alarms=marks))
  drawn += [panel for panel in (_hops_panel(rows), _time_panel(train)) if panel.series]
  missing = [
    key for key in _ESSENTIAL if train and not any(_value(row, key) is not None for row in train)
  ]
  missing += ["strata/share_K"] if train and not drawn[0].series else []
  return drawn if train else [], missing, zero


def warm_start_panel(rows: Rows) -> Panel:
  warm = [row for row in rows if "warm_start/step" in row]
  loss = _series(warm, "warm_start/loss", "loss", 0, "noisy", "warm_start/step")
  return Panel("Warm start: loss by its own step", (loss,))


def _hops_panel(rows: Rows) -> Panel:
  keys = sorted(
    {key for row in rows for key in row if re.fullmatch(r"eval/exact_match_hops_\d+", key)}
  )
  names = {key: f"{_last_number(key)} hop" + "s" * (_last_number(key) != 1) for key in keys}
  series = [
    _series(rows, key, names[key], color % PALETTE, "dots") for color, key in enumerate(keys)
  ]
  return Panel(
    "Held-out exact match by hops", tuple(one for one in series if len(one.x) > 1), percent=True
  )


def _time_panel(train: Rows) -> Panel:
  """Shares of a step's time. time/step_s, where recorded, is the whole; what no part claims is
  drawn too."""
  keys = sorted(
    {key for row in train for key in row if re.fullmatch(r"time/\w+_s", key)} - {"time/step_s"}
  )
  keys.sort(key=lambda key: ("rollout" not in key, "retrieval" not in key, "update" not in key))
  shares = {key: [] for key in keys + ["else"]}
  for row in train:
    parts = {key: max(0.0, _value(row, key) or 0.0) for key in keys}
    parts["else"] = max(0.0, (_value(row, "time/step_s") or 0.0) - sum(parts.values()))
    whole = sum(parts.values())
    for key, value in parts.items():
      shares[key].append(value / whole if whole else None)
  x = [row["step"] for row in train]
  names = {key: key.removeprefix("time/").removesuffix("_s") for key in keys} | {
    "else": "everything else"
  }
  series = tuple(
    Series(names[key], x, y, color % PALETTE)
    for color, (key, y) in enumerate(shares.items())
    if any(value for value in y)
  )
  return Panel("Where a step's time goes", series, stacked=True, percent=True, limits=(0.0, 1.0))


def _series(rows: Rows, key: str, name: str, color: int, style: str, x_key: str = "step") -> Series:
  rows = [row for row in rows if key in row and isinstance(row.get(x_key), int)]
  return Series(
    name, [row[x_key] for row in rows], [_value(row, key) for row in rows], color, style
  )


def _value(row: Mapping[str, Any], key: str) -> float | None:
  value = row.get(key)
  return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _steps(alarms: Sequence[Alarm], key: str) -> tuple[int, ...]:
  return tuple(alarm.step for alarm in alarms if alarm.key == key)


def _last_number(key: str) -> int:
  return int(key.rpartition("_")[2])
