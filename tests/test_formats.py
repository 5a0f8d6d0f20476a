"""Every question set's own files become the one normal form that readers.py reads."""

import csv
import gzip
import io
import json

import pytest

from stratified.data import formats, prepare, readers, records
from stratified.types import Question


def write(path, value):
  if path.name.endswith("jsonl"):
    path.write_text("".join(json.dumps(record) + "\n" for record in value))
  else:
    path.write_text(json.dumps(value))
  return path


def table(path, rows, delimiter):
  text = io.StringIO()
  writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
  writer.writeheader()
  writer.writerows(rows)
  path.write_bytes(text.getvalue().encode())
  return path


def read(path, name=None, split="dev"):
  return list(formats.read(path, name=name, split=split))


def normal(id, question, answers, source, split="dev", **more):
  return {
    "id": id,
    "question": question,
    "golden_answers": answers,
    "data_source": source,
    "split": split,
  } | more


FLASHRAG = [
  {"id": "test_0", "question": " who? ", "golden_answers": ["Ada", "Ada ", "A. L."]},
  {
    "id": "test_1",
    "question": "where?",
    "golden_answers": "Oslo",
    "metadata": {
      "type": "bridge",
      "supporting_facts": {"title": ["Oslo", "Norway", "Oslo"], "sent_id": [0, 1, 2]},
    },
  },
]
TRIVIA = {
  "Version": 1.0,
  "Data": [
    {
      "Question": "Which city?",
      "QuestionId": "tc_1",
      "Answer": {
        "Value": "Oslo",
        "Aliases": ["Christiania", "", "Oslo"],
        "NormalizedValue": "oslo",
      },
    }
  ],
}
POPQA = [
  {
    "id": "4222362",
    "subj": "George Rankin",
    "prop": "occupation",
    "obj": "politician",
    "s_wiki_title": "G. Rankin",
    "question": "What is George Rankin's occupation?",
    "possible_answers": '["politician", "pol \\"x\\""]',
  }
]
HOTPOT = [
  {
    "_id": "5a8b",
    "question": "Same nationality?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Scott Derrickson", 0], ["Ed Wood", 0], ["Ed Wood", 1]],
    "context": [["Ed Wood", ["x"]]],
  }
]
WIKI2 = [
  {
    "_id": "13f5",
    "type": "bridge_comparison",
    "question": "Which film?",
    "context": [],
    "answer": "Move",
    "supporting_facts": [["Move (1970 film)", 0]],
    "evidences": [["Move", "director", "X"]],
  }
]
MUSIQUE = [
  {
    "id": "3hop1__1_2_3",
    "question": "Who?",
    "answer": "Ada",
    "answer_aliases": ["A. L.", ""],
    "answerable": True,
    "paragraphs": [
      {"title": "Ada", "is_supporting": True},
      {"title": "No", "is_supporting": False},
    ],
    "question_decomposition": [],
  },
  {
    "id": "3hop1__1_2_3",
    "question": "Who?",
    "answer": "Ada",
    "answer_aliases": [],
    "answerable": False,
    "paragraphs": [],
    "question_decomposition": [],
  },
]
BAMBOOGLE = [
  {"Question": "Who was president when X?", "Answer": "Ada"},
  {"Question": "Where?", "Answer": "Oslo, Norway"},
]


def test_flashrag(tmp_path):
  assert read(write(tmp_path / "hotpotqa.jsonl", FLASHRAG)) == [
    normal("test_0", "who?", ["Ada", "A. L."], "hotpotqa", hops=2),
    normal(
      "test_1",
      "where?",
      ["Oslo"],
      "hotpotqa",
      hops=2,
      type="bridge",
      supporting_titles=["Oslo", "Norway"],
    ),
  ]
  own = [FLASHRAG[0] | {"data_source": "zoo", "split": "train", "hops": 4}]
  assert read(write(tmp_path / "x.jsonl", own)) == [
    normal("test_0", "who?", ["Ada", "A. L."], "zoo", "train", hops=4)
  ]


