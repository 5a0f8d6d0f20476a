"""Search-E1 end to end on the smallest run there is: its stages, its pairs, and kills in each."""

import json
import shutil
import signal

import pytest
import test_train

from stratified.runs import pairs as pair_files
from stratified.runs.stop import Unusable

SETTINGS = {
  "preset": "configs/search_e1.py:tiny",
  "num_steps": 8,
  "search_e1.cycles": 2,
  "search_e1.distillation_steps": 2,
  "packing.row_length": 256,
  "guide.share": 0.5,
  "eval.every": 0,
  "checkpoint.every": 1,
  "distillation.row_length": 384,
  "distillation.pairs_per_step": 3,
  "distillation.rank": 2,
  "distillation.optimizer": "adamw",
  "distillation.learning_rate": 1e-2,
  # An untrained policy breaks every format and is right by chance of its tokens alone.
  "pairs.num_questions": 5,
  "pairs.correct_at": 0.3,
  "pairs.max_invalid_share": 1.0,
}
STAGES = ("reinforcement_1", "distillation_1", "reinforcement_2", "distillation_2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The workdir of a run that nothing interrupted."""
  workdir = tmp_path_factory.mktemp("runs") / "whole"
  done = test_train.run(workdir, **SETTINGS)
  assert done.returncode == 0, done.stderr[-3000:]
  return workdir


def test_rows_name_cycle_and_phase_and_every_phase_ends_with_an_evaluation(whole):
  rows = test_train.rows(whole)
  steps = [row for row in rows if "stage" in row and "step" in row]
  assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
  assert [row["stage"] for row in steps] == [stage for stage in STAGES for _ in (1, 2)]
  assert [row["cycle"] for row in steps] == [1, 1, 1, 1, 2, 2, 2, 2]
  assert {row["phase"] for row in steps} == {"reinforcement", "distillation"}
  evaluated = [row["step"] for row in rows if "eval/exact_match" in row]
  assert evaluated == [0, 2, 4, 6, 8]
  for row in steps:
    assert row["update/skipped"] == 0 and row["grad/norm"] > 0
    if row["phase"] == "distillation":
      assert row["pairs/count"] > 0 and row["distillation/kl"] > 0
      assert 0 <= row["distillation/clipped_share"] <= 1 and "pairs/skipped_share" in row
      # The published clip takes what is large off a sum of which the rest is negative.
      assert row["distillation/loss"] < row["distillation/kl"]
    else:
      assert set(test_train.KEYS) <= row.keys()


def test_pairs_stand_in_a_file_to_read_with_the_weights_that_made_them(whole):
  first, second = (
    [json.loads(line) for line in (whole / "pairs" / f"cycle_{n}.jsonl").read_text().splitlines()]
    for n in (1, 2)
  )
  assert first[0]["weights"] != second[0]["weights"]
  for head, *pairs in (first, second):
    assert head["pairs"] == len(pairs) == head["stats"]["pairs/count"] > 0
    for pair in pairs:
      assert pair["weights"] == head["weights"]
      assert pair["reference"]["reward"] >= 0.3
      assert pair["reference"]["sample"] != pair["student"]["sample"]
      assert pair["question"] in pair["reference"]["segments"][0]["text"]


# Two rows of the warm start, one of the first policy; then two steps a phase and its score.
@pytest.mark.parametrize(
  "counts",
  [
    pytest.param((7,), id="within a distillation"),
    pytest.param(
      (5, 10, 12),
      id="after a phase's last step, in the next cycle, before its pairs",
      marks=pytest.mark.long,
    ),
  ],
)
def test_kills_in_every_phase_and_at_its_borders_change_nothing(whole, tmp_path, counts):
  workdir = tmp_path / "stopped"
  for count in counts:
    status, log = test_train.interrupt(
      workdir, signal.SIGKILL, lambda rows, count=count: rows >= count, **SETTINGS
    )
    assert status == -signal.SIGKILL, log[-3000:]
  done = test_train.run(workdir, **SETTINGS)
  assert done.returncode == 0, done.stderr[-3000:]
  assert test_train.without_times(test_train.rows(workdir)) == test_train.without_times(
    test_train.rows(whole)
  )
  for name in ("pairs/cycle_1.jsonl", "pairs/cycle_2.jsonl"):
    assert (workdir / name).read_bytes() == (whole / name).read_bytes()


def test_pairs_that_are_gone_changed_or_of_other_weights_are_refused_in_words(whole, tmp_path):
  source, path = whole / "pairs" / "cycle_1.jsonl", tmp_path / "cycle_1.jsonl"
  kept = source.read_bytes()
  made_by = json.loads(kept.splitlines()[0])["weights"]
  for content, weights, sentence in (
    (kept.replace(b'"sample": 0', b'"sample": 1', 1), made_by, "are not those that were written"),
    (kept[:-20], made_by, "are not those that were written"),
    (kept[:100], made_by, "can't be read"),
    (b"", None, "can't be read"),
    (None, None, "can't be read"),
    (kept, "another", f"pairs of the weights {made_by}, while this stage begins with another"),
  ):
    if content is None:
      path.unlink()
    else:
      path.write_bytes(content)
    with pytest.raises(Unusable, match=sentence) as refused:
      pair_files.read(path, weights)
    assert f"{path}" in str(refused.value)
  path.write_bytes(kept)
  assert len(pair_files.read(path, made_by).pairs) > 0


def test_a_policy_is_read_back_from_a_stage_on_adapters(whole, tmp_path):
  """The last stage's checkpoint holds adapters; the weights beside them are the stage before's."""
  copy = tmp_path / "copy"
  shutil.copytree(whole, copy)
  from experiments import evaluate
  from stratified.runs import build, settings

  config = settings.read_workdir(copy)
  made = build.build(config, task=False)
  step, params = evaluate.restore(made, copy)
  assert step == 2 and params["embed"].shape[-1] == 16
  shutil.rmtree(copy / "reinforcement_2")
  with pytest.raises(ValueError, match="reinforcement_2 holds no checkpoint any more"):
    evaluate.restore(made, copy)
