"""The stages of a run that alternates: what each is given, trains on and hands on, and resumes.

One run serves all tests: reinforcement that ends at a plateau and hands on its best policy, twice,
each time with a distillation on adapters behind it.
"""

import contextlib
import dataclasses
import os
import types

import jax
import numpy as np
import pytest
from test_search_e1_run import SETTINGS
import test_train

from configs import search_e1, search_r1
from experiments import evaluate
from stratified.algorithms import guide
from stratified.runs import build, held_out, surroundings, trainer
from stratified.runs import pairs as pair_files
from stratified.runs.surroundings import writing
from stratified.runs.weights import of_stage
from stratified.runs.writer import Writer

# Held-out scores in the order in which policies are first evaluated. Reinforcement 1 ends at its
# step 3 of 5, two scores after its best; reinforcement 2 rises to its end.
SCORES = (0.2, 0.5, 0.4, 0.5, 0.3, 0.35, 0.6, 0.7, 0.8, 0.9, 0.95, 0.93, 0.91)
NEVER = types.SimpleNamespace(
  asked=False, agreed=lambda: False, alone=lambda: False, at_once=contextlib.nullcontext
)


def config_of(**changes):
  """The smallest run of Search-E1 without a warm start."""
  config = search_r1.get_config("tiny")
  config.update_from_flattened_dict(test_train.SETTINGS | search_e1.METHOD)
  of_pairs = {name: value for name, value in SETTINGS.items() if name != "preset"}
  config.update_from_flattened_dict(of_pairs | {"guide.before": " [ ", "guide.after": " ] "})
  fresh = {"pairs.source": "fresh", "pairs.num_questions": 5, "warm_start.num_steps": 0}
  config.update_from_flattened_dict(fresh | changes)
  return config


def steps_in(folder):
  """The checkpoints of a folder; the reference lies beside them."""
  return sorted(name for name in os.listdir(folder) if name.isdigit())


class Calls(list):
  """(stage's name, state before, batch, state after) of every update, on the host."""

  def watch(self, made):
    """The run with each of its updates noted here."""
    return dataclasses.replace(
      made, stages=tuple(dataclasses.replace(p, learn=self.noting(p)) for p in made.stages)
    )

  def noting(self, parts):
    def learn(state, batch):
      before = jax.device_get(state)
      state, stats = parts.learn(state, batch)
      self.append((parts.stage.name, before, jax.device_get(batch), jax.device_get(state)))
      return state, stats

    return learn

  def of(self, name):
    return [call for call in self if call[0] == name]


@pytest.fixture(scope="module")
def made():
  return build.build(
    config_of(
      **{
        "num_steps": 14,
        "eval.every": 1,
        "convergence.patience": 2,
        "convergence.goes_on": "best",
        "distillation.prefix": 0.5,
      }
    )
  )


@pytest.fixture(scope="module", autouse=True)
def scripted():
  """Gives each policy that is evaluated the next of SCORES, and the same again whenever it is."""
  known, loaded = {}, {}

  @contextlib.contextmanager
  def judging(around, policy):
    loaded["embed"] = np.asarray(policy()["embed"], np.float32)
    yield

  def scores(*unused, **others):
    key = loaded["embed"].tobytes()
    score = known.setdefault(key, SCORES[len(known) % len(SCORES)])
    return {"held_out": {"exact_match": score, "searches_mean": 0.0}}

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(surroundings, "judging", judging)
    patched.setattr(held_out, "evaluate", scores)
    yield


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
  """(workdir, updates) of a run that nothing interrupted."""
  workdir, calls = tmp_path_factory.mktemp("runs") / "whole", Calls()
  trainer.train(calls.watch(made), workdir, NEVER)
  return workdir, calls


