"""Reads tool calls in a turn's text, each JSON object by its own boundary, outside of thoughts.

    <think> draft: <tool_call>{"name": ...</think>       said to oneself: never run
    <tool_call>{"name": "search", "arguments": {"query": "what is </tool_call>?"}}</tool_call>

Every function takes time linear in the text: a policy can't slow the rollouts of others down.
"""

from collections.abc import Sequence
import json
from typing import Any

from stratified.tools.base import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder(strict=False)  # a line break inside a query is read as it stands

Calls = tuple[tuple[str, str], ...]  # (tool, argument) each


def spoken(text: str) -> str:
  """The text without its thoughts: what stands before a `</think>`, from its `<think>` on.

  A `</think>` without its opening closes a thought that the prompt opened. A thought that is never
  closed is taken for speech, as some models never close one.
  """
  *thoughts, rest = text.split("</think>")
  said = [
    before for before, opened, _ in (part.partition("<think>") for part in thoughts) if opened
  ]
  return "".join([*said, rest])


def split(text: str) -> tuple[str, list[str | None]]:
  """Splits speech: (what stands before the first call, the JSON text of each call).

  None stands for a call that can't be read, and is the last. A call ends with its object; what may
  follow is `</tool_call>`, another call, or the end of the text. An opening that neither an object
  nor, before the next opening, a closing tag follows is a mention of the tag and no call.
  """
  found, first, at = [], len(text), text.find(OPEN)
  while at >= 0:
    begin = _skip_space(text, at + len(OPEN))
    if text.startswith("{", begin):
      end = _object_end(text, begin)
      found.append(None if end is None else text[begin:end])
    else:
      following = text.find(OPEN, begin)
      end = begin
      if text.find(CLOSE, begin, following if following >= 0 else len(text)) >= 0:
        found.append(None)
    if found:
      first = min(first, at)
      if found[-1] is None:
        break
    at = text.find(OPEN, end)
  return text[:first], found


def _object_end(text: str, begin: int) -> int | None:
  """Where the object that begins there ends; None for a broken one, or one that goes on oddly."""
  try:
    _, end = _DECODER.raw_decode(text, begin)
  except (ValueError, RecursionError):
    return None
  after = _skip_space(text, end)
  over = after == len(text) or text.startswith((OPEN, CLOSE), after)
  return end if over else None


def _skip_space(text: str, at: int) -> int:
  while at < len(text) and text[at].isspace():
    at += 1
  return at


def read_call(text: str, tools: Sequence[Tool | type[Tool]]) -> Calls | None:
  """Reads one call's JSON: (tool, argument) of each call in it, None where it names none of these.

  `parameters` may stand for `arguments`, and either may be the JSON text of the object. A tool
  whose schema has one property takes a string, or a list of strings, each a call of its own; its
  aliases may stand in the property's place. Where the schema wants a list, the list's JSON text
  will do. Of another tool the argument is the JSON object.
  """
  call = _parsed(text)
  if not isinstance(call, dict):
    return None
  tool = next((tool for tool in tools if tool.name == call.get("name")), None)
  arguments = call.get("arguments", call.get("parameters"))
  if isinstance(arguments, str):
    arguments = _parsed(arguments)
  if tool is None or not isinstance(arguments, dict):
    return None
  if len(tool.schema["properties"]) > 1:
    if not arguments.keys() >= set(tool.schema.get("required", ())):
      return None
    values = [json.dumps(arguments)]
  else:
    values = _values(tool, arguments)
  if values is None:
    return None
  # JSON can spell half of a surrogate pair, which no UTF-8 can: it would break the retriever's
  # request.
  return tuple((tool.name, value.encode("utf-8", "replace").decode().strip()) for value in values)


def _values(tool: Tool, arguments: dict[str, Any]) -> list[str] | None:
  name, is_list = first_property(tool)
  names = (name, *getattr(tool, "aliases", ()))
  value = next((arguments[name] for name in names if name in arguments), None)
  if isinstance(value, str):
    listed = _parsed(value) if is_list and value.lstrip().startswith("[") else None
    value = listed if _are_strings(listed) else [value]
  return value if _are_strings(value) else None


def _are_strings(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _parsed(text: str) -> Any:
  """What a JSON text holds; None where it is none."""
  try:
    return _DECODER.decode(text)
  except (ValueError, RecursionError):
    return None


def first_property(tool: Tool) -> tuple[str, bool]:
  """The name of the tool's first property, and whether it holds a list."""
  name, schema = next(iter(tool.schema["properties"].items()))
  return name, schema.get("type") == "array"