def test_nq_open(tmp_path):
  path = write(
    tmp_path / "NQ-open.dev.jsonl",
    [{"question": "who?", "answer": ["Ada", "A. L."]}, {"question": "where", "answer": ["Oslo"]}],
  )
  assert read(path) == [
    normal("nq_0", "who?", ["Ada", "A. L."], "nq"),
    normal("nq_1", "where", ["Oslo"], "nq"),
  ]


def test_triviaqa(tmp_path):
  assert read(write(tmp_path / "unfiltered-web-dev.json", TRIVIA), "triviaqa") == [
    normal("tc_1", "Which city?", ["Oslo", "Christiania"], "triviaqa")
  ]


def test_popqa(tmp_path):
  assert read(table(tmp_path / "popQA.tsv", POPQA, "\t"), split="test") == [
    normal(
      "4222362",
      "What is George Rankin's occupation?",
      ["politician", 'pol "x"'],
      "popqa",
      "test",
      hops=1,
      type="occupation",
      supporting_titles=["G. Rankin"],
    )
  ]


def test_hotpotqa_and_2wiki_share_a_form_and_are_told_apart(tmp_path):
  assert read(write(tmp_path / "hotpot_dev_distractor_v1.json", HOTPOT)) == [
    normal(
      "5a8b",
      "Same nationality?",
      ["yes"],
      "hotpotqa",
      hops=2,
      type="comparison",
      supporting_titles=["Scott Derrickson", "Ed Wood"],
    )
  ]
  two = normal(
    "13f5",
    "Which film?",
    ["Move"],
    "2wikimultihopqa",
    hops=4,
    type="bridge_comparison",
    supporting_titles=["Move (1970 film)"],
  )
  (tmp_path / "2wikimultihopqa").mkdir()
  assert (
    read(write(tmp_path / "2wikimultihopqa" / "dev.json", WIKI2))
    == [two]
    == read(write(tmp_path / "raw.json", WIKI2))
  )


def test_musique_leaves_out_what_has_no_answer(tmp_path):
  expected = [
    normal("3hop1__1_2_3", "Who?", ["Ada", "A. L."], "musique", hops=3, supporting_titles=["Ada"])
  ]
  assert read(write(tmp_path / "musique_full_v1.0_dev.jsonl", MUSIQUE)) == expected
  lines = tmp_path / "musique_dev.json"  # JSON Lines under a JSON name
  lines.write_text("\n".join(map(json.dumps, MUSIQUE)))
  assert read(lines) == expected


@pytest.mark.parametrize(
  "name", ["Bamboogle.csv", "bamboogle.tsv", "bamboogle.json", "bamboogle.jsonl"]
)
def test_bamboogle_in_any_wrapping(tmp_path, name):
  path = tmp_path / name
  made = (
    table(path, BAMBOOGLE, "," if "csv" in name else "\t")
    if name.endswith("sv")
    else write(path, BAMBOOGLE)
  )
  assert read(made, split="test") == [
    normal("bamboogle_0", "Who was president when X?", ["Ada"], "bamboogle", "test", hops=2),
    normal("bamboogle_1", "Where?", ["Oslo, Norway"], "bamboogle", "test", hops=2),
  ]


def test_verl_parquet(tmp_path):
  parquet = pytest.importorskip("pyarrow.parquet")
  import pyarrow

  rows = [
    {
      "data_source": f"searchR1_{name}",
      "prompt": [{"role": "user", "content": "Answer. Question: Who?"}],
      "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada"]}},
      "extra_info": {"index": i, "split": "train"},
    }
    for i, name in enumerate(["nq", "hotpotqa"])
  ]
  parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
  assert read(tmp_path / "train.parquet", split="train") == [
    normal("train_0", "Who?", ["Ada"], "nq", "train"),
    normal("train_1", "Who?", ["Ada"], "hotpotqa", "train", hops=2),
  ]


