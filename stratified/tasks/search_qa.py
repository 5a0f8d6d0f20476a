"""Asks questions from files, answered by searching a corpus: the task of Search-R1."""

import dataclasses
import functools
import os
import pathlib

from stratified import config as settings
from stratified.config import setting, Settings
from stratified.data import readers
from stratified.data import tokenizer as tokenizers
from stratified.retrieval import retrievers
from stratified.retrieval.corpus import Passage, read_corpus
from stratified.tasks import base
from stratified.tasks.base import Sets, Task
from stratified.tasks.encyclopedia import vocabulary
from stratified.tools.search import Search, SearchSettings
from stratified.types import Question


@dataclasses.dataclass(frozen=True)
class FileSettings(Settings):
  """Where questions and passages come from; `$STRATIFIED_DATA` may begin a path."""

  SECTION = "data"
  questions: str = setting("", "files: file or folder (FlashRAG JSONL, verl parquet)")
  corpus: str = setting("", "files: passages, JSONL, plain or .gz")
  split: str = setting(
    "train",
    "files: the split that is trained on; empty is every row",
    affects=["training", "warm_start"],
  )
  held_out_split: str = setting("dev", "files: the split that is evaluated on")
  evaluation: str = setting(
    "",
    "files: what is evaluated on; empty takes held_out_split of data.questions",
    affects=["scores"],
  )


def make(config) -> Task:
  d = config.data
  train = readers.read_questions(path_of(d.questions), split=d.split or None)
  asked = evaluation_questions(config)  # before the passages, which take long
  _say_what_is_trained_on(train, asked)
  tools = base.tools(config, {"search": lambda: search(config)})

  def held_out(count: int) -> Sets:
    # Drawn over all sets: their order is that of step 0 of a fixed seed.
    return {"held_out": (first(asked, count), tools)}

  def sets(count: int | None) -> Sets:
    by_source = {}
    for question in asked:
      by_source.setdefault(question.source, []).append(question)
    return {name: (first(questions, count), tools) for name, questions in by_source.items()}

  return base.make(
    config,
    tools,
    functools.partial(tokenizer, base.marks(config)),
    questions_at=lambda step: readers.questions_at(
      train, seed=config.seed, step=step, count=d.questions_per_step
    ),
    held_out=held_out,
    sets=sets,
  )


def _say_what_is_trained_on(train: list[Question], asked: list[Question]) -> None:
  """Prints a sentence where questions that measure the policy are trained on too."""
  seen = {question.text for question in train}
  shared = sum(question.text in seen for question in asked)
  if shared:
    print(
      f"{shared} of {len(asked)} held-out questions are trained on too, so scores say nothing of "
      "new ones; name others with --config.data.evaluation=PATH, or a split with "
      "--config.data.held_out_split",
      flush=True,
    )


def tokenizer(marks: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
  """Makes the tokenizer of a policy that is built here; `marks` are its protocol's."""
  return vocabulary.build(marks)


def search(config) -> Search:
  opened = retrievers.open_retriever(config, lambda: passages(config))
  return Search(opened, settings.read(SearchSettings, config).topk)


def first(questions: list[Question], count: int | None) -> list[Question]:
  """Takes the first `count` of an order that does not change with the count; None is all."""
  size = len(questions) if count is None else min(count, len(questions))
  return readers.questions_at(questions, seed=0, step=0, count=size)


def evaluation_questions(config) -> list[Question]:
  """Reads all questions from files that training does not see."""
  d = config.data
  if d.evaluation:
    return readers.read_questions(path_of(d.evaluation))
  return readers.read_questions(path_of(d.questions), split=d.held_out_split or None)


def passages(config) -> list[Passage]:
  """Reads the passages of the corpus file."""
  return read_corpus(path_of(config.data.corpus))


def path_of(value: str) -> pathlib.Path:
  """Resolves a path of the config; `$STRATIFIED_DATA` in front of it is the folder of real data."""
  if value.startswith("$STRATIFIED_DATA"):
    return readers.data_root() / value.removeprefix("$STRATIFIED_DATA").lstrip("/")
  if not value:
    raise FileNotFoundError(
      "data.questions and data.corpus must name files for data.name='files'; "
      "give --config.data.questions=PATH --config.data.corpus=PATH"
    )
  return pathlib.Path(os.path.expanduser(value))
