"""Facts that no page of the encyclopedia holds: what can be answered without a search (0 hops).

They are true, and the same for every encyclopedia. A question is a (fact, paraphrase) pair; two of
the six paraphrases of each fact are held out, so that every fact is seen in training, but not in
the words of the evaluation.
"""

import dataclasses
import hashlib

ATTRIBUTES = ("capital", "language", "currency", "continent")

_COUNTRIES = {
  "France": ("Paris", "French", "euro", "Europe"),
  "Japan": ("Tokyo", "Japanese", "yen", "Asia"),
  "Egypt": ("Cairo", "Arabic", "pound", "Africa"),
  "Norway": ("Oslo", "Norwegian", "krone", "Europe"),
  "China": ("Beijing", "Chinese", "yuan", "Asia"),
  "Brazil": ("Brasilia", "Portuguese", "real", "South America"),
  "Poland": ("Warsaw", "Polish", "zloty", "Europe"),
  "Cuba": ("Havana", "Spanish", "peso", "North America"),
  "Iran": ("Tehran", "Persian", "rial", "Asia"),
  "Hungary": ("Budapest", "Hungarian", "forint", "Europe"),
  "Thailand": ("Bangkok", "Thai", "baht", "Asia"),
  "Italy": ("Rome", "Italian", "euro", "Europe"),
  "Sweden": ("Stockholm", "Swedish", "krona", "Europe"),
  "Vietnam": ("Hanoi", "Vietnamese", "dong", "Asia"),
  "Greece": ("Athens", "Greek", "euro", "Europe"),
  "Spain": ("Madrid", "Spanish", "euro", "Europe"),
}

PARAPHRASES = (
  "What is the {a} of {s}?",
  "Name the {a} of {s}.",
  "What {a} does {s} have?",
  "Tell me the {a} of {s}.",
  "Which {a} belongs to {s}?",
  "Which is the {a} of {s}?",
)
HELD_OUT_PARAPHRASES = 2


@dataclasses.dataclass(frozen=True)
class Fact:
  """`value` is the `attribute` of `subject`."""

  subject: str
  attribute: str
  value: str


FACTS = tuple(
  Fact(subject, attribute, value)
  for subject, values in _COUNTRIES.items()
  for attribute, value in zip(ATTRIBUTES, values, strict=True)
)


def held_out_paraphrases(fact: Fact) -> tuple[int, ...]:
  """Chooses the paraphrases of a fact that training never sees, by the fact alone."""
  name = f"{fact.attribute} of {fact.subject}"
  digest = hashlib.blake2b(name.encode(), digest_size=len(PARAPHRASES)).digest()
  order = sorted(range(len(PARAPHRASES)), key=lambda paraphrase: (digest[paraphrase], paraphrase))
  return tuple(sorted(order[:HELD_OUT_PARAPHRASES]))


def combinations(num_facts: int, *, held_out: bool) -> list[tuple[Fact, int]]:
  """Lists (fact, paraphrase) pairs of one side of the split, of the first `num_facts` facts."""
  return [
    (fact, paraphrase)
    for fact in FACTS[:num_facts]
    for paraphrase in range(len(PARAPHRASES))
    if (paraphrase in held_out_paraphrases(fact)) == held_out
  ]
