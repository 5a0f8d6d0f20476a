"""Partition functions on hand-made trajectories, their composition, the shuffled control, and a
user's own function."""

import collections
import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from stratified import advantages, strata
from stratified.types import Call, Question, Trajectory, Turn


def trajectory(*turns, answer="Paris", fault=None, sample=0, question="q1", version=0):
  """Each turn is a tuple of search outcomes; () is a turn without an executed search."""
  searches = [
    tuple(Call("search", "capital", outcome) for outcome in outcomes) for outcomes in turns
  ]
  made = tuple(Turn("call" if executed else "invalid", "", executed) for executed in searches)
  return Trajectory(
    Question(question, "?", ("Paris",)),
    sample,
    (),
    made,
    answer,
    fault=fault,
    weight_version=version,
  )


NONE = trajectory(answer=None)
INVALID_FIRST = trajectory((), ("hit",))
EMPTY = trajectory(("empty",), ("error",))
TWO_IN_ONE_CALL = trajectory(("error", "hit"), ("empty",))
ERRORS = trajectory(("error",), answer=None)
GROUP = [NONE, INVALID_FIRST, EMPTY, TWO_IN_ONE_CALL, ERRORS]


@pytest.mark.parametrize(
  "name,ids,num_strata",
  [
    ("searches", [0, 1, 2, 3, 1], 5),
    ("first_search", [0, 2, 1, 1, 1], 5),
    ("outcome", [0, 3, 2, 3, 1], 4),
    ("answered", [0, 1, 1, 1, 0], 2),
    ("searches*outcome", [0, 1 * 4 + 3, 2 * 4 + 2, 3 * 4 + 3, 1 * 4 + 1], 20),
    ("answered * searches * answered", [0, 10 + 2 + 1, 10 + 4 + 1, 10 + 6 + 1, 2], 20),
  ],
)
def test_ids(name, ids, num_strata):
  assign, count = strata.make(name)
  assert assign(GROUP) == ids
  assert count == num_strata
  assert assign([]) == []


def test_counts_above_the_cap_share_the_last_stratum():
  for cap, ids in ((1, [0, 1, 1, 1, 1]), (2, [0, 1, 2, 2, 1])):
    assign, num_strata = strata.make("searches", cap=cap)
    assert assign(GROUP) == ids
    assert num_strata == cap + 1
  assert strata.make("first_search", cap=1).assign(GROUP) == [0, 1, 1, 1, 1]


def _many(question="q1", version=0):
  return [
    trajectory(*[("hit",)] * (k % 4), sample=k, question=question, version=version)
    for k in range(12)
  ]


def test_random_keeps_the_sizes_and_depends_on_seed_step_and_question():
  base = strata.make("searches").assign(_many())
  draws = [
    strata.make("random", seed=seed).assign(_many(question), step)
    for seed in (0, 1)
    for step in (0, 1)
    for question in ("q1", "q2")
  ]
  for ids in draws:
    assert collections.Counter(ids) == collections.Counter(base)
  assert len({tuple(ids) for ids in draws}) == 8
  assert base not in draws
  again = strata.make("random")
  assert again.assign(_many(), 1) == draws[2] == again.assign(_many(version=1))
  # A hash decides, so the order is the same on every machine and with every version.
  # Golden: ordered by SHA-256 of "0/0/q1/<k>", computed when this was written.
  assert draws[0] == [2, 0, 3, 2, 1, 3, 1, 0, 0, 2, 3, 1]


def test_random_shuffles_another_base():
  assign, num_strata = strata.make("random", base="searches*answered", cap=3)
  assert num_strata == 8
  assert sorted(assign(_many())) == sorted(strata.make("searches*answered", cap=3).assign(_many()))


def test_random_leaves_lost_rollouts_out_of_the_sizes():
  group = [
    trajectory(*[("hit",)] * (k % 3), sample=k, fault="timeout" if k < 4 else None)
    for k in range(12)
  ]
  base = strata.make("searches").assign(group)
  for step in range(20):
    ids = strata.make("random").assign(group, step)
    assert sorted(ids[4:]) == sorted(base[4:]) and ids[:4] == base[:4]


def test_every_position_is_equally_likely():
  # 2,000 shuffles of one marked rollout among 4: each position 500 times, 5 standard deviations are
  # 97.
  group = [trajectory(*[("hit",)] * (k == 0), sample=k) for k in range(4)]
  assign = strata.make("random").assign
  places = collections.Counter(assign(group, step).index(1) for step in range(2000))
  assert all(abs(places[k] - 500) < 97 for k in range(4)), places


