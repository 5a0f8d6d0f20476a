"""What the agent acts in: questions, held-out sets, search, tokenizer and protocol, each by the
config's choice."""

from collections.abc import Callable
import dataclasses
import functools
import os
import pathlib
import time
from typing import Any

import numpy as np

from stratified.agents import chat, loop, tags, tool_calls
from stratified.agents.baselines import methods
from stratified.agents.limits import Limits
from stratified.data import demonstrations, encyclopedia, readers
from stratified.data import questions as generated
from stratified.data import tokenizer as tokenizers
from stratified.learner import batching
from stratified.retrieval import retrievers
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.corpus import Passage, read_corpus
from stratified.runs import writer
from stratified.types import Question

# How far beyond the run's seed the seeds of the other encyclopedias lie: the one that training
# never sees, and those that the warm start practises in.
SECOND_SEED, PRACTICE_SEED = 1_000_003, 2_000_003


@dataclasses.dataclass(frozen=True)
class World:
  """What the agent acts in: questions by step, held-out sets by name, search, and how text becomes
  tokens."""

  tokenizer: tokenizers.Tokenizer
  protocol: tags.SearchTags
  limits: Limits
  retriever: Any
  questions_at: Callable[[int], list[Question]]
  held_out: Callable[
    [int], dict[str, tuple[list[Question], Any]]
  ]  # count -> name -> (questions, retriever)


class Timed:
  """A retriever that counts the seconds and queries of its searches."""

  def __init__(self, retriever):
    self._retriever, self.seconds, self.queries = retriever, 0.0, 0

  @property
  def manifest(self) -> dict:
    return self._retriever.manifest

  def search(self, queries, topk):
    start = time.perf_counter()
    try:
      return self._retriever.search(queries, topk)
    finally:
      self.seconds += time.perf_counter() - start
      self.queries += len(queries)


TAGS = {
  "short": tags.short,
  "search_r1": tags.search_r1,
  "few_shot": tags.few_shot,
} | methods.PROTOCOLS
PROTOCOLS = (*TAGS, "tool_calls")


def protocol(config):
  """The protocol of `rollout.protocol`: tags in plain text or in the model's chat template, or its
  native tool calls."""
  if config.rollout.protocol == "tool_calls":
    return tool_calls.tool_calls(chat.load(config.policy.checkpoint), tokenizer_of(config))
  render = chat.load(config.policy.checkpoint).user if config.rollout.chat_template else None
  return TAGS[config.rollout.protocol](render=render)


def tokenizer_of(config) -> tokenizers.Tokenizer:
  """That of the model's directory, or the encyclopedia's where the policy is made here."""
  if not config.policy.checkpoint:
    return tokenizers.build()
  return tokenizers.Tokenizer.from_file(
    str(pathlib.Path(config.policy.checkpoint) / "tokenizer.json")
  )


def world(config) -> World:
  return (_encyclopedia_world if config.data.name == "encyclopedia" else _file_world)(config)


def _encyclopedia_world(config) -> World:
  d = config.data
  settings = encyclopedia_settings(d)
  first, second = (
    encyclopedia.make(settings, seed) for seed in (config.seed, config.seed + SECOND_SEED)
  )
  search = Timed(retrievers.open_retriever(config, lambda: first.passages))

  def held_out(count):
    ask = lambda book: generated.held_out_questions(
      book, seed=config.seed, count=count, hop_shares=d.hop_shares
    )
    # A server or an index holds the first encyclopedia alone.
    return {
      "held_out": (ask(first), search),
      "second_encyclopedia": (ask(second), BM25(second.passages)),
    }

  return World(
    tokenizer=tokenizer_of(config),
    protocol=protocol(config),
    limits=limits(config),
    retriever=search,
    questions_at=lambda step: generated.training_questions(
      first, seed=config.seed, step=step, count=d.questions_per_step, hop_shares=d.hop_shares
    ),
    held_out=held_out,
  )


def _file_world(config) -> World:
  d = config.data
  train = readers.read_questions(path_of(d.questions), split=d.split or None)
  questions = evaluation_questions(config)  # before the passages, which take long
  search = Timed(retrievers.open_retriever(config, lambda: passages(config)))

  def held_out(count):
    # The same questions each time, drawn over all sets: their order is that of step 0 of a fixed
    # seed.
    return {
      "held_out": (
        readers.questions_at(questions, seed=0, step=0, count=min(count, len(questions))),
        search,
      )
    }

  return World(
    tokenizer=tokenizer_of(config),
    protocol=protocol(config),
    limits=limits(config),
    retriever=search,
    questions_at=lambda step: readers.questions_at(
      train, seed=config.seed, step=step, count=d.questions_per_step
    ),
    held_out=held_out,
  )


