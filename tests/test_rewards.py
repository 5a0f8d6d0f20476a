"""Rewards: agreement with an independent writing of SQuAD's normalisation, and the decisions at the
edges."""

import collections
import itertools
import random

from hypothesis import given, settings, strategies
import pytest

from stratified import rewards
from stratified.agents import tags
from stratified.rewards import methods
from stratified.types import Call, Question, Segment, Trajectory, Turn


def reference_words(text):
  """SQuAD's normalisation written without regular expressions: character by character, then word by
  word.

  Articles are found where a word character neither precedes nor follows them, as `\\b` finds them:
  a word character is a letter, a digit or an underscore, and underscores are gone with the
  punctuation.
  """
  kept = [
    c
    for c in text.lower()
    if not (33 <= ord(c) <= 47 or 58 <= ord(c) <= 64 or 91 <= ord(c) <= 96 or 123 <= ord(c) <= 126)
  ]
  runs = ["".join(run) for _, run in itertools.groupby(kept, str.isalnum)]
  return "".join(" " if run in ("a", "an", "the") else run for run in runs).split()


def reference_match(prediction, golden):
  """Equal words; where the golden answer has none, equal spelling, which an empty answer never
  has."""
  wanted = reference_words(golden)
  if wanted:
    return float(reference_words(prediction) == wanted)
  return float(prediction.strip() != "" and prediction.strip() == golden.strip())


def reference_f1(prediction, golden):
  """F1 as the harmonic mean of precision and recall, matching words off one by one."""
  predicted, left = reference_words(prediction), list(reference_words(golden))
  if not predicted or not left:
    return reference_match(prediction, golden)
  total, common = len(left), 0
  for word in predicted:
    if word in left:
      left.remove(word)
      common += 1
  if not common:
    return 0.0
  precision, recall = common / len(predicted), common / total
  return 2 * precision * recall / (precision + recall)


ODD = [
  "The",
  "the",
  "a",
  "an",
  "A.",
  "an-",
  "U.S.A.",
  "O'Neil",
  "O’Neil",
  "São",
  "Paulo",
  "SAO",
  "Straße",
  "STRASSE",
  "İzmir",
  "i̇zmir",
  "北京",
  "Москва",
  "naïve",
  "nai\u0308ve",
  "1,000",
  "1000",
  "½",
  "e=mc²",
  "—",
  "-",
  "“the”",
  "\u00a0",
  "\u200b",
  "\t",
  "\n",
  "",
  "_the_",
  "theatre",
  "Anna",
  "ﬁne",
  "Å",
  "A\u030a",
  "🙂",
  "a🙂the",
  "the.a",
]


def odd_texts(seed, count):
  generator = random.Random(seed)
  return [
    generator.choice([" ", "", " , ", "\n"]).join(generator.choices(ODD, k=generator.randint(0, 5)))
    for _ in range(count)
  ]


def test_ten_thousand_odd_pairs_agree_with_the_independent_writing():
  predictions, golden = odd_texts(1, 10_000), odd_texts(2, 10_000)
  matches = 0
  for i, (prediction, gold) in enumerate(zip(predictions, golden)):
    others = predictions[i - 1 : i + (i % 3)]
    answers = [gold, *others]
    assert rewards.normalize_answer(prediction) == " ".join(reference_words(prediction)), repr(
      prediction
    )
    expected = max(reference_match(prediction, a) for a in answers)
    assert rewards.exact_match(prediction, answers) == expected, (prediction, answers)
    assert rewards.f1(prediction, answers) == pytest.approx(
      max(reference_f1(prediction, a) for a in answers)
    )
    matches += expected
  assert 400 < matches < 9_000, "the pairs should both match and miss"


@settings(max_examples=300, deadline=None)
@given(strategies.text())
def test_any_text_agrees_with_the_independent_writing_and_matches_itself(text):
  normalized = rewards.normalize_answer(text)
  assert normalized == " ".join(reference_words(text))
  assert rewards.exact_match(text, [text]) == rewards.f1(text, [text]) == float(bool(text.strip()))


