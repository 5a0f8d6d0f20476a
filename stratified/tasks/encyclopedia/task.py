"""The generated encyclopedia as a task: questions of 0 to 3 hops, answered by its pages."""

from collections.abc import Callable
import functools

from stratified import config as settings
from stratified.agents import loop
from stratified.data.tokenizer import Tokenizer
from stratified.retrieval import retrievers
from stratified.retrieval.corpus import Passage
from stratified.tasks import base, generated
from stratified.tasks.base import Sets, Task
from stratified.tasks.encyclopedia import pages, questions, vocabulary
from stratified.tasks.encyclopedia.demonstrations import Demonstrator
from stratified.tools.search import Search, SearchSettings
from stratified.types import Trajectory


def make(config) -> Task:
  asked = settings.read(questions.QuestionSettings, config)
  made = settings.read(pages.EncyclopediaConfig, config)
  first, second = (
    pages.make(made, seed) for seed in (config.seed, config.seed + generated.SECOND_SEED)
  )
  topk = settings.read(SearchSettings, config).topk
  open_search = lambda: Search(retrievers.open_retriever(config, lambda: first.passages), topk)
  tools = base.tools(config, {"search": open_search})

  def held_out(count: int) -> Sets:
    ask = lambda book: questions.held_out_questions(
      book, seed=config.seed, count=count, hop_shares=asked.hop_shares
    )
    # A server or an index holds the first encyclopedia alone.
    return {
      "held_out": (ask(first), tools),
      "second_encyclopedia": (ask(second), generated.searching(tools, second.passages, topk)),
    }

  task = base.make(
    config,
    tools,
    functools.partial(tokenizer, base.marks(config)),
    questions_at=lambda step: questions.training_questions(
      first,
      seed=config.seed,
      step=step,
      count=config.data.questions_per_step,
      hop_shares=asked.in_training,
    ),
    held_out=held_out,
    endless=True,
    demonstrations=lambda step: play(step),
  )
  play = _demonstrations(config, task, made, topk)
  return task


def check(config) -> None:
  """Refuses settings out of their ranges."""
  generated.check(config, pages.EncyclopediaConfig, questions.QuestionSettings)


def tokenizer(marks: tuple[str, ...] = ()) -> Tokenizer:
  """Makes the tokenizer of a policy that is built here; `marks` are its protocol's."""
  return vocabulary.build(marks)


def passages(config) -> tuple[Passage, ...]:
  """Makes the pages that the run searches."""
  return pages.make(settings.read(pages.EncyclopediaConfig, config), config.seed).passages


def _demonstrations(
  config, task: Task, made: pages.EncyclopediaConfig, topk: int
) -> Callable[[int], list[list[Trajectory]]]:
  """Makes step -> scripted rollouts, one a question, through the agent loop.

  They are set in practice encyclopedias of their own, taken in turn. So the policy learns to
  search, read and copy, and has no page of the world that it is trained and tested in to learn by
  heart. Common knowledge is the same everywhere.
  """

  @functools.cache
  def practice(number: int):
    book = pages.make(made, config.seed + generated.PRACTICE_SEED + number)
    script = Demonstrator(
      book,
      task.tokenizer,
      seed=config.seed,
      config=generated.demonstration_config(config),
      protocol=task.protocol,
    )
    return book, generated.searching(task.tools, book.passages, topk), script

  def play(step: int) -> list[list[Trajectory]]:
    w = config.warm_start
    book, tools, script = practice(step % w.encyclopedias)
    asked = questions.training_questions(
      book,
      seed=config.seed,
      step=step,
      count=w.demonstrations_per_step,
      hop_shares=config.data.hop_shares,
    )
    script.begin(step, asked)
    return loop.collect(
      asked,
      sampler=script,
      tools=tools,
      tokenizer=task.tokenizer,
      protocol=task.protocol,
      limits=task.limits,
      samples_per_question=1,
      step=step,
    )

  return play
