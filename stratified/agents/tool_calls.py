"""Native tool calls: the model's chat template with the tools' schemas, and calls as JSON.

    <tool_call>                                  written by the policy, one or several
    {"name": "search", "arguments": {"query_list": ["a query", "another"]}}
    </tool_call><|im_end|>
    <|im_start|>user                             fed back, masked: what the template puts there
    <tool_response>
    Doc 1(Title: ...) ...
    </tool_response><|im_end|>
    <|im_start|>assistant
    <answer> a short answer </answer>            written by the policy

The template is run once, on marks in place of texts, to learn what it writes between two turns of
the policy. During a rollout it is never run again: a turn's token ids stay as they were
sampled, and only the text between turns is encoded, each piece by itself. ToolCalls has the
attributes of tags.Tags, so the agent does not know the difference.

Some templates take the tools' schemas and show nothing of them (SmolLM2's). The policy would never
see its tools, so such a template is refused, unless the schemas stand in the system message.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import re
from typing import Any

from stratified.agents import tags
from stratified.agents.calls import first_property, read_call, split, spoken
from stratified.agents.chat import ChatTemplate
from stratified.agents.tags import Action, ANSWER, Information, neutralise, shown
from stratified.retrieval.corpus import Passage
from stratified.tools.base import Tool
from stratified.tools.search import Search

PROMPT = """\
Answer the question at the end. Reason first. If you lack a fact, call the search tool; queries \
that do not depend on \
each other may go into one call, and you may call it several times. As soon as you know enough, \
write the answer \
between <answer> and </answer>: only the short answer itself, no explanation, as in <answer> \
Lisbon </answer>.
Question: {question}
"""

PROMPT_OF_TOOLS = """\
Answer the question at the end. Reason first. Call a tool for whatever you can't be sure of by \
yourself: {tools}. As \
soon as you know enough, write the answer between <answer> and </answer>: only the short answer \
itself, no \
explanation, as in <answer> Lisbon </answer>.
Question: {question}
"""

CORRECTIVE = """\
That held neither a call of the search tool that can be read nor an answer. A call is one JSON \
object between \
<tool_call> and </tool_call>: {"name": "search", "arguments": {"query_list": ["..."]}}. An answer \
stands between \
<answer> and </answer>. Try again."""

CORRECTIVE_OF_TOOLS = """\
That held neither a call of a tool that can be read nor an answer. A call is one JSON object \
between <tool_call> and \
</tool_call>, such as {call}. An answer stands between <answer> and </answer>. Try again."""

SCHEMAS = """\
You may call tools. A call is one JSON object with a name and arguments between <tool_call> and \
</tool_call>; its result comes back in the next message. The tools, a JSON schema a line:
{schemas}"""
PLACES = ("template", "system")  # where the schemas are shown

_MARKS = tuple(chr(0xE000 + i) * 3 for i in range(4))  # private characters, which no template knows


@dataclasses.dataclass(frozen=True)
class _Frame:
  """What the template writes around the policy's turns."""

  response: str  # from a turn's end to the first result
  between: str  # from one result to the next
  after: str  # from the last result to the opening of the next turn
  correction: str  # from a turn's end through a correction to the opening of the next turn


