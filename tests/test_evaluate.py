"""Scores of finished rollouts, worked out by hand."""

import math

import pytest
from small_rollouts import trajectory

from stratified import rewards
from stratified.evaluation import score
from stratified.types import Question, Turn

TOOLS = ("search", "calculator")


def rollout(answer, *, hops=1, searches=0, tokens=2, **fields):
  return trajectory(
    ("prompt", [1]),
    ("policy", [2] * tokens),
    searches=searches,
    answer=answer,
    question=Question("q", "Where?", ("New York",), hops=hops),
    **fields,
  )


LOST = rollout(
  None, hops=2, searches=9, tokens=50, stop="fault", fault="the retriever did not answer"
)

# By hand: exact match 1, 0, 0, 1; F1 1, 2/3 (one of one word, one of two), 0, 1.
GROUPS = [
  [rollout("new york!", searches=1)],
  [rollout("York", searches=3, tokens=4)],
  [rollout(None, hops=2, tokens=6)],
  [rollout("The New York", hops=2, searches=2, tokens=8)],
  [LOST],
]


def test_summary_averages_over_what_was_not_lost():
  found = score.summary(GROUPS)
  assert (found["count"], found["failed"]) == (4, 1)
  assert found["exact_match"] == 0.5
  assert found["exact_match_error"] == pytest.approx(0.25)  # sqrt(0.5 x 0.5 / 4)
  assert found["f1"] == pytest.approx((1 + 2 / 3 + 0 + 1) / 4)
  assert (
    found["searches_mean"] == 1.5 and found["tokens_mean"] == 5 and found["invalid_actions"] == 0
  )
  one, two = found["by_hops"]["1"], found["by_hops"]["2"]
  assert (one["count"], one["exact_match"], one["searches_mean"]) == (2, 0.5, 2)
  assert (two["count"], two["failed"], two["exact_match"], two["searches_mean"]) == (2, 1, 0.5, 1)


def test_questions_of_unknown_hops_give_no_scores_by_hops():
  assert "by_hops" not in score.summary([[rollout("New York", hops=None)]])


def test_means_of_nothing_are_none():
  found = score.summary([[LOST]])
  assert found["count"] == 0 and found["failed"] == 1
  assert all(
    found[name] is None for name in ("exact_match", "exact_match_error", "f1", "searches_mean")
  )


def test_metrics_row_names_the_main_set_plainly_and_the_others_by_their_names():
  scores = {"held_out": score.summary(GROUPS), "second": score.summary(GROUPS[:1])}
  assert score.metrics_row(scores) == {
    "eval/exact_match": 0.5,
    "eval/searches_mean": 1.5,
    "eval/exact_match_hops_1": 0.5,
    "eval/searches_hops_1": 2,
    "eval/exact_match_hops_2": 0.5,
    "eval/searches_hops_2": 1,
    "eval/second/exact_match": 1,
  }


def test_a_steps_row_averages_over_what_was_not_lost_and_counts_the_rest():
  invalid = trajectory(("policy", [1, 2, 3]), answer="Rome", question=GROUPS[0][0].question)
  invalid = invalid.__class__(
    **vars(invalid) | dict(turns=(Turn("invalid", "?"), Turn("answer", "Rome")))
  )
  worth = lambda total, short: rewards.Score(total, {"short": short})
  scores = [[worth(1.0, 1.0), None], [worth(0.1, 0.0), worth(0.4, 0.5)]]
  row = score.rollout_row([[GROUPS[0][0], LOST], [invalid, GROUPS[1][0]]], scores, 0, TOOLS)
  assert row == {
    "reward/mean": pytest.approx(0.5),
    "reward/exact_match": pytest.approx(1 / 3),
    "reward/short": pytest.approx(0.5),
    "rollout/searches_mean": 4 / 3,
    "rollout/calls_mean_calculator": 0.0,
    "rollout/invalid_actions": 1 / 3,
    "rollout/policy_tokens": 2 + 50 + 3 + 4,
    "rollout/failed": 1,
    "rollout/staleness": 0,
  }
  assert all(math.isfinite(value) for value in row.values())


def test_a_step_of_which_every_rollout_was_lost_stops_the_run_with_the_reason():
  with pytest.raises(
    RuntimeError,
    match="all 2 rollouts of the step were lost, the first because the retriever did not",
  ):
    score.rollout_row([[LOST, LOST]], [[None, None]])