def test_a_function_of_your_own(tmp_path, monkeypatch):
  (tmp_path / "my_strata_module.py").write_text(
    "import numpy as np\n"
    "def words(trajectory): return np.int64(len((trajectory.answer or '').split()))\n"
    "def is_long(trajectory): return trajectory.num_searches > 1\n"
    "def half(trajectory): return 0.5\n"
    "def minus(trajectory): return -1\n"
    "def late(trajectory): return 0 if trajectory.question.id == 'made-up' else -1\n"
    "broken = 3\n"
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("sys.path", list(sys.path))
  assert strata.make("my_strata_module:words", cap=2).assign(GROUP) == [0, 1, 1, 1, 0]
  assert strata.make("my_strata_module:is_long*answered", cap=1).assign(GROUP) == [0, 1, 3, 3, 0]
  assert all(type(k) is int for k in strata.make("my_strata_module:words").assign(GROUP))
  for name, value in (("half", "0.5"), ("minus", "-1")):
    with pytest.raises(
      ValueError, match=f"{name}', which returned {value}: a stratum is a whole number, 0 or more"
    ):
      strata.make(f"my_strata_module:{name}")
  late = "late returned -1; a stratum is a whole number, 0 or more"
  with pytest.raises(ValueError, match=late):  # right when it was tried, wrong in the run
    strata.make("my_strata_module:late").assign(GROUP)
  for name, wrong in (("absent", "has no 'absent'"), ("broken", "which is 3 and no function")):
    with pytest.raises(ValueError, match=wrong):
      strata.make(f"my_strata_module:{name}")


def used(*calls):
  """A rollout with these calls of tools, one a turn."""
  turns = tuple(Turn("call", "", (Call(tool, "x", "hit"),)) for tool in calls)
  return dataclasses.replace(trajectory(), turns=turns)


def test_partitions_by_tool():
  tools = ("search", "calculator")
  group = [used(), used("search"), used("calculator"), used("search", "calculator", "search")]
  ids = lambda name: strata.make(name, tools=tools).assign(group)
  assert ids("calls") == [0, 1, 1, 3] and ids("searches") == [0, 1, 0, 2]
  assert ids("calls_calculator") == [0, 0, 1, 1] and ids("tools") == [0, 1, 2, 3]
  assert ids("first_search") == [0, 1, 0, 1] and ids("first_call") == [0, 1, 1, 1]
  assert strata.make("tools", tools=tools).num_strata == 4
  assert strata.make("calls_clock", tools=None).num_strata == 5  # not known yet
  with pytest.raises(ValueError, match="'calls_clock' is no partition; .*calls_calculator"):
    strata.make("calls_clock", tools=tools)
  alone = strata.make("random", tools=("calculator",)).assign([used(), used("calculator")])
  assert sorted(alone) == [0, 1]


def test_an_import_error_inside_a_module_of_your_own_is_not_hidden(tmp_path, monkeypatch):
  (tmp_path / "strata_needs_absent.py").write_text("import module_that_is_absent\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("sys.path", list(sys.path))
  with pytest.raises(ValueError, match="imports 'module_that_is_absent'"):
    strata.make("strata_needs_absent:f")


@pytest.mark.parametrize(
  "options,words",
  [
    (dict(name="turns"), ["strata.name", "'turns'", "searches", "module:function"]),
    (dict(name="searches*turns"), ["'searches*turns'", "'turns'"]),
    (dict(name="searches", cap=0), ["strata.cap", "0", "1 or more"]),
    (dict(name="searches", cap=1.5), ["strata.cap", "1.5", "whole number"]),
    (dict(name="random", base="random"), ["strata.base", "'searches'"]),
    (dict(name="random", base="turns"), ["'turns'"]),
    (dict(name="no_such_module_here:f"), ["no module 'no_such_module_here'", "PYTHONPATH"]),
  ],
)
def test_a_bad_choice_is_one_clear_sentence(options, words):
  with pytest.raises(ValueError) as caught:
    strata.make(**options)
  message = str(caught.value)
  assert all(word in message for word in words), message
  assert "\n" not in message and not message.endswith(".") and len(message) < 400


def test_no_jax_is_imported():
  code = "import sys, stratified.strata; assert not {'jax', 'numpy'} & set(sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_questions_with_as_many_hops_are_one_group_of_the_batch():
  """HRPO: san over the batch with hops as strata is a z-score over those questions' rollouts."""
  groups = [
    [dataclasses.replace(NONE, question=Question(str(q), "?", ("Paris",), hops=hops))] * 2
    for q, hops in enumerate((1, 2, 1, None))
  ]
  assign, num_strata = strata.make("hops", cap=2)
  ids = np.array([assign(group) for group in groups])
  assert ids.tolist() == [[1, 1], [2, 2], [1, 1], [0, 0]] and num_strata == 3
  reward = np.float32([[1, 0], [1, 1], [0, 0], [1, 0]])
  estimate = advantages.make("san", num_strata=num_strata, over="batch")
  found = np.asarray(estimate(reward, ids, np.ones((4, 2)), 0))
  same = np.float64([1, 0, 0, 0])
  expected = (same - same.mean()) / (same.std() + 1e-6)
  np.testing.assert_allclose(found[[0, 2]].ravel(), expected, rtol=1e-5)
  np.testing.assert_allclose(found[3], [1, -1], rtol=1e-5)
  assert not found[1].any()


def test_tree_grpo_is_twice_a_blend_of_one_half_with_the_tree_as_stratum():
  """Tree-GRPO (arXiv 2509.21240): z over the question + z inside the tree. Trees (1 0 0), (1 1 0),
  divisors n - 1."""
  reward, tree = np.float32([[1, 0, 0, 1, 1, 0]]), np.array([[0, 0, 0, 1, 1, 1]])
  estimate = advantages.make("blend", num_strata=2, alpha=0.5, ddof=1)
  found = 2 * np.asarray(estimate(reward, tree, np.ones((1, 6)), 0))[0]
  expected = [2.0676, -1.4902, -1.4902, 1.4902, 1.4902, -2.0676]
  np.testing.assert_allclose(found, expected, atol=5e-5)
