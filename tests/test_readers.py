"""Questions from files, and the order in which training takes them."""

import collections
import gzip
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from configs import search_r1
from stratified.data import readers
from stratified.data.readers import questions_at, read_questions
from stratified.tasks import search_qa
from stratified.tools import search as search_tool
from stratified.types import Question

LINE = {
  "id": "dev_0",
  "question": "Who wrote Hamlet?",
  "golden_answers": ["Shakespeare", "William Shakespeare"],
}


def write_jsonl(path, *records):
  lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
  data = "".join(line + "\n" for line in lines).encode()
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  return path


def verl_row(index=0, source="searchR1_nq", split="train", **changes):
  """A row as Search-R1's and verl's preparation scripts write it."""
  row = {
    "data_source": source,
    "prompt": [
      {"role": "system", "content": "Be brief."},
      {"role": "user", "content": "Answer it. Question: a word. Question: who wrote hamlet?\n"},
    ],
    "reward_model": {"ground_truth": {"target": ["Shakespeare"]}, "style": "rule"},
    "extra_info": {"index": index, "split": split},
  }
  return row | changes


def write_parquet(path, *rows):
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
  return path


###  FlashRAG's form  ###


@pytest.mark.parametrize("name", ["nq.jsonl", "nq.jsonl.gz"])
def test_reads_flashrag_plain_and_compressed(tmp_path, name):
  path = write_jsonl(tmp_path / name, LINE, "", LINE | {"id": 1, "golden_answers": "one"})
  assert read_questions(path) == [
    Question("dev_0", "Who wrote Hamlet?", ("Shakespeare", "William Shakespeare"), "nq", None),
    Question("1", "Who wrote Hamlet?", ("one",), "nq", None),
  ]


def test_the_set_is_named_by_argument_record_file_or_folder(tmp_path):
  record = LINE | {"source": "tags of another meaning"}
  assert read_questions(write_jsonl(tmp_path / "popqa.jsonl", record))[0].source == "popqa"
  assert read_questions(write_jsonl(tmp_path / "popqa/test.jsonl", record))[0].source == "popqa"
  named = write_jsonl(tmp_path / "popqa.jsonl", record | {"data_source": "searchR1_musique"})
  assert read_questions(named)[0].source == "musique"
  assert read_questions(named, source="mine")[0].source == "mine"


def test_splits_are_chosen_by_name(tmp_path):
  path = write_jsonl(
    tmp_path / "nq.jsonl", LINE | {"split": "train"}, LINE | {"id": "b", "split": "dev"}
  )
  assert [question.id for question in read_questions(path, split="dev")] == ["b"]
  assert len(read_questions(path)) == 2
  with pytest.raises(ValueError, match="no record has split 'test'; splits there: dev, train"):
    read_questions(path, split="test")


@pytest.mark.parametrize(
  "record, parts",
  [
    ('{"id": "2",', ["line 2", "not JSON"]),
    (
      {"id": "2", "golden_answers": ["x"]},
      ["line 2", '"question"', "missing", "golden_answers, id"],
    ),
    (LINE | {"id": "2", "question": ""}, ["line 2", '"question"', "non-empty"]),
    ({"id": "2", "question": "?"}, ["line 2", '"golden_answers"', "prepare_data.py"]),
    (LINE | {"id": "2", "golden_answers": []}, ["line 2", '"golden_answers"', "[]"]),
    (LINE | {"id": "2", "golden_answers": ["x", {"y": 5}]}, ["line 2", '"golden_answers"', "5"]),
    ({"question": "?", "golden_answers": ["x"]}, ["line 2", '"id"', "missing"]),
    (LINE | {"id": "2", "hops": -1}, ["line 2", '"hops"', "-1"]),
    (LINE, ["line 2", '"id"', "dev_0", "line 1", "unique"]),
  ],
)
def test_a_bad_line_names_file_line_and_field(tmp_path, record, parts):
  path = write_jsonl(tmp_path / "nq.jsonl", LINE, record)
  with pytest.raises(ValueError) as error:
    read_questions(path)
  for part in [str(path), *parts]:
    assert part in str(error.value)


def test_paths_that_hold_no_questions_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such file"):
    read_questions(tmp_path / "nowhere.jsonl")
  with pytest.raises(FileNotFoundError, match="no file in it"):
    read_questions(tmp_path)
  (tmp_path / "questions.csv").write_text("x")
  with pytest.raises(ValueError, match=r"end with \.jsonl"):
    read_questions(tmp_path / "questions.csv")


###  Verl's form  ###


def test_reads_verl_parquet(tmp_path):
  path = write_parquet(tmp_path / "train.parquet", verl_row(0), verl_row(1))
  assert read_questions(path) == [
    Question("train_0", "who wrote hamlet?", ("Shakespeare",), "nq", None),
    Question("train_1", "who wrote hamlet?", ("Shakespeare",), "nq", None),
  ]


