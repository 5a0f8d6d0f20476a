"""The folder of an evaluation: kept line by line, gone on with, refused where it is another's."""

import json

import pytest
from small_rollouts import trajectory

from stratified.evaluation import answers, score
from stratified.types import Call, Question, Turn


def rollout(id="q0", answer="Ada", sample=0, text="Who?", **fields):
  question = Question(id, text, ("Ada", "Ada L."), "nq", hops=2)
  made = trajectory(
    ("prompt", [1]), ("policy", [2, 3]), question=question, answer=answer, sample=sample, **fields
  )
  turn = Turn("call", "<search> x </search>", (Call("search", "x", "hit", ("7",)),))
  return made.__class__(**vars(made) | {"turns": (turn,)})


SETTINGS = {"step": 3, "data.sets": ("nq",), "temperature": 0.0}


def test_a_rollout_is_a_line_with_its_scores(tmp_path):
  kept = answers.Answers(tmp_path / "e", SETTINGS)
  kept.append("nq", rollout(side_tokens=5))
  (row,) = kept.read("nq").values()
  assert (
    row["exact_match"] == 1.0
    and row["searches"] == 1
    and row["tokens"] == 7
    and row["side_tokens"] == 5
  )
  assert row["golden_answers"] == ["Ada", "Ada L."] and row["hops"] == 2 and row["fault"] is None
  assert row["turns"] == [
    {
      "action": "call",
      "text": "<search> x </search>",
      "calls": [{"tool": "search", "argument": "x", "outcome": "hit", "results": ["7"]}],
    }
  ]
  assert score.summarise([[row]]) == score.summary([[rollout(side_tokens=5)]])


def test_another_process_goes_on_in_the_same_folder(tmp_path):
  answers.Answers(tmp_path, SETTINGS).append("nq", rollout("q0"))
  kept = answers.Answers(tmp_path, dict(SETTINGS))
  known = kept.read("nq")
  rows = lambda samples: [[known.get((id, k)) for k in range(samples)] for id in ("q0", "q1")]
  assert answers.unfinished(rows(1)) == [1]
  assert answers.unfinished(rows(2)) == [0, 1]
  assert kept.read("popqa") == {}


def test_a_torn_last_line_is_cut_off_and_run_again(tmp_path):
  kept = answers.Answers(tmp_path, SETTINGS)
  for id in ("q0", "q1"):
    kept.append("nq", rollout(id))
  path = kept.path("nq")
  path.write_bytes(path.read_bytes()[:-20])
  assert list(kept.read("nq")) == [("q0", 0)]
  kept.append("nq", rollout("q1"))
  assert list(kept.read("nq")) == [("q0", 0), ("q1", 0)]
  path.write_bytes(b'{"id": "q0"')
  assert kept.read("nq") == {} and path.read_bytes() == b""


def test_a_lost_rollout_is_tried_again_and_the_newest_counts(tmp_path):
  kept = answers.Answers(tmp_path, SETTINGS)
  kept.append("nq", rollout(answer=None, stop="fault", fault="no reply"))
  assert answers.unfinished([[kept.read("nq")["q0", 0]]]) == [0]
  kept.append("nq", rollout())
  assert answers.unfinished([[kept.read("nq")["q0", 0]]]) == []
  assert kept.read("nq")["q0", 0]["exact_match"] == 1.0


def test_other_settings_are_refused_by_name(tmp_path):
  answers.Answers(tmp_path, SETTINGS)
  with pytest.raises(
    ValueError,
    match=r"other settings \(gone was None and is 1; step was 3 and is 4\); name another folder",
  ):
    answers.Answers(tmp_path, SETTINGS | {"step": 4, "gone": 1})
  (tmp_path / "settings.json").write_text("{")
  with pytest.raises(ValueError, match="settings.json is not JSON"):
    answers.Answers(tmp_path, SETTINGS)
  (tmp_path / "settings.json").write_text("[]")
  with pytest.raises(ValueError, match="settings.json is no JSON object"):
    answers.Answers(tmp_path, SETTINGS)


NO_SCORE = json.dumps(answers.record(rollout()) | {"exact_match": None})


@pytest.mark.parametrize(
  "line", ["nonsense", "[1]", '{"id": "q"}', '{"id": "q", "sample": 0}', NO_SCORE, "[" * 100_000]
)
def test_lines_that_are_no_rollouts_are_refused(tmp_path, line):
  kept = answers.Answers(tmp_path, SETTINGS)
  kept.path("nq").write_text(line + "\n")
  with pytest.raises(ValueError, match="nq.jsonl holds lines that are no rollouts"):
    kept.read("nq")


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "", "ü %2e", "\\", "nq.v2"])
def test_a_sets_name_leads_nowhere_else_and_comes_back(tmp_path, name):
  kept = answers.Answers(tmp_path / "e", SETTINGS)
  kept.append(name, rollout())
  assert [path.parent for path in tmp_path.rglob("*.jsonl")] == [tmp_path / "e"]
  assert list(answers.open_folder(tmp_path / "e")) == [name]


def test_a_workdir_stands_for_its_only_evaluation(tmp_path):
  with pytest.raises(FileNotFoundError, match="holds no evaluation"):
    answers.open_folder(tmp_path)
  first = answers.Answers(tmp_path / "evaluation" / "step_000003", SETTINGS)
  first.append("nq", rollout())
  assert json.loads((first.folder / "settings.json").read_text())["step"] == 3
  assert list(answers.open_folder(tmp_path)) == ["nq"] == list(answers.open_folder(first.folder))
  answers.Answers(tmp_path / "evaluation" / "step_000004", SETTINGS)
  with pytest.raises(ValueError, match="holds 2 evaluations; name one of them: .*step_000003"):
    answers.open_folder(tmp_path)


def test_text_without_a_utf8_form_is_kept(tmp_path):
  kept = answers.Answers(tmp_path, SETTINGS)
  kept.append("nq", rollout(answer="\ud800 \u2028 x"))
  assert kept.read("nq")["q0", 0]["answer"] == "\ud800 \u2028 x"
