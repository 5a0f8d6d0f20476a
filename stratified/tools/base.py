"""Defines a tool: a name, a schema, and one function that runs many calls at once.

    class Clock:
      name = "clock"                     # in a tag, <clock> Oslo</clock>, and in a native tool call
      description = "The time of day in a city."
      schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

      def run(self, calls):              # ["Oslo", "Rome"]: each distinct argument once a round
        return [Result(("12:00",)) for city in calls]

An argument is a text. Where the schema has one property, the text is that property's value (of a
list of strings, each string is a call of its own); where it has several, the text is a JSON object.
A policy that asks for nonsense gets a Result with `failed` set, and reads why. Where something
outside the policy broke, a ToolError stands in place of the Result, and the rollout that asked is
masked.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
import time
from typing import Any, Protocol

from stratified.retrieval.corpus import Passage
from stratified.types import Outcome

_NAME = re.compile(r"[a-z][a-z_]*")
RESERVED = ("think", "answer", "information")


class ToolError(Exception):
  """A tool could not run for a reason that is not the policy's; the rollout that asked is lost."""


@dataclasses.dataclass(frozen=True)
class Result:
  """What one call brought.

  items: what is fed back. A Passage is shown with its number and title, a text as it stands.
  failed: whether the call itself was wrong; the items then say why.
  """

  items: tuple[Passage | str, ...] = ()
  failed: bool = False

  @property
  def outcome(self) -> Outcome:
    return "error" if self.failed else "hit" if self.items else "empty"

  @property
  def names(self) -> tuple[str, ...]:
    """The items as a trajectory keeps them: the ids of passages, texts whole."""
    return tuple(item.id if isinstance(item, Passage) else item for item in self.items)


class Tool(Protocol):
  """See the module's docstring. Optional: `aliases`, other names of the schema's one property."""

  name: str
  description: str
  schema: Mapping[str, Any]

  def run(self, calls: Sequence[str]) -> list[Result | ToolError]: ...


class Timed:
  """A tool that counts the seconds and the calls that it has run."""

  def __init__(self, tool: Tool):
    self._tool, self.seconds, self.calls = tool, 0.0, 0

  def __getattr__(self, name: str):
    return getattr(self._tool, name)

  def run(self, calls: Sequence[str]) -> list[Result | ToolError]:
    start = time.perf_counter()
    try:
      return self._tool.run(calls)
    finally:
      self.seconds += time.perf_counter() - start
      self.calls += len(calls)


def check(tools: Sequence[Tool]) -> None:
  """Raises ValueError, one sentence, for an object that is no tool or two tools of one name."""
  for tool in tools:
    lacks = [x for x in ("name", "description", "schema", "run") if not hasattr(tool, x)]
    if lacks:
      raise ValueError(
        f"{tool!r} is no tool: it has no {' and no '.join(lacks)}; a tool has name, description, "
        "schema and run(calls)"
      )
    name = tool.name
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED:
      raise ValueError(
        f"the tool name {name!r} must be lower-case letters and underscores, and none of "
        f"{', '.join(RESERVED)}, since it stands in a tag"
      )
    if not isinstance(tool.schema, Mapping) or not tool.schema.get("properties"):
      raise ValueError(
        f"the schema of the tool {name!r} is {tool.schema!r}; it must be a JSON schema of an "
        "object with at least one property"
      )
  names = [tool.name for tool in tools]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise ValueError(f"two tools are called {twice[0]!r}; each needs a name of its own")


def results_of(tool: Tool, calls: Sequence[str]) -> list[Result | ToolError]:
  """Runs the calls; a tool that fails as a whole gives each of them its ToolError.

  Raises TypeError where the tool does not return one Result or ToolError a call.
  """
  try:
    results = tool.run(calls)
  except ToolError as error:
    return [error] * len(calls)
  whole = isinstance(results, Sequence) and len(results) == len(calls)
  if not whole or not all(isinstance(result, Result | ToolError) for result in results):
    raise TypeError(
      f"the tool {tool.name!r} returned {str(results)[:80]} for {len(calls)} calls; run(calls) "
      "must return a list with one Result or ToolError for each of them"
    )
  return list(results)
