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

A tool with `takes_askers` true is told who asks, `run(calls, askers)`: the step and the question of
each call. Calls are then distinct where their askers are.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import inspect
import json
import re
import time
from typing import Any, Protocol

from stratified.retrieval.corpus import Passage
from stratified.types import Outcome, Question

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


@dataclasses.dataclass(frozen=True)
class Asker:
  """Whose rollouts make a call: those of a question at a step."""

  step: int
  question: Question


class Tool(Protocol):
  """See the module's docstring.

  Optional: `aliases`, other names of the schema's one property; `takes_askers`; `row_at(step)`,
  numbers for the step's row of metrics.jsonl.
  """

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

  def run(self, calls: Sequence[str], *askers: Sequence[Asker]) -> list[Result | ToolError]:
    start = time.perf_counter()
    try:
      return self._tool.run(calls, *askers)
    finally:
      self.seconds += time.perf_counter() - start
      self.calls += len(calls)


def check(tools: Sequence[Tool], field: str = "tools") -> None:
  """Raises ValueError, one sentence, for an object that is no tool or two tools of one name.

  field: where the tools are named, for the sentence.
  """
  for tool in tools:
    if wrong := _wrong_tool(tool):
      raise ValueError(f"{field}: {wrong}")
  names = [tool.name for tool in tools]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise ValueError(f"{field}: two tools are called {twice[0]!r}; each needs a name of its own")


def _wrong_tool(tool: Any) -> str | None:
  lacks = [x for x in ("name", "description", "schema", "run") if not hasattr(tool, x)]
  if lacks:
    return (
      f"{tool!r} is no tool: it has no {' and no '.join(lacks)}; a tool has name, description, "
      "schema and run(calls)"
    )
  name, schema = tool.name, tool.schema
  if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED:
    return (
      f"the tool name {name!r} must be lower-case letters and underscores, and none of "
      f"{', '.join(RESERVED)}, since it stands in a tag"
    )
  if not isinstance(tool.description, str):
    return f"the description of the tool {name!r} is {tool.description!r}; it must be text"
  properties = schema.get("properties") if isinstance(schema, Mapping) else None
  if not isinstance(properties, Mapping) or not properties:
    return (
      f"the schema of the tool {name!r} is {schema!r}; it must be a JSON schema of an object with "
      "at least one property"
    )
  return None


def takes_askers(tool: Tool) -> bool:
  """Whether the tool is told who asks."""
  return bool(getattr(tool, "takes_askers", False))


def results_of(
  tool: Tool, calls: Sequence[str], askers: Sequence[Asker] = ()
) -> list[Result | ToolError]:
  """Runs the calls; a tool that fails as a whole gives each of them its ToolError.

  askers: of each call, for a tool that takes them. Raises TypeError where the tool does not return
  one Result or ToolError a call.
  """
  try:
    results = tool.run(calls, askers) if takes_askers(tool) else tool.run(calls)
  except ToolError as error:
    return [error] * len(calls)
  if wrong := _wrong_results(tool, calls, results):
    raise TypeError(wrong)
  return list(results)


def _wrong_results(tool: Tool, calls: Sequence[str], results: Any) -> str | None:
  whole = isinstance(results, list | tuple) and len(results) == len(calls)
  if not whole or not all(isinstance(result, Result | ToolError) for result in results):
    return (
      f"the tool {tool.name!r} returned {str(results)[:80]!r} for {len(calls)} call"
      f"{'s' * (len(calls) != 1)}; run(calls) must return a list with one Result or ToolError for "
      "each of them"
    )
  items = next((x.items for x in results if isinstance(x, Result) and _wrong_items(x.items)), None)
  if items is not None:
    return (
      f"the tool {tool.name!r} returned a Result of {str(items)[:80]!r}; its items must be a tuple "
      "of texts and Passages, such as Result(('12:00',))"
    )
  return None


def _wrong_items(items: Any) -> bool:
  return not isinstance(items, tuple) or not all(isinstance(x, Passage | str) for x in items)


###  A tool of one's own, before any work  ###


def try_out(tool: Tool, field: str) -> None:
  """Runs one call of a made-up argument; ValueError, one sentence, where the result is wrong.

  A policy that has learnt nothing yet asks for nonsense from the first step on, so the call does
  nothing that a run would not do. A tool that says by a ToolError that it can't run is no mistake.
  """
  call = made_up_call(tool.schema)
  try:
    inspect.signature(tool.run).bind([call])
  except TypeError as error:
    raise ValueError(
      f"{field}: run of the tool {tool.name!r} has the signature {inspect.signature(tool.run)}; it "
      f"is called as run(calls), with a list of texts ({error})"
    ) from error
  except ValueError:  # some built-ins have no signature; the call tells
    pass
  try:
    results = tool.run([call])
  except ToolError:
    return
  except (Exception, SystemExit) as error:
    text = " ".join(str(error).split())[:200]
    raise ValueError(
      f"{field}: the tool {tool.name!r} failed in run([{call!r}]) with {type(error).__name__}: "
      f"{text}; what the policy asks wrongly is a Result with failed=True, what broke outside it a "
      "ToolError"
    ) from error
  if wrong := _wrong_results(tool, [call], results):
    raise ValueError(f"{field}: {wrong}")


def made_up_call(schema: Mapping[str, Any]) -> str:
  """Makes an argument that fits the schema."""
  values = {name: _made_up(rule) for name, rule in schema["properties"].items()}
  if len(values) > 1:
    return json.dumps(values)
  (value,) = values.values()
  value = value[0] if isinstance(value, list) else value
  return value if isinstance(value, str) else json.dumps(value)


def _made_up(rule: Any) -> Any:
  """A value of one property."""
  rule = rule if isinstance(rule, Mapping) else {}
  if rule.get("enum"):
    return rule["enum"][0]
  if rule.get("type") == "array":
    return [_made_up(rule.get("items"))]
  made = {"integer": 1, "number": 1.5, "boolean": True, "object": {}, "null": None}
  return made.get(rule.get("type") if isinstance(rule.get("type"), str) else "", "made-up")
