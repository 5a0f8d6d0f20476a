"""Which rollouts become pairs: every rule on groups made by hand, and the file of pairs."""

import dataclasses
import json
import random

import pytest

from stratified.algorithms import pair_records
from stratified.algorithms.pairs import best_stratum, distance, mine, PairSettings, query_words
from stratified.types import Call, Question, Segment, Trajectory, Turn

QUESTION = Question("q1", "Who?", ("Ada",), "made", 2)


def rollout(sample, *queries, tokens=4, question=QUESTION, **fields):
  """A well-formed rollout with these queries and so many policy tokens."""
  calls = [
    Turn("call", f"<search>{query}</search>", (Call("search", query, "hit", ("7",)),))
    for query in queries
  ]
  segments = (
    Segment((1, 2), "prompt"),
    Segment(tuple(range(3, 3 + tokens)), "policy", (-0.5,) * tokens),
    Segment((9,), "observation"),
  )
  turns = (*calls, Turn("answer", "<answer>Ada</answer>"))
  return Trajectory(question, sample, segments, turns, **{"answer": "Ada"} | fields)


def mined(group, rewards, seed=0, **fields):
  return mine([group], [rewards], PairSettings(**fields), seed=seed)


def samples(group, rewards, **fields):
  """(reference's sample, student's sample) of the group's only pair."""
  (pair,) = mined(group, rewards, **fields).pairs
  return pair.reference.sample, pair.student.sample


###  Distance  ###


def test_distance_is_searches_then_words_of_queries_then_tokens():
  one = rollout(0, "The sea, of Norway", "sea", tokens=4)
  other = rollout(1, "norway's SEA", tokens=9)
  assert query_words(one) == {"sea", "of", "norway"}
  assert distance(one, other) == (1, 1 - 1 / 4, 5)  # {sea} of {sea, of, norway, norways}
  assert distance(other, one) == distance(one, other)
  assert distance(one, one) == (0, 0.0, 0)
  assert distance(rollout(0), rollout(1)) == (0, 0.0, 0), "no queries at all"
  assert distance(rollout(0, "the"), rollout(1, "a b")) == (0, 1.0, 0)


def test_only_searches_count():
  call = Call("calculator", "1 + 1", "hit")
  other = dataclasses.replace(rollout(1), turns=(Turn("call", "", (call,)),))
  assert distance(rollout(0), other) == (0, 0.0, 0)


###  The reference  ###

GROUP = [
  rollout(0, "x", "y", tokens=3),  # right
  rollout(1, "x"),  # wrong
  rollout(2),  # right, no search
  rollout(3, "x"),  # right
  rollout(4, "z"),  # wrong
  rollout(5, "x", "y", tokens=2),  # right
]
REWARDS = [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
  "rule, expected",
  [
    ("fewest_searches", 2),
    ("fewest_searches_some", 3),
    ("stratified", 5),  # two searches: 2 of 2; none: 1 of 1; one: 1 of 3
    ("shortest_correct", 5),  # two tokens; the others have three or four
  ],
)
def test_rules_of_the_reference(rule, expected):
  assert samples(GROUP, REWARDS, reference=rule)[0] == expected


def test_equal_references_go_by_sample_wherever_they_stand():
  group = [rollout(0, "x"), rollout(1, "y"), rollout(2, "z", "z")]
  for rule in ("fewest_searches", "fewest_searches_some", "stratified"):
    assert samples(group, [1, 1, 0], reference=rule)[0] == 0
    assert samples(group[::-1], [0, 1, 1], reference=rule)[0] == 0


def test_the_best_stratum_is_of_more_rollouts_then_of_fewer_searches_where_shares_are_equal():
  none, one, two = (
    (lambda k: rollout(k)),
    (lambda k: rollout(k, "x")),
    (lambda k: rollout(k, *"xy")),
  )
  assert best_stratum([none(0), one(1), one(2)], [none(0), one(1), one(2)]) == 1
  assert best_stratum([none(0), one(1), one(2), one(3)], [none(0), one(1), one(2)]) == 0
  assert best_stratum([two(0), one(1)], [two(0), one(1)]) == 1
  assert best_stratum([none(0), none(1), two(2), two(3)], [none(0), two(2), two(3)]) == 2


