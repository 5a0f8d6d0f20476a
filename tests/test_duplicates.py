"""Questions that stand twice, by their words."""

import pytest

from stratified.data import duplicates


def records(*questions):
  return [{"id": str(i), "question": question} for i, question in enumerate(questions)]


@pytest.mark.parametrize(
  "one, other",
  [
    ("Who wrote Hamlet?", "who wrote hamlet"),
    ("Who  wrote 'Hamlet' ?", "WHO WROTE HAMLET!"),
    ("Where is Café Ünder?", "where is cafe\u0301 under"),
    ("ﬁrst １ film", "first 1 film"),
    ("straße", "STRASSE"),
    ("東京はどこ？", "東京はどこ"),
  ],
)
def test_case_punctuation_and_accents_make_no_other_question(one, other):
  assert duplicates.key(one) == duplicates.key(other)


@pytest.mark.parametrize(
  "one, other",
  [
    ("who wrote hamlet", "who wrote the hamlet"),
    ("a b", "b a"),
    ("3.14", "31 4"),
    ("?", "!"),
    ("नदी", "नद"),
  ],
)
def test_other_words_are_another_question(one, other):
  assert duplicates.key(one) != duplicates.key(other)


def test_finds_what_stands_where():
  train = {"nq": records("a b?", "c", "c!", "d e"), "hotpotqa": records("D, e", "f", "g")}
  benchmarks = {"nq": records("A B"), "popqa": records("a b", "F?", "h", "H")}
  found = duplicates.find(train, benchmarks)
  assert found.across == {"nq / nq": 1, "nq / popqa": 1, "hotpotqa / popqa": 1}
  assert found.within == {"train nq": 1, "benchmark popqa": 1}
  assert found.between == {"hotpotqa / nq": 1}
  assert [r["question"] for r in found.kept["nq"]] == ["c", "c!", "d e"]
  assert [r["question"] for r in found.kept["hotpotqa"]] == ["D, e", "g"]
  assert found.removed == {"nq": 1, "hotpotqa": 1}


def test_nothing_is_compared_with_nothing():
  found = duplicates.find({"nq": records("a")}, {})
  assert (found.across, found.within, found.between, found.removed) == ({}, {}, {}, {"nq": 0})
  assert duplicates.find({}, {"nq": records("a")}).kept == {}
