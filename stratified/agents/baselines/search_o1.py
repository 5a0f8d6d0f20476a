"""Search-o1: searches inside the reasoning, and condenses what was found (arXiv 2501.05366).

A generation of its own reads the passages; its text is fed in their place, its tokens are counted
as `side_tokens`.
"""

from collections.abc import Sequence
import dataclasses
import functools
import re

from stratified.agents.agent import Agent, Calls, Fault, Rollout
from stratified.agents.baselines.moves import Key
from stratified.agents.limits import fit
from stratified.agents.rollout_setting import Setting
from stratified.agents.tags import Information, neutralise, spelled_out, Tags
from stratified.retrieval.corpus import Passage
from stratified.types import Question

SEARCH_O1 = """\
Answer the question at the end. Reason step by step. Whenever you are not sure of a fact, stop \
and ask a search engine \
for it: write a query between <search> and </search>. What its pages say about the query is \
summed up for you between \
<information> and </information>; then go on reasoning. You may search several times. When you \
know the answer, write \
it between <answer> and </answer>: only the short answer itself, as in <answer> Lisbon </answer>.
Question: {question}
"""


DIGEST = """\
Somebody reasons towards the answer of a question and has searched for a fact that the reasoning \
needs. Read the \
passages that the search found and write down, in a few sentences, only what they say that \
answers the query or helps \
with the next step. Use the passages alone. If nothing in them helps, write exactly: No helpful \
information found.

Question: {question}

Reasoning so far: {reasoning}

Query: {query}

Passages:
{passages}

What the passages say:"""

SEARCH_O1_FEW_SHOT = """\
Answer the question. To look something up, write a query between <search> and </search>; the fact \
that was found comes \
back between <information> and </information>. Then write the short answer between <answer> and \
</answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<think> Lisbon is the capital of Portugal. I need the ocean to its west. </think>
<search> Portugal coast ocean </search>
<information>Portugal is bordered by the Atlantic Ocean to the west and south.</information>
<think> The fact names the ocean. </think>
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
<think> I should look up the novel. </think>
<search> Frankenstein novel author </search>
<information>Frankenstein is a novel of 1818 by the English author Mary Shelley.</information>
<think> The author is Mary Shelley. </think>
<answer> Mary Shelley </answer>

Question: {question}
"""


DIGEST_FEW_SHOT = """\
Read the passages. Write in one sentence the fact that the search was for.

Search: Portugal coast ocean
Passages: Doc 1(Title: Portugal) Portugal is a country on the Iberian Peninsula. It is bordered \
by Spain to the north \
and east and by the Atlantic Ocean to the west and south.
Fact: Portugal is bordered by the Atlantic Ocean to the west and south.

Search: Frankenstein novel author
Passages: Doc 1(Title: Frankenstein) Frankenstein; or, The Modern Prometheus is an 1818 novel \
written by the English \
author Mary Shelley.
Fact: Frankenstein is a novel of 1818 by the English author Mary Shelley.

Search: {query}
Passages: {passages}
Fact:"""


@dataclasses.dataclass(frozen=True)
class Digest:
  """The wording of the pass that condenses what a search found.

  template: a text in which `{question}`, `{reasoning}` (the rollout's own text so far), `{query}`
    and `{passages}` stand for what it is about.
  stops: strings that end the generation, beside the end-of-text token.
  """

  template: str
  stops: tuple[str, ...] = ()


def search_and_condense(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...], *, digest: Digest
) -> Rollout:
  """Runs the search agent, each observation condensed first in a generation of its own."""
  agent = Agent(setting, question, key, prompt_ids)
  return (yield from agent.to_end(agent.take_turns(functools.partial(_condense, digest))))


def _condense(digest: Digest, agent: Agent, calls: Calls, results: Sequence[Sequence[Passage]]):
  """Makes the Information to feed in place of the passages, which are condensed together.

  That nothing was found is told as it is.
  """
  setting = agent.setting
  protocol, limits = setting.protocol, setting.limits
  whole = protocol.information(results)
  if not any(results):
    return whole
  longest = min(limits.max_turn_tokens, limits.max_observation_tokens)
  queries = [argument for _, argument in calls]
  context = _digest_context(digest, agent, queries, whole, limits.max_tokens - longest)
  text = yield from agent.beside(context, longest, digest.stops)
  for stop in digest.stops:
    text = text.partition(stop)[0]
  return Information(
    whole.opening, (neutralise(text.strip()) or protocol.nothing_found,), whole.closing
  )


def _digest_context(
  digest: Digest, agent: Agent, queries, whole: Information, limit: int
) -> tuple[int, ...]:
  """Encodes the condensing prompt in `limit` tokens: the reasoning's end, passages that fit."""
  setting, render = agent.setting, agent.setting.protocol.render
  texts = {
    "question": agent.question.text,
    "query": "; ".join(queries),
    "passages": "\ue001",
    "reasoning": "\ue002",
  }
  for name in ("question", "query"):
    # the two marks, at which the rendered text is cut
    texts[name] = spelled_out(re.sub("[\ue001\ue002]", "", texts[name]))
  message = re.sub(
    r"\{(question|query|passages|reasoning)\}", lambda match: texts[match[1]], digest.template
  )
  pieces = re.split("([\ue001\ue002])", render(message) if render else message)
  encoded = {
    piece: () if piece in ("\ue001", "\ue002") else setting.encode(piece) for piece in pieces
  }
  room = limit - sum(len(encoded[piece]) for piece in pieces)
  if "\ue002" in pieces:
    said = [
      token
      for segment in agent.segments
      if segment.origin == "policy"
      for token in segment.token_ids
    ]
    encoded["\ue002"] = tuple(
      [token for token in said if token not in setting.ends][-max(1, room // 4) :]
    )
    room -= len(encoded["\ue002"])
  if room < 1:
    raise Fault(
      f"the prompt that condenses a search takes {limit - room} tokens, which leaves no room for a "
      "passage "
      f"within max_tokens ({setting.limits.max_tokens}); raise it"
    )
  encoded["\ue001"] = fit(Information("", whole.pieces, ""), room, setting.encode, setting.decode)
  return sum((encoded[piece] for piece in pieces), ())


def _condensing(template: str, digest: Digest, **changes):
  return functools.partial(
    Tags,
    template=template,
    rollout=functools.partial(search_and_condense, digest=digest),
    **changes,
  )


# name -> a function of `render` (see tags.Tags)
PROTOCOLS = {
  "search_o1": _condensing(SEARCH_O1, Digest(DIGEST)),
  "search_o1_few_shot": _condensing(
    SEARCH_O1_FEW_SHOT, Digest(DIGEST_FEW_SHOT, ("\n",)), before="\n", after="\n"
  ),
}