@pytest.mark.parametrize(
  "changes, expected",
  [
    (
      {
        "extra_info": {"index": 0, "split": "train", "question": "From extra_info?"},
        "question": "x",
      },
      "From extra_info?",
    ),
    ({"question": "From the column?"}, "From the column?"),
    ({"prompt": "Question: From a plain prompt? "}, "From a plain prompt?"),
    ({"prompt": json.dumps([{"role": "user", "content": "From JSON?"}])}, "From JSON?"),
    ({"prompt": "[From brackets?]"}, "[From brackets?]"),
    (
      {
        "prompt": [
          {"role": "user", "content": "first"},
          {"role": "user", "content": "From the last?"},
        ]
      },
      "From the last?",
    ),
  ],
)
def test_where_the_text_of_a_verl_row_comes_from(tmp_path, changes, expected):
  path = write_parquet(tmp_path / "train.parquet", verl_row(**changes))
  assert [question.text for question in read_questions(path)] == [expected]


@pytest.mark.parametrize(
  "changes, parts",
  [
    (
      {"reward_model": {"ground_truth": {"target": []}}},
      ['"reward_model.ground_truth.target"', "[]"],
    ),
    ({"reward_model": {"style": "rule"}}, ['"reward_model.ground_truth.target"', "None"]),
    ({"prompt": [{"role": "system", "content": "Be brief."}]}, ['"prompt"', "None"]),
    ({"extra_info": {"split": "train"}}, ["extra_info", '"index"', "missing"]),
  ],
)
def test_a_bad_row_names_file_row_and_field(tmp_path, changes, parts):
  path = write_parquet(tmp_path / "train.parquet", verl_row(**changes))
  with pytest.raises(ValueError) as error:
    read_questions(path)
  for part in [str(path), "row 0", *parts]:
    assert part in str(error.value)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
  (tmp_path / "train.parquet").write_text("not parquet")
  with pytest.raises(ValueError, match="train.parquet: not a readable parquet file"):
    read_questions(tmp_path / "train.parquet")


def test_ids_that_two_sets_share_are_told_apart_in_every_split(tmp_path):
  rows = [verl_row(0, "nq"), verl_row(0, "hotpotqa"), verl_row(1, "nq", split="test")]
  path = write_parquet(tmp_path / "train.parquet", *rows)
  assert [q.id for q in read_questions(path)] == ["nq/train_0", "hotpotqa/train_0", "nq/test_1"]
  assert [q.id for q in read_questions(path, split="test")] == ["nq/test_1"]
  with pytest.raises(ValueError, match="row 1.*train_0.*row 0"):
    read_questions(write_parquet(tmp_path / "train.parquet", verl_row(0), verl_row(0)))


def test_a_folder_is_all_its_files(tmp_path):
  write_jsonl(tmp_path / "popqa.jsonl", LINE)
  write_parquet(tmp_path / "a.parquet", verl_row())
  (tmp_path / "notes.txt").write_text("x")
  assert [question.source for question in read_questions(tmp_path)] == ["nq", "popqa"]


###  Hops  ###


@pytest.mark.parametrize(
  "source, record, hops",
  [
    ("musique", {"type": "3hop2"}, 3),
    ("musique", {"id": "4hop1__76291_54348"}, 4),
    ("musique", {"id": "dev_7", "orig_id": "2hop__21104_16334"}, 2),
    ("musique", {"id": "dev_7"}, None),
    ("2wikimultihopqa", {"type": "compositional"}, 2),
    ("2wikimultihopqa", {"metadata": {"type": "bridge_comparison"}}, 4),
    ("2wikimultihopqa", {}, None),
    ("hotpotqa", {"type": "bridge"}, 2),
    ("bamboogle", {}, 2),
    ("popqa", {}, 1),
    ("nq", {}, None),
    ("triviaqa", {}, None),
    ("a set of one's own", {"type": "2hop"}, None),
  ],
)
def test_hops_are_known_only_where_written_down(source, record, hops):
  assert readers.hops_of(source, record) == hops


def test_a_records_own_hops_win(tmp_path):
  path = write_jsonl(tmp_path / "hotpotqa.jsonl", LINE | {"hops": 0}, LINE | {"id": "2"})
  assert [question.hops for question in read_questions(path)] == [0, 2]


###  The order of training  ###


def questions(count):
  return [Question(str(index), "?", ("x",)) for index in range(count)]


