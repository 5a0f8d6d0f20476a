"""Tools, tasks and methods of a user's own: every mistake is one sentence before any work, and what
goes wrong only later ends the run with one."""

import dataclasses
import sys
import types

import numpy as np
import pytest
from test_train import config as smallest

from stratified import made_up
from stratified.algorithms.base import Algorithm, Credit, Critic, Loss
from stratified.runs import build, check_task
from stratified.runs.stop import OutsideFailed
from stratified.tasks import named
from stratified.tools.base import made_up_call, Result, ToolError
from stratified.types import Question

COUNTING = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


class Letters:
  """A tool as it should be; the others here are it with one mistake."""

  name, description, schema = "letters", "Counts the letters of a word.", COUNTING

  def run(self, calls):
    return [Result((str(len(word)),)) for word in calls]


class Needy(Letters):
  def __init__(self, path):
    self.path = path


class Absent(Letters):
  def __init__(self):
    raise OSError("no such device")


class Bare(Letters):
  def run(self):
    return []


class Single(Letters):
  def run(self, calls):
    return "3"


class Plain(Letters):
  def run(self, calls):
    return [str(len(word)) for word in calls]


class Few(Letters):
  def run(self, calls):
    return []


class Spelt(Letters):
  def run(self, calls):
    return [Result("12") for _ in calls]


class Raising(Letters):
  def run(self, calls):
    return [Result((str(int(word)),)) for word in calls]


class Numbered(Letters):
  name = 3


class Undescribed(Letters):
  description = None


class Listed(Letters):
  schema = {"type": "object", "properties": ["word"]}


class Down(Letters):
  def run(self, calls):
    raise ToolError("the service is down")


class Own(Algorithm):
  """A method as it should be."""

  @classmethod
  def make(cls, read, facts):
    return cls()

  def credit(self, batch, before, step):
    return Credit(batch.reward_qk, {"advantage": batch.reward_qk}, {})

  def losses(self, outputs, before, credit, micro):
    return {"policy": Loss(-credit["advantage"] * outputs.logp)}


class Headed(Own):
  critic = Critic({"crown": 0}, {"learning_rate": 1e-3})


class NanStream(Own):
  STREAMS = ("policy", "bonus")

  def streams(self, trajectory, reward):
    count = len(trajectory.token_ids)
    return {"policy": [1.0] * count, "bonus": [float("nan")] * count}


class HugeStream(NanStream):
  def streams(self, trajectory, reward):
    return super().streams(trajectory, reward) | {"bonus": [1e300] * len(trajectory.token_ids)}


class InfiniteArray(Own):
  def arrays(self, groups, rewards):
    return {"length": np.full((len(groups), len(groups[0])), np.inf)}


class FlatArray(Own):
  def arrays(self, groups, rewards):
    return {"length": np.zeros(3)}


class Failing(Own):
  @classmethod
  def make(cls, read, facts):
    raise KeyError("alpha")


class Stageless(Own):
  def stages(self, num_steps):
    return num_steps


def refusal(**changes) -> str:
  with pytest.raises(ValueError) as error:
    build.build(smallest(**changes))
  assert "\n" not in str(error.value)
  return str(error.value)


###  Tools  ###


@pytest.mark.parametrize(
  "tool, rule",
  [
    (
      "Needy",
      "missing 1 required positional argument: 'path'; a class is called without arguments",
    ),
    ("Absent", "Absent() failed with OSError: no such device"),
    ("Bare", "run of the tool 'letters' has the signature (); it is called as run(calls)"),
    (
      "Single",
      "the tool 'letters' returned '3' for 1 call; run(calls) must return a list with one",
    ),
    ("Plain", "the tool 'letters' returned \"['7']\" for 1 call; run(calls) must return a list"),
    ("Few", "the tool 'letters' returned '[]' for 1 call; run(calls) must return a list with one"),
    ("Spelt", "the tool 'letters' returned a Result of '12'; its items must be a tuple of texts"),
    ("Raising", "the tool 'letters' failed in run(['made-up']) with ValueError: invalid literal"),
    ("Numbered", "the tool name 3 must be lower-case letters and underscores"),
    ("Undescribed", "the description of the tool 'letters' is None; it must be text"),
    ("Listed", "it must be a JSON schema of an object with at least one property"),
  ],
)
def test_a_tool_with_a_mistake_is_refused_before_work(tool, rule):
  tools = f"search,test_own_parts:{tool}"
  said = refusal(tools=tools)
  assert said.startswith(f"tools={tools!r}: ") and rule in said


def test_a_tool_that_is_right_or_says_that_it_is_down_is_taken():
  for tool in ("Letters", "Down"):
    run = build.build(smallest(tools=f"search,test_own_parts:{tool}"))
    assert run.task.tool_names == ("search", "letters")


def test_the_made_up_argument_fits_the_schema():
  of = lambda **properties: made_up_call({"type": "object", "properties": properties})
  assert of(word={"type": "string"}) == of(words={"type": "array", "items": {"type": "string"}})
  assert of(count={"type": "integer"}) == "1" and of(unit={"enum": ["km", "mile"]}) == "km"
  assert of(a={"type": "number"}, b={"type": "boolean"}) == '{"a": 1.5, "b": true}'


def test_strata_are_those_of_all_tools_and_the_partition_is_made_once(monkeypatch):
  from stratified import strata

  made, calls = strata.make, []
  monkeypatch.setattr(strata, "make", lambda *a, **k: calls.append(k) or made(*a, **k))
  tools = "search,calculator,test_own_parts:Letters"
  run = build.build(smallest(tools=tools, **{"strata.name": "tools"}))
  assert run.partition.num_strata == run.algorithm.num_strata == 8
  assert [call["tools"] for call in calls] == [("search", "calculator", "letters")]