def test_compressed_files_are_read_too(tmp_path):
  (tmp_path / "nq-dev.jsonl.gz").write_bytes(
    gzip.compress(b'{"question": "who?", "answer": ["Ada"]}\n')
  )
  (tmp_path / "popqa.tsv.gz").write_bytes(
    gzip.compress(table(tmp_path / "p.tsv", POPQA, "\t").read_bytes())
  )
  assert (
    read(tmp_path / "nq-dev.jsonl.gz")[0]["id"] == "nq_0"
    and read(tmp_path / "popqa.tsv.gz")[0]["type"] == "occupation"
  )


def test_what_is_written_is_what_the_reader_reads(tmp_path):
  for name, path in (
    ("musique", write(tmp_path / "a.jsonl", MUSIQUE)),
    ("popqa", table(tmp_path / "popqa.tsv", POPQA, "\t")),
  ):
    (record,) = read(path, name)
    out = write(tmp_path / f"{name}.jsonl", [record])
    assert readers.read_questions(out, split="dev") == [
      Question(
        record["id"], record["question"], tuple(record["golden_answers"]), name, record["hops"]
      )
    ]


@pytest.mark.parametrize(
  "path, expected",
  [
    ("raw/NQ-open.train.jsonl", ("nq", "train")),
    ("hotpotqa/dev.jsonl", ("hotpotqa", "dev")),
    ("hotpot_train_v1.1.json", ("hotpotqa", "train")),
    ("2wikimultihopqa/dev.json", ("2wikimultihopqa", "dev")),
    ("raw/2WikiMultihopQA_test.jsonl", ("2wikimultihopqa", "test")),
    ("raw/popQA.tsv", ("popqa", None)),
    ("triviaqa-unfiltered/wikipedia-train.json", ("triviaqa", "train")),
    ("musique/validation.jsonl", ("musique", "dev")),
    ("raw/bamboogle.csv", ("bamboogle", None)),
    ("nq_hotpotqa_train/hotpotqa.jsonl", ("hotpotqa", None)),
  ],
)
def test_names_tell_set_and_split(tmp_path, path, expected):
  assert formats.named(tmp_path / path) == expected


def test_a_name_that_only_looks_like_a_set_is_none(tmp_path):
  assert formats.named(tmp_path / "raw" / "train.parquet") is None
  assert formats.named(tmp_path / "raw" / "inquiry.jsonl") is None  # nq inside a word


@pytest.mark.parametrize(
  "name, content, message",
  [
    (
      "nq.jsonl",
      '{"question": "x", "answer": []}',
      r"nq.jsonl, line 1, field \"answer\": it is \[\]; it must be a list of at least one",
    ),
    ("nq.jsonl", '{"question": "x", "answer": ["  "]}', "must be a list of at least one answer"),
    ("nq.jsonl", '{"question": "", "answer": ["x"]}', "field \"question\": it is ''"),
    (
      "nq.jsonl",
      '{"query": "x"}',
      "line 1: its fields \\(query\\) are those of no known question format",
    ),
    ("nq.jsonl", "[1]", "a JSON list, but each line must be one JSON object"),
    (
      "zoo.jsonl",
      '{"id": "1", "question": "x", "golden_answers": ["x"]}',
      "which question set this is; name it as SET=",
    ),
    (
      "hotpotqa_test.json",
      '[{"_id": "1", "question": "x", "context": []}]',
      "the answers of this test set are not published",
    ),
    (
      "triviaqa-test.json",
      '{"Data": [{"Question": "x", "QuestionId": "1"}]}',
      "TriviaQA's test set are not published",
    ),
    (
      "popqa.tsv",
      "id\tquestion\tpossible_answers\n1\tx\tno json\n",
      'row 2, field "possible_answers": not a JSON list',
    ),
    (
      "popqa.tsv",
      "id\tquestion\tpossible_answers\n1\tx\n",
      "row 2: 2 fields, the header has another number",
    ),
    ("popqa.tsv", "id\tquestion\tpossible_answers\n1\tx\t[]\t9\n", "the header has another number"),
    ("hotpot.json", "{", "hotpot.json: not JSON"),
    ("hotpot.json", "3", "a JSON int, but questions come as a list"),
    ("hotpot.json", "[3]", "entry 0: a JSON int, but each question is an object"),
    ("nq.txt", "x", "questions are read from .jsonl, .json, .csv, .tsv"),
    ("hotpot.json.gz", "not gzip", "not readable text"),
    ("bamboogle.csv.gz", "not gzip", "not a readable table"),
  ],
)
def test_a_bad_file_is_one_sentence(tmp_path, name, content, message):
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=message):
    read(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="nq.jsonl: there is no such file"):
    read(tmp_path / "nq.jsonl")


