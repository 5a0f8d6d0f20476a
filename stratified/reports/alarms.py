"""Finds what went wrong in a run, and at which step, before hundreds of steps are lost.

Every rule compares a short trailing window with the run's own start, so no rule needs a setting for
a model.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import statistics
from typing import Any

from stratified.runs.workdir import is_number

_START = 10  # rows that tell how the run began
_WINDOW = 10  # rows that tell how it stands


@dataclasses.dataclass(frozen=True)
class Alarm:
  """`key` is the metric of metrics.jsonl that shows it, `message` one sentence with the numbers."""

  step: int
  key: str
  message: str


def find(rows: Sequence[Mapping[str, Any]], rollouts_per_step: int | None = None) -> list[Alarm]:
  """Finds alarms in a run's training rows, in step order; each rule speaks once, when first broken.

  Args:
    rows: rows of metrics.jsonl; those without reward/mean are left out, absent keys raise no alarm.
    rollouts_per_step: questions times samples; with it, up to 5 % lost rollouts in a step raise no
      alarm.
  """
  rows = [row for row in rows if "reward/mean" in row and isinstance(row.get("step"), int)]
  found = [
    _relative(
      rows,
      "policy/entropy",
      lambda now, start: now < 0.1 * start,
      "entropy fell to {now:.3g} from {start:.3g} nats a token: the policy has stopped exploring",
    ),
    _relative(
      rows,
      "policy/entropy",
      lambda now, start: now > max(3 * start, start + 0.5),
      "entropy rose to {now:.3g} from {start:.3g} nats a token: the policy dissolves into noise",
    ),
    _relative(
      rows,
      "policy/logp_gap_mean",
      lambda now, start: now > max(3 * start, 0.01),
      "sampler and trainer log-probs are {now:.3g} apart, {start:.3g} at the start: training "
      "drifts off-policy",
    ),
    _relative(
      rows,
      "rollout/searches_mean",
      lambda now, start: start >= 0.2 and now < 0.2 * start,
      "searches fell to {now:.2f} a question from {start:.2f}: the agent learnt to skip the tool",
    ),
    _absolute(
      rows, "loss/kl", lambda now: now > 1.0, "KL to the reference reached {now:.3g} nats a token"
    ),
    _absolute(
      rows,
      "advantage/zero_share",
      lambda now: now > 0.95,
      "{now:.0%} of the advantages are zero: almost no rollout teaches anything",
    ),
    _reward_fell(rows),
    _gradient_exploded(rows),
    _one_stratum(rows),
    _counted(
      rows, "update/skipped", 0, "updates skipped because loss or gradient was not finite: {count}"
    ),
    _counted(
      rows,
      "rollout/failed",
      0.05 * (rollouts_per_step or 0),
      "rollouts of this step lost to faults: {count}",
      of_step=True,
    ),
    _not_finite(rows),
  ]
  return sorted((alarm for alarm in found if alarm), key=lambda alarm: alarm.step)


def _series(rows, key) -> tuple[list[int], list[float]]:
  pairs = [(row["step"], row[key]) for row in rows if is_number(row.get(key))]
  return [step for step, _ in pairs], [value for _, value in pairs]


def _windows(values: Sequence[float]) -> list[float]:
  """Medians of the trailing window at each row: one odd step is not a collapse."""
  return [statistics.median(values[i - _WINDOW : i]) for i in range(_WINDOW, len(values) + 1)]


def _relative(rows, key: str, broken: Callable[[float, float], bool], message: str) -> Alarm | None:
  steps, values = _series(rows, key)
  if len(values) < _START + _WINDOW:
    return None
  start = statistics.median(values[:_START])
  for step, now in zip(steps[_WINDOW - 1 :], _windows(values)):
    if broken(now, start):
      return Alarm(step, key, message.format(now=now, start=start))
  return None


def _absolute(rows, key: str, broken: Callable[[float], bool], message: str) -> Alarm | None:
  return _relative(rows, key, lambda now, start: broken(now), message)


def _reward_fell(rows) -> Alarm | None:
  steps, values = _series(rows, "reward/mean")
  best = 0.0
  for step, now in zip(steps[_WINDOW - 1 :], _windows(values)):
    best = max(best, now)
    if best >= 0.1 and now < 0.5 * best:
      message = f"reward fell to {now:.3g}, less than half of the {best:.3g} reached before"
      return Alarm(step, "reward/mean", message)
  return None


def _gradient_exploded(rows) -> Alarm | None:
  steps, values = _series(rows, "grad/norm")
  for i in range(_START, len(values)):
    usual = statistics.median(values[max(0, i - 2 * _WINDOW) : i])
    if usual > 0 and values[i] > 10 * usual:
      return Alarm(
        steps[i],
        "grad/norm",
        f"the gradient norm jumped to {values[i]:.3g}, "
        f"{values[i] / usual:.0f} times the usual {usual:.3g}",
      )
  return None


def _one_stratum(rows) -> Alarm | None:
  for key in sorted({key for row in rows for key in row if key.startswith("strata/share_")}):
    message = "{now:.0%} of the rollouts lie in stratum " + key.removeprefix("strata/share_")
    alarm = _absolute(
      rows,
      key,
      lambda now: now > 0.98,
      message + ": stratified and group advantages are the same there",
    )
    if alarm:
      return alarm
  return None


def _counted(rows, key: str, tolerated: float, message: str, of_step: bool = False) -> Alarm | None:
  steps, values = _series(rows, key)
  first = next((i for i, value in enumerate(values) if value > tolerated), None)
  if first is None:
    return None
  count = values[first] if of_step else sum(values)
  return Alarm(steps[first], key, message.format(count=f"{count:.0f}"))


def _not_finite(rows) -> Alarm | None:
  for row in rows:
    if isinstance(row.get("not_finite"), Mapping) and row["not_finite"]:
      named = ", ".join(f"{key} ({value})" for key, value in row["not_finite"].items())
      return Alarm(row["step"], next(iter(row["not_finite"])), f"not finite: {named}")
  return None
