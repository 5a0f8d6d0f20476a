"""Rewards of single searches: gain and redundancy by hand, where they lie, and in a run."""

import dataclasses
import json
import math
import types

import numpy as np
import pytest
from small_rollouts import collate, OneCharacterEach
from test_train import config

from stratified.algorithms.policy_loss import PolicyLossSettings
from stratified.algorithms.ppo import CriticSettings, Ppo, turn_ends
from stratified.rewards import steps
from stratified.runs import build, refusals, stages
from stratified.tasks import named
from stratified.types import Call, Question, Segment, Trajectory, Turn

TOKENIZER = OneCharacterEach()
QUESTION = Question("q1", "Who?", ("Ada",))


def rollout(*turns):
  """Each turn: (ids of what it brought, the text that the policy then reads); last an answer."""
  segments, made = [Segment((1,), "prompt")], []
  for ids, text in turns:
    segments += [Segment((2, 3), "policy", (-1.0, -1.0)),
                 Segment(tuple(TOKENIZER.encode(text)), "observation")]  # fmt: skip
    calls = (Call("search", "who", "hit", tuple(ids)),) if ids is not None else ()
    made.append(Turn("call" if calls else "invalid", "", calls))
  segments.append(Segment((4,), "policy", (-1.0,)))
  return Trajectory(QUESTION, 0, tuple(segments), (*made, Turn("answer", "")), "Ada")


def test_redundancy_is_the_share_of_ids_seen_in_earlier_turns():
  assert steps.redundancy([["a", "b"], ["b", "c"], [], ["a", "b", "c", "d"]]) == [0, 0.5, 0, 0.75]


def test_tf_idf_by_hand():
  """Two texts, one word shared: idf of it ln(3/3) + 1 = 1, of the others ln(3/2) + 1."""
  x, y = steps.tf_idf(["Ada ada wrote.", "The wrote engine"])  # articles go, case too
  rare = math.log(1.5) + 1
  size = math.hypot(2 * rare, 1)
  assert x == pytest.approx({"ada": 2 * rare / size, "wrote": 1 / size})
  assert y == pytest.approx(
    {"wrote": 1 / math.hypot(1, rare), "engine": rare / math.hypot(1, rare)}
  )


def test_gain_is_the_rise_of_the_best_cosine_over_gold_documents():
  gold = ["ada wrote", "bob sang"]
  found = steps.added(gold, [["ada wrote"], ["cora"], [], ["bob", "ada wrote"]])
  flat = steps.tf_idf([*gold, "ada wrote", "cora", "bob", "ada wrote"])
  half = flat[1]["bob"] * flat[4]["bob"]
  np.testing.assert_allclose(found, [0.5, 0, 0, half / 2], rtol=1e-9)
  assert 0 < half < 1


def test_a_turns_reward_is_scaled_gain_less_redundancy():
  """The first search finds a gold document word for word; the second brings it again."""
  passage = "<information>Doc 1(Title: Ada) she wrote</information>"
  one = rollout((["7"], passage), (None, "no call"), (["7"], passage))
  assert steps.passages(one, TOKENIZER.decode) == [
    [" Ada) she wrote "[1:]], [], ["Ada) she wrote "], []
  ]  # fmt: skip
  reward = steps.StepReward({"q1": ["Ada she wrote"]}, TOKENIZER.decode, 0.6)
  np.testing.assert_allclose(reward(one), [0.6, 0, -0.6, 0], rtol=1e-9)
  other = dataclasses.replace(one, question=dataclasses.replace(QUESTION, id="q2"))
  with pytest.raises(ValueError, match="no gold documents of question 'q2'"):
    reward(other)


def test_each_lies_at_the_last_token_of_its_turn():
  one = rollout((["7"], "ab"), (["8"], "c"))
  algorithm = Ppo(CriticSettings(), PolicyLossSettings(), 24, 3)
  assert turn_ends(one) == [2, 6, 8]
  batch = collate(
    [[one]], rewards=[[1.0]], strata=[[0]], algorithm=algorithm, steps=[[[0.5, -0.25, 0]]]
  )
  given = batch.stream_art["reward"].ravel()
  assert {int(i): float(given[i]) for i in np.flatnonzero(given)} == {2: 0.5, 6: -0.25, 8: 1.0}


@pytest.mark.parametrize(
  "text, words",
  [
    ("", "holds no line"),
    (
      '{"id": "a", "documents": ["x"]}\n{"id": "b", "documents": "x"}\nnothing',
      "holds 2 bad lines",
    ),
    ('{"id": "a", "documents": []}', "holds 1 bad lines"),
  ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, words):
  path = tmp_path / "steps.jsonl"
  path.write_text(text)
  with pytest.raises(ValueError, match=f"reward.documents=.*{words}; each must be a question"):
    steps.read_documents(str(path))


def test_a_method_without_a_place_for_them_is_refused(tmp_path):
  made = config(**{"reward.documents": "steps.jsonl"})
  with pytest.raises(ValueError, match="rewards single searches, for which algorithm.name='grpo'"):
    refusals.check_steps(made, build.algorithm(made, 4).stages(4))


def test_a_run_rewards_the_searches_of_its_tasks_rollouts(tmp_path):
  """Demonstrations search: the gold documents are what their questions' answers stand in."""
  made = config(**{"algorithm.name": "ppo", "reward.documents": str(tmp_path / "steps.jsonl")})
  groups = named.make(made).demonstrations(0)
  write = lambda t: {"id": t.question.id, "documents": [" ".join(t.question.golden_answers)]}
  lines = [json.dumps(write(t)) for group in groups for t in group]
  (tmp_path / "steps.jsonl").write_text("\n".join(lines))
  run = build.build(made)
  groups.append([dataclasses.replace(groups[0][0], fault="lost")])
  stage = types.SimpleNamespace(_around=types.SimpleNamespace(run=run))
  found = stages.Reinforcement._steps(stage, groups)
  assert found.pop() == [[]]
  searched = 0
  for group, each in zip(groups, found):
    for one, turns in zip(group, each):
      assert len(turns) == len(one.turns)
      assert all(turn.calls or value == 0 for turn, value in zip(one.turns, turns))
      searched += sum(value > 0 for value in turns)
  assert searched > 0
  path = str(tmp_path / "none.jsonl")
  with pytest.raises(ValueError, match="reward.documents=.*none.jsonl' holds no line"):
    build.check(config(**{"algorithm.name": "ppo", "reward.documents": path}))