@pytest.mark.parametrize(
  "text, expected",
  [
    ("The  Beatles!", "beatles"),
    ("a An THE", ""),
    ("", ""),
    (" \n", ""),
    ("U.S.A.", "usa"),
    ("An apple a day", "apple day"),
    ("theatre", "theatre"),
    ("São Paulo", "são paulo"),
    ("O’Neil", "o’neil"),
    ("Vitamin A", "vitamin"),
    ("北京 the 市", "北京 市"),
    ("half-life", "halflife"),
  ],
)
def test_normalisation_by_example(text, expected):
  assert rewards.normalize_answer(text) == expected


@pytest.mark.parametrize(
  "prediction, golden, match, f1",
  [
    ("Oslo", ["Bergen", "oslo."], 1.0, 1.0),
    ("Oslo", ["Bergen"], 0.0, 0.0),
    ("the city of Oslo", ["Oslo"], 0.0, 0.5),
    ("new york new york", ["New York"], 0.0, 2 / 3),
    ("Oslo", [], 0.0, 0.0),
    (None, ["Oslo"], 0.0, 0.0),
    (None, [""], 0.0, 0.0),
    ("", ["Oslo"], 0.0, 0.0),
    # a golden answer of which nothing is left is matched by its own spelling alone
    ("The", ["A"], 0.0, 0.0),
    ("", ["The"], 0.0, 0.0),
    ("", [""], 0.0, 0.0),
    (" ", [" "], 0.0, 0.0),
    ("?", ["---"], 0.0, 0.0),
    ("the", ["The The"], 0.0, 0.0),
    ("", ["A", "Oslo"], 0.0, 0.0),
    ("A ", ["A"], 1.0, 1.0),
    ("---", ["---"], 1.0, 1.0),
  ],
)
def test_matches_by_example(prediction, golden, match, f1):
  assert rewards.exact_match(prediction, golden) == match
  assert rewards.f1(prediction, golden) == pytest.approx(f1)
  assert rewards.exact_match(prediction, tuple(golden)) == match


@pytest.mark.parametrize("metric", [rewards.exact_match, rewards.f1])
def test_one_string_in_place_of_the_list_of_golden_answers_is_refused(metric):
  with pytest.raises(TypeError, match="single string 'Oslo'; give a list"):
    metric("o", "Oslo")


@pytest.mark.parametrize(
  "text, answer",
  [
    ("<answer> Oslo </answer>", "Oslo"),
    ("<answer>a</answer> no <answer>b</answer>", "b"),
    ("<answer>a</answer><answer>b", "a"),
    ("<answer>a<answer>b</answer>", "b"),
    ("<answer>\na\nb </answer>", "a\nb"),
    ("<answer></answer>", ""),
    ("Oslo", None),
    ("<answer>Oslo", None),
    ("Oslo</answer>", None),
    ("", None),
    ("</answer>Oslo<answer>", None),
  ],
)
def test_the_last_complete_answer_is_extracted(text, answer):
  assert rewards.extract_answer(text) == answer


@settings(max_examples=300, deadline=None)
@given(
  strategies.lists(
    strategies.sampled_from(["<answer>", "</answer>", "<search>", "</search>", " a", "\n"]),
    max_size=8,
  )
)
def test_an_answer_that_the_agent_takes_is_the_one_extracted(parts):
  text = "".join(parts)
  ends = [text.find(tag) + len(tag) for tag in ("</search>", "</answer>") if tag in text]
  stop = min(ends, default=None)
  action = tags.parse(text[:stop])
  if action.kind != "search":
    assert rewards.extract_answer(text[:stop]) == action.answer


def trajectory(answer="Oslo", stop="answer", fault=None, turns=(Turn("answer", ""),)):
  question = Question("q", "?", ("Oslo", "Kristiania"))
  return Trajectory(question, 3, (Segment((1,), "prompt"),), turns, answer, stop, fault)


