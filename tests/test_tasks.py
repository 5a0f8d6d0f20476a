"""The generated tasks with a calculator: answers read off the text, splits, demonstrations."""

import collections
import re

import pytest

from configs import arithmetic as presets
from configs import search_r1
from stratified.runs import build
from stratified.tasks import ages, arithmetic, draws, named
from stratified.tasks.draws import generator

SHARES = (0.25, 0.25, 0.25, 0.25)


def config(preset="tiny", **changes):
  made = presets.get_config(preset)
  made.update_from_flattened_dict({"data.entities": 60, "data.questions_per_step": 40} | changes)
  return made


def problems(count=200, seed=0, limits=(100, 99_999), **options):
  return arithmetic.questions(SHARES, count, generator(seed, 0, 1), limits, **options)


# ---------------------------------------------------------------- arithmetic


def worked_out(text: str) -> int:
  """The answer by reading the text, sentence by sentence, with no help of the generator."""
  *said, asked = re.findall(r"[^.?]+[.?]", text)
  who = re.search(r"(?:does|of) (\w+)", asked)[1]
  value = None
  for sentence in map(str.strip, said):
    number = int(re.search(r"\d+", sentence)[0])
    starts = re.search(r"^(\w+) has|^There are .* house of (\w+)", sentence)
    if starts:
      value = number if who in (starts[1], starts[2]) else value
    elif re.search("buys|given", sentence):
      value += number
    elif re.search("sells|lost", sentence):
      value -= number
    elif re.search("times as many|of each", sentence):
      value *= number
    else:
      assert re.search("part of|one in", sentence) and value % number == 0, sentence
      value //= number
  return value


@pytest.mark.parametrize("second", [False, True])
def test_the_text_says_what_the_answer_is(second):
  asked = problems(held_out=second, second=second)
  for question in asked:
    assert question.golden_answers == (str(worked_out(question.text)),), question.text
    assert arithmetic.problem_of(question).id == question.id
    assert question.hops == len(arithmetic.problem_of(question).steps)
    assert min(arithmetic.problem_of(question).values) > 0
  assert collections.Counter(q.hops for q in asked) == dict.fromkeys(range(4), 50)
  assert len({q.id for q in asked}) == len(asked)


def test_training_never_asks_what_is_held_out():
  training = {q.id for seed in range(5) for q in problems(seed=seed, held_out=False)}
  held_out = {q.id for q in problems(seed=9, held_out=True)}
  assert not training & held_out
  assert all(draws.is_held_out(q.id) for q in problems(held_out=True))


def test_the_second_wording_uses_no_word_that_training_lacks():
  words = lambda asked: {word for q in asked for word in re.findall("[A-Za-z]+", q.text)}
  assert words(problems(held_out=True, second=True)) <= words(problems(1000, held_out=False))
  sentences = lambda asked: {re.sub(r"\d+|[A-Z][a-z]+ ", "", q.text) for q in asked}
  assert not sentences(problems(held_out=True, second=True)) & sentences(
    problems(1000, held_out=False)
  )


@pytest.mark.parametrize("module", [arithmetic, ages])
def test_a_number_is_cut_from_the_left_and_every_text_comes_back(module):
  tokenizer = module.tokenizer()
  pieces = [tokenizer.decode([token]) for token in tokenizer.encode("43125+7=1000007 x")]
  assert pieces[:6] == ["431", "25", "+", "7", "=", "100"]
  assert tokenizer.decode(tokenizer.encode("Ann: 0071.50 <a>é")) == "Ann: 0071.50 <a>é"
  for tag in ("<calculator>", "</calculator>", "<answer>", "</information>"):
    assert len(tokenizer.encode(tag)) == 1
  for text in (q.text for q in problems(held_out=False)):
    assert module is ages or len(tokenizer.encode(text)) < 70


# ---------------------------------------------------------------- ages


def looked_up(book, text: str) -> int:
  """The answer by reading the text and the pages."""
  year_of = lambda name: int(
    re.search(r"born in (\d+)", next(p.text for p in book.passages if p.title == name))[1]
  )
  names = [name for name in book.names if re.search(rf"\b{name}\b", text)]
  names.sort(key=text.index)
  years = [int(year) for year in re.findall(r"\d+", text)]
  if " was born in " in text and years:
    return years[0]
  if "older" in text:
    return year_of(names[1]) - year_of(names[0])
  if not names:
    return years[1] - years[0]
  return years[0] - year_of(names[0]) if years else year_of(names[0])


def test_the_pages_say_what_the_answer_is():
  book = ages.people(ages.EncyclopediaConfig(entities=60, near_duplicates=0.0), 3)
  asked = ages.questions(book, SHARES, 200, generator(0, 0, 1), held_out=False)
  for question in asked:
    assert question.golden_answers == (str(looked_up(book, question.text)),), question.text
    kind, about = ages.of_id(question)
    assert ages.WORDING[kind][0] == question.hops == len(ages.plan(kind, about))
    assert int(question.golden_answers[0]) > 0
  assert {ages.of_id(q)[0] for q in asked} == set(ages.WORDING)
  held_out = ages.questions(book, SHARES, 100, generator(0, 0, 1), held_out=True)
  assert not {q.id for q in held_out} & {q.id for q in asked}


def test_more_people_than_there_are_names_are_refused():
  with pytest.raises(ValueError, match="data.entities=2400 must be at most 2000"):
    ages.people(ages.EncyclopediaConfig(entities=2400), 0)


