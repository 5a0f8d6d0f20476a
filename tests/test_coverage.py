"""Which questions a corpus can answer, against looking for every answer in every passage."""

import json
import random
import subprocess
import sys

import pytest

from stratified.evaluation import coverage
from stratified.retrieval.corpus import Passage
from stratified.rewards.matching import holds
from stratified.types import Question


def audited(questions, passages):
  audit = coverage.Audit(questions)
  for passage in passages:
    audit.read(passage)
  return audit.rows()


def test_an_answer_is_found_as_whole_words_in_title_and_text():
  passages = [
    Passage("1", "Oslo", "The capital of Norway, and its largest city."),
    Passage("2", "", "New  York's parks; the U.S.A."),
  ]
  golden = {
    "title": ("Oslo",),
    "across": ("Oslo capital",),  # articles and punctuation go
    "part": ("Norw",),
    "second": ("Bergen", "new yorks"),
    "marks": ("USA",),
    "nothing": ("The",),
    "absent": ("Bergen",),
    "choice": ("yes",),
    "overlap": ("york's parks usa",),
  }
  rows = audited([Question(id, "?", golden[id], "s") for id in golden], passages)
  assert {row["id"]: row["passage"] for row in rows} == {
    "title": "1",
    "across": "1",
    "part": None,
    "second": "2",
    "marks": "2",
    "nothing": None,
    "absent": None,
    "choice": None,
    "overlap": "2",
  }
  assert [row["id"] for row in rows if row["choice"]] == ["choice"]


def test_one_pass_finds_what_looking_for_each_finds():
  draw = random.Random(0)
  text = lambda most: " ".join(draw.choices("a b c d the e-f g.".split(), k=draw.randint(1, most)))
  questions = [
    Question(str(i), "?", tuple(text(4) for _ in range(draw.randint(1, 3))), "s")
    for i in range(400)
  ]
  passages = [Passage(str(i), text(3), text(8)) for i in range(40)]
  rows = audited(questions, passages)
  for question, row in zip(questions, rows):
    found = [p.id for p in passages if holds(f"{p.title}\n{p.text}", question.golden_answers)]
    assert row["covered"] == bool(found) and row["passage"] == (found[0] if found else None)
  assert 50 < sum(row["covered"] for row in rows) < 390


def test_the_command_writes_what_evaluation_reads_and_prints_shares(tmp_path):
  questions = [
    {"id": f"{i}", "question": "?", "golden_answers": [answer], "data_source": name}
    for name in ("zoo", "nq")
    for i, answer in enumerate(["Oslo", "Bergen", "yes"])
  ]
  (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
  (tmp_path / "c.jsonl").write_text(json.dumps({"id": "7", "contents": '"Oslo"\nyes'}) + "\n")
  run = lambda *more: subprocess.run(
    [sys.executable, "experiments/audit_corpus.py", f"--corpus={tmp_path}/c.jsonl", *more],
    capture_output=True,
    text=True,
  )
  out = tmp_path / "new" / "coverage.jsonl"
  done = run(f"--questions={tmp_path}/q.jsonl", f"--out={out}")
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[2:] == ["| nq | 3 | 2 | 66.7 | 1 |", "| zoo | 3 | 2 | 66.7 | 1 |"]
  known = coverage.read(out)
  assert known == {
    **{"zoo/0": True, "zoo/1": False, "zoo/2": True},
    **{"nq/0": True, "nq/1": False, "nq/2": True},
  }
  asked = {"nq": [Question("nq/0", "?", ("x",)), Question("else", "?", ("x",))]}
  with pytest.raises(ValueError, match="nothing of 1 questions of nq, the first 'else'"):
    coverage.check(known, asked, out)
  groups = {"nq": [[{"id": "nq/0"}], [{"id": "nq/1"}]], "zoo": [[{"id": "zoo/1"}]]}
  assert coverage.covered(groups, known) == {"nq": [[{"id": "nq/0"}]]}
  done = run("--questions=absent.jsonl")
  assert done.returncode == 1 and "there is no such file" in done.stderr


def test_what_is_no_such_file_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match="does not exist; make it with .*audit_corpus.py"):
    coverage.read(tmp_path / "absent")
  (tmp_path / "x").write_text('{"id": "1"}\n')
  with pytest.raises(ValueError, match="is no file of experiments/audit_corpus.py"):
    coverage.read(tmp_path / "x")
