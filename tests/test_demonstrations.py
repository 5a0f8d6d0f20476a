"""The scripted policy, played through the real loop, protocol and retriever."""

import collections
import itertools

import pytest

from stratified import rewards
from stratified.agents import loop, protocols, tags
from stratified.agents.limits import Limits
from stratified.retrieval.bm25 import BM25
from stratified.sampling.interface import Request
from stratified.tasks.encyclopedia import demonstrations, language, pages, questions, vocabulary
from stratified.tasks.encyclopedia.demonstrations import DemonstrationConfig
from stratified.tools.search import Search

WORLD = pages.make(pages.EncyclopediaConfig(entities=600), 0)
TOKENIZER = vocabulary.build()
RETRIEVER = BM25(WORLD.passages)
ASKED = questions.training_questions(WORLD, seed=0, step=7, count=100)
FAULTLESS = dict(mixture=(0.25,) * 4, wrong_query=0.0, wrong_relation=0.0, invalid=0.0)
LIMITS = dict(
  max_turns=4, max_turn_tokens=32, max_observation_tokens=128, max_tokens=512, answer_tokens=8
)


def play(
  config=DemonstrationConfig(**FAULTLESS),
  *,
  seed=0,
  samples=4,
  asked=ASKED,
  topk=2,
  protocol=tags.short(),
  **limits,
):
  """All trajectories of the questions, as the loop returns them, and the demonstrator."""
  tokenizer = vocabulary.build(protocol.marks)
  script = demonstrations.Demonstrator(
    WORLD, tokenizer, seed=seed, config=config, protocol=protocol
  )
  script.begin(7, asked)
  groups = loop.collect(
    asked,
    sampler=script,
    tools=(Search(RETRIEVER, topk),),
    tokenizer=tokenizer,
    protocol=protocol,
    limits=Limits(**{**LIMITS, **limits}),
    samples_per_question=samples,
    step=7,
  )
  trajectories = list(itertools.chain(*groups))
  assert all(t.fault is None for t in trajectories)
  return trajectories, script


def right(trajectory):
  return rewards.exact_match(trajectory.answer or "", trajectory.question.golden_answers) == 1


def share_right(trajectories):
  return sum(map(right, trajectories)) / len(trajectories)


