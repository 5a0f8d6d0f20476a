"""Answers at once, without a search: directly, or after reasoning (arXiv 2201.11903)."""

from stratified.agents.agent import Agent, Rollout
from stratified.agents.baselines.moves import answer, answering, Key
from stratified.agents.rollout_setting import Setting
from stratified.types import Question

DIRECT = """\
Answer the question with the short answer alone: no explanation, no whole sentence. Write it \
between <answer> and \
</answer>, as in <answer> Lisbon </answer>.
Question: {question}
"""


DIRECT_FEW_SHOT = """\
Answer each question. Write the short answer between <answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
<answer> Mary Shelley </answer>

Question: {question}
"""


COT = """\
Answer the question. First think it through step by step between <think> and </think>. Then write \
the answer between \
<answer> and </answer>: only the short answer itself, as in <answer> Lisbon </answer>.
Question: {question}
"""


COT_FEW_SHOT = """\
Answer each question. Think first, then write the short answer between <answer> and </answer>.

Question: Which ocean lies to the west of the country whose capital is Lisbon?
<think> Lisbon is the capital of Portugal. The ocean to the west of Portugal is the Atlantic \
Ocean. </think>
<answer> Atlantic Ocean </answer>

Question: Who wrote the novel Frankenstein?
<think> Frankenstein is a novel of 1818. Its author is Mary Shelley. </think>
<answer> Mary Shelley </answer>

Question: {question}
"""


def answer_once(
  setting: Setting, question: Question, key: Key, prompt_ids: tuple[int, ...]
) -> Rollout:
  """Generates once, to answer: direct inference and chain of thought."""
  agent = Agent(setting, question, key, prompt_ids)
  return (yield from agent.to_end(answer(agent)))


# name -> a function of `render` (see tags.Tags)
PROTOCOLS = {
  "direct": answering(DIRECT, answer_once, (0, 0)),
  "direct_few_shot": answering(DIRECT_FEW_SHOT, answer_once, (0, 0)),
  "cot": answering(COT, answer_once, (0, 0)),
  "cot_few_shot": answering(COT_FEW_SHOT, answer_once, (0, 0)),
}