def test_a_group_whose_right_rollouts_never_searched_has_no_reference_that_did():
  pairs, stats = mined([rollout(0), rollout(1, "x")], [1, 0], reference="fewest_searches_some")
  assert not pairs and stats["pairs/skipped_no_search"] == stats["pairs/skipped_share"] == 1


def test_a_wrong_reference_teaches_another_wrong_rollout_the_most_different_one():
  group = [
    rollout(0, "x"),  # right
    rollout(1, "x"),  # wrong
    rollout(2, "x", "y", "z"),  # wrong
    rollout(3, *"abcdef"),  # right, further from any wrong one than those are
  ]
  seen = {
    (pair.reference.sample, pair.student.sample, pair.reference_reward, pair.student_reward)
    for seed in range(20)
    for pair in mined(group, [1, 0, 0, 1], seed, reference="random_wrong").pairs
  }
  assert seen == {(1, 2, 0, 0), (2, 1, 0, 0)}
  group = [rollout(0, "x"), rollout(1), rollout(2, "x"), rollout(3, "x", "y"), rollout(4, *"xyz")]
  for seed in range(20):
    (pair,) = mined(group, [1, 0, 0, 0, 0], seed, reference="random_wrong").pairs
    expected = max(group[1:], key=lambda one: distance(pair.reference, one))
    assert pair.student is expected and pair.student is not pair.reference
  (pair,) = mined(group, [1, 0, 0, 0, 0], reference="random_wrong", student="least_different").pairs
  assert pair.distance[0] == 1, "the rule of the student holds as for any reference"


@pytest.mark.parametrize(
  "rewards, reason", [([1, 0, 1], "one_wrong"), ([1, 1, 1], "one_wrong"), ([0, 0, 0], "all_wrong")]
)
def test_a_wrong_reference_needs_two_wrong_rollouts_beside_a_right_one(rewards, reason):
  group = [rollout(0), rollout(1, "x"), rollout(2, "x", "y")]
  pairs, stats = mined(group, rewards, reference="random_wrong")
  assert not pairs and stats[f"pairs/skipped_{reason}"] == stats["pairs/skipped_share"] == 1
  assert stats[f"pairs/skipped_{reason}_hops_2"] == 1
  lost = [*group[:2], rollout(2, "x", "y", fault="gone"), rollout(3)]
  _, stats = mined(lost, [1, 0, None, 1], reference="random_wrong")
  assert stats["pairs/skipped_one_wrong"] == 1, "a lost rollout is not a wrong one"


###  The student  ###


@pytest.mark.parametrize("rule, expected", [("most_different", 4), ("least_different", 2)])
def test_rules_of_the_student(rule, expected):
  group = [
    rollout(0, "a b"),  # right
    rollout(1, "a", "b", tokens=5),  # wrong by one search, the same words
    rollout(2, "a b", tokens=9),  # wrong, other length alone
    rollout(3, "c d", "e", "f"),  # right, and further than any
    rollout(4, "c", "d"),  # wrong by one search, other words
    rollout(5, "c", "d"),  # the same
  ]
  assert samples(group, [1, 0, 0, 1, 0, 0], student=rule) == (0, expected)


def test_the_longest_wrong_one_is_the_student_and_of_equal_ones_the_first():
  group = [rollout(0, tokens=9), rollout(1), rollout(2, tokens=6), rollout(3, tokens=6)]
  assert samples(group, [1, 0, 0, 0], student="longest_wrong") == (0, 2)
  assert samples(group, [1, 1, 1, 0], student="longest_wrong", reference="random_correct")[1] == 3


