"""The regular language of the generated encyclopedia: kinds, relations, sentences, questions.

Every relation leads from an entity to an entity, so that facts can be chained without end. Each has
a name, two nouns by which a question may call it, and three sentences in which a page may state it.
"""

import dataclasses

# Share of the entities of each kind; they sum to 1.
KINDS = {"person": 0.5, "city": 0.2, "company": 0.15, "river": 0.1, "country": 0.05}


@dataclasses.dataclass(frozen=True)
class Relation:
  """A fact type: `name` leads from an entity of kind `source` to one of kind `target`.

  nouns: what a question calls it ("the NOUN of X"). No noun stands for two relations; the first is
    the name.
  sentences: what a page says, with {s} for the subject, named first, and {v} for the value.
  direct: a question about one fact in its own words, with {s} for the subject.
  """

  name: str
  source: str
  target: str
  nouns: tuple[str, str]
  sentences: tuple[str, str, str]
  direct: str


RELATIONS = {
  relation.name: relation
  for relation in (
    Relation(
      "birthplace",
      "person",
      "city",
      ("birthplace", "hometown"),
      ("{s} was born in {v}.", "{s} grew up in {v}.", "{s} comes from {v}."),
      "Where was {s} born?",
    ),
    Relation(
      "employer",
      "person",
      "company",
      ("employer", "workplace"),
      ("{s} works for {v}.", "{s} has a job at {v}.", "{s} is paid by {v}."),
      "Who does {s} work for?",
    ),
    Relation(
      "spouse",
      "person",
      "person",
      ("spouse", "partner"),
      ("{s} is married to {v}.", "{s} shares a home with {v}.", "{s} lives with {v}."),
      "Who is {s} married to?",
    ),
    Relation(
      "teacher",
      "person",
      "person",
      ("teacher", "mentor"),
      ("{s} was taught by {v}.", "{s} learned everything from {v}.", "{s} was a pupil of {v}."),
      "Who taught {s}?",
    ),
    Relation(
      "country",
      "city",
      "country",
      ("country", "nation"),
      ("{s} is a city in {v}.", "{s} is part of {v}.", "{s} belongs to {v}."),
      "Which country is {s} part of?",
    ),
    Relation(
      "mayor",
      "city",
      "person",
      ("mayor", "governor"),
      ("{s} is run by {v}.", "{s} is governed by {v}.", "{s} elected {v} last year."),
      "Who governs {s}?",
    ),
    Relation(
      "river",
      "city",
      "river",
      ("river", "stream"),
      ("{s} stands on the {v}.", "{s} gets its water from {v}.", "{s} was built beside {v}."),
      "Which river does {s} stand on?",
    ),
    Relation(
      "founder",
      "company",
      "person",
      ("founder", "creator"),
      ("{s} was founded by {v}.", "{s} was started by {v}.", "{s} was the idea of {v}."),
      "Who founded {s}?",
    ),
    Relation(
      "headquarters",
      "company",
      "city",
      ("headquarters", "base"),
      ("{s} is based in {v}.", "{s} has its offices in {v}.", "{s} pays its rent in {v}."),
      "Where is {s} based?",
    ),
    Relation(
      "rival",
      "company",
      "company",
      ("rival", "competitor"),
      ("{s} competes with {v}.", "{s} fights for sales with {v}.", "{s} sells less than {v}."),
      "Who does {s} compete with?",
    ),
    Relation(
      "source",
      "river",
      "country",
      ("source", "origin"),
      ("{s} rises in {v}.", "{s} begins in {v}.", "{s} springs up in {v}."),
      "Where does {s} rise?",
    ),
    Relation(
      "mouth",
      "river",
      "city",
      ("mouth", "end"),
      ("{s} meets the sea at {v}.", "{s} ends at {v}.", "{s} flows out at {v}."),
      "Where does {s} meet the sea?",
    ),
    Relation(
      "explorer",
      "river",
      "person",
      ("explorer", "discoverer"),
      ("{s} was explored by {v}.", "{s} was first mapped by {v}.", "{s} was first seen by {v}."),
      "Who explored {s}?",
    ),
    Relation(
      "capital",
      "country",
      "city",
      ("capital", "metropolis"),
      ("{s} has its capital at {v}.", "{s} is ruled from {v}.", "{s} keeps its court at {v}."),
      "Where is {s} ruled from?",
    ),
    Relation(
      "leader",
      "country",
      "person",
      ("leader", "president"),
      ("{s} is led by {v}.", "{s} takes orders from {v}.", "{s} chose {v} to lead it."),
      "Who leads {s}?",
    ),
    Relation(
      "ally",
      "country",
      "country",
      ("ally", "friend"),
      ("{s} is allied with {v}.", "{s} signed a treaty with {v}.", "{s} is at peace with {v}."),
      "Who is {s} allied with?",
    ),
  )
}

RELATIONS_OF = {kind: tuple(r for r in RELATIONS.values() if r.source == kind) for kind in KINDS}

# Pages that bear an entity's name without being its page: title and sentences, with {n} for that
# name, {v} and {w} for a city and a person. They name {n} no more often than its own page does, and
# are longer, so that BM25 mostly ranks them second.
DISTRACTORS = (
  (
    "{n} Prize",
    "The prize is given each year in {v}. It was last won by {w}. It bears the old name of {n}. "
    "It is worth very little.",
  ),
  (
    "{n} Museum",
    "The museum shows the old letters of {w}. It was opened in {v}. It bears the old name of {n}. "
    "It is worth a visit.",
  ),
  (
    "{n} Street",
    "The street is a short road in {v}. It has the old house of {w}. It bears the name of {n}. "
    "It is a quiet place.",
  ),
)

PRONOUNS = {kind: ("He", "She") if kind == "person" else ("It",) for kind in KINDS}

# Frames around "the NOUN of ... of NAME"; {q} is Who for a person, else What.
QUESTION_FRAMES = ("{q} is {np}?", "Name {np}.", "Tell me {np}.")

# Two syllables make a word of a name. All have three letters, so that a word splits in one way
# only.
FIRST_SYLLABLES = tuple(
  "Bar Ben Bol Bur Cal Cor Dal Den Dor Dun Fal Fen Fir Gal Gar Gil Gor Hal Har Hel Hol Jan Jor Kal "
  "Kar "
  "Kel Kir Kor Lan Lar Len Lor Lun Mal Mar Mel Mir Mor Nal Nar Nel Nor Pal Par Pel Por Ral Ran Rol "
  "Run "
  "Sal Sar Sel Sil Sor Tal Tar Tel Tor Tul Val Var Vel Vor Wal War Wel Wil Yar Yor Zan Zel".split()
)
SECOND_SYLLABLES = tuple(
  "bak bel bin bor dak dan del dim dor dus fan fel fin gan gel gin gor gus han hem hin kan kel kim "
  "kor "
  "kus lak lan len lim lon lus mak man mel min mor mus nak nel nim nor nus pak pel pin por rak ran "
  "rel "
  "rim ron rus sak san sel sin sor tak tan tel tim tor tus vak van vel vin vor vus zan zen".split()
)
