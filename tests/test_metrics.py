"""metrics.jsonl, TensorBoard events and trajectories survive a killed run, and every row is strict
JSON."""

import json
import pathlib

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from stratified import files
from stratified.runs import writer as metrics
from stratified.types import Call, Question, Segment, Trajectory, Turn


def _strict(constant):
  raise ValueError(f"{constant} is no JSON")


def _rows(workdir):
  text = (pathlib.Path(workdir) / "metrics.jsonl").read_text()
  assert text.endswith("\n") or not text
  return [json.loads(line, parse_constant=_strict) for line in text.splitlines()]


def _events(workdir, run):
  """Every event of a TensorBoard run in file order, framing removed."""
  events = []
  for path in sorted((pathlib.Path(workdir) / "tensorboard" / run).iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], "little")
      events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
      data = data[16 + size :]
  return events


def _run(workdir, steps, resume_step=None, **kwargs):
  with metrics.Writer(workdir, resume_step, **kwargs) as writer:
    for step in steps:
      writer.write_trajectories(step, [{"step": step}])
      writer.write({"step": step, "reward/mean": step / 7})


def test_a_row_is_readable_before_the_writer_closes(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write({"step": 1, "reward/mean": 0.5})
  assert _rows(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
  writer.close()


def test_values_come_back_bit_for_bit(tmp_path):
  values = np.random.default_rng(0).standard_normal(20).astype(np.float32)
  with metrics.Writer(tmp_path) as writer:
    writer.write({"step": np.int32(3)} | {f"k/{i}": value for i, value in enumerate(values)})
  row = _rows(tmp_path)[0]
  assert type(row["step"]) is int
  assert [np.float32(row[f"k/{i}"]) for i in range(20)] == list(values)


def test_an_interrupted_run_leaves_the_files_of_an_uninterrupted_one(tmp_path):
  _run(tmp_path / "whole", range(1, 9))
  _run(tmp_path / "cut", range(1, 7))
  _run(tmp_path / "cut", range(5, 9), resume_step=4)
  assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (
    tmp_path / "cut/metrics.jsonl"
  ).read_bytes()
  assert {path.name: path.read_bytes() for path in (tmp_path / "whole/trajectories").iterdir()} == {
    path.name: path.read_bytes() for path in (tmp_path / "cut/trajectories").iterdir()
  }


def test_a_later_trajectory_file_goes_even_if_no_row_was_written_for_it(tmp_path):
  _run(tmp_path, range(1, 4))
  (tmp_path / "trajectories/step_000004.jsonl").write_text("{}\n")
  (tmp_path / "trajectories/step_000005.jsonl.part").write_text('{"half')
  (tmp_path / "trajectories/notes.txt").write_text("kept: not ours")
  metrics.Writer(tmp_path, 3).close()
  names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
  assert names == ["notes.txt", "step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"]


@pytest.mark.parametrize(
  "torn",
  ['{"step": 4, "reward/mea', '{"step": 4, "reward/mean": 0.1}', '{"step": 4, "rew\n', "\0\0"],
)
def test_a_half_written_last_line_is_dropped(tmp_path, torn):
  _run(tmp_path, range(1, 4))
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write(torn)
  _run(tmp_path, [4], resume_step=3)
  assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is no JSON object"):
    metrics.Writer(tmp_path, 2)
  assert files.read_rows(tmp_path / "metrics.jsonl") == ([{"step": 1}, {"step": 2}], 1)


def test_without_a_checkpoint_only_the_finished_warm_start_is_kept(tmp_path):
  def write():
    with metrics.Writer(tmp_path, warm_start_step=2) as writer:
      for step in range(1, 4):
        writer.write({"warm_start/step": step, "warm_start/loss": 1 / step})
      writer.write({"step": 0, "eval/exact_match": 0.1})

  write()
  metrics.Writer(tmp_path, warm_start_step=2).close()
  assert _rows(tmp_path) == [
    {"warm_start/step": 1, "warm_start/loss": 1.0},
    {"warm_start/step": 2, "warm_start/loss": 0.5},
  ]
  metrics.Writer(tmp_path).close()
  assert not _rows(tmp_path)


def test_a_restored_step_keeps_the_warm_start_and_the_evaluation_of_its_step(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write({"warm_start/step": 900, "warm_start/loss": 0.1})
    for step in range(3):
      writer.write({"step": step, "reward/mean": 0.0})
      writer.write({"step": step, "eval/exact_match": 0.5})
  metrics.Writer(tmp_path, 1).close()
  assert [row.get("step", "warm") for row in _rows(tmp_path)] == ["warm", 0, 0, 1, 1]


def test_what_is_not_finite_is_null_and_named(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write(
      {"step": 1, "grad/norm": np.float32("inf"), "loss/policy": float("nan"), "reward/mean": 0.0}
    )
    writer.write_trajectories(
      1, [{"advantage": float("nan"), "segments": [{"x": np.float32(0.5)}]}]
    )
  assert _rows(tmp_path) == [
    {
      "step": 1,
      "grad/norm": None,
      "loss/policy": None,
      "reward/mean": 0.0,
      "not_finite": {"grad/norm": "inf", "loss/policy": "nan"},
    }
  ]
  records, _ = files.read_rows(metrics.trajectory_path(tmp_path, 1))
  assert records == [{"advantage": None, "segments": [{"x": 0.5}]}]


def test_steps_never_go_back_not_even_across_a_resume(tmp_path):
  _run(tmp_path, [1, 2])
  with metrics.Writer(tmp_path, 2) as writer:
    with pytest.raises(ValueError, match="step 1 comes after step 2"):
      writer.write({"step": 1})
    with pytest.raises(ValueError, match="needs an integer step"):
      writer.write({"reward/mean": 1.0})


def test_an_inactive_writer_touches_nothing(tmp_path):
  _run(tmp_path / "no", [1], active=False)
  assert not (tmp_path / "no").exists()


def test_another_backend_takes_the_numbers_in_tensorboards_place(tmp_path):
  said = []

  class Backend:
    def __init__(self, workdir, run, first):
      self.run = run
      said.append((workdir, run, first))

    def write(self, step, values):
      said.append((self.run, step, dict(values)))

    def close(self):
      said.append((self.run, "closed"))

  with metrics.Writer(tmp_path, 4, backends=[Backend]) as writer:
    writer.write({"step": 5, "reward/mean": 0.5, "stage": "reinforcement"})
    writer.write({"warm_start/step": 9, "warm_start/loss": 2.0})
  assert said == [
    (tmp_path, "train", 5),
    ("train", 5, {"reward/mean": 0.5}),
    (tmp_path, "warm_start", None),
    ("warm_start", 9, {"warm_start/loss": 2.0}),
    ("train", "closed"),
    ("warm_start", "closed"),
  ]
  assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_gets_every_number_and_forgets_what_a_resume_repeats(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write({"warm_start/step": 7, "warm_start/loss": 0.25})
    writer.write({"step": 1, "reward/mean": 0.5, "loss/kl": float("nan"), "what": "text"})
    writer.write({"step": 2, "reward/mean": 0.75})
  metrics.Writer(tmp_path, 1).close()
  _run(tmp_path, [2], resume_step=1)
  train = [event for event in _events(tmp_path, "train") if not event.file_version]
  seen = [
    (event.step, event.session_log.status or [(v.tag, v.simple_value) for v in event.summary.value])
    for event in train
  ]
  start = event_pb2.SessionLog.START  # TensorBoard drops earlier events from this step on
  assert seen == [
    (0, start),
    (1, [("reward/mean", 0.5)]),
    (2, [("reward/mean", 0.75)]),
    (2, start),
    (2, [("reward/mean", pytest.approx(2 / 7))]),
  ]
  warm = [event for event in _events(tmp_path, "warm_start") if event.summary.value]
  assert [(event.step, event.summary.value[0].simple_value) for event in warm] == [(7, 0.25)]


def test_a_trajectory_becomes_one_object_with_every_segment_as_text():
  trajectory = Trajectory(
    question=Question("q7", "Where was Ada born?", ("London", "London, England"), "made-up", 1),
    sample=3,
    segments=(
      Segment((1, 2), "prompt"),
      Segment((3,), "policy", (-0.5,)),
      Segment((4, 5), "observation"),
      Segment((6,), "policy", (-0.25,)),
    ),
    turns=(
      Turn(
        "call", "…", (Call("search", "ada born", "hit", ("p1", "p2")), Call("search", "", "empty"))
      ),
      Turn("answer", "…"),
    ),
    answer="London",
  )
  record = metrics.trajectory_record(
    trajectory,
    lambda ids: "".join("?abcdef"[i] for i in ids),
    reward=1.0,
    stratum=2,
    advantage=-0.5,
  )
  assert json.loads(json.dumps(record)) == {
    "question_id": "q7",
    "question": "Where was Ada born?",
    "golden_answers": ["London", "London, England"],
    "source": "made-up",
    "hops": 1,
    "sample": 3,
    "segments": [
      {"origin": "prompt", "text": "ab", "tokens": 2},
      {"origin": "policy", "text": "c", "tokens": 1},
      {"origin": "observation", "text": "de", "tokens": 2},
      {"origin": "policy", "text": "f", "tokens": 1},
    ],
    "turns": [
      {
        "action": "call",
        "calls": [
          {"tool": "search", "argument": "ada born", "outcome": "hit", "results": ["p1", "p2"]},
          {"tool": "search", "argument": "", "outcome": "empty", "results": []},
        ],
      },
      {"action": "answer", "calls": []},
    ],
    "searches": 2,
    "calls": {"search": 2},
    "answer": "London",
    "stop": "answer",
    "fault": None,
    "weight_version": 0,
    "reward": 1.0,
    "stratum": 2,
    "advantage": -0.5,
  }


def test_any_text_stays_one_line_of_utf8(tmp_path):
  hostile = "a\nb\u2028c\x85d\ud800 \u202e</script>"
  with metrics.Writer(tmp_path) as writer:
    writer.write_trajectories(5, [{"answer": hostile}, {"answer": "second"}])
  text = metrics.trajectory_path(tmp_path, 5).read_text(encoding="utf-8")
  assert [json.loads(line)["answer"] for line in text.splitlines()] == [hostile, "second"]


@pytest.mark.parametrize(
  "before, said", [(None, "metrics.jsonl is gone"), (3, "metrics.jsonl ends at step 3"), (5, None)]
)
def test_a_resumed_run_says_which_rows_are_gone(tmp_path, capsys, before, said):
  if before:
    rows = "".join(f'{{"step": {step}}}\n' for step in range(1, before + 1))
    (tmp_path / "metrics.jsonl").write_text(rows)
  with metrics.Writer(tmp_path, resume_step=5):
    pass
  found = capsys.readouterr().out
  assert (said is None and not found) or (said in found and "checkpoint is of step 5" in found)


def test_a_resumed_warm_start_says_that_its_rows_are_gone(tmp_path, capsys):
  with metrics.Writer(tmp_path, warm_start_step=4):
    pass
  assert "metrics.jsonl is gone, but the checkpoint is of warm_start/step 4" in (
    capsys.readouterr().out
  )


def test_tokens_are_counted_from_the_run_s_start_also_by_one_that_goes_on(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write({"warm_start/step": 1, "warm_start/loss": 1.0}, trained=10)
    for step in (1, 2, 3):
      writer.write({"step": step}, sampled=step, trained=100)
      writer.write({"step": step, "eval/exact_match": 0.5})
  with metrics.Writer(tmp_path, resume_step=2) as writer:
    writer.write({"step": 3}, sampled=5, trained=100)
  rows = [row for row in _rows(tmp_path) if "run/sampled_tokens" in row]
  assert [(row["run/sampled_tokens"], row["run/trained_tokens"]) for row in rows] == [
    (0, 10), (1, 110), (3, 210), (8, 310)
  ]  # fmt: skip