def test_every_right_rollout_is_a_reference_with_a_student_of_its_own():
  found = mined(GROUP, REWARDS, reference="every_correct")
  assert [pair.reference.sample for pair in found.pairs] == [0, 2, 3, 5]
  # The wrong ones searched once for x, once for z: of 0's two searches for x and y, z is unlike.
  assert [pair.student.sample for pair in found.pairs] == [4, 1, 4, 4]
  assert [pair.reference_reward for pair in found.pairs] == [1] * 4
  assert {pair.student_reward for pair in found.pairs} == {0}
  assert {pair.right_share for pair in found.pairs} == {4 / 6}
  assert found.stats["pairs/count"] == 4 and found.stats["pairs/skipped_share"] == 0
  right = mined(GROUP[:2] + GROUP[2:4], [1, 1, 1, 1], reference="every_correct").pairs
  assert all(pair.reference.sample != pair.student.sample for pair in right) and len(right) == 4
  spoilt = [dataclasses.replace(one, answer=None) for one in GROUP]
  found = mined(spoilt, REWARDS, reference="every_correct", max_invalid_share=0.0)
  assert not found.pairs and found.stats["pairs/skipped_invalid"] == 1


def test_a_contrast_is_a_wrong_rollout_besides_the_student():
  group = [rollout(0), rollout(1, "x"), rollout(2, "y", "z"), rollout(3), rollout(4)]
  seen = set()
  for seed in range(20):
    (pair,) = mined(group, [1, 0, 0, 1, 0], seed=seed, contrast=1.0).pairs
    assert pair.student.sample == 2 and pair.right_share == 0.4
    seen.add(pair.contrast.sample)
  assert seen == {1, 4}
  assert mined(group, [1, 0, 0, 1, 0]).pairs[0].contrast is None
  found = mined(group, [1, 0, 1, 1, 1], contrast=0.5)
  assert not found.pairs and found.stats["pairs/skipped_no_contrast"] == 1
  with pytest.raises(ValueError, match="contrast=0.5 with pairs.reference='random_wrong'"):
    PairSettings(contrast=0.5, reference="random_wrong")


def test_length_decides_last():
  group = [rollout(0), rollout(1, tokens=6), rollout(2, tokens=9), rollout(3, tokens=9)]
  assert samples(group, [1, 0, 0, 0]) == (0, 2)
  assert samples(group[::-1], [0, 0, 0, 1]) == (0, 2)


@pytest.mark.parametrize("rule", ["most_different", "least_different", "random_wrong"])
def test_where_none_is_wrong_another_right_one_is_the_student(rule):
  group = [rollout(0), rollout(1, "x"), rollout(2, "x", "y")]
  _, stats = mined(group, [1, 1, 1], student=rule)
  assert stats["pairs/all_right"] == 1 and stats["pairs/count"] == 1
  expected = {"most_different": {2}, "least_different": {1}, "random_wrong": {1, 2}}[rule]
  assert samples(group, [1, 1, 1], student=rule)[1] in expected


def test_random_rules_draw_by_seed_and_question_alone():
  groups = []
  for q in range(60):
    question = dataclasses.replace(QUESTION, id=f"q{q}")
    groups.append([rollout(k, question=question) for k in range(6)])
  rewards = [[1, 0, 1, 0, 1, 0]] * 60
  settings = PairSettings(reference="random_correct", student="random_wrong")
  chosen = lambda groups, seed: {
    pair.reference.question.id: (pair.reference.sample, pair.student.sample)
    for pair in mine(groups, rewards, settings, seed=seed).pairs
  }
  first = chosen(groups, 3)
  assert {one for one, _ in first.values()} == {0, 2, 4}
  assert {one for _, one in first.values()} == {1, 3, 5}
  assert len(set(first.values())) == 9, "the two draws are independent"
  shuffled = random.Random(0).sample(groups, 60)
  assert chosen(shuffled, 3) == first and chosen(groups, 4) != first
  # BLAKE2b (8 bytes, big-endian) of "3/reference/q0" mod 3 is 2, of "3/student/q0" 1.
  assert first["q0"] == (4, 3), "the same in every process"


