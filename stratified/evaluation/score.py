"""Scores finished rollouts, by set and by hops where they are known."""

import collections
from collections.abc import Mapping, Sequence
import math
from typing import Any

from stratified import rewards
from stratified.evaluation import intervals
from stratified.types import Trajectory

Row = dict[str, Any]

HELD_OUT = "held_out"  # the set that a run is measured by


def score(trajectory: Trajectory, tools: Sequence[str] = ()) -> Row:
  """Scores one rollout: exact_match, f1, searches, calls, invalid, tokens, hops, fault.

  Exact match and F1 are None for a lost one. `calls` counts those of `tools`, called or not, and of
  whatever else was called. `tokens` counts all that was sampled for it, also beside the rollout
  (`side_tokens`).
  """
  question, lost = trajectory.question, trajectory.fault is not None
  return {
    "exact_match": None
    if lost
    else rewards.exact_match(trajectory.answer, question.golden_answers),
    "f1": None if lost else rewards.f1(trajectory.answer, question.golden_answers),
    "searches": trajectory.num_searches,
    "calls": dict.fromkeys(tools, 0) | collections.Counter(call.tool for call in trajectory.calls),
    "invalid": trajectory.num_invalid,
    "tokens": trajectory.num_policy_tokens + trajectory.side_tokens,
    "side_tokens": trajectory.side_tokens,
    "hops": question.hops,
    "fault": trajectory.fault,
  }


def summary(groups: Sequence[Sequence[Trajectory]], tools: Sequence[str] = ()) -> dict[str, Any]:
  """Scores rollouts and summarises them: see `summarise`."""
  return summarise([[score(trajectory, tools) for trajectory in group] for group in groups])


def summarise(
  groups: Sequence[Sequence[Mapping[str, Any]]], *, with_intervals: bool = False
) -> dict[str, Any]:
  """Summarises rows that `score` made, [Q][K]: means over the rollouts that were not lost.

  Returns {"count", "failed", "exact_match", "exact_match_error", "f1", "searches_mean",
  "calls_mean": {other tool: mean}, "invalid_actions", "tokens_mean", "by_hops": {"2": {...}}}; the
  error is the standard error of the mean over questions. Means of nothing are None. With several
  rollouts a question also "exact_match_any", the share of questions that at least one of them
  answered; `with_intervals` also "exact_match_interval" and "f1_interval", the 95 % intervals over
  questions.
  """
  result = _means(groups, with_intervals)
  known = sorted({row["hops"] for group in groups for row in group if row["hops"] is not None})
  if known:
    result["by_hops"] = {
      str(h): _means(
        [[row for row in group if row["hops"] == h] for group in groups], with_intervals
      )
      for h in known
    }
  return result


def by_question(groups: Sequence[Sequence[Mapping[str, Any]]], key: str) -> list[float]:
  """Means of `key` by question over the rollouts not lost; leaves out questions without one."""
  done = [[row[key] for row in group if row["fault"] is None] for group in groups]
  return [sum(values) / len(values) for values in done if values]


def _means(groups, with_intervals: bool) -> dict[str, Any]:
  done = [row for group in groups for row in group if row["fault"] is None]
  mean = lambda key: sum(row[key] for row in done) / len(done) if done else None
  tools = sorted({tool for row in done for tool in row.get("calls", {})} - {"search"})
  exact = by_question(groups, "exact_match")
  result = {
    "count": len(done),
    "failed": sum(len(group) for group in groups) - len(done),
    "exact_match": mean("exact_match"),
    "exact_match_error": _standard_error(exact),
    "f1": mean("f1"),
    "searches_mean": mean("searches"),
    "invalid_actions": mean("invalid"),
    "tokens_mean": mean("tokens"),
  }
  if tools:
    result["calls_mean"] = {
      tool: sum(row["calls"].get(tool, 0) for row in done) / len(done) for tool in tools
    }
  if done and max(len(group) for group in groups) > 1:
    result["exact_match_any"] = sum(value > 0 for value in exact) / len(exact)
  if done and with_intervals:
    for key in ("exact_match", "f1"):
      result[f"{key}_interval"] = list(intervals.interval({"": by_question(groups, key)}))
  return result


def _standard_error(values: Sequence[float]) -> float | None:
  if not values:
    return None
  mean = sum(values) / len(values)
  return math.sqrt(sum((value - mean) ** 2 for value in values)) / len(values)


def metrics_row(scores: dict[str, dict[str, Any]], main: str = HELD_OUT) -> dict[str, float]:
  """Makes the row of an evaluation.

  The main set has eval/exact_match, eval/exact_match_hops_H and the like, others
  eval/NAME/exact_match.
  """
  row = {
    "eval/exact_match": scores[main]["exact_match"],
    "eval/searches_mean": scores[main]["searches_mean"],
  }
  for tool, mean in scores[main].get("calls_mean", {}).items():
    row[f"eval/calls_mean_{tool}"] = mean
  for hops, part in scores[main].get("by_hops", {}).items():
    row[f"eval/exact_match_hops_{hops}"] = part["exact_match"]
    row[f"eval/searches_hops_{hops}"] = part["searches_mean"]
    for tool, mean in part.get("calls_mean", {}).items():
      row[f"eval/calls_mean_{tool}_hops_{hops}"] = mean
  return row | {
    f"eval/{name}/exact_match": score["exact_match"]
    for name, score in scores.items()
    if name != main
  }


class AllLost(RuntimeError):
  """Every rollout of a step was lost; the sentence says why."""


def rollout_row(
  groups: Sequence[Sequence[Trajectory]],
  scores: Sequence[Sequence[rewards.Score | None]],
  step: int = 0,
  tools: Sequence[str] = (),
) -> dict[str, float]:
  """Makes the row of a training step's rollouts: means over those not lost.

  `rollout/failed` is a count. Every tool but search has `rollout/calls_mean_TOOL`, every part of
  the reward `reward/PART`. Raises AllLost where every rollout was lost: there is nothing to learn
  from, and a step would hide it.
  """
  pairs = [(t, s) for group, row in zip(groups, scores) for t, s in zip(group, row)]
  done = [(t, s) for t, s in pairs if t.fault is None]
  if not done:
    raise AllLost(
      f"all {len(pairs)} rollouts of the step were lost, the first because {pairs[0][0].fault}; "
      "mend that and run the same command again: it goes on from the last checkpoint"
    )
  mean = lambda values: sum(values) / len(done)
  return {
    **rewards.parts_row([s for _, s in done]),
    "reward/mean": mean([s.total for _, s in done]),
    "reward/exact_match": mean(
      [rewards.exact_match(t.answer, t.question.golden_answers) for t, _ in done]
    ),
    "rollout/searches_mean": mean([t.num_searches for t, _ in done]),
    **{
      f"rollout/calls_mean_{tool}": mean([t.num_calls(tool) for t, _ in done])
      for tool in tools
      if tool != "search"
    },
    "rollout/invalid_actions": mean([t.num_invalid for t, _ in done]),
    "rollout/policy_tokens": sum(t.num_policy_tokens for t, _ in pairs),
    "rollout/failed": len(pairs) - len(done),
    "rollout/staleness": mean([step - t.oldest_weight_version for t, _ in done]),
  }
