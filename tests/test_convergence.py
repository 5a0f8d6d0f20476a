"""Convergence: when a stage ends, which checkpoint is its best and stays."""

import os

import pytest
from test_checkpoint import make_state

from configs import search_e1
from stratified.runs import build, checkpoint, convergence
from stratified.runs import workdir as workdirs
from stratified.runs.convergence import ConvergenceSettings, StageScores


def test_the_best_is_the_first_of_the_highest_scores():
  assert convergence.best([]) is None
  assert convergence.best([(0, 0.0), (2, 0.5), (4, 0.4), (6, 0.5)]) == 2
  scores = StageScores(scores=[(0, 0.0), (2, 0.5), (4, 0.4), (6, 0.5)])
  assert scores.best([0, 4, 6]) == 6 and scores.best([1]) is None


@pytest.mark.parametrize(
  "scores, patience, min_gain, ended",
  [
    ([0.5, 0.4, 0.3, 0.2], 0, 0.0, False),
    ([0.5, 0.4], 2, 0.0, False),
    ([0.5, 0.4, 0.5], 2, 0.0, True),
    ([0.5, 0.4, 0.51], 2, 0.0, False),
    ([0.5, 0.4, 0.51], 2, 0.02, True),
    ([0.5, 0.51, 0.53], 2, 0.02, False),  # small gains add up within the patience
    ([0.1, 0.5, 0.4, 0.6, 0.5, 0.4], 3, 0.0, False),
    ([0.1, 0.5, 0.4, 0.6, 0.5, 0.4, 0.6], 3, 0.0, True),
  ],
)
def test_a_stage_ends_after_so_many_scores_without_a_gain(scores, patience, min_gain, ended):
  assert convergence.ended(list(enumerate(scores)), patience, min_gain) == ended


def test_the_row_of_the_score_that_ends_a_run_says_so_and_the_run_counts_as_trained():
  settings = ConvergenceSettings(patience=1, metric="f1")
  scores = StageScores(settings, first=10, last=True)
  of = lambda f1: {"held_out": {"f1": f1, "exact_match": 0.0}}
  assert scores.add(12, of(0.4)) == {"convergence/best_step": 12}
  row = {"step": 14, "stage": "x", "eval/exact_match": 0.0} | scores.add(14, of(0.4))
  assert row["convergence/best_step"] == 12 and row["convergence/ended"] == row["run/ended"] == 1
  assert scores.scores == [(2, 0.4), (4, 0.4)]
  run = workdirs.Run("x", {"num_steps": 20}, [row])
  assert run.trained and run.finished
  assert not workdirs.Run("x", {"num_steps": 20}, [{**row, "run/ended": 0}]).trained
  not_last = StageScores(settings, scores=[(2, 0.4)])
  assert "run/ended" not in not_last.add(4, of(0.1))
  assert StageScores().add(4, of(0.1)) == {}  # off: rows are as without any of this


def test_the_best_checkpoint_stays_besides_the_newest_until_a_better_one_is_whole(tmp_path):
  kept = lambda: sorted(os.listdir(tmp_path / "checkpoints"), key=int)
  with checkpoint.Checkpointer(tmp_path, every=1) as saved:
    for step in (1, 2, 3, 4):
      saved.save(step, make_state(step), scores=[(2, 0.5)] if step > 1 else [], best=2)
    saved.wait()
    assert kept() == ["2", "3", "4"] and saved.steps == [2, 3, 4]
  assert checkpoint.best_step(tmp_path) == 2
  with checkpoint.Checkpointer(tmp_path, every=1) as saved:  # a run that resumes
    assert saved.scores(4) == [(2, 0.5)]
    saved.save(5, make_state(5), scores=[(2, 0.5)], best=2)
    saved.wait()
    assert kept() == ["2", "4", "5"]
    saved.save(6, make_state(6), scores=[(2, 0.5), (6, 0.6)], best=6)
    saved.wait()
    assert kept() == ["5", "6"] and saved.scores(6) == [(2, 0.5), (6, 0.6)]
    saved.save(7, make_state(7))
  assert checkpoint.best_step(tmp_path) is None
  assert checkpoint.step_of(tmp_path, 6) == 6 and checkpoint.step_of(tmp_path, None) is None
  with pytest.raises(ValueError, match="keeps no checkpoint that is known as the best"):
    checkpoint.step_of(tmp_path, "best")


@pytest.mark.parametrize(
  "changes, sentence",
  [
    (
      {"convergence.patience": 2, "eval.every": 0},
      r"patience=2 counts evaluations, and eval\.every=0 makes none",
    ),
    (
      {"convergence.goes_on": "best", "checkpoint.keep_best": False},
      r"goes_on='best' with checkpoint\.keep_best=False",
    ),
    (
      {"convergence.patience": 2, "pairs.source": "last_steps", "pairs.num_questions": 64},
      r"pairs\.source='last_steps' needs reinforcement that ends where it says",
    ),
  ],
)
def test_a_rule_that_has_nothing_to_go_by_is_refused(changes, sentence):
  config = search_e1.get_config("tiny")
  config.update_from_flattened_dict(changes)
  with pytest.raises(ValueError, match=sentence):
    build.check(config)
