"""IRCoT: searches with the question, then with each sentence of reasoning (arXiv 2212.10509).

It differs from the paper in three points. Passages stand where they were found, not in front of the
question, so a rollout is one sequence whose prefix never changes: it can be trained on, and its
cache kept. A line is a sentence. Where the budget ends, the answer is begun for the policy, in
place of a second reader.
"""

import re

from stratified.agents.agent import Agent, Rollout, Turns
from stratified.agents.baselines.moves import (
  answer,
  answering,
  FRANKENSTEIN,
  Key,
  PORTUGAL,
  retrieve_into_prompt,
  room_before_answer,
)
from stratified.agents.limits import fit, smallest_observation
from stratified.agents.rollout_setting import Setting
from stratified.types import Question, Turn

TAGS_IN_TEXT = re.compile(r"</?(?:think|search|answer|information)>")

IRCOT = """\
Answer the question by reasoning in short sentences, one a line. Each sentence states one fact \
that follows from the \
passages or from what you know. After a sentence you may be given new passages between \
<information> and \
</information>; they were found with it. When the facts suffice, write on a line of its own: So \
the answer is: \
<answer> the short answer </answer>
{passages}Question: {question}
"""


IRCOT_FEW_SHOT = (
  f"""\
Answer each question. Write one fact on each line; passages found for it come back between \
<information> and \
</information>. Then write the short answer between <answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<information>Doc 1(Title: Lisbon) Lisbon is the capital and the largest city of \
Portugal.</information>
Lisbon is the capital of Portugal.
{PORTUGAL}
The Atlantic Ocean lies to the west of Portugal.
So the answer is: <answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
{FRANKENSTEIN}
The author of Frankenstein is Mary Shelley.
So the answer is: <answer> Mary Shelley </answer>

"""
  + """\
Question: {question}
{passages}"""
)


def interleave(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...]
) -> Rollout:
  """Searches with the question, then with each sentence until one holds an answer.

  The first search counts among max_turns. A passage is put in the first time that it is found. A
  sentence without a word searches nothing and counts as invalid. After the last search the answer
  is begun for the policy.
  """
  agent = Agent(setting, question, key, prompt_ids)

  def turns() -> Turns:
    limits, protocol = setting.limits, setting.protocol
    free = limits.forced_searches is None
    seen = {passage.id for passage in (yield from retrieve_into_prompt(agent))}
    for _ in range((limits.max_turns if free else limits.forced_searches) - 1):
      if room_before_answer(agent) < 1:
        break
      stops = protocol.stops if free else protocol.more_stops
      text = yield from agent.sample(stops, reserve=agent.room() - room_before_answer(agent))
      action = protocol.parse(text)
      if free and action.kind == "answer":
        agent.turns.append(Turn("answer", text))
        return action.answer, "answer"
      seen |= yield from search_with(agent, text, seen)
    return (yield from answer(agent, begin=True))

  return (yield from agent.to_end(turns()))


def search_with(agent: Agent, text: str, seen: set[str]):
  """Searches with a sentence, feeds what is new, and returns the ids of those passages."""
  setting = agent.setting
  query = " ".join(TAGS_IN_TEXT.sub(" ", text).split())
  if not any(character.isalnum() for character in query):
    agent.turns.append(Turn("invalid", text))
    return set()
  if room_before_answer(agent) < smallest_observation(
    setting.protocol.information([]), setting.encode
  ):
    agent.turns.append(Turn("call", text))
    return set()
  (found,) = yield from agent.run(text, (("search", query),))
  fresh = [passage for passage in found if passage.id not in seen]
  if fresh:
    agent.feed(
      fit(
        setting.protocol.information([fresh]),
        min(room_before_answer(agent), setting.limits.max_observation_tokens),
        setting.encode,
        setting.decode,
      )
    )
  return {passage.id for passage in fresh}


# name -> a function of `render` (see tags.Tags)
PROTOCOLS = {
  name: answering(template, interleave, (1, None), more_stops=("\n",), after="\n")
  for name, template in (("ircot", IRCOT), ("ircot_few_shot", IRCOT_FEW_SHOT))
}
