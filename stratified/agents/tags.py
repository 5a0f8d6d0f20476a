"""The tag protocol of Search-R1 (arXiv 2503.09516): what the policy reads, how its text is read.

A turn of the policy ends with the closing tag of a tool's name, or with `</answer>`:

    <think> ... </think> <search> a query </search>
    <information>Doc 1(Title: ...) ...</information>       fed back, masked
    <calculator> 12 * 34 </calculator>
    <information>408</information>
    <answer> a short answer </answer>

This module knows text only; budgets and token ids are the agent's business. Another protocol
(native tool calls, say) offers the same attributes: `tools`, `stops`, `corrective`, `prompt`,
`parse`, `opening`, `closing`, `information`. It may also offer `rollout`, `parts` and `searches`,
as agent.py says.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re
from typing import Literal

from stratified.agents import prompts
from stratified.retrieval.corpus import Passage
from stratified.tools.base import Tool
from stratified.tools.search import Search

ANSWER = "answer"  # every other tag that is an action bears the name of a tool

# The innermost pair: a tag opened twice counts from its last opening: `<search> a <search> b
# </search>` asks for "b". Tags are matched literally; case and spacing inside the brackets are not
# forgiven.
_PAIR = r"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>"

# Every `<` that could open a tag or a chat template's control token (`</s>`, `<|im_end|>`), in any
# alphabet.
_OPENS_A_TAG = re.compile(r"<(?![\s\d=<-]|$)")
# Control tokens of the known families: <|im_end|>, </s>, <bos>, <start_of_turn>; [INST], [/INST].
_ANGLED_CONTROL = re.compile(
  r"<(?=[|\uff5c]|/?s>|(?:bos|eos|pad|unk|mask|cls|sep)>|(?:start|end)_of_\w+>|/?tool_\w+>)"
)
_SQUARE_CONTROL = re.compile(r"\[(?=/?[A-Z][A-Z_]{2,}\])")


@dataclasses.dataclass(frozen=True)
class Action:
  """What a turn asks for: calls of tools, an answer, or neither of them ("invalid").

  calls: (tool, argument) each.
  sizes: how many of them each of several responses answers; empty where one answers them all.
  """

  kind: Literal["call", "answer", "invalid"]
  calls: tuple[tuple[str, str], ...] = ()
  answer: str | None = None
  sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Information:
  """An observation in parts, opening + pieces + closing, so that it can be cut and still closed."""

  opening: str
  pieces: tuple[str, ...]
  closing: str


def neutralise(text: str) -> str:
  """Turns every `<` of a foreign text that could open a tag or a control token into `[`.

  A passage with `</information><answer>` would otherwise end its own observation and answer for the
  policy. A plain comparison such as `a < b` is left alone.
  """
  return _OPENS_A_TAG.sub("[", _SQUARE_CONTROL.sub("(", text))


def spelled_out(text: str) -> str:
  """Breaks what a question spells of control tokens: `<|im_end|>` would end its own message.

  The opening bracket becomes another: `[|im_end|>`, `(INST]`. Other tags stay.
  """
  return _ANGLED_CONTROL.sub("[", _SQUARE_CONTROL.sub("(", text))


@functools.cache
def _pair(tag: str) -> re.Pattern:
  return re.compile(_PAIR.format(tag=tag), re.DOTALL)


def parse(text: str, tags: Sequence[str] = ("search", ANSWER)) -> Action:
  """Reads the first completed action of a turn's text; what follows it is ignored.

  text: decoded policy text of one turn. tags: the tags to look for.

  The action whose closing tag comes first wins, so `<answer> a <search> q </search>` is a search,
  and an answer never closed is none. A closing tag without its opening, or of the other kind, is
  invalid.
  """
  found = [
    (match.end(), tag, match.group(1).strip()) for tag in tags if (match := _pair(tag).search(text))
  ]
  if not found:
    return Action("invalid")
  _, tag, content = min(found)
  if tag == ANSWER:
    return Action("answer", answer=content)
  return Action("call", ((tag, content),))


def shown(items: Sequence[Sequence[Passage | str]], first: int = 1) -> list[str]:
  """Writes the items of a turn's results, tags neutralised, passages numbered from `first`."""
  texts = []
  for item in (item for result in items for item in result):
    if isinstance(item, str):
      texts.append(neutralise(item))
      continue
    texts.append(f"Doc {first}(Title: {neutralise(item.title)}) {neutralise(item.text)}")
    first += 1
  return texts