###  Tasks  ###


def task_with(**parts):
  """A module with a task that is right but for `parts`, and the name of it."""

  def make(config):
    config = config.copy_and_resolve_references()
    config.task.name = ""
    task = named.make(config)
    return dataclasses.replace(task, **{k: v(task) for k, v in parts.items()})

  module = types.ModuleType("own_task_of_tests")
  module.make = make
  sys.modules["own_task_of_tests"] = module
  return "own_task_of_tests:make"


@pytest.mark.parametrize(
  "parts, rule",
  [
    ({"demonstrations": lambda t: lambda step: []}, "gives 0 for the demonstrations of a step; it "
     "must give warm_start.demonstrations_per_step=4"),
    ({"demonstrations": lambda t: lambda step: [[], [], [], []]}, "gives 0 for a demonstration; it "
     "must be a list of one Trajectory"),
    ({"demonstrations": lambda t: lambda step: [one * 2 for one in t.demonstrations(step)]},
     "gives 2 for a demonstration; it must be a list of one Trajectory"),
    ({"demonstrations": lambda t: lambda step: t.nothing}, "failed with AttributeError"),
    ({"questions_at": lambda t: lambda step: t.questions_at(step)[:1]}, "gives 1 for the questions "
     "of a step; it must give data.questions_per_step=2"),
    ({"questions_at": lambda t: lambda step: ["Who?", "Where?"]}, "gives str in the questions of"),
    ({"questions_at": lambda t: lambda step: [Question("a", "Who?", "Ada")] * 2},
     "gives golden_answers='Ada' to the question 'a'; they must be a tuple of texts"),
    ({"held_out": lambda t: lambda count: {"held_out": ([], t.tools)}},
     "gives no question in the held-out set 'held_out'; it must give one at least"),
    ({"held_out": lambda t: lambda count: {"held_out": t.questions_at(0)}},
     "gives list for the held-out set 'held_out'; it must be a pair (questions, tools)"),
    ({"held_out": lambda t: lambda count: {}}, "gives none for the held-out sets; one must be"),
    ({"tools": lambda t: (Single(),)}, "the tool 'letters' returned '3' for 1 call"),
    ({"tools": lambda t: (3,)}, "3 is no tool: it has no name and no description"),
  ],
)  # fmt: skip
def test_a_task_with_a_mistake_is_refused_before_work(parts, rule):
  name = task_with(**parts)
  said = refusal(**{"task.name": name})
  assert said.startswith(f"task.name={name!r}") and rule in said


@pytest.mark.parametrize(
  "parts, call, rule",
  [
    ({"questions_at": lambda t: lambda step: t.questions_at(step)[step:]}, "questions_at",
     "gives 1 for the questions of a step; .* (at step 1); mend it"),
    ({"demonstrations": lambda t: lambda step: [] if step else t.demonstrations(step)},
     "demonstrations", "gives 0 for the demonstrations of a step; .* (at step 1); mend it"),
    ({"questions_at": lambda t: lambda step: t.questions_at(step) if step < 1 else 1 / 0},
     "questions_at", "failed with ZeroDivisionError: division by zero (at step 1)"),
  ],
)  # fmt: skip
def test_what_a_task_gives_wrongly_later_ends_the_run_in_a_sentence(parts, call, rule):
  run = build.build(smallest(**{"task.name": task_with(**parts)}))
  function = getattr(run.task, call)
  function(0)
  words = rule.replace("(", r"\(").replace(")", r"\)")
  with pytest.raises(OutsideFailed, match=f"^task.name='own_task_of_tests:make' {words}"):
    function(1)


def test_demonstrations_that_were_all_lost_name_the_fault():
  [lost] = made_up.rollouts(1)
  groups = [[dataclasses.replace(lost, fault="too long")]] * 4
  assert "all lost, the first to this: too long" in check_task.wrong_demonstrations(
    smallest(), groups
  )


###  Methods  ###


@pytest.mark.parametrize(
  "name, rule",
  [
    ("Headed", "Headed has a critic that can't be: heads={'crown': 0} must be {name: how many"),
    ("NanStream", "gives the stream 'bonus' numbers that are not finite"),
    ("HugeStream", "gives the stream 'bonus' numbers that are not finite"),
    ("InfiniteArray", "gives the array 'length' values that are not finite"),
    ("FlatArray", "gives the array 'length' of shape [3]; it must begin with questions and"),
    ("Failing", "whose make(read, facts) failed with KeyError: 'alpha'"),
    ("Stageless", "it must give one Stage at least"),
  ],
)  # fmt: skip
def test_a_method_with_a_mistake_is_refused_before_work(name, rule):
  said = refusal(**{"algorithm.name": f"test_own_parts:{name}"})
  assert said.startswith("algorithm.name") and f"'test_own_parts:{name}'" in said and rule in said


def test_a_method_that_is_right_is_taken():
  assert isinstance(
    build.build(smallest(**{"algorithm.name": "test_own_parts:Own"})).algorithm, Own
  )


def test_made_up_rollouts_are_of_every_kind():
  made = made_up.rollouts(8)
  assert {(bool(t.calls), t.answer, t.stop) for t in made} == {
    (False, "Oslo", "answer"), (True, "Oslo", "answer"), (True, None, "turns"),
    (False, None, "length"),
  }  # fmt: skip
  assert [t.sample for t in made] == list(range(8))
  assert max(len(t.token_ids) for t in made) <= made_up.LONGEST
