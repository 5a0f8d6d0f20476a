"""Asks word problems of 0 to 3 operations on numbers too large to do by heart, with a calculator.

    Dan has 512 cups. Ann has 43125 pens. Ann buys 871 more. Ann sells 1204.
    How many pens does Ann have now?

A problem starts with a number and applies its operations in order; 0 operations ask for a number
that stands in the text. Half of the problems also mention somebody else's things, which have
nothing to do with the question. A question's id spells the problem, and a stable hash of it says
whether training may ask it.
"""

from collections.abc import Sequence
import dataclasses
import functools
import re

import numpy as np

from stratified import config as settings
from stratified.config import setting, Settings
from stratified.data.tokenizer import Tokenizer
from stratified.tasks import base, generated, numbers, script
from stratified.tasks.base import Sets, Task
from stratified.tasks.draws import generator, HELD_OUT, TRAINING
from stratified.tasks.encyclopedia.demonstrations import DemonstrationConfig
from stratified.tasks.encyclopedia.questions import QuestionSettings
from stratified.tools.calculator import Calculator
from stratified.types import Question

LARGEST_VALUE = 10**9

NAMES = ("Ann", "Ben", "Cora", "Dan", "Eve", "Finn", "Gus", "Hal")
THINGS = ("pens", "cups", "coins", "shells", "stamps", "beads", "nails", "cards")
# Two wordings of training and a third, of the same words, for the second held-out set.
START = (
  "{n} has {v} {t}.",
  "There are {v} {t} at the house of {n}.",
  "{n} has {v} {t} at the house.",
)
STEPS = {
  "+": ("{n} buys {v} more.", "Then {n} is given {v} more.", "Then {n} buys {v} more."),
  "-": ("{n} sells {v}.", "Then {v} of them are lost.", "Then {n} sells {v} of them."),
  "*": (
    "Now {n} makes {v} of each.",
    "Then there are {v} times as many.",
    "Then {n} makes {v} of each.",
  ),
  "/": (
    "{n} keeps one part of {v}.",
    "Then only one in {v} is left.",
    "Then {n} keeps only one in {v}.",
  ),
}
QUESTIONS = (
  "How many {t} does {n} have now?",
  "How many {t} are left at the house of {n}?",
  "How many {t} does {n} have left at the house?",
)


@dataclasses.dataclass(frozen=True)
class ArithmeticSettings(Settings):
  """How large the numbers are. `hop_shares` are the shares of 0, 1, 2, 3 operations."""

  SECTION = "data"
  smallest: int = setting(100, "arithmetic: least number of a problem", low=2, high=10**6)
  largest: int = setting(99_999, "arithmetic: greatest number of a problem", low=99, high=10**6)

  def __post_init__(self):
    super().__post_init__()
    if self.largest < 10 * self.smallest:
      raise ValueError(
        f"data.largest={self.largest} must be at least 10 times data.smallest={self.smallest}, "
        "or there are too few problems"
      )


@dataclasses.dataclass(frozen=True)
class Problem:
  """A start and its operations, each an operator and a number."""

  start: int
  steps: tuple[tuple[str, int], ...]

  @property
  def values(self) -> tuple[int, ...]:
    """Lists the start and what each operation leads to; all whole."""
    found = [self.start]
    for operator, number in self.steps:
      found.append(apply(found[-1], operator, number))
    return tuple(found)

  @property
  def id(self) -> str:
    return "/".join(
      ["arithmetic", str(self.start), *(f"{o}{n}".replace("/", ":") for o, n in self.steps)]
    )


def apply(value: int, operator: str, number: int) -> int:
  """value operator number, where that is whole."""
  results = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}
  return results[operator]


def problem_of(question: Question) -> Problem:
  """Reads the problem that the question's id spells."""
  _, start, *steps = question.id.split("/")
  return Problem(int(start), tuple((s[0].replace(":", "/"), int(s[1:])) for s in steps))


