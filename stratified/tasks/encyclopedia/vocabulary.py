"""Makes the encyclopedia's tokenizer, whose vocabulary is written down, not trained.

A word of the templates is one token with the space before it, a word of a name is two (one a
syllable), a tag of the search protocol is one.
"""

import functools
import re

from stratified.data import tokenizer
from stratified.tasks.encyclopedia import common_knowledge, language

TAGS = (
  "<think>",
  "</think>",
  "<search>",
  "</search>",
  "<information>",
  "</information>",
  "<answer>",
  "</answer>",
)

# Strings of the prompt and the observations that are one token each, as they stand there.
FIXED = ("Question:", *(f"Doc {i}(Title:" for i in range(1, 6)), "No passages found.", "No search.")


@functools.cache
def build(marks: tuple[str, ...] = ()) -> tokenizer.Tokenizer:
  """Makes the encyclopedia's tokenizer; the same on every machine.

  marks: strings of another protocol, each a token too; they come after the others.
  """
  fixed = [mark for mark in marks if mark not in TAGS]
  return tokenizer.from_pieces([*pieces(), *fixed], (*FIXED, *fixed))


def words() -> list[str]:
  """Every word of the templates and of common knowledge, in alphabetical order; names aside."""
  texts = [
    *common_knowledge.PARAPHRASES,
    *common_knowledge.ATTRIBUTES,
    *language.QUESTION_FRAMES,
    "Who What",
  ]
  for relation in language.RELATIONS.values():
    texts += [*relation.nouns, *relation.sentences, relation.direct]
  texts += [text for page in language.DISTRACTORS for text in page]
  texts += [word for pronouns in language.PRONOUNS.values() for word in pronouns]
  texts += [word for fact in common_knowledge.FACTS for word in (fact.subject, fact.value)]
  return sorted(
    {word for text in texts for word in re.findall(r"[A-Za-z]+", re.sub(r"\{\w\}", " ", text))}
  )


def pieces() -> list[str]:
  """The vocabulary but for the end of text and the bytes; ids follow from the order."""
  spaced = [" " + word for word in (*words(), *language.FIRST_SYLLABLES)]
  return list(dict.fromkeys([*TAGS, *FIXED, *spaced, *language.SECOND_SYLLABLES]))