@pytest.mark.parametrize(
  "name",
  ["bamboogle.csv", "bamboogle.tsv", "bamboogle.json", "bamboogle.jsonl", "bamboogle.jsonl.gz"],
)
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
  plain = tmp_path / name.removesuffix(".gz")
  table(plain, BAMBOOGLE, "," if "csv" in name else "\t") if name.endswith("sv") else write(
    plain, BAMBOOGLE
  )
  without = read(plain)
  marked = b"\xef\xbb\xbf" + plain.read_bytes()
  (tmp_path / name).write_bytes(gzip.compress(marked) if name.endswith(".gz") else marked)
  assert read(tmp_path / name) == without


def test_json_lines_under_a_json_name_may_begin_with_a_byte_order_mark(tmp_path):
  (tmp_path / "musique_dev.json").write_text(
    "\n".join(map(json.dumps, MUSIQUE)), encoding="utf-8-sig"
  )
  assert len(read(tmp_path / "musique_dev.json")) == 1


###  Every row stays a row  ###


PASSAGES = (
  '1\t"He said so, and it went on.\tOpen\n'
  "2\tIn between.\tMiddle\n"
  '3\tA 20" pipe and a 3" one\tPipe\n'
  '4\tThe end"\tEnd\n'
  '5\t"A ""quoted"" text\twith a tab."\t"Title"\n'
)


def test_a_quotation_mark_left_open_joins_no_rows(tmp_path):
  rows = list(records.tsv_rows(PASSAGES.splitlines(keepends=True)))
  assert [fields[0] for _, fields in rows] == ["1", "2", "3", "4", "5"]
  assert rows[0][1] == ["1", '"He said so, and it went on.', "Open"]
  assert rows[2][1][1] == 'A 20" pipe and a 3" one'
  assert rows[4] == (5, ["5", 'A "quoted" text\twith a tab.', "Title"])
  (tmp_path / "c.tsv").write_text("id\ttext\ttitle\n" + PASSAGES)
  prepare.write_corpus(tmp_path / "c.tsv", tmp_path / "c.jsonl")
  written = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
  assert [one["id"] for one in written] == ["1", "2", "3", "4", "5"]
  assert written[0]["contents"] == '"Open"\n"He said so, and it went on.'


def test_a_row_over_two_lines_is_refused_with_its_line(tmp_path):
  (tmp_path / "popqa.tsv").write_text('id\tquestion\tpossible_answers\n1\t"x\ny"\t["a"]\n')
  with pytest.raises(ValueError, match="row 2: 2 fields, .*a row is one line"):
    read(tmp_path / "popqa.tsv")


def test_a_csv_with_a_quotation_mark_left_open_is_refused(tmp_path):
  text = 'Question,Answer\n"Who,Ada\nWhere?,"20"" pipe"\nWhen?,"now"\n'
  (tmp_path / "bamboogle.csv").write_text(text)
  with pytest.raises(ValueError, match="not a readable table"):
    read(tmp_path / "bamboogle.csv")


def test_a_parquet_row_keeps_its_split(tmp_path):
  parquet = pytest.importorskip("pyarrow.parquet")
  import pyarrow

  row = {
    "data_source": "nq",
    "question": "Who?",
    "reward_model": {"ground_truth": {"target": ["Ada"]}},
  }
  rows = [
    row | {"extra_info": {"index": i, "split": s}} for i, s in enumerate(["train", "test", ""])
  ]
  parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "all.parquet")
  assert [one["split"] for one in read(tmp_path / "all.parquet", split="dev")] == [
    "train",
    "test",
    "dev",
  ]


