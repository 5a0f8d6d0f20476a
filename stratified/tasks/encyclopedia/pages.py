"""A generated encyclopedia: entities, typed facts between them, and one page of prose for each.

Nothing in it is true and nobody in it exists. It is a small world to learn searching in: the names
of another seed are made of the same syllables, so what was learnt by heart from one encyclopedia is
of no use in the next.
"""

import dataclasses
import functools
import re

import numpy as np

from stratified.config import setting, Settings
from stratified.retrieval.corpus import Passage
from stratified.tasks.draws import generator
from stratified.tasks.encyclopedia import common_knowledge, language

MIN_ENTITIES, MAX_ENTITIES = 40, 3400


@dataclasses.dataclass(frozen=True)
class EncyclopediaConfig(Settings):
  """How large and how hard the encyclopedia is.

  The entities are rounded so that persons can be paired; 3 paraphrases add direct one-fact
  questions. held_out: share of chains that training never asks, from 0.01 to 0.9.
  facts: facts of an entity, the same ones for all of a kind, drawn by the seed; 0 is all that its
    kind has (3, of a person 4).
  """

  SECTION = "data"
  entities: int = setting(2400, "entities, each with one page", low=MIN_ENTITIES, high=MAX_ENTITIES)
  near_duplicates: float = setting(
    0.2, "share of the entities whose name takes a word of another's", low=0, high=0.5
  )
  distractors: float = setting(
    0.1, "pages that bear an entity's name without being its page, per entity", low=0, high=1
  )
  paraphrases: int = setting(2, "ways of saying each fact and of asking for it", low=1, high=3)
  common_facts: int = setting(
    48, "facts of common knowledge, which no page holds", low=1, high=len(common_knowledge.FACTS)
  )
  held_out: float = 0.1
  facts: int = 0

  def __post_init__(self):
    super().__post_init__()
    if not 0.01 <= self.held_out <= 0.9:
      raise ValueError(f"data.held_out={self.held_out} must be at least 0.01 and at most 0.9")


@dataclasses.dataclass(frozen=True)
class Entity:
  """One thing with a page. `facts` maps each relation of its kind to the name of another entity."""

  name: str
  kind: str
  facts: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Encyclopedia:
  """The world of one seed; `passages` are the pages of the entities in order, then distractors."""

  config: EncyclopediaConfig
  seed: int
  entities: tuple[Entity, ...]
  passages: tuple[Passage, ...]

  @functools.cached_property
  def by_name(self) -> dict[str, Entity]:
    return {entity.name: entity for entity in self.entities}

  @functools.cached_property
  def by_kind(self) -> dict[str, tuple[Entity, ...]]:
    return {kind: tuple(e for e in self.entities if e.kind == kind) for kind in language.KINDS}

  @functools.cached_property
  def relations_of(self) -> dict[str, tuple[language.Relation, ...]]:
    """The relations that pages of each kind state, in the language's order."""
    stated = {kind: of_kind[0].facts for kind, of_kind in self.by_kind.items()}
    return {
      kind: tuple(relation for relation in language.RELATIONS_OF[kind] if relation.name in facts)
      for kind, facts in stated.items()
    }


def make(config: EncyclopediaConfig, seed: int) -> Encyclopedia:
  """Builds the encyclopedia of a seed, at least 0; the same arguments give the same pages."""
  rng = generator(seed, 0)
  kinds = [kind for kind, count in _counts(config.entities).items() for _ in range(count)]
  names = draw_names(kinds, config.near_duplicates, rng)
  links, stated = _links(kinds, rng), _stated(config.facts, seed)
  entities = tuple(
    Entity(name, kind, {to: names[target] for to, target in link.items() if to in stated[kind]})
    for name, kind, link in zip(names, kinds, links, strict=True)
  )
  pages = [
    Passage(f"{seed}-{i}", e.name, _page(e, config.paraphrases, rng))
    for i, e in enumerate(entities)
  ]
  count = round(config.distractors * len(entities))
  places, persons = ([e.name for e in entities if e.kind == kind] for kind in ("city", "person"))
  for i, about in enumerate(rng.permutation(len(entities))[:count]):
    title, text = _distractor(entities[about].name, places, persons, rng)
    pages.append(Passage(f"{seed}-d{i}", title, text))
  return Encyclopedia(config, seed, entities, tuple(pages))


def _stated(facts: int, seed: int) -> dict[str, set[str]]:
  """Draws which relations the pages of each kind state.

  Where not all are, the two that lead back (a spouse's spouse, the capital of a capital's country)
  are left out: a chain along them alone would end after a step.
  """
  rng, stated = generator(seed, 1), {}
  for kind, relations in language.RELATIONS_OF.items():
    names = [relation.name for relation in relations]
    if facts:
      names = [name for name in names if name not in ("spouse", "capital")]
      names = [names[i] for i in rng.permutation(len(names))[:facts]]
    stated[kind] = set(names)
  return stated


