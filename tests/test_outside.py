"""What a config names as module:name: every mistake is one sentence that names the field."""

import sys

import pytest

from stratified import made_up, outside, rewards, strata
from stratified.runs.stages import blame
from stratified.runs.stop import OutsideFailed

MODULE = """
import math
value = 3
def good(trajectory): return len(trajectory.answer or "")
def none(trajectory): return None
def text(trajectory): return "1"
def huge(trajectory): return 1e300
def whole(trajectory): return 10**400
def nan(trajectory): return math.nan
def array(trajectory):
  import numpy as np
  return np.ones(2)
def two(trajectory, other): return 1.0
def failing(trajectory): raise KeyError("x")
def ending(trajectory): raise SystemExit(3)
def late(trajectory): return 1.0 if trajectory.question.id == "made-up" else float("inf")
def exact_match(trajectory): return 0.0
class Method:
  def __call__(self, trajectory): return 1
method = Method()
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
  (tmp_path / "outside_module.py").write_text(MODULE)
  (tmp_path / "outside_broken.py").write_text("import absent_dependency\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("sys.path", list(sys.path))


@pytest.mark.parametrize(
  "spec, message",
  [
    (":f", "is named module:name"),
    (".x:f", "is named module:name"),
    ("x:", "is named module:name"),
    ("x.y", "is named module:name"),
    ("a:b:c", "is named module:name"),
    ("no_such_module:f", "no module 'no_such_module' on the Python path"),
    ("os.nothing:f", "no module"),
    ("sys:foo", "the module sys has no 'foo'"),
    ("outside_module:absent", "outside_module.py has no 'absent'; define it there"),
  ],
)
def test_what_cannot_be_loaded(spec, message):
  with pytest.raises(ValueError, match=message) as caught:
    outside.load("a.field", spec)
  assert str(caught.value).startswith(f"a.field is {spec!r}") and "\n" not in str(caught.value)


def test_an_error_inside_the_module_is_named():
  with pytest.raises(ValueError, match="imports 'absent_dependency'.*no such module; install it"):
    outside.load("a.field", "outside_broken:f")


def test_a_module_that_ends_the_program_is_a_mistake_and_no_success(tmp_path, monkeypatch):
  (tmp_path / "outside_exits.py").write_text("import sys\nsys.exit(0)\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match="whose module failed to import with SystemExit"):
    outside.load("a.field", "outside_exits:f")


@pytest.mark.parametrize(
  "spec, message",
  [
    ("os:getcwd", r"whose signature is \(\); it is called with a Trajectory"),
    ("outside_module:two", "whose signature is .*missing a required argument: 'other'"),
    ("outside_module:value", "which is 3 and no function"),
    ("sys:path", "and no function; name one"),
    ("builtins:str", "which returned .*: a reward is a number"),
    ("builtins:len", "failed on a made-up rollout with TypeError"),
    ("outside_module:none", "which returned None: a reward is a number"),
    ("outside_module:text", "which returned '1': a reward is a number"),
    ("outside_module:huge", "which returned 1e.300: a reward is at most 1e.06 in size"),
    ("outside_module:whole", "a reward is a finite number"),
    ("outside_module:nan", "which returned nan: a reward is a finite number"),
    ("outside_module:array", "a reward is one number"),
    ("outside_module:failing", "failed on a made-up rollout with KeyError: 'x'"),
    ("outside_module:ending", "failed on a made-up rollout with SystemExit"),
    ("2000000*f1", "which gives 'f1' the weight 2e.06; it must be at most 1e.06"),
    ("outside_module:exact_match", "a part called 'exact_match' exists"),
  ],
)
def test_what_is_no_reward(spec, message):
  with pytest.raises(ValueError, match=message) as caught:
    rewards.make(spec)
  assert str(caught.value).startswith("reward.name is ") and "\n" not in str(caught.value)
  assert len(str(caught.value)) < 400


def test_what_is_one():
  score = rewards.make("2*outside_module:good + exact_match - outside_module:method")(
    made_up.rollouts(2)[1]
  )
  assert score.total == 2 * 4 + 1 - 1
  assert dict(score.parts) == {"good": 4.0, "exact_match": 1.0, "method": 1.0}


def test_keyword_arguments_are_part_of_the_signature():
  with pytest.raises(ValueError, match="called with a Trajectory, eps="):
    outside.function("a.field", "outside_module:good", "a Trajectory", named=("eps",))


def test_a_reward_that_is_wrong_only_later_names_the_rollout():
  import dataclasses

  reward, one = rewards.make("outside_module:late"), made_up.rollouts(1)[0]
  later = dataclasses.replace(one, question=dataclasses.replace(one.question, id="q9"), sample=3)
  with pytest.raises(ValueError, match="the reward 'late' of rollout 3 of question 'q9' is inf"):
    reward(later)


def test_what_fails_on_one_kind_of_rollout_is_found_before_work(tmp_path, monkeypatch):
  (tmp_path / "outside_partial.py").write_text("def f(t): return len(t.answer)\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match="failed on a made-up rollout with TypeError"):
    rewards.make("outside_partial:f")
  with pytest.raises(ValueError, match="failed on a made-up rollout with TypeError"):
    strata.make("outside_partial:f")


def test_what_fails_late_is_a_sentence_that_names_its_field():
  with pytest.raises(OutsideFailed, match="reward.name='m:f' failed on a rollout with KeyError"):
    with blame("reward.name", "m:f"):
      raise KeyError("x")
