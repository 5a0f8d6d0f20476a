"""ZeroSearch's curriculum: how much noise, what is noise, and who meets it."""

import pytest
from test_loop import ASK, PAGES, Sampler, SAY, Tokenizer, WIDE

from configs import search_r1
from stratified.agents import loop, tags
from stratified.retrieval.corpus import Passage, RetrieverError
from stratified.retrieval.noise import NoiseSettings, Noisy
from stratified.rewards.matching import holds
from stratified.runs import build
from stratified.tasks import base
from stratified.tools.base import Asker
from stratified.tools.search import Search
from stratified.types import Question

FOUND = [
  Passage("1", "Norway", "A country."),
  Passage("2", "Fjord", "Water."),
  Passage("3", "Capital", "It is Oslo."),
  Passage("4", "Bergen", "A town."),
  Passage("5", "Oslo", "A city."),
  Passage("6", "Tromsdal", "A valley."),
]
ASKED = Question("q", "Where?", ("Oslo",))
ALWAYS, NEVER = NoiseSettings(1.0, 1.0), NoiseSettings(0.0, 1e-9)


class Retriever:
  manifest = {"corpus": "x"}

  def __init__(self):
    self.calls = []

  def search(self, queries, topk):
    self.calls.append((list(queries), topk))
    return [RetrieverError("gone") if query == "gone" else FOUND[:topk] for query in queries]


def ids(settings, topk, asked=(("where", 0, ASKED),)):
  found = Noisy(Retriever(), settings, 0).search_for(asked, topk)
  return [passage.id for passage in found[0]]


###  How much  ###


def test_the_share_rises_as_in_the_paper():
  settings = NoiseSettings(noise_end=0.5, noise_steps=10)
  shares = [settings.probability(step) for step in (0, 5, 10, 99)]
  assert shares == pytest.approx([0, 1 / 6, 1 / 2, 1 / 2])
  falling = NoiseSettings(noise_start=0.4, noise_end=0.1, noise_steps=4, noise_base=9.0)
  assert falling.probability(2) == pytest.approx(0.4 - 0.3 * (3 - 1) / 8)


def test_as_many_searches_are_noisy_as_the_share_says_and_the_same_every_time():
  noisy = Noisy(Retriever(), NoiseSettings(noise_end=0.5, noise_steps=10), 3)
  share = lambda made, step: (
    sum(made.is_noisy(f"query {i}", step, ASKED) for i in range(3000)) / 3000
  )
  assert share(noisy, 0) == 0 and share(noisy, 5) == pytest.approx(1 / 6, abs=0.03)
  assert share(noisy, 10) == pytest.approx(0.5, abs=0.04)
  drawn = lambda made, step=10, of=ASKED: [made.is_noisy(f"{i}", step, of) for i in range(200)]
  assert drawn(noisy) == drawn(Noisy(Retriever(), noisy.settings, 3))
  other = Question("r", "Where?", ("Oslo",))
  assert drawn(noisy) not in (
    drawn(Noisy(Retriever(), noisy.settings, 4)),
    drawn(noisy, step=11),
    drawn(noisy, of=other),
  )


###  What  ###


def test_useful_passages_hold_the_answer_first_and_noisy_ones_never():
  assert ids(NEVER, 2) == ["3", "5"] and ids(NEVER, 3) == ["3", "5", "1"]
  assert ids(ALWAYS, 2) == ["4", "6"]  # the next best after the first two, without an answer
  assert ids(ALWAYS, 1) == ["2"]


def test_it_looks_deep_enough_and_asks_each_query_once():
  retriever = Retriever()
  other = Question("r", "Which?", ("Bergen",))
  asked = [("a", 0, ASKED), ("a", 0, other), ("gone", 0, other)]
  useful, theirs, lost = Noisy(retriever, NoiseSettings(noise_end=1e-9), 0).search_for(asked, 2)
  assert retriever.calls == [(["a", "gone"], 20)] and isinstance(lost, RetrieverError)
  assert [p.id for p in useful] == ["3", "5"] and [p.id for p in theirs] == ["4", "1"]
  ids(NoiseSettings(noise_end=0.5, noise_depth=2), 2)
  deep = Retriever()
  Noisy(deep, NoiseSettings(noise_end=0.5, noise_depth=2), 0).search_for(asked[:1], 3)
  assert deep.calls == [(["a"], 6)]


@pytest.mark.parametrize(
  "text, whether",
  [("It is Oslo.", True), ("the OSLO fjord", True), ("Oslofjord", False), ("", False)],
)
def test_an_answer_is_held_as_whole_words(text, whether):
  assert holds(text, ["Bergen", "Oslo"]) == whether
  assert not holds(text, ["The"]) and not holds(text, [])


###  Who  ###


class Recording(Search):
  takes_askers = True

  def __init__(self):
    self.calls = []

  def run(self, calls, askers):
    self.calls.append([(call, asker.step, asker.question.id) for call, asker in zip(calls, askers)])
    return Search(type("R", (), {"search": lambda _, q, k: [PAGES["Oslo"]] * len(q)})()).run(calls)


def test_the_loop_tells_who_asks_and_each_question_is_answered_for_itself():
  tool = Recording()
  script = {(q, k): [ASK, SAY] for q in (4, 7) for k in range(2)}
  groups = loop.collect(
    [ASKED, Question("r", "Which?", ("x",))],
    sampler=Sampler(script),
    tools=(tool,),
    tokenizer=Tokenizer(),
    protocol=tags.short(),
    limits=WIDE,
    samples_per_question=2,
    step=9,
    indices=[4, 7],
  )
  assert tool.calls == [[("Oslo", 9, "q"), ("Oslo", 9, "r")]]
  assert all(t.answer == "Oslo" and t.num_searches == 1 for group in groups for t in group)


def test_training_meets_noise_and_evaluation_does_not():
  config = search_r1.get_config("tiny")
  config.data.entities, config.eval.questions = 200, 40
  config.retriever.noise_end = config.retriever.noise_start = 1.0
  task = build.open_task(config)
  (asked, tools), _ = task.held_out(4).values()
  (query,) = {asked[0].text}
  useful = tools[0].run([query])
  assert useful == tools[0].run([query]) and not hasattr(tools[0].retriever, "search_for")
  noisy = task.tools[0].run([query], [Asker(0, asked[0])])
  assert noisy[0].names and noisy[0].names != useful[0].names
  assert task.row_at(0) == {"rollout/noise_probability": 1.0} and task.seconds > 0
  config.retriever.noise_end = config.retriever.noise_start = 0.0
  quiet = build.open_task(config)
  assert quiet.row_at(0) == {}
  assert quiet.demonstrations(0) == task.demonstrations(0), "a warm start is shared by both"


def test_noise_without_a_search_is_refused():
  config = search_r1.get_config("tiny")
  config.retriever.noise_end = 0.5
  with pytest.raises(ValueError, match="noise_end=0.5 .*need a search tool"):
    base.noisy(config, ())