@dataclasses.dataclass(frozen=True)
class ToolCalls:
  """The tool-call protocol of one model.

  chat: its template, see chat.load.
  turn_end: the text of the token that ends a turn, the tokenizer's end of text.
  available: the tools, of which name, description, schema and aliases are read.
  template: the user message; `{question}` stands for the question.
  corrective_text: said after a turn that neither calls nor answers.
  max_calls: the most in one turn; more make it invalid, as does any call that can't be read.
  schema: where the tools' schemas stand, one of PLACES: where the template puts them, or in a
    system message of ours.

  Raises ValueError where the template does not show the schemas that it is given, can't carry a
  tool's results, or ends turns with another token.
  """

  chat: ChatTemplate
  turn_end: str
  available: tuple[Tool | type[Tool], ...] = (Search,)
  template: str = PROMPT
  corrective_text: str = CORRECTIVE
  separator: str = "\n"
  nothing_found: str = "No passages found."
  max_calls: int = 8
  schema: str = "template"

  family = "one context"
  stops = ("</answer>",)  # a turn with calls ends with the end-of-text token: there may be several
  ends_turns = True  # the agent feeds that token where a turn was cut before it

  def __post_init__(self):
    if "{question}" not in self.template:
      raise ValueError(
        f"the prompt template has no {{question}}; put it in, it begins {self.template[:60]!r}"
      )
    _ = self._frame
    shown = self._rendered([{"role": "user", "content": ""}])
    if shown == self.chat.user("") and self.schema == "template":
      raise ValueError(
        "the model's chat template shows nothing of the tools that it is given, so the policy "
        "would never see their schema; show it in the system message with "
        "--config.rollout.tool_schema=system, or set rollout.protocol to search_r1"
      )

  @property
  def tools(self) -> tuple[str, ...]:
    return tuple(tool.name for tool in self.available)

  @functools.cached_property
  def _schemas(self) -> list[dict[str, Any]]:
    return [described(tool) for tool in self.available]

  def prompt(self, question: str) -> str:
    """Opens the rollout; a question that spells a control token can't open or end a message."""
    message = self.template.replace("{question}", neutralise(question))
    return self._rendered([{"role": "user", "content": message}])

  def _rendered(self, messages: Sequence[dict[str, Any]]) -> str:
    """Renders messages with the schemas where they are to stand."""
    if self.schema == "template":
      return self.chat.render(messages, tools=self._schemas)
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self._schemas)
    system = {"role": "system", "content": SCHEMAS.replace("{schemas}", lines)}
    return self.chat.render([system, *messages])

  def goes_on(self, text: str) -> bool:
    """Whether a turn's text is within a thought, in which an answer is a draft."""
    text = "<think>" * self._opens_a_thought + text
    return text.rfind("<think>") > text.rfind("</think>")

  @functools.cached_property
  def _opens_a_thought(self) -> bool:
    return self.prompt("").rstrip().endswith("<think>")

  def parse(self, text: str, only: str | None = None) -> Action:
    """Reads the calls of a turn, or its answer, whichever comes first; thoughts are left out.

    A call that can't be read makes the turn invalid.
    """
    before, calls = split(spoken(text)) if only != ANSWER else (text, [])
    answer = tags.parse(before, (ANSWER,)) if only in (None, ANSWER) else Action("invalid")
    return answer if answer.kind == "answer" or not calls else self._calls(calls)

  def _calls(self, texts: Sequence[str | None]) -> Action:
    found = [None if text is None else read_call(text, self.available) for text in texts]
    if None in found or not 1 <= sum(map(len, found)) <= self.max_calls:
      return Action("invalid")
    return Action("call", sum(found, ()), sizes=tuple(map(len, found)))

  def opening(self, tag: str) -> str:
    """The text that forces a turn to be one call of a tool, or an answer."""
    if tag == ANSWER:
      return "<answer>"
    key, is_list = first_property(self._tool(tag))
    start = '["' if is_list else '"'
    return f'<tool_call>\n{{"name": "{tag}", "arguments": {{"{key}": {start}'

  def closing(self, tag: str) -> str:
    if tag == ANSWER:
      return "</answer>"
    return ('"]' if first_property(self._tool(tag))[1] else '"') + "}}\n</tool_call>"

  def _tool(self, name: str) -> Tool:
    return next(tool for tool in self.available if tool.name == name)

  @property
  def corrective(self) -> str:
    return self._frame.correction

  def information(
    self, items: Sequence[Sequence[Passage | str]], sizes: Sequence[int] = ()
  ) -> Information:
    """Makes the responses to a turn's calls; passages are numbered through the turn, tags neutral.

    items: what each call brought.
    sizes: how many of the calls share each response; by default all share one.
    """
    frame, rest, pieces, first = self._frame, list(items), [], 1
    for size in sizes or (len(rest),):
      texts = shown(rest[:size], first)
      first += sum(isinstance(item, Passage) for result in rest[:size] for item in result)
      texts = [
        self.separator * (i > 0) + text for i, text in enumerate(texts or [self.nothing_found])
      ]
      pieces += [frame.between * bool(pieces) + texts[0], *texts[1:]]
      rest = rest[size:]
    return Information(frame.response, tuple(pieces), frame.after)

  @functools.cached_property
  def _frame(self) -> _Frame:
    asked, said, first, second = _MARKS
    opened = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    name = self.tools[0]
    tool = [{"role": "tool", "name": name, "content": mark} for mark in (first, second)]
    answered = self._rendered([*opened, *tool])
    corrected = self._rendered([*opened, {"role": "user", "content": self.corrective_text}])
    pieces = re.split("|".join(_MARKS[1:]), answered)
    if (
      len(pieces) != 4
      or said not in corrected
      or self.corrective_text not in corrected.split(said)[1]
    ):
      raise ValueError(
        "the model's chat template has no place for a tool's results after the assistant's turn; "
        "set rollout.protocol to search_r1"
      )
    response, between, after = pieces[1:]
    correction = corrected.split(said)[1]
    for text in (response, correction):
      if not text.startswith(self.turn_end):
        raise ValueError(
          f"the model's chat template ends a turn with {text[:20]!r}, the tokenizer's end-of-text "
          "token is "
          f"{self.turn_end!r}; set eos_token in the model's tokenizer_config.json to the former"
        )
    return _Frame(
      response.removeprefix(self.turn_end), between, after, correction.removeprefix(self.turn_end)
    )


def described(tool: Tool | type[Tool]) -> dict[str, Any]:
  """Describes a tool as chat templates and servers want it."""
  fields = {"name": tool.name, "description": tool.description, "parameters": dict(tool.schema)}
  return {"type": "function", "function": fields}


def tool_calls(
  chat: ChatTemplate,
  tokenizer,
  tools: Sequence[Tool | type[Tool]] = (Search,),
  schema: str = "template",
) -> ToolCalls:
  """The protocol for a model with this template and tokenizer (`decode`, `eos_id`).

  schema: see ToolCalls.
  """
  turn_end = tokenizer.decode([tokenizer.eos_id])
  if [tool.name for tool in tools] == ["search"]:
    return ToolCalls(chat, turn_end, tuple(tools), schema=schema)
  told = "; ".join(f"{tool.name} ({tool.description.rstrip('.')})" for tool in tools)
  example = json.dumps({"name": tools[0].name, "arguments": {first_property(tools[0])[0]: "..."}})
  return ToolCalls(
    chat,
    turn_end,
    tuple(tools),
    template=PROMPT_OF_TOOLS.replace("{tools}", told),
    corrective_text=CORRECTIVE_OF_TOOLS.replace("{call}", example),
    schema=schema,
  )