BOX = "\\boxed{"


def boxed(text: str) -> str | None:
  """The content of the last `\\boxed{...}` whose braces close, stripped; None without one."""
  found, at = None, text.find(BOX)
  while at >= 0:
    begin = end = at + len(BOX)
    depth = 1
    while depth and end < len(text):
      depth += {"{": 1, "}": -1}.get(text[end], 0)
      end += 1
    if depth:  # never closed, so none that opens later ends outside of it
      break
    found, at = text[begin : end - 1].strip(), text.find(BOX, end)
  return found


# How the answer is read from what stands between its tags, and how it is written there.
READ: dict[str, Callable[[str], str | None]] = {"plain": str.strip, "boxed": boxed}
WRITTEN = {"plain": "<answer> {}</answer>", "boxed": "<answer> \\boxed{{{}}}</answer>"}


@dataclasses.dataclass(frozen=True)
class Tags:
  """A tag protocol with its wording; stratified/agents/protocols.py has those of published methods.

  template: the one user message; `{question}` stands for the question. Where it holds `{passages}`
    too, the rollout searches first and puts what it found there.
  system: the instruction, where a chat template shows it as a system message and the bare question
    as the user's; empty shows the template as the user's.
  render: turns (message, system message) into the text that is tokenised (a chat template); None
    feeds the template as it is.
  corrective: fed after a turn that neither calls a tool nor answers; empty ends the rollout there.
  results: the tag around an observation. before, after: stand around it; inside: between the tag
    and what it holds, on both sides.
  separator: between results. nothing_found: in place of results.
  last_words: fed before the generation that may only answer.
  digest: the tag in which the policy sums up what it was told, in protocols that ask for it.
  answer: how the answer is read, a name of READ.
  tools: names of those that the policy may call.
  more_stops: strings beside the closing tags that end a turn.
  rollout, searches: see agent.py; None is the agent that calls and answers.

  Raises ValueError for a template without `{question}`.
  """

  template: str = prompts.SEARCH_R1
  system: str = ""
  render: Callable[..., str] | None = None
  corrective: str = prompts.CORRECTIVE
  results: str = "information"
  before: str = "\n\n"
  after: str = "\n\n"
  inside: str = ""
  separator: str = "\n"
  nothing_found: str = "No passages found."
  last_words: str = ""
  digest: str = ""
  answer: str = "plain"
  tools: tuple[str, ...] = ("search",)
  more_stops: tuple[str, ...] = ()
  rollout: Callable | None = None
  searches: tuple[int, int | None] = (0, None)

  def __post_init__(self):
    if "{question}" not in self.template:
      raise ValueError(
        "the prompt template has no {question}: the policy would never see what is asked; "
        f"put it in, it begins {self.template[:60]!r}"
      )

  @property
  def family(self) -> str:
    """Says in tables which protocols compare: how often a rollout searches, and in what context."""
    return {(0, 0): "no search", (1, 1): "one search"}.get(self.searches, "one context")

  @property
  def stops(self) -> tuple[str, ...]:
    return tuple(self.closing(tag) for tag in (*self.tools, ANSWER)) + self.more_stops

  def prompt(self, question: str) -> str:
    """The text that opens the rollout: the whole prompt, or what comes before the passages."""
    return self.parts(question)[0]

  def parts(self, question: str) -> tuple[str, ...]:
    """The prompt's text in pieces, cut where `{passages}` stands in the template."""
    # The cut is made after rendering, so that a chat template sees one message; a mark that the
    # question holds by chance would cut there.
    mark = "\ue000"
    while mark in question:
      mark += "\ue000"
    # not str.format: worked examples and questions may hold braces
    asked = spelled_out(question)
    message = self.template.replace("{passages}", mark).replace("{question}", asked)
    if self.render:
      message = self.render(asked, self.system) if self.system else self.render(message)
    return tuple(message.split(mark))

  def parse(self, text: str, only: str | None = None) -> Action:
    """Reads what a turn's text asks for; `only` is the tool, or answer, that was forced open."""
    action = parse(text, (only,) if only else (*self.tools, ANSWER))
    if action.kind != "answer":
      return action
    return dataclasses.replace(action, answer=READ[self.answer](action.answer))

  def answered(self, answer: str) -> str:
    """Writes an answer as the protocol wants it; a demonstration's last turn."""
    return WRITTEN[self.answer].format(answer)

  def digested(self, fact: str) -> str:
    """Writes what a demonstration has learnt from an observation; nothing where none is asked."""
    return f"<{self.digest}> {fact}</{self.digest}>" if self.digest else ""

  @property
  def marks(self) -> tuple[str, ...]:
    """The tags, and whatever else, that a policy has to write or read."""
    names = (*self.tools, ANSWER, self.results, *filter(None, [self.digest]))
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    return (*tags, *([BOX] if self.answer == "boxed" else []))

  def opening(self, tag: str) -> str:
    """The text that forces a turn to call a tool, or to answer."""
    return f"<{tag}>"

  def closing(self, tag: str) -> str:
    return f"</{tag}>"

  def information(self, items: Sequence[Sequence[Passage | str]]) -> Information:
    """Makes the observation for the items of all calls of a turn, passages numbered from 1."""
    pieces = [("" if i == 0 else self.separator) + text for i, text in enumerate(shown(items))]
    return Information(
      f"{self.before}<{self.results}>{self.inside}",
      tuple(pieces or [self.nothing_found]),
      f"{self.inside}</{self.results}>{self.after}",
    )


