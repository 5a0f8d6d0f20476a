"""A tool of your own: how many letters a word has.

A tool is an object with a name (its tag, and its name in a native call), a description and a JSON
schema (what a chat template shows), and `run`, which gets every distinct argument of a round in one
call. See examples/my_task.py for a task that uses it; a task of the project gets it by

    --config.tools="search,my_tool:Letters"
"""

from collections.abc import Sequence

from stratified.tools.base import Result


class Letters:
  """Counts the letters of a text."""

  name = "letters"
  description = "Counts the letters of a word."
  schema = {
    "type": "object",
    "properties": {"word": {"type": "string", "description": "The word."}},
    "required": ["word"],
  }

  def run(self, calls: Sequence[str]) -> list[Result]:
    return [self.count(word) for word in calls]

  def count(self, word: str) -> Result:
    if not word.isalpha():  # the policy's mistake: it reads why, and goes on
      return Result(("error: not a word",), failed=True)
    return Result((str(len(word)),))