###  One rule for answers  ###

GIVEN = [
  ("Paris", ("Paris",)),
  (["Paris", " "], ("Paris",)),
  (["Paris", None, ""], ("Paris",)),
  (1912, ("1912",)),
  ([1912, "nineteen twelve"], ("1912", "nineteen twelve")),
  ([1912.0, 0.5], ("1912", "0.5")),
  ('["Paris", "Lutetia"]', ("Paris", "Lutetia")),
  ("['Paris', \"L'Isle\"]", ("Paris", "L'Isle")),
  ("[1912]", ("1912",)),
  ("[sic]", ("[sic]",)),
  ("[", ("[",)),
]
REFUSED = [[], None, "", ["  "], [None], {"a": 1}, [["a"]], [True], True, [float("nan")], "[]"]


def both(tmp_path, answers):
  """The answers as training reads them, and as they are prepared for it."""
  record = {"id": "1", "question": "Where?", "golden_answers": answers}
  path = tmp_path / "nq.jsonl"
  path.write_text(json.dumps(record) + "\n")
  yield lambda: readers.read_questions(path)[0].golden_answers
  yield lambda: tuple(next(formats.read(path, name="nq", split="dev"))["golden_answers"])
  path = tmp_path / "open" / "nq.jsonl"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps({"question": "Where?", "answer": answers}) + "\n")
  yield lambda: tuple(next(formats.read(path, name="nq", split="dev"))["golden_answers"])


@pytest.mark.parametrize("given, answers", GIVEN)
def test_every_reader_takes_the_same_for_answers(tmp_path, given, answers):
  assert [found() for found in both(tmp_path, given)] == [answers] * 3


@pytest.mark.parametrize("given", REFUSED)
def test_every_reader_refuses_the_same_with_the_row(tmp_path, given):
  for found in both(tmp_path, given):
    with pytest.raises(ValueError, match="nq.jsonl, line 1, field .*answer"):
      found()


def test_hotpotqa_as_hugging_face_has_it_is_read(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  row = {
    "id": "5a7",
    "question": "who?",
    "answer": "Ada",
    "type": "bridge",
    "supporting_facts": {"title": ["Oslo", "Norway", "Oslo"], "sent_id": [0, 1, 2]},
    "context": {"title": ["Oslo"], "sentences": [["A town."]]},
  }
  path = tmp_path / "hotpot-validation.parquet"
  parquet.write_table(pyarrow.Table.from_pylist([row]), path)
  (found,) = read(path)
  assert found == normal(
    "5a7", "who?", ["Ada"], "hotpotqa", type="bridge", supporting_titles=["Oslo", "Norway"], hops=2
  )
  with pytest.raises(ValueError, match='row 0: it has no field "golden_answers" .*prepare_data.py'):
    readers.read_questions(path)


@pytest.mark.parametrize("name", ["nq-dev.qa.csv", "nq-dev.tsv"])
def test_dpr_s_tables_without_a_header_are_read_line_by_line(tmp_path, name):
  path = tmp_path / name
  path.write_text('who, and when?\t[\'A B\', \'C\']\nwhere\t"[""D\'s""]"\n')
  assert read(path) == [
    normal("row_0", "who, and when?", ["A B", "C"], "nq"),
    normal("row_1", "where", ["D's"], "nq"),
  ]
  path.write_text("who\t['A']\nwhere\n")
  with pytest.raises(ValueError, match="row 2: not a question, a tab and a list of answers"):
    read(path)


def test_a_file_without_splits_names_the_way_out(tmp_path):
  path = write(tmp_path / "nq.jsonl", FLASHRAG)
  with pytest.raises(ValueError, match=r"splits there: none\. .*--config\.data\.split= "):
    readers.read_questions(path, split="train")