def evaluation_questions(config) -> list[Question]:
  """All questions from files that training does not see."""
  d = config.data
  if d.evaluation:
    return readers.read_questions(path_of(d.evaluation))
  return readers.read_questions(path_of(d.questions), split=d.held_out_split or None)


def passages(config) -> list[Passage]:
  """What the agent searches: the pages of the encyclopedia, or the passages of the corpus file."""
  if config.data.name == "encyclopedia":
    return encyclopedia.make(encyclopedia_settings(config.data), config.seed).passages
  return read_corpus(path_of(config.data.corpus))


def path_of(value: str) -> pathlib.Path:
  """A path from the config; `$STRATIFIED_DATA` in front of it is the folder of real data."""
  if value.startswith("$STRATIFIED_DATA"):
    return readers.data_root() / value.removeprefix("$STRATIFIED_DATA").lstrip("/")
  if not value:
    raise FileNotFoundError(
      "data.questions and data.corpus must name files for data.name='files'; "
      "give --config.data.questions=PATH --config.data.corpus=PATH"
    )
  return pathlib.Path(os.path.expanduser(value))


def limits(config, **changes) -> Limits:
  names = (
    "max_turns",
    "max_turn_tokens",
    "max_observation_tokens",
    "max_tokens",
    "answer_tokens",
    "topk",
  )
  return Limits(**{name: config.rollout[name] for name in names} | changes)


def encyclopedia_settings(d) -> encyclopedia.EncyclopediaConfig:
  names = ("entities", "near_duplicates", "distractors", "paraphrases", "common_facts")
  return encyclopedia.EncyclopediaConfig(**{name: d[name] for name in names})


def demonstration_config(config) -> demonstrations.DemonstrationConfig:
  w = config.warm_start
  return demonstrations.DemonstrationConfig(
    mixture=tuple(w.mixture),
    max_turns=config.rollout.max_turns,
    wrong_query=w.wrong_query,
    wrong_relation=w.wrong_relation,
    invalid=w.invalid,
  )


def demonstration_batches(config, world_: World, shape: batching.Packing):
  """step -> Batch of scripted demonstrations, one a question, through the agent loop.

  shape: of a batch of warm_start.demonstrations_per_step rollouts.

  They are set in practice encyclopedias of their own, taken in turn: the policy learns to search,
  read and copy, and has no page of the world that it is trained and tested in to learn by heart.
  Common knowledge is the same everywhere.
  """
  w, d = config.warm_start, config.data
  script_config = demonstration_config(config)

  @functools.cache
  def practice(number: int):
    book = encyclopedia.make(encyclopedia_settings(d), config.seed + PRACTICE_SEED + number)
    return (
      book,
      BM25(book.passages),
      demonstrations.Demonstrator(book, world_.tokenizer, seed=config.seed, config=script_config),
    )

  def batch_at(step: int):
    book, search, script = practice(step % w.encyclopedias)
    questions = generated.training_questions(
      book, seed=config.seed, step=step, count=w.demonstrations_per_step, hop_shares=d.hop_shares
    )
    script.begin(step, questions)
    groups = loop.collect(
      questions,
      sampler=script,
      retriever=search,
      tokenizer=world_.tokenizer,
      protocol=world_.protocol,
      limits=world_.limits,
      samples_per_question=1,
      step=step,
    )
    zeros = np.zeros((len(groups), 1), np.int32)
    batch = batching.collate(groups, packing=shape, rewards=zeros, strata=zeros, num_strata=1)
    return batching.weigh_context(batch, w.context_weight)

  return batch_at


def records(world_: World, groups, reward, strata_, advantage_qk) -> list[dict]:
  """The step's rollouts as they go into trajectories/; a lost one has no reward, stratum or
  advantage."""
  rows = []
  for q, group in enumerate(groups):
    for k, trajectory in enumerate(group):
      lost = trajectory.fault is not None
      rows.append(
        writer.trajectory_record(
          trajectory,
          world_.tokenizer.decode,
          reward=None if lost else reward[q][k],
          stratum=None if lost else strata_[q][k],
          advantage=None if lost else float(advantage_qk[q, k]),
        )
      )
  return rows
