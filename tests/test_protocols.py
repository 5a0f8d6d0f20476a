"""The protocols of published methods, each played through the real agent loop by test_loop's
scripted sampler: what is fed, what is sampled, and what is trained on, token by token."""

import dataclasses
import json

import pytest
import test_loop
from test_loop import PAGES, Retriever, Sampler, Tokenizer

from stratified import rewards
from stratified.agents import protocols, tags
from stratified.agents.chat import ChatTemplate
from stratified.agents.limits import Limits
from stratified.algorithms.base import by_origin
from stratified.tasks import base
from stratified.types import Question

QUESTION = Question("q0", "Where?", ("Oslo",))
LIMITS = Limits(
  max_turns=3, max_turn_tokens=200, max_observation_tokens=300, max_tokens=4000, answer_tokens=30
)
OSLO = "Doc 1(Title: Oslo) Oslo is a city.\nDoc 2(Title: Oslo Fjord) A fjord."
BERGEN = "Doc 1(Title: Bergen) Bergen is a town."
ASK, ASK_MORE = "<think> hm </think>\n<search> Oslo </search>", "<search>Bergen</search>"
SAY = "<answer> Oslo </answer>"


def play(name, *turns, render=None, **changes):
  sampler, retriever = Sampler({(0, 0): turns}), Retriever(PAGES)
  limits = dataclasses.replace(LIMITS, **changes)
  protocol = protocols.PROTOCOLS[name](render=render)
  ((trajectory,),) = test_loop.collect(
    [QUESTION], sampler, retriever, protocol=protocol, limits=limits
  )
  test_loop.check(trajectory, sampler, limits)
  return trajectory, sampler, retriever


def assert_is(trajectory, *parts):
  """The tokens are those of the parts after the prompt, and the mask is 1 on the policy's alone."""
  (_, prompt), *rest = test_loop.texts(trajectory)
  tokens, mask = Tokenizer().encode(prompt), [0.0] * len(prompt)
  for origin, text in parts:
    tokens += Tokenizer().encode(text)
    mask += [float(origin == "policy")] * len(text)
  assert rest == list(parts)
  assert trajectory.token_ids == tokens
  assert by_origin(trajectory, policy=1.0) == mask
  return prompt


def worth(name, trajectory, **options):
  return rewards.make(name, **options)(trajectory).total


###  A rollout of each  ###


def test_research_reads_the_box_and_feeds_results():
  boxed = "<think> so </think>\n<answer> It is \\boxed{Oslo} </answer>"
  trajectory, sampler, retriever = play("research", ASK, ASK_MORE, boxed)
  prompt = assert_is(
    trajectory,
    ("policy", ASK),
    ("observation", f" <result>\n{OSLO}\n</result>"),
    ("policy", ASK_MORE),
    ("observation", f" <result>\n{BERGEN}\n</result>"),
    ("policy", boxed),
  )
  assert prompt.startswith("A user asks an assistant") and prompt.endswith(
    "User: Where?\nAssistant:"
  )
  assert (trajectory.answer, trajectory.stop, trajectory.num_searches) == ("Oslo", "answer", 2)
  assert sampler.requests[0].stop == ("</search>", "</answer>")
  assert retriever.calls == [(["Oslo"], 2), (["Bergen"], 2)]
  assert worth("research", trajectory) == 1.0


def test_research_ends_where_nothing_is_asked_and_an_answer_without_a_box_is_none():
  trajectory, _, _ = play("research", "I give up")
  assert_is(trajectory, ("policy", "I give up"))
  assert (trajectory.answer, trajectory.stop, trajectory.num_invalid) == (None, "turns", 1)
  assert worth("research", trajectory) == 0.0
  trajectory, _, _ = play("research", SAY)
  assert (trajectory.answer, trajectory.stop) == (None, "answer")
  assert worth("research", trajectory) == worth("exact_match", trajectory) == 0.0
  assert worth("no_answer", trajectory) == 1.0


def test_research_shows_its_instruction_as_a_system_message():
  chat = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[said]")
  trajectory, _, _ = play("research", SAY, render=chat.user)
  prompt = test_loop.texts(trajectory)[0][1]
  assert prompt == f"[system]{protocols.RESEARCH}[user]Where?[said]"


