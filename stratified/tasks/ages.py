"""Asks questions of age over a generated encyclopedia of people: a task of two tools.

    How much older is Marvel Dortim than Kalgin Sorvak?

Pages hold years of birth, so that search finds two numbers and the calculator their difference.
`hops` is the number of calls that a question needs:

    0  the year stands in the text               1  search, or calculator, alone
    2  an age in some year: search, calculator   3  a difference: search, search, calculator
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re

import numpy as np

from stratified import config as settings
from stratified.data.tokenizer import Tokenizer
from stratified.retrieval import retrievers
from stratified.retrieval.corpus import Passage
from stratified.tasks import base, generated, numbers, script
from stratified.tasks.base import Sets, Task
from stratified.tasks.draws import generator, HELD_OUT, TRAINING
from stratified.tasks.encyclopedia import language
from stratified.tasks.encyclopedia.demonstrations import DemonstrationConfig
from stratified.tasks.encyclopedia.pages import draw_names, EncyclopediaConfig
from stratified.tasks.encyclopedia.questions import QuestionSettings
from stratified.tools.calculator import Calculator
from stratified.tools.search import Search, SearchSettings
from stratified.types import Question

MOST_PEOPLE = 2000  # names for more would run out
YEARS = (1100, 1999)
_PEOPLE = 0  # tag of a random stream

PAGE = ("{n} was born in {y}. {p} lived in {v}.", "{n} came to {v}. {p} was born in {y}.")
# kind -> the calls that it needs, and two wordings
WORDING = {
  "told": (0, ("{n} was born in {y}. When was {n} born?", "{n} was born in {y}. Name the year.")),
  "born": (1, ("When was {n} born?", "In which year was {n} born?")),
  "between": (1, ("How many years lie between {y} and {z}?", "How many years from {y} to {z}?")),
  "age": (2, ("How old was {n} in {z}?", "In {z}, how old was {n}?")),
  "older": (3, ("How much older is {n} than {m}?", "How many years is {n} older than {m}?")),
}


@dataclasses.dataclass(frozen=True)
class People:
  """Everybody's year of birth, and a page for each."""

  seed: int
  born: dict[str, int]
  passages: tuple[Passage, ...]

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    return tuple(self.born)


def people(made: EncyclopediaConfig, seed: int) -> People:
  """Draws the people of a seed: `entities` of them, named as in the encyclopedia."""
  if made.entities > MOST_PEOPLE:
    raise ValueError(
      f"data.entities={made.entities} must be at most {MOST_PEOPLE} with task.name='ages'"
    )
  rng = generator(seed, _PEOPLE)
  names = draw_names(["person"] * made.entities, made.near_duplicates, rng)
  born = {name: int(rng.integers(*YEARS)) for name in names}
  towns = [language.FIRST_SYLLABLES[i] + language.SECOND_SYLLABLES[i] for i in range(40)]
  pages = []
  for i, (name, year) in enumerate(born.items()):
    text = PAGE[rng.integers(2)].format(
      n=name, y=year, p=("He", "She")[rng.integers(2)], v=towns[rng.integers(len(towns))]
    )
    pages.append(Passage(f"{seed}-{i}", name, text))
  return People(seed, born, tuple(pages))


def draw(book: People, calls: int, rng: np.random.Generator) -> tuple[str, tuple]:
  """Draws a question that needs so many calls: its kind, and the names and years in it."""
  kinds = [kind for kind, (needed, _) in WORDING.items() if needed == calls]
  kind = kinds[rng.integers(len(kinds))]
  one, other = (book.names[i] for i in rng.integers(len(book.names), size=2))
  early, late = sorted(int(year) for year in rng.integers(*YEARS, size=2))
  if kind == "told":
    return kind, (one, early)
  if kind == "born":
    return kind, (one,)
  if kind == "between":
    return kind, (early, late + 1)
  if kind == "age":
    return kind, (one, book.born[one] + int(rng.integers(1, 100)))
  if book.born[one] == book.born[other]:
    return draw(book, calls, rng)
  return kind, tuple(sorted((one, other), key=book.born.get))


def plan(kind: str, about: Sequence) -> list[str]:
  """Plans the calls that answer a question; `{0}`, `{1}` stand for what earlier ones brought."""
  return {
    "told": [],
    "born": [f"<search> {about[0]}</search>"],
    "between": [f"<calculator>{about[-1]}-{about[0]}</calculator>"],
    "age": [f"<search> {about[0]}</search>", f"<calculator>{about[-1]}-{{0}}</calculator>"],
    "older": [
      f"<search> {about[0]}</search>",
      f"<search> {about[-1]}</search>",
      "<calculator>{1}-{0}</calculator>",
    ],
  }[kind]


def question(book: People, kind: str, about: Sequence, rng: np.random.Generator) -> Question:
  calls, ways = WORDING[kind]
  born = [book.born.get(one) for one in about]
  first, last = about[0], about[-1]
  answer = {
    "told": lambda: last,
    "born": lambda: born[0],
    "between": lambda: last - first,
    "age": lambda: last - born[0],
    "older": lambda: born[1] - born[0],
  }[kind]()
  text = ways[rng.integers(2)].format(n=first, m=last, y=last if kind == "told" else first, z=last)
  return Question(_id(book, kind, about), text, (str(answer),), "ages", calls)


def _id(book: People, kind: str, about: Sequence) -> str:
  return "/".join([f"ages-{book.seed}", kind, *(str(one).replace(" ", "_") for one in about)])