# ---------------------------------------------------------------- as tasks


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_a_task_is_a_function_of_seed_and_step(preset):
  task, again = named.make(config(preset)), named.make(config(preset))
  assert task.questions_at(3) == again.questions_at(3) != task.questions_at(4)
  assert task.held_out(30)["held_out"][0] == again.held_out(30)["held_out"][0]
  ids = {q.id for step in range(5) for q in task.questions_at(step)}
  assert not ids & {q.id for q in task.held_out(60)["held_out"][0]}
  first, second = (asked for asked, _ in task.held_out(30).values())
  assert not {q.id for q in first} & {q.id for q in second}
  tokens = lambda step: [one.token_ids for [one] in task.demonstrations(step)]
  assert tokens(2) == tokens(2) != tokens(3)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_only_as_many_calls_as_are_needed_are_right(preset):
  """Faultless scripts: a right number of calls answers, another one does so only by chance."""
  clean = {"wrong_query": 0.0, "invalid": 0.0, "demonstrations_per_step": 60}
  task = named.make(config(preset, **{f"warm_start.{k}": v for k, v in clean.items()}))
  right = collections.defaultdict(list)
  for step in range(10):
    for [one] in task.demonstrations(step):
      assert one.fault is None and one.stop == "answer" and one.num_invalid == 0
      enough = one.num_calls() == one.question.hops
      right[enough].append(one.answer == one.question.golden_answers[0])
  assert all(right[True]) and len(right[True]) > 100
  assert sum(right[False]) < 0.25 * len(right[False])
  used = {
    call.tool for step in range(3) for [one] in task.demonstrations(step) for call in one.calls
  }
  assert used == set(task.tool_names)


def by_hops(asked):
  return [sum(one.hops == hops for one in asked) for hops in range(4)]


@pytest.mark.parametrize("name", ["encyclopedia", "arithmetic", "ages"])
def test_training_may_ask_more_of_the_deep_questions_than_the_other_sets(name):
  """40 questions of each; the demonstrations' are as the held-out ones."""
  changes = {
    "task.name": name,
    "data.training_hop_shares": (0.1, 0.2, 0.3, 0.4),
    "data.hop_shares": SHARES,
    "warm_start.demonstrations_per_step": 40,
    "warm_start.right_calls": 1.0,
    "warm_start.invalid": 0.0,
  }
  task = named.make(config("two_tools", **changes))
  assert by_hops(task.questions_at(3)) == [4, 8, 12, 16]
  assert all(by_hops(asked) == [10] * 4 for asked, _ in task.held_out(40).values())
  played = [one for [one] in task.demonstrations(0)]
  assert by_hops([one.question for one in played]) == [10] * 4
  assert all(one.num_calls() == one.question.hops for one in played)


def test_a_task_is_named_by_task_name_or_by_data_name():
  assert named.name_of(search_r1.get_config("tiny")) == "encyclopedia"
  assert named.name_of(search_r1.get_config("base")) == "search_qa"
  assert named.name_of(config()) == "arithmetic" and named.name_of(config("two_tools")) == "ages"
  with pytest.raises(ValueError, match="task.name='cooking' is unknown; choose one of search_qa"):
    named.name_of(config(**{"task.name": "cooking"}))
  with pytest.raises(ValueError, match="task.name='arithmetic' has no passages to search"):
    named.passages(config())


def test_tools_by_name():
  task = named.make(config("two_tools", tools="calculator, search"))
  assert task.tool_names == ("calculator", "search") == task.protocol.tools
  assert named.make(config("two_tools", tools="search")).tool_names == ("search",)
  with pytest.raises(ValueError, match="tools='clock' names 'clock', which is no tool"):
    named.make(config(tools="clock"))
  with pytest.raises(ValueError, match="two tools are called 'calculator'"):
    named.make(config(tools="calculator,stratified.tools.calculator:Calculator"))


@pytest.mark.parametrize(
  "preset, changes, way",
  [
    ("tiny", {"data.smallest": 9, "data.largest": 99}, "widen data.smallest .. data.largest"),
    ("two_tools", {"data.hop_shares": (0.0, 1.0, 0.0, 0.0), "data.entities": 40}, "data.entities"),
  ],
)
def test_more_questions_than_there_are_end_in_a_sentence(preset, changes, way, monkeypatch):
  monkeypatch.setattr(ages, "YEARS", (1100, 1110))
  task = named.make(config(preset, **changes))
  assert len(task.held_out(5)["held_out"][0]) == 5
  with pytest.raises(ValueError, match=f"ran out; lower eval.questions, or .*{way}"):
    task.held_out(300)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"data.smallest": 1}, "data.smallest=1 must be at least 2"),
    ({"data.largest": 500}, "data.largest=500 must be at least 10 times"),
    ({"data.hop_shares": (0.5, 0.5, 0.5, 0.5)}, "must be four shares"),
    ({"data.training_hop_shares": (0.5, 0.5)}, "data.training_hop_shares=.* must be four shares"),
    ({"warm_start.mixture": (0.5, 0.4)}, "warm_start.mixture=.* sum to 1"),
    ({"warm_start.mixture": (0.2,) * 5}, "asks for up to 4 calls, but rollout.max_turns is 3"),
  ],
)
def test_settings_out_of_range_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    named.check(config(**change))


def test_strata_of_two_tools_name_the_tools():
  made = config("two_tools")
  task = named.make(made)
  assign = build.partition(made, task.tool_names)
  assert assign.num_strata == 4
  for step in range(3):
    group = [one for [one] in task.demonstrations(step)]
    for one, stratum in zip(group, assign.assign(group, step)):
      assert stratum == bool(one.num_calls("search")) + 2 * bool(one.num_calls("calculator"))