def same(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


class Killed(Exception):
  pass


def die(made, workdir, monkeypatch, rows):
  """Trains until so many rows are written, and dies before their checkpoint."""
  left, write = [rows], Writer.write

  def dying(self, *args, **kwargs):
    write(self, *args, **kwargs)
    left[0] -= 1
    if not left[0]:
      raise Killed

  with monkeypatch.context() as patched, pytest.raises(Killed):
    patched.setattr(Writer, "write", dying)
    trainer.train(made, workdir, NEVER)


def test_a_plateau_ends_a_stage_and_its_best_is_kept(made, whole):
  workdir, _ = whole
  rows = test_train.rows(workdir)
  trained = [row["step"] for row in rows if "grad/norm" in row and "step" in row]
  assert trained == [1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14]
  watched = {row["step"]: row for row in rows if "convergence/best_step" in row}
  best = [row["convergence/best_step"] for row in watched.values()]
  assert best == [0, 1, 1, 1, 8, 9, 10, 11, 12]
  assert [step for step, row in watched.items() if "convergence/ended" in row] == [3]
  assert not any("run/ended" in row for row in rows)
  assert steps_in(workdir / "reinforcement_1" / "checkpoints") == ["1", "2", "3"]
  assert evaluate.restore(made, workdir, "best")[0] == 1
  assert evaluate.restore(made, workdir)[0] == 2


def test_a_run_that_dies_goes_on_as_if_it_had_not(made, whole, tmp_path, monkeypatch, capsys):
  """At the score that ends a stage, whose checkpoint is not written; then in a distillation."""
  workdir = tmp_path / "died"
  for count in (7, 5):
    die(made, workdir, monkeypatch, count)
  said = capsys.readouterr().out
  assert "reinforcement_1 ended at step 3 of 5: its held-out score rose no more" in said
  assert "going on with step 1 of reinforcement_1, its best on held-out questions" in said
  trainer.train(made, workdir, NEVER)
  said = capsys.readouterr().out
  assert "going on with step 5 of reinforcement_2" in said and "reinforcement_2 ended" not in said
  rows, wanted = (test_train.rows(folder) for folder in (workdir, whole[0]))
  assert test_train.without_times(rows) == test_train.without_times(wanted)
  last = of_stage(made, made.stages[-1], workdir)
  same(last.restore_policy(workdir)[0], last.restore_policy(whole[0])[0])


def product(a, b):
  """A B of each layer in float64, A [L, inputs ..., r], B [L, r, outputs ...]."""
  layers, rank = len(a), a.shape[-1]
  return np.float64(a.reshape(layers, -1, rank)) @ np.float64(b.reshape(layers, rank, -1))


def test_each_stage_begins_with_the_policy_that_the_one_before_handed_on(made, whole):
  _, calls = whole
  best = calls.of("reinforcement_1")[0][3].params  # after step 1
  last = calls.of("reinforcement_2")[-1][3].params
  for name, began in (("distillation_1", best), ("distillation_2", last)):
    for _, before, _, _ in calls.of(name):  # the teacher: frozen, and what the adapters lie beside
      same(before.reference, {k: began[k].astype(before.reference[k].dtype) for k in began})
  _, before, _, _ = calls.of("distillation_1")[0]
  for name, value in before.params.items():  # A is drawn, B is 0: nothing is added yet
    assert not value.any() or name.endswith("_a"), name
  adapters = calls.of("distillation_1")[-1][3].params
  _, second, _, _ = calls.of("reinforcement_2")[0]
  settings, moved = made.config.distillation, 0
  for name, value in second.params.items():
    a, b = adapters.get(f"{name}_a"), adapters.get(f"{name}_b")
    if a is None:
      np.testing.assert_array_equal(value, best[name])
      continue
    added = settings.alpha / settings.rank * product(a, b).reshape(value.shape)
    np.testing.assert_allclose(value, best[name] + added, rtol=1e-5, atol=1e-6)
    moved += np.abs(added).max() > 1e-4
  assert moved > 3


def test_a_cycle_has_its_own_reference_and_moments(whole):
  _, calls = whole
  _, before, _, after = calls.of("reinforcement_2")[0]
  same(before.reference, {k: before.params[k].astype(v.dtype) for k, v in before.reference.items()})
  same(after.reference, before.reference)
  moments = [x for x in jax.tree.leaves(before.opt_state) if np.ndim(x)]
  assert moments and not any(np.any(x) for x in moments)
  assert any(np.any(x) for x in jax.tree.leaves(after.opt_state) if np.ndim(x))


@pytest.mark.parametrize("kept", ["optimizer_of", "reference_of"])
def test_a_later_stage_may_take_over_moments_or_the_reference(made, whole, kept):
  workdir, calls = whole
  wanted = calls.of("reinforcement_1")[0][3]  # its best
  stage = made.stages[2].stage._replace(**{kept: "reinforcement_1"})
  parts = dataclasses.replace(made.stages[2], stage=stage)
  made = dataclasses.replace(made, stages=(*made.stages[:2], parts, *made.stages[3:]))
  params = jax.tree.map(lambda x: jax.numpy.array(x) + 1, dict(wanted.params))
  given = jax.device_get(params)
  with (
    trainer.seat_of(made, made.stages[0], workdir) as first,
    trainer.seat_of(made, parts, workdir) as third,
  ):
    state = trainer.begin(third, [first, third], params)
  same(state.params, given)
  own = kept == "optimizer_of"
  same(state.reference, given if own else wanted.reference)
  moments = [np.any(x) for x in jax.tree.leaves(state.opt_state) if np.ndim(x)]
  assert any(moments) == own and not int(state.step)
  if own:
    same(state.opt_state, wanted.opt_state)


@pytest.mark.parametrize("cycle, first", [(1, 5), (2, 12)])
def test_a_distillation_learns_from_the_pairs_of_its_cycle(made, whole, cycle, first):
  workdir, calls = whole
  task, config = made.task, made.config
  found = pair_files.read(workdir / "pairs" / f"cycle_{cycle}.jsonl", None).pairs
  asked = [q for step in range(first, first + 3) for q in task.questions_at(step)][:5]
  assert {pair.student.question for pair in found} <= set(asked) and len(found) > 3
  assert {one.weight_version for pair in found for one in pair[:2]} == {first}
  settings = made.stages[1].stage.algorithm.guide
  trained = []
  for _, _, batch, _ in calls.of(f"distillation_{cycle}"):
    taught = batch.teacher_art
    for q in range(config.distillation.pairs_per_step):
      own = (batch.trajectory_art == q) & (batch.segment_art > 0)
      (number,) = [
        n for n, pair in enumerate(found)
        if pair.student.token_ids == batch.token_art[own].tolist()
      ]  # fmt: skip
      pair, trained = found[number], [*trained, number]
      prompt = guide.prompt(pair.student.question, pair.reference, settings, **writing(task))
      a, r, _ = np.argwhere(own)[0]
      row = taught["segment"][a, r] == batch.segment_art[own][0]
      rest = pair.student.token_ids[len(pair.student.segments[0].token_ids) :]
      assert taught["token"][a, r][row].tolist() == [*prompt, *rest]
      weights = guide.weights(pair.student, "all", task.tokenizer.decode, 0.5)
      assert batch.stream_art["distillation"][own].tolist() == list(weights)
  passes = [trained[at : at + len(found)] for at in range(0, len(trained), len(found))]
  assert all(len(set(one)) == len(one) for one in passes), "a pair came twice in a pass"


###  Other methods, as the smallest run of each  ###


def trained(workdir, **changes):
  """(rows of steps, pairs, policy before and after) of a run of two steps."""
  made = build.build(config_of(**{"num_steps": 2, "eval.every": 0} | changes))
  calls = Calls()
  trainer.train(calls.watch(made), workdir, NEVER)
  rows = [row for row in test_train.rows(workdir) if "stage" in row]
  assert [row["step"] for row in rows] == [1, 2]
  assert all(row["update/skipped"] == 0 and row["grad/norm"] > 0 for row in rows)
  assert all(row["run/trained_tokens"] > 0 for row in rows)
  path = workdir / "pairs" / "cycle_1.jsonl"
  return rows, pair_files.read(path, None).pairs if path.exists() else [], calls


OF_PAIRS = {"search_e1.cycles": 1, "search_e1.distillation_steps": 2}


def test_sft_trains(tmp_path):
  rows, pairs, calls = trained(tmp_path, **{"algorithm.name": "sft"})
  assert [row["stage"] for row in rows] == ["sft", "sft"] and not pairs
  assert all(row["sft/kept_share"] == 1 and 3 < row["sft/loss"] < 10 for row in rows)
  assert calls[0][1].reference is None
  assert (calls[0][1].params["embed"] != calls[1][3].params["embed"]).any()


def test_rejection_sampling_trains_on_every_right_rollout(tmp_path):
  rows, pairs, _ = trained(tmp_path, **search_e1.NEIGHBOURS["rejection_sampling"] | OF_PAIRS)
  chosen = [(pair.reference.question.id, pair.reference.sample) for pair in pairs]
  assert len(set(chosen)) == len(chosen) > len({question for question, _ in chosen})
  assert all(pair.reference_reward >= 0.3 for pair in pairs)
  for pair in pairs:  # of five rollouts
    same_question = sum(question == pair.reference.question.id for question, _ in chosen)
    assert pair.right_share == same_question / 5
  assert all(row["distillation/loss"] > 3 and "distillation/kl" not in row for row in rows)


def test_pairs_by_weight_and_contrast_train(tmp_path):
  neighbours = search_e1.NEIGHBOURS["ssopd"] | search_e1.NEIGHBOURS["rlcsd"]
  # A step without a pair that counts has no gradient; all rollouts right is worth nothing here.
  rows, pairs, calls = trained(tmp_path, **neighbours | OF_PAIRS | {"pairs.num_questions": 8})
  assert all(row["distillation/kl"] > 0 for row in rows)
  assert all(
    pair.contrast.sample not in (pair.student.sample, pair.reference.sample) for pair in pairs
  )
  weights = {round(4 * pair.right_share * (1 - pair.right_share), 5) for pair in pairs}
  for _, _, batch, _ in calls:
    given = {round(float(x), 5) for x in batch.array_qk["weight"].ravel()}
    assert given <= weights and batch.teacher_art["other_token"].any()