def search_r1(
  render: Callable[[str], str] | None = None, tools: Sequence[Tool | type[Tool]] = (Search,)
) -> Tags:
  """The long instruction for real models, as one user message; it names the tools."""
  names = tuple(tool.name for tool in tools)
  if names == ("search",):
    return Tags(render=render)
  tagged = {tool.name: f"<{tool.name}> and </{tool.name}>" for tool in tools}
  told = [f"{tagged[tool.name]} ({tool.description.rstrip('.')})" for tool in tools]
  return Tags(
    template=prompts.TOOLS.replace("{tools}", "; ".join(told)),
    render=render,
    corrective=prompts.CORRECTIVE_OF_TOOLS.replace("{tags}", ", ".join(tagged.values())),
    tools=names,
  )


def few_shot(
  render: Callable[[str], str] | None = None, tools: Sequence[Tool | type[Tool]] = (Search,)
) -> Tags:
  """A short instruction and two worked examples, for a small model that does not know the format.

  Best without a chat template: SmolLM2-135M-Instruct continues the examples, but inside its
  template it answers in plain words. Raises ValueError for other tools than search.
  """
  names = [tool.name for tool in tools]
  if names != ["search"]:
    raise ValueError(
      "rollout.protocol='few_shot' shows worked examples of search, and the tools are "
      f"{', '.join(names) or 'none'}; choose search_r1, short or tool_calls"
    )
  return Tags(template=prompts.FEW_SHOT, render=render, before="\n", after="\n")


def short(
  render: Callable[[str], str] | None = None, tools: Sequence[Tool | type[Tool]] = (Search,)
) -> Tags:
  """As few tokens as the format allows, for the tiny policy."""
  names = tuple(tool.name for tool in tools)
  return Tags(
    template=prompts.SHORT,
    render=render,
    corrective=prompts.SHORT_CORRECTIVE if "search" in names else prompts.SHORT_NO_CALL,
    tools=names,
    before="",
    after="",
  )