###  What is left out  ###


def test_skipped_questions_by_reason_and_hops():
  of = lambda name, hops: dataclasses.replace(QUESTION, id=name, hops=hops)
  lost = dict(fault="the server is gone")
  groups = [
    [rollout(0, question=of("all wrong", 1)), rollout(1, question=of("all wrong", 1))],
    [rollout(0, question=of("all right", 1)), rollout(1, question=of("all right", 1))],
    [rollout(0, question=of("alone", 2))],
    [rollout(0, question=of("lost", 2), **lost), rollout(1, question=of("lost", 2), **lost)],
    [rollout(0, "x", question=of("one left", 2)), rollout(1, question=of("one left", 2), **lost)],
    [rollout(0, "x", question=of("pair", None)), rollout(1, "y", "z", question=of("pair", None))],
  ]
  rewards = [[0, 0], [1, 1], [1], [None, None], [1, None], [1, 0]]
  pairs, stats = mine(groups, rewards, PairSettings(), seed=0)
  assert [pair.reference.question.id for pair in pairs] == ["all right", "pair"]
  assert stats["pairs/count"] == 2 and stats["pairs/lost"] == 3
  share = lambda name: stats[f"pairs/{name}"]
  assert share("skipped_all_wrong") == share("skipped_lost") == 1 / 6
  assert share("skipped_single") == 2 / 6 and share("skipped_share") == 4 / 6
  assert share("all_right") == 3 / 6, "of what was not lost"
  assert (share("skipped_all_wrong_hops_1"), share("skipped_all_wrong_hops_2")) == (1 / 2, 0)
  assert (share("all_right_hops_1"), share("count_hops_1"), share("count_hops_2")) == (1 / 2, 1, 0)
  assert (share("reference_searches"), share("student_searches")) == (0.5, 1)
  assert share("search_distance") == 0.5 and share("query_distance") == 0.5
  assert "pairs/reference_searches_hops_2" not in stats, "no mean of nothing"
  assert not any("None" in key for key in stats)


def test_a_rollout_lost_to_a_fault_is_neither_reference_nor_student():
  lost = dict(fault="gone")
  group = [rollout(0, **lost), rollout(1, "x"), rollout(2, "y"), rollout(3, *"abcd", **lost)]
  assert samples(group, [1, 1, 0, 0]) == (1, 2)


def test_the_only_right_one_is_the_reference_and_never_the_student():
  assert samples([rollout(0), rollout(1)], [0, 1]) == (1, 0)
  pairs, stats = mined([rollout(0)], [1])
  assert not pairs and stats["pairs/skipped_single"] == 1
  pairs, stats = mined([rollout(0)], [0])
  assert not pairs and stats["pairs/skipped_all_wrong"] == 1


def test_right_is_a_reward_of_at_least_correct_at():
  group = [rollout(0), rollout(1, "x"), rollout(2, "x", "y")]
  assert samples(group, [0.4, 0.6, 1.0]) == (2, 0)
  assert samples(group, [0.4, 0.6, 1.0], correct_at=0.6) == (1, 0)
  pair = mined(group, [0.4, 0.6, 1.0]).pairs[0]
  assert (pair.reference_reward, pair.student_reward, pair.distance) == (1.0, 0.4, (2, 1.0, 0))


