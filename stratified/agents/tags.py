"""Search-R1's tag protocol (arXiv 2503.09516): what the policy reads, and what its text is taken
for.

A turn of the policy ends with `</search>` or `</answer>`:

    <think> ... </think> <search> a query </search>
    <information>Doc 1(Title: ...) ...</information>       fed back, masked
    <answer> a short answer </answer>

This module knows text only; budgets and token ids are the agent's. Another protocol (native tool
calls, say) offers the same attributes: `stops`, `corrective`, `prompt`, `parse`, `opening`,
`closing`, `information`. It may also offer `rollout`, `parts` and `searches`, as agent.py says.
"""

from collections.abc import Callable, Sequence
import dataclasses
import re
from typing import Literal

from stratified.agents import prompts
from stratified.retrieval.corpus import Passage

Kind = Literal["search", "answer"]

# The innermost pair: a tag opened twice counts from its last opening: `<search> a <search> b
# </search>` asks for "b". Tags are matched literally; case and spacing inside the brackets are not
# forgiven.
_PAIR = r"<{kind}>((?:(?!<{kind}>).)*?)</{kind}>"
_PAIRS = {kind: re.compile(_PAIR.format(kind=kind), re.DOTALL) for kind in ("search", "answer")}

# Every `<` that could open a tag or a chat template's control token (`</s>`, `<|im_end|>`), in any
# alphabet.
_OPENS_A_TAG = re.compile(r"<(?![\s\d=<-]|$)")


@dataclasses.dataclass(frozen=True)
class Action:
  """What a turn asks for: queries to run, an answer, or neither of them ("invalid").

  calls: how many of the queries each of several calls asks; empty where a turn has one.
  """

  kind: Literal["search", "answer", "invalid"]
  queries: tuple[str, ...] = ()
  answer: str | None = None
  calls: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Information:
  """An observation in parts, so that it can be cut and still be closed: opening + pieces +
  closing."""

  opening: str
  pieces: tuple[str, ...]
  closing: str


def neutralise(text: str) -> str:
  """Retrieved text with every `<` that could open a tag or a control token turned into `[`.

  A passage with `</information><answer>` would otherwise end its own observation and answer for the
  policy. A plain comparison such as `a < b` is left alone.
  """
  return _OPENS_A_TAG.sub("[", text)


def parse(text: str, kinds: Sequence[Kind] = ("search", "answer")) -> Action:
  """The first completed action of a turn's text; what follows it is ignored.

  text: decoded policy text of one turn. kinds: consider these kinds of tag alone.
  The action whose closing tag comes first wins, so `<answer> a <search> q </search>` is a search,
  and an answer never closed is none. A closing tag without its opening, or of the other kind, is
  invalid.
  """
  found = [
    (match.end(), kind, match.group(1).strip())
    for kind in kinds
    if (match := _PAIRS[kind].search(text))
  ]
  if not found:
    return Action("invalid")
  _, kind, content = min(found)
  return (
    Action("search", queries=(content,)) if kind == "search" else Action("answer", answer=content)
  )


@dataclasses.dataclass(frozen=True)
class SearchTags:
  """The tag protocol with its wording.

  template: the one user message; `{question}` stands for the question. Raises ValueError without
    it. Where it holds `{passages}` too, the rollout is one that searches first, and puts what it
    found there.
  render: turns that message into the text that is tokenised (a chat template); None feeds it as it
  is. corrective: fed after a turn that neither searches nor answers. before, after: around an
  observation; separator: between passages; nothing_found: in place of passages. actions: what a
  turn of the policy may be; more_stops: strings beside their closing tags that end a turn. rollout,
  searches: see agent.py; None is the search agent.
  """

  template: str = prompts.SEARCH_R1
  render: Callable[[str], str] | None = None
  corrective: str = prompts.CORRECTIVE
  before: str = "\n\n"
  after: str = "\n\n"
  separator: str = "\n"
  nothing_found: str = "No passages found."
  actions: tuple[Kind, ...] = ("search", "answer")
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
  def stops(self) -> tuple[str, ...]:
    return tuple(self.closing(kind) for kind in self.actions) + self.more_stops

  def prompt(self, question: str) -> str:
    """The text that opens the rollout: the whole prompt, or what comes before the passages."""
    return self.parts(question)[0]

  def parts(self, question: str) -> tuple[str, ...]:
    """The prompt's text, cut where `{passages}` stands in the template."""
    # The cut is made after rendering, so that a chat template sees one message; a mark that the
    # question holds by chance would cut there.
    mark = "\ue000"
    while mark in question:
      mark += "\ue000"
    # not str.format: worked examples and questions may hold braces
    message = self.template.replace("{passages}", mark).replace("{question}", question)
    return tuple((self.render(message) if self.render else message).split(mark))

  def parse(self, text: str, only: Kind | None = None) -> Action:
    """What a turn's text asks for; `only` this kind of action where the turn was forced open."""
    return parse(text, (only,) if only else self.actions)

  def opening(self, kind: Kind) -> str:
    """The text that forces a turn to be a search or an answer."""
    return f"<{kind}>"

  def closing(self, kind: Kind) -> str:
    return f"</{kind}>"

  def information(self, results: Sequence[Sequence[Passage]]) -> Information:
    """The observation for the passages of every query of the turn, numbered from 1, tags
    neutralised."""
    passages = [passage for result in results for passage in result]
    pieces = [
      ("" if i == 0 else self.separator)
      + f"Doc {i + 1}(Title: {neutralise(passage.title)}) {neutralise(passage.text)}"
      for i, passage in enumerate(passages)
    ]
    return Information(
      self.before + "<information>",
      tuple(pieces or [self.nothing_found]),
      "</information>" + self.after,
    )


def search_r1(render: Callable[[str], str] | None = None) -> SearchTags:
  """The long instruction for real models, as one user message."""
  return SearchTags(render=render)


def few_shot(render: Callable[[str], str] | None = None) -> SearchTags:
  """A short instruction and two worked examples, for a small real model that has not learnt the
  format.

  Best without a chat template: SmolLM2-135M-Instruct continues the examples, but inside its
  template it answers in plain words.
  """
  return SearchTags(template=prompts.FEW_SHOT, render=render, before="\n", after="\n")


def short(render: Callable[[str], str] | None = None) -> SearchTags:
  """As few tokens as the format allows, for the tiny policy."""
  return SearchTags(
    template=prompts.SHORT, render=render, corrective=prompts.SHORT_CORRECTIVE, before="", after=""
  )