def _counts(entities: int) -> dict[str, int]:
  counts = {kind: max(2, round(share * entities)) for kind, share in language.KINDS.items()}
  counts["person"] += counts["person"] % 2  # persons are married in pairs
  return counts


def draw_names(kinds: list[str], near_duplicates: float, rng: np.random.Generator) -> list[str]:
  """Draws names: two words for a person, one otherwise; a near-duplicate takes one of an earlier.

  Every other word is used for one name only, so `near_duplicates` alone says how confusable names
  are.
  """
  words = [
    first + second for first in language.FIRST_SYLLABLES for second in language.SECOND_SYLLABLES
  ]
  fresh = iter([words[i] for i in rng.permutation(len(words))])
  order = rng.permutation(len(kinds))
  copies = set(order[len(kinds) - round(near_duplicates * len(kinds)) :].tolist())
  names = [""] * len(kinds)
  originals: list[str] = []
  for i in order:
    if i in copies:
      shared = originals[rng.integers(len(originals))].split()
      parts = [shared[rng.integers(len(shared))], next(fresh)]
      names[i] = " ".join(parts if rng.integers(2) else parts[::-1])
    else:
      names[i] = " ".join(next(fresh) for _ in range(2 if kinds[i] == "person" else 1))
      originals.append(names[i])
  return names


def _links(kinds: list[str], rng: np.random.Generator) -> list[dict[str, int]]:
  """Draws the graph: each entity's relations, and the index of the entity that each leads to.

  No entity is linked to itself, nor twice to the same one. Two relations are tied: a marriage has
  two sides, and a capital lies in its own country.
  """
  members = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in language.KINDS}
  links = [{} for _ in kinds]
  for one, other in rng.permutation(members["person"]).reshape(-1, 2).tolist():
    links[one]["spouse"], links[other]["spouse"] = other, one
  capitals = rng.permutation(members["city"])[: len(members["country"])].tolist()
  for country, capital in zip(members["country"], capitals, strict=True):
    links[country]["capital"], links[capital]["country"] = capital, country
  for i, kind in enumerate(kinds):
    for relation in language.RELATIONS_OF[kind]:
      pool = members[relation.target]
      while relation.name not in links[i]:
        target = pool[rng.integers(len(pool))]
        if target != i and target not in links[i].values():
          links[i][relation.name] = target
  return links


def _page(entity: Entity, paraphrases: int, rng: np.random.Generator) -> str:
  """Writes one fact a sentence in random order; the first names the subject, later ones do not."""
  pronouns = language.PRONOUNS[entity.kind]
  pronoun = pronouns[rng.integers(len(pronouns))]
  relations = [r for r in language.RELATIONS_OF[entity.kind] if r.name in entity.facts]
  sentences = []
  for position, i in enumerate(rng.permutation(len(relations))):
    template = relations[i].sentences[rng.integers(paraphrases)]
    subject = pronoun if position else entity.name
    sentences.append(template.format(s=subject, v=entity.facts[relations[i].name]))
  return " ".join(sentences)


def _distractor(
  name: str, places: list[str], persons: list[str], rng: np.random.Generator
) -> tuple[str, str]:
  title, text = language.DISTRACTORS[rng.integers(len(language.DISTRACTORS))]
  place, person = places[rng.integers(len(places))], persons[rng.integers(len(persons))]
  return title.format(n=name), text.format(n=name, v=place, w=person)


_NAME = r"[A-Z][a-z]+(?: [A-Z][a-z]+)*"
_SENTENCES = [
  (
    relation.name,
    re.compile(re.escape(template).replace(r"\{s\}", _NAME).replace(r"\{v\}", f"({_NAME})")),
  )
  for relation in language.RELATIONS.values()
  for template in relation.sentences
]


def facts_in(text: str) -> dict[str, str]:
  """Reads the facts that a page's prose states, relation -> name."""
  return {relation: name for relation, (name, _) in stated_in(text).items()}


def stated_in(text: str) -> dict[str, tuple[str, str]]:
  """Reads the facts that a page's prose states, relation -> (name, the sentence that says so)."""
  stated = {}
  for sentence in (found.strip() for found in re.findall(r"[^.]+\.", text)):
    for relation, pattern in _SENTENCES:
      match = pattern.fullmatch(sentence)
      if match:
        stated[relation] = match.group(1), sentence
  return stated
