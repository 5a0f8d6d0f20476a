"""Searches once, with the question, and answers from the passages (arXiv 2005.11401's task)."""

from stratified.agents.agent import Agent, Rollout, Turns
from stratified.agents.baselines.moves import (
  answer,
  answering,
  FRANKENSTEIN,
  Key,
  PORTUGAL,
  retrieve_into_prompt,
)
from stratified.agents.rollout_setting import Setting
from stratified.types import Question

RAG = """\
Answer the question. These passages were found for it; they may help, or be about something else:
{passages}
Write the short answer alone, between <answer> and </answer>, as in <answer> Lisbon </answer>: no \
explanation, no \
whole sentence.
Question: {question}
"""


RAG_FEW_SHOT = (
  f"""\
Answer each question from the passages between <information> and </information>. Write the short \
answer between \
<answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
{PORTUGAL}
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
{FRANKENSTEIN}
<answer> Mary Shelley </answer>

"""
  + """\
Question: {question}
{passages}
"""
)


def retrieve_first(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...]
) -> Rollout:
  """Searches once with the question itself, then generates: retrieval-augmented generation."""
  agent = Agent(setting, question, key, prompt_ids)

  def turns() -> Turns:
    yield from retrieve_into_prompt(agent)
    return (yield from answer(agent))

  return (yield from agent.to_end(turns()))


# name -> a function of `render` (see tags.Tags)
PROTOCOLS = {
  "rag": answering(RAG, retrieve_first, (1, 1)),
  "rag_few_shot": answering(RAG_FEW_SHOT, retrieve_first, (1, 1)),
}
