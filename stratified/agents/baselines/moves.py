"""Moves that several baselines are made of, and the examples that their prompts share.

Token ids, budgets, faults and forced numbers of searches are the agent's business. Answers stand
between <answer> tags, so that one metric reads all methods.
"""

import functools

from stratified.agents.agent import Agent, Fault, Turns
from stratified.agents.limits import fit, smallest_observation
from stratified.agents.rollout_setting import opening, prompt_pieces
from stratified.agents.tags import ANSWER, Tags
from stratified.types import Turn

Key = tuple[int, int, int]

# The two examples of prompts.FEW_SHOT, so that no method sees another fact than its rivals.
PORTUGAL = """\
<information>Doc 1(Title: Portugal) Portugal is a country on the Iberian Peninsula. It is \
bordered by Spain to the \
north and east and by the Atlantic Ocean to the west and south.</information>"""


FRANKENSTEIN = """\
<information>Doc 1(Title: Frankenstein) Frankenstein; or, The Modern Prometheus is an 1818 novel \
written by the \
English author Mary Shelley.</information>"""


def answer(agent: Agent, begin: bool = False) -> Turns:
  """Makes the last generation; `begin` feeds the answer's opening, as a forced answer does too."""
  forced = ANSWER if begin else None
  agent.feed(opening_of_answer(agent) if begin else opening(agent.setting, agent.num_calls()))
  text, action = yield from agent.generate(final=True, forced=forced)
  agent.turns.append(Turn("answer" if action.kind == "answer" else "invalid", text))
  if action.kind == "answer":
    return action.answer, "answer"
  return None, "turns" if agent.room() else "length"


def opening_of_answer(agent: Agent) -> tuple[int, ...]:
  return agent.setting.encode(agent.setting.protocol.opening(ANSWER))


def room_before_answer(agent: Agent) -> int:
  """Tokens that may be taken and leave room for an answer that is begun for the policy."""
  return agent.room() - agent.setting.limits.answer_tokens - len(opening_of_answer(agent))


def retrieve_into_prompt(agent: Agent):
  """Searches with the question, puts the passages where the prompt is cut, and returns them."""
  setting = agent.setting
  rest = prompt_pieces(setting, agent.question.text)[1:]
  (found,) = yield from agent.run("", (("search", agent.question.text.strip()),))
  information = setting.protocol.information([found])
  room = min(room_before_answer(agent) - sum(map(len, rest)), setting.limits.max_observation_tokens)
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


def answering(template: str, rollout, searches, **changes):
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