def of_id(asked: Question) -> tuple[str, list]:
  """Reads the kind of a question, and what it is about, from its id."""
  _, kind, *about = asked.id.split("/")
  return kind, [int(one) if one.isdigit() else one.replace("_", " ") for one in about]


def questions(
  book: People, shares: Sequence[float], count: int, rng: np.random.Generator, *, held_out: bool
) -> list[Question]:
  """Draws `count` distinct questions with shares of 0 to 3 calls, on one side of the split."""

  def drawn(calls: int) -> tuple[str, tuple]:
    kind, about = draw(book, calls, rng)
    return _id(book, kind, about), (kind, about)

  ask = lambda made: question(book, *made, rng)
  more = "raise data.entities"
  return generated.distinct(shares, count, rng, drawn, ask, held_out=held_out, more=more)


def make(config) -> Task:
  asked = settings.read(QuestionSettings, config)
  made = settings.read(EncyclopediaConfig, config)
  first, second = (
    people(made, seed) for seed in (config.seed, config.seed + generated.SECOND_SEED)
  )
  topk = settings.read(SearchSettings, config).topk
  tools = base.tools(
    config,
    {
      "search": lambda: Search(retrievers.open_retriever(config, lambda: first.passages), topk),
      "calculator": Calculator,
    },
  )

  def held_out(count: int) -> Sets:
    ask = lambda book: questions(
      book, asked.hop_shares, count, generator(config.seed, 0, HELD_OUT), held_out=True
    )
    return {
      "held_out": (ask(first), tools),
      "second_encyclopedia": (ask(second), generated.searching(tools, second.passages, topk)),
    }

  task = base.make(
    config,
    tools,
    functools.partial(tokenizer, base.marks(config)),
    questions_at=lambda step: questions(
      first,
      asked.in_training,
      config.data.questions_per_step,
      generator(config.seed, step, TRAINING),
      held_out=False,
    ),
    held_out=held_out,
    endless=True,
    demonstrations=lambda step: play(step),
  )
  play = _demonstrations(config, task, made, topk)
  return task


def _demonstrations(config, task: Task, made: EncyclopediaConfig, topk: int) -> Callable:
  """Makes step -> scripted rollouts, among other people that change with the step."""
  w = config.warm_start

  @functools.cache
  def practice(number: int):
    book = people(made, config.seed + generated.PRACTICE_SEED + number)
    return book, generated.searching(task.tools, book.passages, topk)

  def play(step: int):
    book, tools = practice(step % w.encyclopedias)
    shares, rng = config.data.hop_shares, generator(config.seed, step, TRAINING)
    asked = questions(book, shares, w.demonstrations_per_step, rng, held_out=False)
    act = functools.partial(demonstrate, book=book, config=generated.demonstration_config(config))
    return script.collect(task, asked, act, seed=config.seed, step=step, tools=tools)

  return play


def check(config) -> None:
  """Refuses settings out of their ranges."""
  generated.check(config, EncyclopediaConfig, QuestionSettings)


def passages(config) -> tuple[Passage, ...]:
  """Makes the pages that the run searches."""
  return people(settings.read(EncyclopediaConfig, config), config.seed).passages


@functools.cache
def tokenizer(marks: tuple[str, ...] = ()) -> Tokenizer:
  """Makes the tokenizer of a policy that is built here; `marks` are its protocol's."""
  texts = [*PAGE, "He She", *(way for _, ways in WORDING.values() for way in ways)]
  tools = ["search", "calculator"]
  first, second = language.FIRST_SYLLABLES, language.SECOND_SYLLABLES
  return numbers.build([*texts, *first], tools, second, marks)


def demonstrate(
  asked: Question, rng: np.random.Generator, *, book: People, config: DemonstrationConfig
) -> script.Script:
  """Makes a drawn number of the calls of the question's plan, then answers with the last result.

  The number is drawn apart from the question. With too few calls it answers too early; with too
  many it goes on searching for somebody or calculating with a number at hand. `wrong_relation` is
  the share of calls of the other tool.
  """
  kind, about = of_id(asked)
  wanted, brought = plan(kind, about), []
  for position in range(config.draw_calls(len(wanted), rng)):
    if rng.random() < config.invalid:
      yield f" {about[0]}"
      continue
    call = wanted[position] if position < len(wanted) else _more(about, brought, book, rng)
    call = call.format(*brought, *["0"] * 3)
    if rng.random() < config.wrong_query:
      call = _more(about, brought, book, rng)
    fed = yield call
    found = re.search(r"<information>(\d+)</information>|born in (\d+)", fed)
    brought.append((found[1] or found[2]) if found else str(about[-1]))
  if brought:
    value = brought[-1]
  else:  # by heart: right where the text tells it
    value = about[-1] if kind in ("told", "between") else int(rng.integers(*YEARS))
  yield f"<answer>{value}</answer>"


def _more(about: Sequence, brought: list[str], book: People, rng: np.random.Generator) -> str:
  """Makes a call that nothing asks for."""
  if rng.random() < 0.5:
    named = [one for one in about if isinstance(one, str)]
    name = named[rng.integers(len(named))] if named else book.names[rng.integers(len(book.names))]
    return f"<search> {name}</search>"
  at_hand = [*brought, *(str(one) for one in about if isinstance(one, int)), "1"]
  one, other = (at_hand[i] for i in rng.integers(len(at_hand), size=2))
  return f"<calculator>{one}{'+-'[rng.integers(2)]}{other}</calculator>"
