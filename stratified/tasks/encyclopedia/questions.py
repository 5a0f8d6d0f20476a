"""Asks questions of 0 to 3 hops over a generated encyclopedia, some held out for good.

A question of h >= 1 hops follows a chain of h facts from a head entity; its text nests the
relations in reverse ("Who is the leader of the country of the birthplace of X?"), so the path can
be read off it. A question of 0 hops asks for common knowledge. No entity occurs twice in a chain,
so one cut short or walked too far misses the answer.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from stratified.config import setting, Settings
from stratified.tasks import draws
from stratified.tasks.draws import generator, HELD_OUT, spread, TRAINING
from stratified.tasks.encyclopedia import common_knowledge, language
from stratified.tasks.encyclopedia.pages import Encyclopedia
from stratified.types import Question

HOP_SHARES = (0.2, 0.3, 0.3, 0.2)
MAX_HOPS = 3


@dataclasses.dataclass(frozen=True)
class QuestionSettings(Settings):
  """What the encyclopedia is asked."""

  SECTION = "data"
  hop_shares: tuple[float, ...] = setting(HOP_SHARES, "shares of questions of 0, 1, 2, 3 hops")
  training_hop_shares: tuple[float, ...] = setting(
    (),
    "the same among the questions of training alone; empty is hop_shares",
    affects=["training", "warm_start"],
  )

  def __post_init__(self):
    super().__post_init__()
    check_shares(self.hop_shares)
    check_shares(self.in_training, "training_hop_shares")

  @property
  def in_training(self) -> tuple[float, ...]:
    """The shares among the questions that are reinforced."""
    return self.training_hop_shares or self.hop_shares


@dataclasses.dataclass(frozen=True)
class Chain:
  """The facts of a question: entities[i + 1] is relations[i] of entities[i]; the answer is last.

  A question of 0 hops has one entry in each, the subject and the attribute of common knowledge, and
  its answer in `value`.
  """

  entities: tuple[str, ...]
  relations: tuple[str, ...]
  value: str | None = None

  @property
  def hops(self) -> int:
    return len(self.entities) - 1

  @property
  def answer(self) -> str:
    return self.entities[-1] if self.value is None else self.value


def training_questions(
  encyclopedia: Encyclopedia,
  *,
  seed: int,
  step: int,
  count: int,
  hop_shares: Sequence[float] = HOP_SHARES,
) -> list[Question]:
  """Draws the questions of one training step, as a pure function of its arguments.

  Hops are spread over the step by systematic sampling: each share holds to within one question, and
  exactly on average. Raises ValueError for a count below 1, a negative step, or shares that are no
  distribution over 0 to 3 hops.
  """
  _check(count, hop_shares)
  if step < 0:
    raise ValueError(f"training step {step} is negative: steps count from 0")
  rng = generator(seed, step, TRAINING)
  common = common_knowledge.combinations(encyclopedia.config.common_facts, held_out=False)
  questions = []
  for hops in spread(hop_shares, count, rng):
    if hops == 0:
      questions.append(_common_question(*common[rng.integers(len(common))]))
    else:
      chain = next(c for c in _chains(encyclopedia, hops, rng) if not is_held_out(encyclopedia, c))
      questions.append(_question(encyclopedia, chain, rng))
  return questions


def held_out_questions(
  encyclopedia: Encyclopedia, *, seed: int, count: int, hop_shares: Sequence[float] = HOP_SHARES
) -> list[Question]:
  """Draws distinct questions that training never asks; of another encyclopedia, any about it.

  Raises ValueError as `training_questions` does, and where fewer held-out questions exist than
  asked for.
  """
  _check(count, hop_shares)
  rng = generator(seed, 0, HELD_OUT)
  common = common_knowledge.combinations(encyclopedia.config.common_facts, held_out=True)
  order = iter(rng.permutation(len(common)))
  questions: dict[str, Question] = {}
  for hops in spread(hop_shares, count, rng):
    if hops == 0:
      index = next(order, None)
      if index is None:
        raise ValueError(
          f"eval.questions={count} with data.hop_shares={tuple(hop_shares)} needs more than the "
          f"{len(common)} held-out questions of common knowledge: ask for fewer, or raise "
          "data.common_facts"
        )
      question = _common_question(*common[index])
    else:
      question = _new_held_out(encyclopedia, hops, rng, questions)
    questions[question.id] = question
  return list(questions.values())


def chain_of(encyclopedia: Encyclopedia, question: Question) -> Chain:
  """Recovers the chain behind a question of this encyclopedia from its id."""
  origin, head, path = (question.id.split("/") + ["", ""])[:3]
  if origin == "common":
    fact = next(f for f in common_knowledge.FACTS if f.subject == head and f.attribute == path)
    return Chain((fact.subject,), (fact.attribute,), fact.value)
  if origin != f"encyclopedia-{encyclopedia.seed}":
    raise ValueError(
      f"question {question.id!r} belongs to another encyclopedia than that of seed "
      f"{encyclopedia.seed}: pass the encyclopedia that it was made from"
    )
  return _walk(encyclopedia, head.replace("_", " "), path.split("."))


def is_held_out(encyclopedia: Encyclopedia, chain: Chain) -> bool:
  """Whether training never asks this chain, by a stable hash of seed, head and path."""
  return draws.is_held_out(_chain_id(encyclopedia, chain), encyclopedia.config.held_out)


def _check(count: int, hop_shares: Sequence[float]):
  if count < 1:
    raise ValueError(f"question count {count} is too small: ask for at least 1")
  check_shares(hop_shares)


def check_shares(hop_shares: Sequence[float], field: str = "hop_shares") -> None:
  """Raises ValueError where the shares are no distribution over 0 to 3 hops."""
  if len(hop_shares) != MAX_HOPS + 1 or min(hop_shares) < 0 or not abs(sum(hop_shares) - 1) < 1e-6:
    raise ValueError(
      f"data.{field}={tuple(hop_shares)} must be four shares (0, 1, 2, 3 hops) of at least 0 "
      "that sum to 1"
    )


def _chains(encyclopedia: Encyclopedia, hops: int, rng: np.random.Generator) -> Iterator[Chain]:
  """Yields random chains without a repeated entity, for ever; all kinds are heads equally often."""
  kinds = list(language.KINDS)
  while True:
    heads = encyclopedia.by_kind[kinds[rng.integers(len(kinds))]]
    kind, path = heads[0].kind, []
    head = heads[rng.integers(len(heads))]
    for _ in range(hops):
      relations = language.RELATIONS_OF[kind]
      relation = relations[rng.integers(len(relations))]
      path.append(relation.name)
      kind = relation.target
    chain = _walk(encyclopedia, head.name, path)
    if len(set(chain.entities)) == hops + 1:
      yield chain


def _walk(encyclopedia: Encyclopedia, head: str, path: Sequence[str]) -> Chain:
  entities = [head]
  for relation in path:
    entities.append(encyclopedia.by_name[entities[-1]].facts[relation])
  return Chain(tuple(entities), tuple(path))


def _new_held_out(
  encyclopedia: Encyclopedia, hops: int, rng: np.random.Generator, taken: dict[str, Question]
) -> Question:
  """Draws a held-out question whose id is not taken; 10,000 draws run out in a tiny world only."""
  for _, chain in zip(range(10_000), _chains(encyclopedia, hops, rng), strict=False):
    if is_held_out(encyclopedia, chain) and _chain_id(encyclopedia, chain) not in taken:
      return _question(encyclopedia, chain, rng)
  raise ValueError(
    f"eval.questions asks for more held-out questions of {hops} hops than there are about "
    f"data.entities={len(encyclopedia.entities)}: ask for fewer, or raise the number of entities"
  )


def _chain_id(encyclopedia: Encyclopedia, chain: Chain) -> str:
  head = chain.entities[0].replace(" ", "_")
  return f"encyclopedia-{encyclopedia.seed}/{head}/{'.'.join(chain.relations)}"


def _question(encyclopedia: Encyclopedia, chain: Chain, rng: np.random.Generator) -> Question:
  text = _text(chain, encyclopedia.config.paraphrases, rng)
  return Question(_chain_id(encyclopedia, chain), text, (chain.answer,), "encyclopedia", chain.hops)


def _text(chain: Chain, paraphrases: int, rng: np.random.Generator) -> str:
  relations = [language.RELATIONS[name] for name in chain.relations]
  frame = int(rng.integers(paraphrases))
  if frame == 2 and chain.hops == 1:
    return relations[0].direct.format(s=chain.entities[0])
  phrase = chain.entities[0]
  for relation in relations:
    phrase = f"the {relation.nouns[rng.integers(min(paraphrases, 2))]} of {phrase}"
  word = "Who" if relations[-1].target == "person" else "What"
  return language.QUESTION_FRAMES[frame].format(q=word, np=phrase)


def _common_question(fact: common_knowledge.Fact, paraphrase: int) -> Question:
  text = common_knowledge.PARAPHRASES[paraphrase].format(a=fact.attribute, s=fact.subject)
  name = f"common/{fact.subject}/{fact.attribute}/{paraphrase}"
  return Question(name, text, (fact.value,), "encyclopedia", 0)
