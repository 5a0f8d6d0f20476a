"""Lists the tag protocols of published methods, each as data: what differs from Search-R1's.

    research              ReSearch (arXiv 2503.19470): results in <result>, the answer in a box
    autorefine            AutoRefine (2505.11277): results in <documents>, summed up in <refine>
    stepsearch            StepSearch (2505.15107): results summed up in <observation>
    search_r1_plus_plus   Search-R1++ (2602.19526): no <think>
    r1                    R1 (2501.12948): reasoning and an answer, no tool

Each has three wordings: the instruction; `NAME_few_shot`, two worked examples for a model that
follows no instruction; `NAME_short`, the bare question, for a policy that is built here and learns
the tags from demonstrations. The instructions are worded here, not the papers'.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

from stratified.agents import prompts
from stratified.agents.baselines.direct import answer_once
from stratified.agents.tags import Tags
from stratified.retrieval.corpus import Passage
from stratified.tools.base import Tool
from stratified.tools.search import Search

RESEARCH = """\
Answer the question that the user asks. Reason first, between <think> and </think>; think again \
after each search. Whenever you lack a fact, write a query between <search> and </search>: what \
it finds is given to you between <result> and </result>. Search as often as you need to. At the \
end write one answer between <answer> and </answer>, with the short final answer in a box, as in \
<answer> It is \\boxed{Lisbon} </answer>."""

RESEARCH_PLAIN = f"""\
A user asks an assistant a question. The assistant was told: {RESEARCH}
User: {{question}}
Assistant:"""

AUTOREFINE = """\
Answer the question at the end. Reason between <think> and </think>. For a fact that you lack, \
write a query between <search> and </search>; the passages it finds are given to you between \
<documents> and </documents>. After each search, write between <refine> and </refine> only what \
matters of them. You may search several times. As soon as you know enough, write the short answer \
alone between <answer> and </answer>, as in <answer> Lisbon </answer>.
Question: {question}
"""

STEPSEARCH = """\
Answer the question at the end, step by step. In each step, plan between <think> and </think> what \
to find out next, and write one simple query for it between <search> and </search>; the passages \
it finds are given to you between <information> and </information>. Then write between \
<observation> and </observation> what you learnt. You have few steps, so ask about one thing at a \
time. As soon as you know enough, write the short answer alone between <answer> and </answer>, as \
in <answer> Lisbon </answer>, and nothing after it.
Question: {question}
"""

LAST_STEP = "\nThis is my last step: I answer now, between <answer> and </answer>.\n"

NO_THINK = """\
Answer the question at the end. For a fact that you lack, write a query between <search> and \
</search>; the passages it finds are given to you between <information> and </information>. You \
may search several times. As soon as you know enough, write the answer between <answer> and \
</answer>: only the short answer itself, no explanation, as in <answer> Lisbon </answer>.
Question: {question}
"""

R1 = """\
Answer the question at the end. Reason first, between <think> and </think>. Then write the answer \
between <answer> and </answer>: only the short answer itself, no explanation, as in <answer> \
Lisbon </answer>.
Question: {question}
"""

# name -> the fields of Tags in which the protocol differs from Search-R1's
FORMS: dict[str, Mapping[str, Any]] = {
  "research": {
    "template": RESEARCH_PLAIN,
    "system": RESEARCH,
    "results": "result",
    "before": " ",
    "inside": "\n",
    "after": "",
    "answer": "boxed",
    "corrective": "",  # a turn that neither searches nor answers is the response's end
  },
  "autorefine": {"template": AUTOREFINE, "results": "documents", "digest": "refine"},
  "stepsearch": {"template": STEPSEARCH, "digest": "observation", "last_words": LAST_STEP},
  "search_r1_plus_plus": {"template": NO_THINK},
  "r1": {"template": R1, "tools": (), "rollout": answer_once, "searches": (0, 0)},
}
WITHOUT_THOUGHT = ("search_r1_plus_plus",)

# Question, thought, query, its passage, what it says, thought, answer: no method sees another fact.
EXAMPLES = (
  (
    "Which ocean lies to the west of the country whose capital is Lisbon?",
    "Lisbon is the capital of Portugal. I need the ocean to its west.",
    "Portugal coast ocean",
    Passage(
      "",
      "Portugal",
      "Portugal is a country on the Iberian Peninsula. It is bordered by Spain to the north and "
      "east and by the Atlantic Ocean to the west and south.",
    ),
    "Portugal is bordered by the Atlantic Ocean to the west.",
    "The ocean is named.",
    "Atlantic Ocean",
  ),
  (
    "Who wrote the novel Frankenstein?",
    "I should look up the novel.",
    "Frankenstein novel author",
    Passage(
      "",
      "Frankenstein",
      "Frankenstein; or, The Modern Prometheus is an 1818 novel written by the English author Mary "
      "Shelley.",
    ),
    "Frankenstein was written by Mary Shelley.",
    "The author is Mary Shelley.",
    "Mary Shelley",
  ),
)


def worked(protocol: Tags, thought: bool) -> str:
  """Writes the template of two worked examples in the protocol's own tags."""
  told = "Answer the question."
  if protocol.tools:
    results, digest = protocol.results, protocol.digest
    told += (
      " To look something up, write a query between <search> and </search>; passages come back "
      f"between <{results}> and </{results}>."
    )
    told += f" Sum them up between <{digest}> and </{digest}>." if digest else ""
  told += " Then write the short answer between <answer> and </answer>"
  told += ", in a box." if protocol.answer == "boxed" else "."
  return "\n\n".join(
    [told, *(_shown(protocol, thought, *e) for e in EXAMPLES), "Question: {question}\n"]
  )


