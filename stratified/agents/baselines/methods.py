"""The methods that are compared with a trained search agent and learn nothing, as protocols of the
same loop.

    direct     answer at once
    cot        reason, then answer
    rag        search once, with the question; answer from the passages
    ircot      search with the question, then with each sentence of reasoning (arXiv 2212.10509)
    search_o1  search inside the reasoning; a generation of its own condenses what was found (arXiv
               2501.05366)

Each has the generator of its rollout here, beside `agent.run`, and two wordings: `*_few_shot` shows
worked examples to a model that follows no instruction. Token ids, budgets, faults and forced
numbers of searches are the agent's.

What differs from the papers: answers stand between <answer> tags, so that one metric reads all
methods. IRCoT's passages are put in where they were found and not in front of the question, so that
a rollout is one sequence whose prefix never changes (it can be trained on, and its cache be kept);
a line is a sentence; where its budget ends the answer is begun for the policy, in place of a second
reader. Search-o1's condensed text is fed, its generation is counted as `side_tokens`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re

from stratified.agents.agent import (
  Agent,
  Calls,
  Fault,
  opening,
  prompt_pieces,
  Rollout,
  Setting,
  Turns,
)
from stratified.agents.baselines import wording
from stratified.agents.limits import fit, smallest_observation
from stratified.agents.tags import ANSWER, Information, neutralise, Tags
from stratified.retrieval.corpus import Passage
from stratified.types import Question, Turn

Render = Callable[[str], str] | None
Key = tuple[int, int, int]

_TAGS = re.compile(r"</?(?:think|search|answer|information)>")


def answer_once(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...]
) -> Rollout:
  """One generation, which is to answer: direct inference and chain of thought."""
  agent = Agent(setting, question, key, prompt_ids)
  return (yield from agent.to_end(_answer(agent)))


def retrieve_first(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...]
) -> Rollout:
  """One search, with the question itself, then one generation: retrieval-augmented generation."""
  agent = Agent(setting, question, key, prompt_ids)

  def turns() -> Turns:
    yield from _retrieve_into_prompt(agent)
    return (yield from _answer(agent))

  return (yield from agent.to_end(turns()))


def interleave(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...]
) -> Rollout:
  """IRCoT: a search with the question, then a search with each sentence until one holds an answer.

  The first search counts among max_turns. A passage is put in the first time that it is found. A
  sentence without a word searches nothing and counts as invalid. After the last search the answer
  is begun for the policy.
  """
  agent = Agent(setting, question, key, prompt_ids)

  def turns() -> Turns:
    limits, protocol = setting.limits, setting.protocol
    free = limits.forced_searches is None
    seen = {passage.id for passage in (yield from _retrieve_into_prompt(agent))}
    for _ in range((limits.max_turns if free else limits.forced_searches) - 1):
      if _room(agent) < 1:
        break
      stops = protocol.stops if free else protocol.more_stops
      text = yield from agent.sample(stops, reserve=agent.room() - _room(agent))
      action = protocol.parse(text)
      if free and action.kind == "answer":
        agent.turns.append(Turn("answer", text))
        return action.answer, "answer"
      seen |= yield from _search_with(agent, text, seen)
    return (yield from _answer(agent, begin=True))

  return (yield from agent.to_end(turns()))


def _search_with(agent: Agent, text: str, seen: set[str]):
  """Searches with a sentence and feeds what is new; the ids of those passages."""
  setting = agent.setting
  query = " ".join(_TAGS.sub(" ", text).split())
  if not any(character.isalnum() for character in query):
    agent.turns.append(Turn("invalid", text))
    return set()
  if _room(agent) < smallest_observation(setting.protocol.information([]), setting.encode):
    agent.turns.append(Turn("call", text))
    return set()
  (found,) = yield from agent.run(text, (("search", query),))
  fresh = [passage for passage in found if passage.id not in seen]
  if fresh:
    agent.feed(
      fit(
        setting.protocol.information([fresh]),
        min(_room(agent), setting.limits.max_observation_tokens),
        setting.encode,
        setting.decode,
      )
    )
  return {passage.id for passage in fresh}


def _room(agent: Agent) -> int:
  """Tokens that may be taken so that an answer that is begun for the policy still fits."""
  return agent.room() - agent.setting.limits.answer_tokens - len(opening_of_answer(agent))


@dataclasses.dataclass(frozen=True)
class Digest:
  """The wording of the pass that condenses what a search found.

  template: `{question}`, `{reasoning}` (the rollout's own text so far), `{query}` and `{passages}`
    stand for what it is about. stops: strings that end the generation, beside the end-of-text
    token.
  """

  template: str
  stops: tuple[str, ...] = ()


def search_and_condense(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...], *, digest: Digest
) -> Rollout:
  """The search agent whose observations are condensed first, in a generation of its own."""
  agent = Agent(setting, question, key, prompt_ids)
  return (yield from agent.to_end(agent.take_turns(functools.partial(_condense, digest))))


def opening_of_answer(agent: Agent) -> tuple[int, ...]:
  return agent.setting.encode(agent.setting.protocol.opening(ANSWER))


def _answer(agent: Agent, begin: bool = False) -> Turns:
  """The last generation; `begin` feeds the answer's opening for the policy, as a forced answer does
  anyway."""
  forced = ANSWER if begin else None
  agent.feed(opening_of_answer(agent) if begin else opening(agent.setting, agent.num_calls()))
  text, action = yield from agent.generate(final=True, forced=forced)
  agent.turns.append(Turn("answer" if action.kind == "answer" else "invalid", text))
  if action.kind == "answer":
    return action.answer, "answer"
  return None, "turns" if agent.room() else "length"


def _retrieve_into_prompt(agent: Agent):
  """Searches with the question and puts the passages where the prompt is cut; the passages."""
  setting = agent.setting
  rest = prompt_pieces(setting, agent.question.text)[1:]
  (found,) = yield from agent.run("", (("search", agent.question.text.strip()),))
  information = setting.protocol.information([found])
  room = min(_room(agent) - sum(map(len, rest)), setting.limits.max_observation_tokens)
  if room < smallest_observation(information, setting.encode):
    raise Fault(
      f"the prompt takes {len(agent.context) + sum(map(len, rest))} tokens, which leaves no room "
      "for a "
      f"passage and an answer within max_tokens ({setting.limits.max_tokens}); raise it"
    )
  agent.feed(fit(information, room, setting.encode, setting.decode))
  for piece in rest:
    agent.feed(piece, "prompt")
  return found


def _condense(digest: Digest, agent: Agent, calls: Calls, results: Sequence[Sequence[Passage]]):
  """The Information to feed in place of the passages; passages are condensed together, none found
  is told as is."""
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
  """Token ids of the condensing prompt, at most `limit`: of the reasoning its end, of the passages
  what fits."""
  setting, render = agent.setting, agent.setting.protocol.render
  texts = {
    "question": agent.question.text,
    "query": "; ".join(queries),
    "passages": "\ue001",
    "reasoning": "\ue002",
  }
  for name in ("question", "query"):
    texts[name] = re.sub(
      "[\ue001\ue002]", "", texts[name]
    )  # the two marks, at which the rendered text is cut
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
      [token for token in said if token != setting.eos_id][-max(1, room // 4) :]
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


def _answers(template: str, rollout, searches, **changes):
  """A protocol whose policy only answers; what it reads is searched for it."""
  return functools.partial(
    Tags,
    template=template,
    tools=(),
    rollout=rollout,
    searches=searches,
    before="",
    **{"after": ""} | changes,
  )


def _condensing(template: str, digest: Digest, **changes):
  return functools.partial(
    Tags,
    template=template,
    rollout=functools.partial(search_and_condense, digest=digest),
    **changes,
  )


# name -> a function of `render` (see SearchTags)
PROTOCOLS = {
  "direct": _answers(wording.DIRECT, answer_once, (0, 0)),
  "direct_few_shot": _answers(wording.DIRECT_FEW_SHOT, answer_once, (0, 0)),
  "cot": _answers(wording.COT, answer_once, (0, 0)),
  "cot_few_shot": _answers(wording.COT_FEW_SHOT, answer_once, (0, 0)),
  "rag": _answers(wording.RAG, retrieve_first, (1, 1)),
  "rag_few_shot": _answers(wording.RAG_FEW_SHOT, retrieve_first, (1, 1)),
  "ircot": _answers(wording.IRCOT, interleave, (1, None), more_stops=("\n",), after="\n"),
  "ircot_few_shot": _answers(
    wording.IRCOT_FEW_SHOT, interleave, (1, None), more_stops=("\n",), after="\n"
  ),
  "search_o1": _condensing(wording.SEARCH_O1, Digest(wording.DIGEST)),
  "search_o1_few_shot": _condensing(
    wording.SEARCH_O1_FEW_SHOT, Digest(wording.DIGEST_FEW_SHOT, ("\n",)), before="\n", after="\n"
  ),
}