def draw(rng: np.random.Generator, operations: int, limits: tuple[int, int]) -> Problem:
  """Draws a problem of so many operations on numbers within the limits; factors are below 100."""
  number = lambda low, high: int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
  problem = Problem(number(*limits), ())
  while len(problem.steps) < operations:
    value, operator = problem.values[-1], "+-*/"[rng.integers(4)]
    if operator == "+":
      step = number(*limits)
    elif operator == "-":
      step = number(limits[0], min(limits[1], value - 1)) if value > limits[0] + 1 else 0
    elif operator == "*":
      step = number(2, 99) if value * 99 < LARGEST_VALUE else 0
    else:
      divisors = [d for d in range(2, 100) if value % d == 0 and value // d > 1]
      step = divisors[rng.integers(len(divisors))] if divisors else 0
    if step:
      problem = Problem(problem.start, (*problem.steps, (operator, step)))
  return problem


def question(problem: Problem, rng: np.random.Generator, limits, second: bool = False) -> Question:
  """Puts the problem into words; those of the second held-out set where that is asked for."""
  name, other = (NAMES[i] for i in rng.permutation(len(NAMES))[:2])
  thing, others = (THINGS[i] for i in rng.permutation(len(THINGS))[:2])
  way = lambda: 2 if second else int(rng.integers(2))
  said = [START[way()].format(n=name, v=problem.start, t=thing)]
  said += [STEPS[operator][way()].format(n=name, v=v) for operator, v in problem.steps]
  if rng.random() < 0.5:
    extra = START[way()].format(n=other, v=draw(rng, 0, limits).start, t=others)
    said.insert(0 if rng.random() < 0.5 else len(said), extra)
  said.append(QUESTIONS[way()].format(n=name, t=thing))
  source = "arithmetic_second" if second else "arithmetic"
  operations = len(problem.steps)
  return Question(problem.id, " ".join(said), (str(problem.values[-1]),), source, operations)


def questions(
  shares: Sequence[float],
  count: int,
  rng: np.random.Generator,
  limits,
  *,
  held_out: bool,
  second=False,
) -> list[Question]:
  """Draws `count` distinct questions with shares of 0 to 3 operations, on one side of the split."""

  def drawn(operations: int) -> tuple[str, Problem]:
    problem = draw(rng, operations, limits)
    return problem.id, problem

  ask = lambda problem: question(problem, rng, limits, second)
  more = "widen data.smallest .. data.largest"
  return generated.distinct(shares, count, rng, drawn, ask, held_out=held_out, more=more)


def make(config) -> Task:
  asked = settings.read(QuestionSettings, config)
  sizes = settings.read(ArithmeticSettings, config)
  limits, larger = (sizes.smallest, sizes.largest), (sizes.largest, 10 * sizes.largest)
  tools = base.tools(config, {"calculator": Calculator})
  w = config.warm_start

  def held_out(count: int) -> Sets:
    ask = lambda limits, second: questions(
      asked.hop_shares,
      count,
      generator(config.seed, int(second), HELD_OUT),
      limits,
      held_out=True,
      second=second,
    )
    return {"held_out": (ask(limits, False), tools), "other_wording": (ask(larger, True), tools)}

  training = lambda step, shares, count, seed: questions(
    shares, count, generator(seed, step, TRAINING), limits, held_out=False
  )
  play = functools.partial(demonstrate, config=generated.demonstration_config(config))
  task = base.make(
    config,
    tools,
    functools.partial(tokenizer, base.marks(config)),
    questions_at=lambda step: training(
      step, asked.in_training, config.data.questions_per_step, config.seed
    ),
    held_out=held_out,
    endless=True,
    demonstrations=lambda step: script.collect(
      task,
      training(
        step, asked.hop_shares, w.demonstrations_per_step, config.seed + generated.PRACTICE_SEED
      ),
      play,
      seed=config.seed,
      step=step,
    ),
  )
  return task


def check(config) -> None:
  """Refuses settings out of their ranges."""
  generated.check(config, ArithmeticSettings, QuestionSettings)


@functools.cache
def tokenizer(marks: tuple[str, ...] = ()) -> Tokenizer:
  """Makes the tokenizer of a policy that is built here; `marks` are its protocol's."""
  sentences = [text for ways in (START, QUESTIONS, *STEPS.values()) for text in ways]
  return numbers.build([*sentences, *NAMES, *THINGS], ["calculator"], marks=marks)


def demonstrate(
  asked: Question, rng: np.random.Generator, *, config: DemonstrationConfig
) -> script.Script:
  """Calls the calculator a number of times drawn apart from the question, then answers.

  One operation a call, in the problem's order. With too few calls it answers too early, with too
  many it goes on with a number of the text: only as many as there are operations are right.
  """
  problem = problem_of(asked)
  value = str(problem.start)
  for position in range(config.draw_calls(len(problem.steps), rng)):
    if rng.random() < config.invalid:
      yield f"{value}"
      continue
    if position < len(problem.steps):
      operator, number = problem.steps[position]
    else:
      found = re.findall(r"\d+", asked.text)
      operator, number = "+-*"[rng.integers(3)], found[rng.integers(len(found))]
    expression = f"{value}{operator}{number}"
    if rng.random() < config.wrong_query:
      expression = expression[: rng.integers(1, len(expression))]
    fed = yield f"<calculator>{expression}</calculator>"
    found = re.search(r"<information>(-?\d+)</information>", fed)
    value = found[1] if found else value
  yield f"<answer>{value}</answer>"