def _shown(protocol: Tags, thought: bool, question, before, query, passage, fact, after, answer):
  """One worked example: the turns of a rollout, and what was fed between them."""
  think = lambda text: f"<think> {text} </think>\n" if thought else ""
  lines = f"Question: {question}\n"
  if protocol.tools:
    found = protocol.information([[passage]])
    lines += f"{think(before)}<search> {query} </search>"
    lines += found.opening + "".join(found.pieces) + found.closing
    lines += f"{protocol.digested(fact)}\n" if protocol.digest else ""
  else:
    after = f"{fact} {after}"
  return (lines + think(after) + protocol.answered(answer)).rstrip()


def make(
  name: str,
  wording: str,
  render: Callable[..., str] | None = None,
  tools: Sequence[Tool | type[Tool]] = (Search,),
) -> Tags:
  """Makes the protocol of FORMS in a wording: "", "few_shot" or "short".

  Raises ValueError for other tools than search, which are not part of these methods.
  """
  form = dict(FORMS[name])
  names = [tool.name for tool in tools]
  if form.get("tools", ("search",)) and names != ["search"]:
    raise ValueError(
      f"rollout.protocol={name!r} is a protocol of search alone, and the tools are "
      f"{', '.join(names) or 'none'}; choose search_r1, short or tool_calls"
    )
  if wording == "few_shot":
    form |= {"system": "", "before": "\n", "after": "\n", "inside": ""}
    form["template"] = worked(Tags(**form), name not in WITHOUT_THOUGHT)
  if wording == "short":
    form |= {"template": prompts.SHORT, "system": "", "before": "", "after": "", "inside": ""}
    form |= {"last_words": "", "corrective": form.get("corrective", prompts.SHORT_CORRECTIVE)}
    if form["corrective"]:
      tag = form.get("results", "information")
      form["corrective"] = prompts.SHORT_CORRECTIVE.replace("information", tag)
  return Tags(render=render, **form)


# name -> a function of (render, tools), as the task's TAGS have them
PROTOCOLS: dict[str, Callable[..., Tags]] = {
  f"{name}{'_' * bool(wording)}{wording}": functools.partial(make, name, wording)
  for name in FORMS
  for wording in ("", "few_shot", "short")
}
