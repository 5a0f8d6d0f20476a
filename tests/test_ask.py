"""experiments/ask.py: one question to a policy, on a terminal and on a page."""

import pathlib
import re

import programs
import pytest
from starlette.testclient import TestClient
from test_evaluation import TINY

from configs import search_r1
from stratified.reports import ask_page, terminal
from stratified.runs import build, claim, trainer

ESCAPE = "\x1b[2J<script>alert(1)</script>"


def record(**changes):
  """A rollout of one search, as `asking` makes it."""
  segments = [("prompt", "Q: who?", 4), ("policy", f"<search>{ESCAPE}</search>", 5)]
  segments += [("observation", f"<information>{ESCAPE}</information>", 6)]
  segments += [("policy", "<answer> Rome</answer>", 3)]
  found = {
    "question": f"who? {ESCAPE}",
    "golden_answers": [],
    "segments": [{"origin": o, "text": t, "tokens": n} for o, t, n in segments],
    "turns": [
      {
        "action": "call",
        "calls": [{"tool": "search", "argument": ESCAPE, "outcome": "hit", "results": ["7"]}],
      },
      {"action": "answer", "calls": []},
    ],
    "calls": {"search": 1},
    "answer": "Rome",
    "stop": "answer",
    "fault": None,
  }
  return found | changes


###  On a terminal  ###


def test_a_terminal_shows_searches_what_came_back_and_the_answer():
  shown = terminal.show(record())
  lines = [line.split(" ")[0].rstrip(":") for line in shown.split("\n")]
  assert lines == ["question", "policy", "search", "found", "policy", "answer", "calls"]
  assert "answer: Rome\n" in shown and "calls: search 1; 8 tokens of the policy" in shown


@pytest.mark.parametrize("color", [False, True])
def test_no_text_steers_the_terminal(color):
  shown = terminal.show(record(answer=f"a\nb{ESCAPE}"), color)
  assert ESCAPE not in shown and "[U+001B][2J" in shown
  assert color == ("\033[" in shown)
  assert "answer: a b" in shown


def test_an_answer_is_judged_where_golden_answers_are_known():
  assert "Rome (right)" in terminal.show(record(golden_answers=["rome"]))
  shown = terminal.show(record(golden_answers=["Paris", "France"]))
  assert "Rome (wrong)\nright would be: Paris, France" in shown
  lost = terminal.show(record(fault="the retriever did not answer", golden_answers=["Rome"]))
  assert lost.endswith("lost: the retriever did not answer")


###  On a page  ###


def client(ask, examples=()):
  return TestClient(ask_page.make_app("runs/x, step 3", ask, examples), "http://127.0.0.1:9")


def test_the_page_asks_and_shows_the_transcript_escaped():
  asked = []
  page = client(lambda question: asked.append(question) or record(), ["who is <b>?"])
  assert "who is &lt;b&gt;?" in page.get("/").text
  found = page.post("/ask", data={"question": "  who\n wrote it? "})
  assert asked == ["who wrote it?"] and found.url.path == "/"
  assert "<script>" not in found.text and "&lt;script&gt;" in found.text
  assert "\x1b" not in found.text and "U+001B" in found.text
  assert len(re.findall(r'<details class="roll[^"]*" open', found.text)) == 1
  assert "default-src 'none'" in found.text and found.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
  "question, status, said",
  [
    ("", 400, "1 to 2,000 characters"),
    ("x" * 2001, 400, "1 to 2,000 characters"),
    ("x" * 10**6, 400, "1 to 2,000 characters"),
    ("long", 400, "the prompt takes &lt;9&gt; tokens"),
    ("down", 502, "the retriever is gone"),
  ],
)
def test_the_page_says_what_is_wrong(question, status, said):
  errors = {
    "long": ValueError("the prompt takes <9> tokens"),
    "down": RuntimeError("the retriever is gone"),
  }

  def ask(text):
    raise errors[text]

  found = client(ask).post("/ask", data={"question": question})
  assert found.status_code == status and said in found.text


def test_another_sites_name_does_not_reach_the_page():
  page = client(lambda question: record())
  assert page.get("/", headers={"host": "evil.example"}).status_code == 400
  assert page.get("/", headers={"host": "localhost:9"}).status_code == 200


###  The command  ###


def ask(*arguments):
  return programs.run("experiments/ask.py", *arguments)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run's folder with the checkpoint of its start."""
  folder = tmp_path_factory.mktemp("ask") / "run"
  config = search_r1.get_config("tiny")
  config.update_from_flattened_dict(TINY | {"warm_start.num_steps": 0})
  made = build.build(config)
  claim.check_config(folder, made.workdir_config, made.rules)
  params = build.initial_params(config, made.model, made.mesh)
  with trainer.seat_of(made, made.last, folder) as seat:
    seat.save(0, seat.weights.begin(params), force=True)
  return folder


def test_a_checkpoint_answers_a_question_a_held_out_one_and_lines(workdir, monkeypatch):
  found = ask(f"--workdir={workdir}", "Who", "wrote it?")
  assert found.returncode == 0, found.stderr
  assert found.stdout.startswith("question | Who wrote it?\npolicy   | ")
  assert "\033" not in found.stdout and "right would be" not in found.stdout
  held_out = ask(f"--workdir={workdir}", "--example=1", "--temperature=0.5")
  assert "right" in held_out.stdout
  (pathlib.Path(workdir) / "lines").write_text("Who?\n\n" + "x " * 5000 + "\nWhere?\n")
  with (pathlib.Path(workdir) / "lines").open() as lines:
    monkeypatch.setattr("sys.stdin", lines)
    found = ask(f"--workdir={workdir}", "--step=0")
  assert found.stdout.count("question | ") == 3 and "question | Where?" in found.stdout
  assert "leaves no room for an answer" in found.stderr and found.returncode == 0


def test_what_is_missing_is_said_in_a_sentence(workdir, tmp_path):
  cases = {
    ("--workdir=/nowhere",): "/nowhere holds no run (no config.json)",
    (f"--workdir={workdir}", "--step=7"): "has no checkpoint of step 7; it has 0",
    (f"--workdir={workdir}", "--step=best"): "keeps no checkpoint that is known as the best",
    (f"--workdir={workdir}", "--config.rollout.topk=2"): "rollout.topk can't be changed",
    (f"--workdir={workdir}", "--config=configs/search_r1.py"): "--config is not used",
    (f"--workdir={workdir}", "--page", "Who?"): "give one of a question, --example and --page",
  }
  for arguments, said in cases.items():
    found = ask(*arguments)
    assert found.returncode in (1, 2) and said in found.stderr, (arguments, found.stderr)
    assert "Traceback" not in found.stderr and not found.stdout
  (tmp_path / "config.json").write_bytes((workdir / "config.json").read_bytes())
  assert "has no checkpoint yet" in ask(f"--workdir={tmp_path}", "Who?").stderr