def test_the_score_is_the_metric_of_the_answer():
  assert rewards.score(trajectory("kristiania")) == 1.0
  assert rewards.score(trajectory("in Oslo")) == 0.0 == rewards.score(trajectory(None, "turns"))
  assert rewards.score(trajectory("in Oslo"), metric=rewards.f1) == pytest.approx(2 / 3)


def test_the_format_reward_goes_to_wrong_answers_in_the_right_format_only():
  invalid = (Turn("invalid", ""), Turn("answer", ""))
  assert rewards.score(trajectory("Bergen"), format_reward=0.1) == 0.1
  assert rewards.score(trajectory("Oslo"), format_reward=0.1) == 1.0
  assert rewards.score(trajectory("Bergen", turns=invalid), format_reward=0.1) == 0.0
  assert rewards.score(trajectory("Oslo", turns=invalid), format_reward=0.1) == 1.0
  assert rewards.score(trajectory(""), format_reward=0.1) == 0.0
  assert rewards.score(trajectory(None, "length"), format_reward=0.1) == 0.0


def test_a_lost_rollout_has_no_reward():
  with pytest.raises(
    ValueError, match="rollout 3 of question 'q' was lost to a fault .no reply.; mask it"
  ):
    rewards.score(trajectory("Oslo", "fault", "no reply"))


def test_common_words_count_as_often_as_both_hold_them():
  words = collections.Counter("x x x y".split()) & collections.Counter("x x z".split())
  assert rewards.f1("x x x y", ["x x z"]) == pytest.approx(2 * sum(words.values()) / 7)


###  Sums of parts  ###


def worth(name, *args, **fields):
  return rewards.make(name)(trajectory(*args, **fields))


def test_a_sum_of_parts_has_each_part_and_its_weight():
  score = worth("exact_match + 0.25*format - .5*no_answer", "Oslo")
  assert score.total == 1.25 and dict(score.parts) == dict(exact_match=1, format=1, no_answer=0)
  score = worth("exact_match+0.25 * format - 0.5*no_answer", None, "turns")
  assert score.total == -0.5 and score.parts["no_answer"] == 1.0
  assert worth("-2*calls", "Oslo").total == -2 * trajectory("Oslo").num_calls()
  assert worth("f1", "in Oslo").total == pytest.approx(2 / 3)
  assert worth("exact_match_or_format", "Bergen").total == 0.1
  assert worth("exact_match_or_format", "Oslo").total == 1.0
  assert worth("f1_or_format", "in Oslo").total == pytest.approx(2 / 3)
  assert worth("f1_or_format", "Bergen").total == 0.1


def test_a_mean_of_each_part_is_logged():
  reward = rewards.make("exact_match + f1")
  scores = [reward(trajectory("Oslo")), reward(trajectory("Bergen"))]
  assert rewards.parts_row(scores) == {"reward/exact_match": 0.5, "reward/f1": 0.5}


@pytest.mark.parametrize(
  "name, message",
  [
    ("", "must be a sum of parts"),
    ("exact_match f1", "must be a sum of parts"),
    ("exact_match +", "must be a sum of parts"),
    ("2 exact_match", "must be a sum of parts"),
    ("exact_match*2", "must be a sum of parts"),
    ("max(exact_match, f1)", "'max' is no reward"),
    ("exact", "'exact' is no reward; choose from exact_match, f1"),
    ("f1 - 0.5*f1", "names 'f1' twice"),
    (":f", "as module:function"),
    (".x:f", "as module:function"),
  ],
)
def test_a_wrong_sum_is_one_sentence(name, message):
  with pytest.raises(ValueError, match=message) as caught:
    rewards.make(name)
  assert "\n" not in str(caught.value)


def test_a_lost_rollout_is_never_scored_by_a_sum():
  with pytest.raises(ValueError, match="was lost to a fault .*mask it"):
    worth("exact_match", "Oslo", "fault", "no reply")