@pytest.mark.parametrize("most, kept", [(1.0, 8), (0.5, 4), (0.25, 1), (0.0, 0)])
def test_students_that_broke_the_format_are_at_most_a_share(most, kept):
  broken = dict(stop="length", answer=None)
  groups, rewards = [], [[1, 0]] * 12
  for q in range(12):  # 4 well formed, 8 not
    question = dataclasses.replace(QUESTION, id=f"q{q}")
    groups.append(
      [rollout(0, question=question), rollout(1, question=question, **broken if q > 3 else {})]
    )
  settings = PairSettings(max_invalid_share=most)
  pairs, stats = mine(groups, rewards, settings, seed=0)
  ids = [pair.reference.question.id for pair in pairs]
  assert len(ids) == 4 + kept and {"q0", "q1", "q2", "q3"} <= set(ids)
  assert stats["pairs/student_invalid"] == kept / (4 + kept)
  assert stats["pairs/skipped_invalid"] == (8 - kept) / 12
  backwards = mine(groups[::-1], rewards, settings, seed=0).pairs
  assert [pair.reference.question.id for pair in backwards] == ids[::-1]


def test_rewards_that_are_none_are_refused():
  with pytest.raises(ValueError, match="rollout 1 of question 'q1' has the reward None"):
    mined([rollout(0), rollout(1)], [1, None])
  with pytest.raises(ValueError, match="has the reward nan"):
    mined([rollout(0), rollout(1)], [1, float("nan")])
  with pytest.raises(ValueError, match="a group of 2 rollouts has 1 rewards"):
    mined([rollout(0), rollout(1)], [1])


###  The file  ###


@pytest.fixture
def rows():
  """The rows of a file, as JSON gives them back."""
  decode = lambda ids: "".join(map(chr, ids))
  group = [rollout(0, "sea of Norway", tokens=3), rollout(1, "x", stop="length", answer=None)]
  group.append(rollout(2, "sea"))
  pairs = mined(group, [1, 0, 0], max_invalid_share=1.0, contrast=1.0).pairs
  return json.loads(json.dumps(pair_records.records(pairs, decode, "abc"))), pairs


def test_a_row_says_what_was_asked_and_what_each_rollout_did(rows):
  (row,), _ = rows
  assert (row["question_id"], row["question"], row["golden_answers"]) == ("q1", "Who?", ["Ada"])
  assert (row["weights"], row["hops"]) == ("abc", 2)
  assert row["distance"] == {"searches": 0, "queries": 1.0, "policy_tokens": 1}
  reference, student = row["reference"], row["student"]
  assert (reference["sample"], student["sample"]) == (0, 1)
  assert (reference["reward"], student["reward"]) == (1.0, 0.0)
  assert (reference["searches"], reference["queries"]) == (1, ["sea of Norway"])
  assert (student["stop"], student["answer"]) == ("length", None)
  assert row["contrast"]["sample"] == 2 and row["right_share"] == 1 / 3
  assert reference["segments"][1] == {
    "origin": "policy",
    "text": "\x03\x04\x05",
    "token_ids": [3, 4, 5],
  }


def test_what_is_read_back_is_what_was_mined_but_for_log_probs(rows):
  found, pairs = pair_records.restore(rows[0], "abc"), rows[1]
  silent = lambda one: dataclasses.replace(
    one,
    segments=tuple(
      dataclasses.replace(segment, log_probs=(0.0,) * len(segment.log_probs))
      for segment in one.segments
    ),
  )
  assert found == [
    pair._replace(
      **{part: silent(getattr(pair, part)) for part in ("reference", "student", "contrast")}
    )
    for pair in pairs
  ]


@pytest.mark.parametrize(
  "change, sentence",
  [
    (lambda row: row.pop("student"), r"row 1 of the pairs is damaged \(KeyError: 'student'\)"),
    (lambda row: row["student"].pop("turns"), "damaged"),
    (lambda row: row["student"]["segments"].append(3), "damaged"),
    (lambda row: row["distance"].update(searches=5), "damaged.*its distance is"),
    (lambda row: row.update(weights="xyz"), "weights xyz, not by abc"),
    (lambda row: row["student"].update(sample=0), "one rollout as both"),
  ],
)
def test_a_damaged_row_is_refused(rows, change, sentence):
  change(rows[0][0])
  with pytest.raises(ValueError, match=sentence):
    pair_records.restore(rows[0], "abc")