def test_only_as_many_searches_as_hops_give_the_right_answer():
  trajectories, script = play()
  by_depth = collections.defaultdict(list)
  for i, trajectory in enumerate(trajectories):
    assert (
      trajectory.num_searches == script.depth((7, i // 4, i % 4)) and trajectory.stop == "answer"
    )
    by_depth[trajectory.question.hops, trajectory.num_searches].append(trajectory)
  assert len(by_depth) == 16
  for (hops, searches), found in by_depth.items():
    if hops == searches:
      assert share_right(found) > 0.9, (hops, searches)  # a near-duplicate may hide the page
    else:
      assert share_right(found) < 0.1, (
        hops,
        searches,
      )  # only by way of a wrong page, or by a lucky guess


def test_with_its_page_always_found_the_script_is_always_right():

  class Oracle:
    """Finds a page of somebody else, then the page whose title begins the query."""

    def search(self, queries, topk):
      page_of = {page.title: page for page in WORLD.passages}
      names = [query.rsplit(" ", 1)[0] for query in queries]
      return [
        [other, page_of[name]] if name in page_of else []
        for name in names
        for other in [next(p for p in WORLD.passages if p.title != name)]
      ]

  config = DemonstrationConfig(guess=0.0, **FAULTLESS)
  script = demonstrations.Demonstrator(WORLD, TOKENIZER, seed=1, config=config)
  script.begin(0, ASKED)
  groups = loop.collect(
    ASKED,
    sampler=script,
    tools=(Search(Oracle(), 2),),
    tokenizer=TOKENIZER,
    protocol=tags.short(),
    limits=Limits(**LIMITS),
    samples_per_question=4,
    step=0,
  )
  for trajectory in itertools.chain(*groups):
    assert right(trajectory) == (trajectory.num_searches == trajectory.question.hops)


def test_a_share_of_the_rollouts_searches_as_often_as_there_are_hops():
  trajectories, script = play(
    DemonstrationConfig(**FAULTLESS | dict(mixture=(0.0, 0.0, 1.0), right_calls=0.4)), samples=8
  )
  for hops in (0, 1, 3):
    depths = collections.Counter(t.num_searches for t in trajectories if t.question.hops == hops)
    total = sum(depths.values())
    assert depths[2] + depths[hops] == total and abs(depths[hops] / total - 0.4) < 0.12
  assert [t.num_searches for t in trajectories[::8]] == [
    script.depth((7, i, 0)) for i in range(100)
  ]


def test_depths_follow_the_mixture_whatever_the_question():
  trajectories, _ = play(
    DemonstrationConfig(**FAULTLESS | dict(mixture=(0.1, 0.6, 0.0, 0.3))), samples=16
  )
  for hops in range(4):
    depths = collections.Counter(t.num_searches for t in trajectories if t.question.hops == hops)
    total = sum(depths.values())
    assert depths[2] == 0
    assert abs(depths[1] / total - 0.6) < 0.12 and abs(depths[3] / total - 0.3) < 0.12


def test_demonstrations_repeat_by_seed_and_do_not_depend_on_what_else_is_asked():
  first, _ = play(DemonstrationConfig())
  assert first == play(DemonstrationConfig())[0]
  assert [t.token_ids for t in first] != [
    t.token_ids for t in play(DemonstrationConfig(), seed=1)[0]
  ]
  assert play(DemonstrationConfig(), asked=ASKED[:5])[0] == first[:20]


def test_too_few_searches_answer_with_a_link_of_the_chain():
  trajectories, _ = play(DemonstrationConfig(guess=0.0, **FAULTLESS))
  early = [t for t in trajectories if t.num_searches < t.question.hops]
  on_chain = [
    t.answer == questions.chain_of(WORLD, t.question).entities[t.num_searches] for t in early
  ]
  assert len(early) > 50 and sum(on_chain) > 0.9 * len(early)


def test_without_a_search_a_guess_is_of_the_right_kind():
  trajectories, _ = play(DemonstrationConfig(**FAULTLESS | dict(mixture=(1.0,), guess=1.0)))
  for t in trajectories:
    if t.question.hops:
      assert WORLD.by_name[t.answer].kind == WORLD.by_name[t.question.golden_answers[0]].kind
    else:
      assert right(t)
  assert len({t.answer for t in trajectories}) > 50


def test_turns_are_one_action_each_and_the_script_is_certain():
  trajectories, _ = play()
  for t in trajectories:
    assert [turn.action for turn in t.turns] == ["call"] * t.num_searches + ["answer"]
    policy = [s for s in t.segments if s.origin == "policy"]
    assert all(set(s.log_probs) == {0.0} for s in policy)
    assert all(len(s.token_ids) <= 8 for s in policy)


@pytest.mark.parametrize("plan", ["query", "think", "none"])
def test_the_plan_stands_where_it_was_asked_for(plan):
  trajectories, _ = play(DemonstrationConfig(plan=plan, **FAULTLESS), samples=1)
  nouns = {noun for relation in language.RELATIONS.values() for noun in relation.nouns}
  seen = 0
  for t in trajectories:
    if t.question.hops and t.num_searches:
      seen += 1
      in_query = t.calls[0].argument.split()[-1] in nouns
      in_think = t.turns[0].text.startswith("<think>")
      assert (in_query, in_think) == (plan == "query", plan == "think")
      assert t.calls[0].argument.startswith(questions.chain_of(WORLD, t.question).entities[0])
  assert seen > 20


def test_each_imperfection_happens_at_its_rate_and_costs():
  clean = share_right([t for t in play()[0] if t.num_searches == t.question.hops > 0])
  for name in ("wrong_query", "wrong_relation"):
    spoiled, _ = play(DemonstrationConfig(**{**FAULTLESS, name: 0.5}))
    matching = [t for t in spoiled if t.num_searches == t.question.hops > 0]
    assert share_right(matching) < clean - 0.15, name
  spoiled, _ = play(DemonstrationConfig(**{**FAULTLESS, "wrong_query": 1.0, "mixture": (0.0, 1.0)}))
  heads = [questions.chain_of(WORLD, t.question).entities[0] for t in spoiled if t.question.hops]
  queries = [t.calls[0].argument for t in spoiled if t.question.hops]
  assert sum(query.startswith(head + " ") for query, head in zip(queries, heads)) < 0.05 * len(
    heads
  )


def test_an_invalid_turn_is_corrected_and_the_script_goes_on():
  trajectories, _ = play(DemonstrationConfig(**{**FAULTLESS, "invalid": 0.3}))
  share = sum(t.num_invalid for t in trajectories) / sum(len(t.turns) for t in trajectories)
  assert 0.1 < share < 0.3
  recovered = [
    t for t in trajectories if t.num_invalid == 1 and t.num_searches == t.question.hops > 0
  ]
  assert len(recovered) > 20 and share_right(recovered) > 0.8
  assert all(
    t.stop == "answer" for t in trajectories
  )  # also where invalid turns used up the searches


def test_common_knowledge_searched_for_is_answered_wrongly_by_what_was_read():
  trajectories, _ = play()
  searched = [t for t in trajectories if t.question.hops == 0 and t.num_searches]
  assert len(searched) > 20 and not any(map(right, searched))
  assert {s.outcome for t in searched for s in t.calls} == {"hit", "empty"}


def test_a_page_cut_short_is_read_as_far_as_it_goes():
  trajectories, _ = play(
    DemonstrationConfig(guess=0.0, **FAULTLESS), max_observation_tokens=20, topk=1
  )
  matching = [t for t in trajectories if t.num_searches == t.question.hops > 0]
  assert 0.05 < share_right(matching) < 0.9


def test_a_turn_longer_than_asked_for_is_cut():
  script = demonstrations.Demonstrator(
    WORLD, TOKENIZER, seed=0, config=DemonstrationConfig(**FAULTLESS)
  )
  script.begin(0, ASKED)
  script.submit(Request((0, 0, 0), tuple(TOKENIZER.encode("Question:")), max_new_tokens=2))
  (completion,) = script.poll()
  assert (
    completion.finish == "length" and len(completion.token_ids) == len(completion.log_probs) == 2
  )
  assert script.poll() == []


def test_a_request_for_an_unknown_question_is_refused():
  script = demonstrations.Demonstrator(WORLD, TOKENIZER, seed=0)
  with pytest.raises(
    ValueError, match=r"question 0 of step 3: call begin\(step, questions\) first"
  ):
    script.submit(Request((3, 0, 0), (1,), 8))


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (dict(mixture=(0.5, 0.6)), "must be shares of at least 0 that sum to 1"),
    (dict(mixture=()), "must be shares"),
    (dict(mixture=(0.5, float("nan"))), r"mixture=\(0.5, nan\) must be finite"),
    (dict(mixture=(0.2,) * 5, max_turns=3), "asks for up to 4 calls, but rollout.max_turns is 3"),
    (dict(plan="aloud"), "plan 'aloud' is unknown: choose one of query, think, none"),
    (dict(invalid=1.5), "invalid=1.5 must be at least 0 and at most 1"),
    (dict(guess=float("nan")), "guess=nan is no share"),
  ],
)
def test_settings_that_make_no_sense_are_refused_in_a_sentence(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    DemonstrationConfig(**arguments)


@pytest.mark.parametrize("name", ["research", "autorefine", "stepsearch"])
def test_demonstrations_speak_the_tags_of_the_protocol(name):
  protocol = protocols.PROTOCOLS[f"{name}_short"]()
  plain, _ = play(asked=ASKED[:20])
  spoken, _ = play(asked=ASKED[:20], protocol=protocol)
  tokenizer = vocabulary.build(protocol.marks)
  assert len(tokenizer.encode("".join(protocol.marks))) == len(protocol.marks)  # a token each
  for one, other in zip(plain, spoken):
    assert (one.answer, one.num_searches) == (other.answer, other.num_searches)
    text = tokenizer.decode(other.token_ids)
    assert text.count(f"</{protocol.results}>") == other.num_searches
    if protocol.digest:
      assert text.count(f"</{protocol.digest}>") == other.num_searches
  if name != "stepsearch":
    worth = rewards.make(name)
    assert all(worth(other).total == 1.0 for other in spoken if right(other))
    assert {worth(other).total for other in spoken} >= {1.0, 0.1}


def test_the_tags_of_another_protocol_leave_the_other_ids_as_they_are():
  more = vocabulary.build(protocols.PROTOCOLS["autorefine_short"]().marks)
  for piece in (*vocabulary.TAGS, *vocabulary.FIXED, " Who"):
    assert more.encode(piece) == TOKENIZER.encode(piece)