###  Rewards of published methods  ###

SEARCHED = Turn("call", "<think>a</think> <search>b</search>", (Call("search", "b", "hit"),))
ANSWERED = Turn("answer", "<think>c</think>\n<answer>Oslo</answer>\n")


def test_search_r1s_format_reward_by_its_table():
  rows = {
    (True, True, True): 1.0,
    (True, False, True): 0.8,
    (False, True, True): 0.2,
    (False, False, True): 0.1,
    (False, True, False): 0.2,
    (False, False, False): 0.0,
  }
  assert {row: methods.search_r1_format(*row) for row in rows} == rows
  assert worth("search_r1_format", "Oslo", turns=(SEARCHED, ANSWERED)).total == 1.0
  assert worth("search_r1_format", "Oslo").total == 0.8
  assert worth("search_r1_format", "Rome", turns=(SEARCHED, ANSWERED)).total == 0.2
  assert worth("search_r1_format", "Rome").total == 0.1
  assert worth("search_r1_format", None, "turns", turns=(SEARCHED,)).total == 0.0


@pytest.mark.parametrize(
  "texts, whether",
  [
    (["<think>c</think><answer>a</answer>"], True),
    (["<think>c</think><search>b</search>", "<think></think> <answer>a</answer>"], True),
    (["<search>b</search>", "<think>c</think><answer>a</answer>"], False),
    (["<think>c</think><search>b</search>", "<answer>a</answer>"], False),
    (["<think>c</think>so<answer>a</answer>"], False),
    (["<think>c</think><answer>a</answer>."], False),
    (["<think>c<think>d</think><answer>a</answer>"], False),
    (["<think><information>x</information></think><answer>a</answer>"], False),
    (["<think>c</think><think>c</think><answer>a</answer>"], False),
  ],
)
def test_the_structure_is_thought_and_act_in_turns(texts, whether):
  kinds = ["call"] * (len(texts) - 1) + ["answer"]
  turns = [Turn(kind, text) for kind, text in zip(kinds, texts)]
  assert methods.structured(turns) == whether
  assert not methods.structured([*turns[:-1], Turn("invalid", texts[-1])])
  assert not methods.structured([Turn("invalid", "x"), *turns])
  assert not methods.structured([])


def test_researchs_reward_is_f1_in_its_format():
  assert [methods.research(f, ok) for f in (0.0, 0.5, 1.0) for ok in (True, False)] == [
    *(0.1, 0.0),
    *(0.5, 0.0),
    *(1.0, 0.0),
  ]
  boxed = Turn("answer", "<answer>\\boxed{Oslo}</answer>")
  assert worth("research", "in Oslo", turns=(SEARCHED, boxed)).total == pytest.approx(2 / 3)
  assert worth("research", "Rome", turns=(SEARCHED, boxed)).total == 0.1


@pytest.mark.parametrize(
  "answer, stop, texts",
  [
    (None, "answer", ["<answer>Oslo</answer>"]),  # no box
    ("Oslo", "answer", ["<think>a<answer>\\boxed{Oslo}</answer>"]),
    ("Oslo", "answer", ["<answer>x</answer> <answer>\\boxed{Oslo}</answer>"]),
    ("Oslo", "answer", ["<search>a <search>b</search>", "<answer>\\boxed{Oslo}</answer>"]),
    ("Oslo", "answer", ["<search>a</search>", "<search> <answer>\\boxed{Oslo}</answer>"]),
    ("Oslo", "answer", ["<result>x <answer>\\boxed{Oslo}</answer>"]),
    ("Oslo", "answer", ["x</result><answer>\\boxed{Oslo}</answer>"]),
    (None, "length", ["<search>a</search>", "<think>"]),
  ],
)
def test_researchs_format_is_broken(answer, stop, texts):
  kinds = ["call"] * (len(texts) - 1) + ["answer" if stop == "answer" else "invalid"]
  turns = tuple(Turn(kind, text) for kind, text in zip(kinds, texts))
  assert worth("research", answer, stop, turns=turns).total == 0.0


