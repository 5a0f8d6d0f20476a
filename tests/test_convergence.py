"""Convergence: a plateau ends a stage, its best checkpoint stays and goes on, whatever stops it."""

import os
import types

import jax
import numpy as np
import pytest
from test_checkpoint import make_state
from test_search_e1_run import SETTINGS
import test_train

from configs import search_e1, search_r1
from experiments import evaluate
from stratified.runs import build, checkpoint, convergence, held_out, trainer
from stratified.runs import pairs as pair_files
from stratified.runs import workdir as workdirs
from stratified.runs.convergence import ConvergenceSettings, StageScores
from stratified.runs.weights import of_stage
from stratified.runs.writer import Writer


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


# Held-out scores in the order in which policies are first evaluated. Reinforcement 1 ends at its
# step 3 of 5, two scores after its best; reinforcement 2 rises to its end.
SCORES = (0.2, 0.5, 0.4, 0.5, 0.3, 0.35, 0.6, 0.7, 0.8, 0.9, 0.95, 0.93, 0.91)
NEVER = types.SimpleNamespace(asked=False, agreed=lambda: False)


@pytest.fixture(scope="module")
def made():
  config = search_r1.get_config("tiny")
  config.update_from_flattened_dict(test_train.SETTINGS | search_e1.METHOD)
  changes = {
    "num_steps": 14,
    "warm_start.num_steps": 0,
    "eval.every": 1,
    "convergence.patience": 2,
    "convergence.goes_on": "best",
  }
  of_pairs = {name: value for name, value in SETTINGS.items() if name not in ("preset", *changes)}
  config.update_from_flattened_dict(of_pairs | {"guide.before": " [ ", "guide.after": " ] "})
  config.update_from_flattened_dict(changes)
  return build.build(config)


@pytest.fixture
def scripted(monkeypatch):
  """Gives each policy that is evaluated the next of SCORES, and the same again whenever it is."""
  known = {}

  def scores(params, *unused, **others):
    key = np.asarray(params["embed"], np.float32).tobytes()
    score = known.setdefault(key, SCORES[len(known) % len(SCORES)])
    return {"held_out": {"exact_match": score, "searches_mean": 0.0}}

  monkeypatch.setattr(held_out, "evaluate", scores)


class Killed(Exception):
  pass


def train(made, workdir, monkeypatch=None, rows=None):
  """Trains; with `rows` it dies when it has written so many, before their checkpoint."""
  if rows is None:
    return trainer.train(made, workdir, NEVER)
  left, write = [rows], Writer.write

  def dying(self, *args, **kwargs):
    write(self, *args, **kwargs)
    left[0] -= 1
    if not left[0]:
      raise Killed

  with monkeypatch.context() as patched, pytest.raises(Killed):
    patched.setattr(Writer, "write", dying)
    trainer.train(made, workdir, NEVER)


def test_a_plateau_ends_a_stage_and_its_best_goes_on_however_often_the_run_dies(
  made, scripted, tmp_path, monkeypatch, capsys
):
  whole, died = tmp_path / "whole", tmp_path / "died"
  train(made, whole)
  said = capsys.readouterr().out
  assert "reinforcement_1 ended at step 3 of 5: its held-out score rose no more" in said
  assert "going on with step 1 of reinforcement_1, its best on held-out questions" in said
  assert "going on with step 5 of reinforcement_2" in said and "reinforcement_2 ended" not in said

  rows = test_train.rows(whole)
  trained = [row["step"] for row in rows if "grad/norm" in row and "step" in row]
  assert trained == [1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14]
  watched = {row["step"]: row for row in rows if "convergence/best_step" in row}
  assert [row["convergence/best_step"] for row in watched.values()] == [
    0,
    1,
    1,
    1,
    8,
    9,
    10,
    11,
    12,
  ]
  assert [step for step, row in watched.items() if "convergence/ended" in row] == [3]
  assert not any("run/ended" in row for row in rows)

  first, last = made.stages[0], made.stages[-1]
  folder = whole / "reinforcement_1"
  assert sorted(os.listdir(folder / "checkpoints")) == ["1", "2", "3"]
  best, _ = of_stage(made, first, whole).restore_policy(folder, 1)
  made_by = pair_files.hash_of(best)
  pair_files.read(whole / "pairs" / "cycle_1.jsonl", made_by)  # raises for those of other weights
  step, params = evaluate.restore(made, whole, "best")
  assert step == 1 and evaluate.restore(made, whole)[0] == 2
  frozen, _ = of_stage(made, made.stages[2], whole).restore_policy(whole / "reinforcement_2", 5)
  assert any((np.asarray(params[name]) != np.asarray(frozen[name])).any() for name in params)

  # Rows: step 0's, then a step's and its score's. Dies at the score that ends the stage, whose
  # checkpoint is not written, then within the distillation, whose frozen weights are the best's.
  for count in (7, 5):
    train(made, died, monkeypatch, count)
  train(made, died)
  assert test_train.without_times(test_train.rows(died)) == test_train.without_times(rows)
  same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
  again = of_stage(made, last, died).restore_policy(died)[0]
  jax.tree.map(same, again, of_stage(made, last, whole).restore_policy(whole)[0])
