"""Scores of finished rollouts: by set, and by hops where they are known."""

from collections.abc import Sequence
import math
from typing import Any

from stratified import rewards
from stratified.types import Trajectory


def summary(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
  """Mean exact match, F1 and searches of the rollouts that were not lost, with the same by hops.

  Returns {"count", "failed", "exact_match", "exact_match_error", "f1", "searches_mean", "invalid_actions", "tokens_mean",
  "by_hops": {"2": {...}}}; the error is the standard error of the mean. Means of nothing are None.
  """
  flat = [trajectory for group in groups for trajectory in group]
  result = _means(flat)
  hops = sorted({t.question.hops for t in flat if t.question.hops is not None})
  if hops:
    result["by_hops"] = {str(h): _means([t for t in flat if t.question.hops == h]) for h in hops}
  return result


def _means(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
  done = [t for t in trajectories if t.fault is None]
  mean = lambda values: sum(values) / len(done) if done else None
  exact = mean([rewards.exact_match(t.answer, t.question.golden_answers) for t in done])
  return {
      "count": len(done),
      "failed": len(trajectories) - len(done),
      "exact_match": exact,
      "exact_match_error": math.sqrt(exact * (1 - exact) / len(done)) if done else None,
      "f1": mean([rewards.f1(t.answer, t.question.golden_answers) for t in done]),
      "searches_mean": mean([t.num_searches for t in done]),
      "invalid_actions": mean([t.num_invalid for t in done]),
      "tokens_mean": mean([t.num_policy_tokens for t in done]),
  }


def metrics_row(scores: dict[str, dict[str, Any]], main: str = "held_out") -> dict[str, float]:
  """The rows' keys: eval/exact_match and eval/exact_match_hops_H of the main set, eval/NAME/exact_match of others."""
  row = {"eval/exact_match": scores[main]["exact_match"], "eval/searches_mean": scores[main]["searches_mean"]}
  for hops, part in scores[main].get("by_hops", {}).items():
    row[f"eval/exact_match_hops_{hops}"] = part["exact_match"]
    row[f"eval/searches_hops_{hops}"] = part["searches_mean"]
  return row | {f"eval/{name}/exact_match": score["exact_match"] for name, score in scores.items() if name != main}


def rollout_row(groups: Sequence[Sequence[Trajectory]], reward: Sequence[Sequence[float]]) -> dict[str, float]:
  """What a training step's rollouts say of themselves; means over those not lost, `rollout/failed` a count.

  Raises RuntimeError where every rollout was lost: there is nothing to learn from, and a step would hide it.
  """
  pairs = [(t, r) for group, row in zip(groups, reward) for t, r in zip(group, row)]
  done = [(t, r) for t, r in pairs if t.fault is None]
  if not done:
    raise RuntimeError(f"all {len(pairs)} rollouts of the step were lost, the first because {pairs[0][0].fault}; "
                       "mend that and run the same command again: it goes on from the last checkpoint")
  mean = lambda values: sum(values) / len(done)
  return {
      "reward/mean": mean([r for _, r in done]),
      "reward/exact_match": mean([rewards.exact_match(t.answer, t.question.golden_answers) for t, _ in done]),
      "rollout/searches_mean": mean([t.num_searches for t, _ in done]),
      "rollout/invalid_actions": mean([t.num_invalid for t, _ in done]),
      "rollout/policy_tokens": sum(t.num_policy_tokens for t, _ in pairs),
      "rollout/failed": len(pairs) - len(done),
  }