@pytest.mark.parametrize(
  "answer, golden, refined, reward",
  [
    ("Oslo", ["Oslo"], "", 1.0),
    ("in Oslo", ["Oslo"], "", 2 / 3),
    ("Rome", ["Oslo"], "the city of OSLO.", 0.1),
    ("Rome", ["Oslo"], "Bergen", 0.0),
    (None, ["Oslo"], "Oslo", 0.0),
    ("yes it is", ["yes"], "", 0.0),  # a golden yes has to be met exactly
    ("yes", ["yes"], "", 1.0),
    ("no", ["no one"], "", 0.0),
    ("Rome", ["A"], "a city", 0.0),  # nothing is left of this golden answer
  ],
)
def test_autorefines_reward(answer, golden, refined, reward):
  assert methods.autorefine(answer, golden, refined) == pytest.approx(reward)


@pytest.mark.parametrize(
  "text, inside",
  [
    ("<r>a</r> b <r>c\nd</r>", "a c\nd"),
    ("a</r><r>b</r><r>c", "b"),
    ("<r>a<r>b</r></r>", "a<r>b"),
    ("<r></r>", ""),
    ("a", ""),
    ("<r>" * 100_000, ""),
  ],
)
def test_what_was_written_between_tags(text, inside):
  assert methods.written(trajectory(turns=(Turn("answer", text),)), "r") == inside


def test_stepsearchs_reward_by_hand():
  # F1 0.8, M = 2 with best F1s 0.5 and 1.0: 0.8 + 0.618 x 0.75
  groups = [["a1 b1 c1", "x1 b2 c2"], ["d1 e1"]]
  covered = methods.sub_query_f1(["a1", "d1 e1", "zz"], groups)
  assert covered == pytest.approx((2 * 1 / 4 + 1) / 2)
  assert methods.stepsearch(0.8, 0.75, True) == pytest.approx(1.2635)
  assert methods.stepsearch(0.8, 0.75, False) == -1.0
  assert methods.sub_query_f1([], groups) == methods.sub_query_f1(["a1"], []) == 0.0


def test_stepsearch_counts_what_follows_the_answer_as_none():
  groups = {"q": [["b"]]}
  reward = rewards.make("stepsearch", groups)
  assert reward(trajectory("Oslo", turns=(SEARCHED, ANSWERED))).total == pytest.approx(1.618)
  late = Turn("answer", ANSWERED.text + "I am sure.")
  assert reward(trajectory("Oslo", turns=(SEARCHED, late))).total == -1.0
  assert reward(trajectory(None, "turns", turns=(SEARCHED,))).total == -1.0


def test_reference_queries_come_from_a_file_that_is_checked(tmp_path):
  path = tmp_path / "sub_queries.jsonl"
  path.write_text('{"id": "q", "sub_queries": [["b", "c"], ["d"]]}\n')
  made = rewards.of(rewards.RewardSettings("stepsearch", str(path)))
  found = made(trajectory("Oslo", turns=(SEARCHED, ANSWERED))).total
  assert found == pytest.approx(1 + 0.618 * 0.5)
  path.write_text('{"id": "q", "sub_queries": ["b"]}\n{"id": 1}\n')
  with pytest.raises(ValueError, match="holds 2 bad lines; each must be a question"):
    rewards.of(rewards.RewardSettings("stepsearch", str(path)))
  with pytest.raises(ValueError, match="holds no line"):
    rewards.of(rewards.RewardSettings("stepsearch", str(tmp_path / "absent")))
  with pytest.raises(ValueError, match="needs reference queries; .*reward.sub_queries=PATH"):
    rewards.make("f1 + stepsearch")


def test_a_mistyped_reward_is_told_the_nearest():
  with pytest.raises(ValueError, match="'reserch' is no reward; .*did you mean research?"):
    rewards.make("reserch")