def test_autorefine_refines_what_it_reads():
  refine = "<refine> Oslo is a city. </refine>\n" + SAY
  trajectory, sampler, _ = play("autorefine", ASK, refine)
  prompt = assert_is(
    trajectory,
    ("policy", ASK),
    ("observation", f"\n\n<documents>{OSLO}</documents>\n\n"),
    ("policy", refine),
  )
  assert "<refine>" in prompt and prompt.endswith("Question: Where?\n")
  assert trajectory.answer == "Oslo" and sampler.requests[0].stop == ("</search>", "</answer>")
  assert worth("autorefine", trajectory) == 1.0


def test_autorefine_rewards_refining_but_no_retrieval_alone():
  wrong = "<answer> Rome </answer>"
  trajectory, _, _ = play("autorefine", ASK, "<refine> it is Oslo </refine>" + wrong)
  assert worth("autorefine", trajectory) == pytest.approx(0.1)
  trajectory, _, _ = play("autorefine", ASK, "<refine> a city </refine>" + wrong)
  assert worth("autorefine", trajectory) == 0.0  # the documents name Oslo, the policy does not
  trajectory, _, _ = play("autorefine", ASK, "<refine> it is Oslo </refine>", "x", "y")
  assert trajectory.answer is None and worth("autorefine", trajectory) == 0.0


def test_stepsearch_warns_before_its_last_turn():
  seen = "<observation> a city </observation>" + ASK_MORE
  trajectory, sampler, _ = play("stepsearch", ASK, seen, SAY, max_turns=2)
  assert_is(
    trajectory,
    ("policy", ASK),
    ("observation", f"\n\n<information>{OSLO}</information>\n\n"),
    ("policy", seen),
    ("observation", f"\n\n<information>{BERGEN}</information>\n\n{protocols.LAST_STEP}"),
    ("policy", SAY),
  )
  assert trajectory.answer == "Oslo" and sampler.requests[-1].last
  groups = {"q0": [["Oslo"], ["Bergen town", "Trondheim"]]}
  found = worth("stepsearch", trajectory, sub_queries=groups)
  assert found == pytest.approx(1 + 0.618 * (1 + 2 / 3) / 2)


def test_the_warning_takes_its_room_from_the_observation():
  prompt = protocols.PROTOCOLS["stepsearch"]().prompt("Where?")
  tight = len(prompt) + len(ASK) + len(protocols.LAST_STEP) + LIMITS.answer_tokens + 60
  trajectory, _, _ = play("stepsearch", ASK, SAY, max_turns=1, max_tokens=tight)
  observation = test_loop.texts(trajectory)[2][1]
  assert observation.endswith(f"</information>\n\n{protocols.LAST_STEP}")
  assert len(observation) == 60 + len(protocols.LAST_STEP) and trajectory.answer == "Oslo"


def test_search_r1_plus_plus_asks_for_no_thoughts():
  trajectory, _, _ = play("search_r1_plus_plus", ASK_MORE, SAY)
  prompt = assert_is(
    trajectory,
    ("policy", ASK_MORE),
    ("observation", f"\n\n<information>{BERGEN}</information>\n\n"),
    ("policy", SAY),
  )
  assert "think" not in prompt
  name = "f1 - 0.1*no_search - 0.1*no_answer"
  assert worth(name, trajectory) == 1.0
  assert worth(name, play("search_r1_plus_plus", SAY)[0]) == 0.9
  assert worth(name, play("search_r1_plus_plus", *"abcd")[0]) == pytest.approx(-0.2)


def test_r1_is_one_generation_without_a_tool():
  said = "<think> <search> Oslo </search> </think>" + SAY
  trajectory, sampler, retriever = play("r1", said)
  prompt = assert_is(trajectory, ("policy", said))
  assert "search" not in prompt and retriever.calls == []
  (request,) = sampler.requests
  assert request.last and request.stop == ("</answer>",)
  assert (trajectory.answer, trajectory.num_searches) == ("Oslo", 0)


###  Other wordings  ###