@given(size=st.integers(1, 40), count=st.integers(1, 12), seed=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_every_question_once(size, count, seed):
  steps = -(-3 * size // count)  # three epochs
  pool = questions(size)
  stream = [
    q.id for step in range(steps) for q in questions_at(pool, seed=seed, step=step, count=count)
  ]
  assert len(stream) == steps * count
  for epoch in range(3):
    assert len(set(stream[epoch * size : (epoch + 1) * size])) == size


@given(count=st.integers(1, 9), extra=st.integers(0, 30), seed=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_no_step_holds_a_question_twice(count, extra, seed):
  pool = questions(3 * count + extra)
  for step in range(0, 30):
    assert len({q.id for q in questions_at(pool, seed=seed, step=step, count=count)}) == count


def test_a_step_is_a_pure_function_of_seed_and_step():
  pool = questions(48)  # an epoch is six steps
  in_order = [questions_at(pool, seed=7, step=step, count=8) for step in range(20)]
  for step in np.random.default_rng(0).permutation(20).tolist():
    assert questions_at(pool, seed=7, step=step, count=8) == in_order[step]
  assert questions_at(pool, seed=8, step=0, count=8) != in_order[0]
  assert in_order[:6] != in_order[6:12]  # another epoch, another order


def test_fewer_questions_than_a_step_wants_are_repeated_evenly():
  taken = collections.Counter(q.id for q in questions_at(questions(4), seed=0, step=3, count=8))
  assert taken == {"0": 2, "1": 2, "2": 2, "3": 2}


@pytest.mark.parametrize("size, step, count", [(0, 0, 1), (3, -1, 1), (3, 0, 0)])
def test_impossible_steps_are_refused(size, step, count):
  with pytest.raises(ValueError, match="needs at least one question"):
    questions_at(questions(size), seed=0, step=step, count=count)


###  The folder of real data  ###


def test_data_root_says_what_is_missing(tmp_path, monkeypatch):
  monkeypatch.delenv("STRATIFIED_DATA", raising=False)
  with pytest.raises(
    FileNotFoundError, match="STRATIFIED_DATA is not set; set it to a folder with"
  ):
    readers.data_root()
  monkeypatch.setenv("STRATIFIED_DATA", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="lacks corpus.jsonl.gz"):
    readers.data_root()
  write_jsonl(tmp_path / "corpus.jsonl.gz", {})
  with pytest.raises(FileNotFoundError, match="lacks questions"):
    readers.data_root()
  (tmp_path / "questions").mkdir()
  assert readers.data_root() == tmp_path


@pytest.mark.parametrize("name", readers.QUESTION_SETS)
def test_real_question_sets(name):
  try:
    path = readers.data_root() / "questions" / f"{name}.jsonl"
  except FileNotFoundError as error:
    pytest.skip(f"needs the real questions: {error}")
  everything = read_questions(path)
  train, dev = read_questions(path, split="train"), read_questions(path, split="dev")
  assert len(everything) == len(train) + len(dev) and min(len(train), len(dev)) > 0
  assert {question.source for question in everything} == {name}
  hops = {question.hops for question in everything}
  assert (
    hops
    == {
      "nq": {None},
      "triviaqa": {None},
      "popqa": {1},
      "hotpotqa": {2},
      "2wikimultihopqa": {2, 4, None},
      "musique": {2, 3, 4, None},
      "bamboogle": {2},
    }[name]
  )


def test_the_real_folder_reads_as_one():
  try:
    root = readers.data_root()
  except FileNotFoundError as error:
    pytest.skip(f"needs the real questions: {error}")
  assert {question.source for question in read_questions(root / "questions")} == set(
    readers.QUESTION_SETS
  )


def test_questions_may_begin_with_a_byte_order_mark_and_faults_keep_their_place(tmp_path):
  path, line = tmp_path / "nq.jsonl", '{"id": "1", "question": "x", "golden_answers": ["y"]}\n'
  path.write_text(line, encoding="utf-8-sig")
  assert [q.text for q in readers.read_questions(path)] == ["x"]
  path.write_text(line + "{\n", encoding="utf-8-sig")
  with pytest.raises(ValueError, match="nq.jsonl, line 2: not JSON"):
    readers.read_questions(path)
  path.write_bytes(b"\xef\xbb\xbf\xff\n")
  with pytest.raises(ValueError, match="nq.jsonl, line 1: not UTF-8 text"):
    readers.read_questions(path)


@pytest.mark.parametrize("held_out_split, said", [("", True), ("dev", False)])
def test_questions_that_are_trained_on_and_held_out_are_said(
  tmp_path, capsys, monkeypatch, held_out_split, said
):
  rows = [
    LINE | {"id": str(i), "question": f"Who {i}?", "split": split}
    for i, split in enumerate(["train", "train", "dev"])
  ]
  monkeypatch.setattr(search_qa, "search", lambda config: search_tool.Search(None))
  config = search_r1.get_config("tiny")
  config.data.questions = str(write_jsonl(tmp_path / "mine.jsonl", *rows))
  config.data.held_out_split = held_out_split
  search_qa.make(config)
  found = capsys.readouterr().out
  assert ("2 of 3 held-out questions are trained on too" in found) == said


def test_an_answer_may_be_a_number_of_any_size():
  assert readers.answers_of([10**400, 2.0, 1.5], "a", "here") == (str(10**400), "2", "1.5")
