"""Makes the tokenizer of tasks with numbers: up to three digits are one token.

A number of more digits is cut from the left: 43125 is "431", "25". So a number is copied like a
word, and adding two of them is beyond what a small policy can learn by heart.
"""

from collections.abc import Iterable, Sequence
import re

from stratified.data import tokenizer
from stratified.tools.base import RESERVED

FIXED = ("Question:", "Doc 1(Title:", "No passages found.", "No call.", "No search.", "error:")
NUMBERS = tuple(f"{n:0{digits}d}" for digits in (1, 2, 3) for n in range(10**digits))


def build(
  texts: Iterable[str],
  tools: Sequence[str],
  syllables: Sequence[str] = (),
  marks: Sequence[str] = (),
) -> tokenizer.Tokenizer:
  """Makes a tokenizer of words, numbers, tags and further pieces.

  Words are those of `texts`, each with the space before it; tags are those of answers, of results
  and of these tools. marks: strings of another protocol, each a token too.
  """
  words = {
    word for text in texts for word in re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", text))
  }
  tags = [f"<{slash}{tag}>" for tag in (*tools, *RESERVED) for slash in ("", "/")]
  spaced = [f" {word}" for word in sorted(words)]
  fixed = (*FIXED, *(mark for mark in marks if mark not in tags))
  pieces = [*tags, *FIXED, *NUMBERS, *spaced, *syllables, *fixed]
  return tokenizer.from_pieces(list(dict.fromkeys(pieces)), fixed, patterns=[r"\d{1,3}"])