@pytest.mark.parametrize("name", protocols.FORMS)
def test_worked_examples_are_rollouts_of_the_protocol(name):
  """What an example shows as fed is what is fed, and its answers are read as such."""
  protocol = protocols.PROTOCOLS[f"{name}_few_shot"]()
  template = protocol.template
  assert template.count("Question: ") == 3 and template.endswith("Question: {question}\n")
  for *_, query, passage, _, _, answer in protocols.EXAMPLES:
    found = protocol.information([[passage]])
    if protocol.tools:
      asked = f"<search> {query} </search>{found.opening}{found.pieces[0]}{found.closing}"
      assert asked in template
    assert protocol.parse(protocol.answered(answer)).answer == answer
    assert protocol.answered(answer) in template
  assert ("<think>" in template) == (name != "search_r1_plus_plus")
  assert template.count("<refine>") == (3 if name == "autorefine" else 0)


def test_the_short_wordings_keep_the_tags():
  trajectory, _, _ = play("autorefine_short", "x", ASK, SAY)
  assert_is(
    trajectory,
    ("policy", "x"),
    ("observation", "<documents>No search.</documents>"),
    ("policy", ASK),
    ("observation", f"<documents>{OSLO}</documents>"),
    ("policy", SAY),
  )
  trajectory, _, _ = play("research_short", ASK, "<answer> \\boxed{Oslo}</answer>")
  assert_is(
    trajectory,
    ("policy", ASK),
    ("observation", f"<result>{OSLO}</result>"),
    ("policy", "<answer> \\boxed{Oslo}</answer>"),
  )
  assert protocols.PROTOCOLS["search_r1_plus_plus_short"]() == dataclasses.replace(
    tags.short(), template="Question: {question}\n"
  )


###  Parts  ###


@pytest.mark.parametrize(
  "text, inside",
  [
    ("\\boxed{Oslo}", "Oslo"),
    ("so \\boxed{ a } and \\boxed{b}.", "b"),
    ("\\boxed{x_{1}} y", "x_{1}"),
    ("\\boxed{\\boxed{a}}", "\\boxed{a}"),
    ("\\boxed{}", ""),
    ("\\boxed{a", None),
    ("\\boxed{a} \\boxed{b", "a"),
    ("boxed{a}", None),
    ("", None),
  ],
)
def test_the_last_closed_box_is_read(text, inside):
  assert tags.boxed(text) == inside


@pytest.mark.parametrize("name", ["research", "autorefine", "stepsearch", "search_r1_plus_plus"])
def test_other_tools_are_refused(name):
  from stratified.tools.calculator import Calculator

  with pytest.raises(ValueError, match=f"'{name}' is a protocol of search alone.*calculator"):
    protocols.PROTOCOLS[name](tools=(Calculator,))


def test_a_mistyped_protocol_is_told_the_nearest():
  from stratified.tasks.base import ProtocolSettings

  with pytest.raises(ValueError, match="'autorefin' is unknown; .*did you mean autorefine?"):
    ProtocolSettings(protocol="autorefin")


def test_tables_tell_which_protocols_compare():
  families = {name: make(render=None).family for name, make in base.TAGS.items()}
  assert {families[name] for name in ("direct", "cot", "r1", "r1_few_shot")} == {"no search"}
  assert families["rag"] == "one search"
  assert families["search_r1"] == families["research"] == families["ircot"] == "one context"


###  Native tool calls, as a config names them  ###


def test_a_model_whose_template_ignores_tools_is_refused_or_told_of_them(tmp_path):
  from test_tool_calls import IGNORES

  from configs import search_r1
  from stratified.tasks.encyclopedia import vocabulary
  from stratified.tools.search import Search

  end = vocabulary.build().decode([vocabulary.build().eos_id])
  vocabulary.build().save(tmp_path / "tokenizer.json")
  stored = {"chat_template": IGNORES.replace("<|im_end|>", end), "eos_token": end}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(stored))
  config = search_r1.get_config("tiny")
  config.policy.checkpoint, config.rollout.protocol = str(tmp_path), "tool_calls"
  with pytest.raises(ValueError, match="--config.rollout.tool_schema=system"):
    base.protocol(config, (Search,))
  config.rollout.tool_schema = "system"
  assert '"name": "search"' in base.protocol(config, (Search,)).prompt("Where?")
