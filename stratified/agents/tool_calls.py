"""Native tool calls: the model's chat template with a tool schema, queries as JSON, results as the
tool's response.

    <tool_call>                                           written by the policy, one or several
    {"name": "search", "arguments": {"query_list": ["a query", "another"]}}
    </tool_call><|im_end|>
    <|im_start|>user                                      fed back, masked: what the template puts
                                                          there
    <tool_response>
    Doc 1(Title: ...) ...
    </tool_response><|im_end|>
    <|im_start|>assistant
    <answer> a short answer </answer>                     written by the policy

The template is run once, on marks in place of texts, to learn what it writes between the policy's
turn and the next. During a rollout it is never run again: a turn's token ids stay as they were
sampled, and only the text between turns is encoded, each piece by itself. The same attributes as
tags.SearchTags, so the agent does not know the difference.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import re
from typing import Any

from stratified.agents import tags
from stratified.agents.chat import ChatTemplate
from stratified.agents.tags import Action, Information, Kind, neutralise
from stratified.retrieval.corpus import Passage

PROMPT = """\
Answer the question at the end. Reason first. If you lack a fact, call the search tool; queries that do not depend on \
each other may go into one call, and you may call it several times. As soon as you know enough, write the answer \
between <answer> and </answer>: only the short answer itself, no explanation, as in <answer> Lisbon </answer>.
Question: {question}
"""

CORRECTIVE = """\
That held neither a call of the search tool that can be read nor an answer. A call is one JSON object between \
<tool_call> and </tool_call>: {"name": "search", "arguments": {"query_list": ["..."]}}. An answer stands between \
<answer> and </answer>. Try again."""

SEARCH = {
  "type": "function",
  "function": {
    "name": "search",
    "description": "Searches an encyclopedia and returns the passages that fit each query best.",
    "parameters": {
      "type": "object",
      "properties": {
        "query_list": {
          "type": "array",
          "items": {"type": "string"},
          "description": "Queries in plain words, each searched on its own.",
        }
      },
      "required": ["query_list"],
    },
  },
}

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
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

  chat: its template, see chat.load. turn_end: the text of the token that ends a turn, the
  tokenizer's end of text. template: the user message, `{question}` stands for the question.
  corrective_text: said after a turn that neither calls nor answers. max_queries: in one turn; more
  make it invalid, as does any call that can't be read. Raises ValueError where the template cannot
  carry a tool's results, or ends turns with another token.
  """

  chat: ChatTemplate
  turn_end: str
  template: str = PROMPT
  corrective_text: str = CORRECTIVE
  separator: str = "\n"
  nothing_found: str = "No passages found."
  max_queries: int = 8

  stops = ("</answer>",)  # a turn with calls ends with the end-of-text token: there may be several
  ends_turns = True  # the agent feeds that token where a turn was cut before it

  def __post_init__(self):
    if "{question}" not in self.template:
      raise ValueError(
        f"the prompt template has no {{question}}; put it in, it begins {self.template[:60]!r}"
      )
    _ = self._frame

  def prompt(self, question: str) -> str:
    """The opening of the rollout; a question that spells a control token can't open or end a
    message."""
    message = self.template.replace("{question}", neutralise(question))
    return self.chat.render([{"role": "user", "content": message}], tools=[SEARCH])

  def parse(self, text: str, only: Kind | None = None) -> Action:
    """The calls of a turn, or its answer, whichever is completed first; a call that can't be read
    makes it invalid."""
    answer = tags.parse(text, ("answer",)) if only != "search" else Action("invalid")
    call = _CALL.search(text) if only != "answer" else None
    if answer.kind == "answer" and (call is None or text.index("</answer>") < call.start()):
      return answer
    return self._calls(text) if call else Action("invalid")

  def _calls(self, text: str) -> Action:
    found = [read_call(match.group(1)) for match in _CALL.finditer(text)]
    left_open = "<tool_call>" in _CALL.sub("", text)
    if left_open or None in found or not 1 <= sum(map(len, found)) <= self.max_queries:
      return Action("invalid")
    return Action("search", queries=sum(found, ()), calls=tuple(map(len, found)))

  def opening(self, kind: Kind) -> str:
    """The text that forces a turn to be a search of one query, or an answer."""
    return (
      "<answer>"
      if kind == "answer"
      else '<tool_call>\n{"name": "search", "arguments": {"query_list": ["'
    )

  def closing(self, kind: Kind) -> str:
    return "</answer>" if kind == "answer" else '"]}}\n</tool_call>'

  @property
  def corrective(self) -> str:
    return self._frame.correction

  def information(
    self, results: Sequence[Sequence[Passage]], calls: Sequence[int] = ()
  ) -> Information:
    """The responses to a turn's calls.

    results: the passages of each query. calls: how many of the queries belong to each call, which
    gets a response of its own; by default they are one call's. Passages are numbered through the
    turn, their tags neutralised.
    """
    frame, rest, pieces, number = self._frame, list(results), [], 0
    for size in calls or (len(rest),):
      texts = []
      for passage in (passage for result in rest[:size] for passage in result):
        number += 1
        texts.append(f"Doc {number}(Title: {neutralise(passage.title)}) {neutralise(passage.text)}")
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
    tool = [{"role": "tool", "name": "search", "content": mark} for mark in (first, second)]
    answered = self.chat.render([*opened, *tool], tools=[SEARCH])
    corrected = self.chat.render(
      [*opened, {"role": "user", "content": self.corrective_text}], tools=[SEARCH]
    )
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


def read_call(text: str) -> tuple[str, ...] | None:
  """The queries of one call's JSON, None where it is not a call of the search tool.

  `query_list` is a list of strings, or one string; `query` in its place is taken too.
  """
  try:
    call = json.loads(text)
  except (ValueError, RecursionError):
    return None
  if not isinstance(call, dict) or call.get("name") != "search":
    return None
  queries = _queries(call.get("arguments"))
  if (
    not isinstance(queries, list)
    or not queries
    or not all(isinstance(query, str) for query in queries)
  ):
    return None
  # JSON can spell half of a surrogate pair, which no UTF-8 can: it would break the retriever's
  # request.
  return tuple(query.encode("utf-8", "replace").decode().strip() for query in queries)


def _queries(arguments: Any):
  if not isinstance(arguments, dict):
    return None
  queries = arguments.get("query_list", arguments.get("query"))
  return [queries] if isinstance(queries, str) else queries


def tool_calls(chat: ChatTemplate, tokenizer) -> ToolCalls:
  """The protocol for a model with this template and tokenizer (`decode`, `eos_id`)."""
  return ToolCalls(chat, tokenizer.decode([tokenizer.eos_id]))
