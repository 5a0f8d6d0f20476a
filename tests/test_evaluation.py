"""experiments/evaluate.py: sets, resuming, comparing, and what it refuses; with a scripted policy,
and once for real."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import cpu_devices
import programs
import pytest
from test_loop import Completion, Tokenizer

from configs import baselines, search_r1
from stratified import rewards
from stratified.agents import loop, tags
from stratified.agents.limits import Limits
from stratified.evaluation import answers, paired, runner
from stratified.retrieval.corpus import Passage
from stratified.runs import build, evaluations
from stratified.tasks import base, search_qa
from stratified.tools import search
from stratified.types import Question

ROOT = pathlib.Path(__file__).parents[1]
LIMITS = Limits(
  max_turns=2, max_turn_tokens=60, max_observation_tokens=100, max_tokens=400, answer_tokens=20
)
GO_ON = types.SimpleNamespace(asked=False)


class Policy:
  """Searches, then answers with the number of its question's key and its sample; one generation a
  poll."""

  def __init__(self, stop_after=None, stop=None):
    self.waiting, self.keys, self.stop_after, self.stop = [], set(), stop_after, stop

  def submit(self, request):
    self.waiting.append(request)
    self.keys.add(request.key)

  def poll(self):
    request = self.waiting.pop(0)
    text = Tokenizer().decode(request.token_ids)
    said = (
      f"<answer> {request.key[1]}.{request.key[2]} </answer>"
      if "</information>" in text
      else "<search> x </search>"
    )
    if self.stop_after is not None and "answer" in said:
      self.stop_after -= 1
      self.stop.asked = self.stop_after < 0
    return [Completion(request.key, tuple(said.encode()), (-1.0,) * len(said), "stop")]


class Search:
  def search(self, queries, topk):
    return [[Passage("1", "T", "text")] for _ in queries]


def questions(count, name="nq"):
  return [
    Question(f"{name}_{i}", f"What is {i}?", (f"{i}.0",), name, hops=1 + i % 2)
    for i in range(count)
  ]


def run(kept, asked, policy, *, samples=1, stop=GO_ON, name="nq"):
  collect = functools.partial(
    loop.collect,
    sampler=policy,
    tools=(search.Search(Search(), 1),),
    tokenizer=Tokenizer(),
    protocol=tags.short(),
    limits=LIMITS,
  )
  return runner.run(
    name, asked, collect, samples=samples, kept=kept, stop=lambda: stop.asked, active=False
  )


def test_a_stopped_evaluation_goes_on_and_ends_as_an_uninterrupted_one(tmp_path):
  whole = run(answers.Answers(tmp_path / "whole", {}), questions(9), Policy(), samples=2)
  assert [[row["answer"] for row in group] for group in whole] == [
    [f"{i}.0", f"{i}.1"] for i in range(9)
  ]
  stop = types.SimpleNamespace(asked=False)
  with pytest.raises(runner.Stopped):
    run(answers.Answers(tmp_path / "b", {}), questions(9), Policy(7, stop), samples=2, stop=stop)
  first = len(answers.read(tmp_path / "b" / "nq.jsonl"))
  assert 0 < first < 18
  policy = Policy()
  assert run(answers.Answers(tmp_path / "b", {}), questions(9), policy, samples=2) == whole
  asked_again = {key[1] for key in policy.keys}
  assert (
    asked_again and min(asked_again) >= first // 2 - 1
  )  # questions that were whole are not asked again
  assert (
    run(answers.Answers(tmp_path / "b", {}), questions(9), (idle := Policy()), samples=2) == whole
    and not idle.keys
  )


def test_more_questions_go_on_from_fewer(tmp_path):
  kept = answers.Answers(tmp_path, {})
  few = run(kept, questions(4), Policy())
  policy = Policy()
  assert run(kept, questions(9), policy)[:4] == few and {key[1] for key in policy.keys} == set(
    range(4, 9)
  )


def test_each_set_has_random_keys_of_its_own_whichever_run_beside_it(tmp_path):
  keys = {}
  for order in (["nq", "popqa"], ["popqa"]):
    for name in order:
      policy = Policy()
      run(answers.Answers(tmp_path / "-".join(order), {}), questions(3, name), policy, name=name)
      assert keys.setdefault(name, policy.keys) == policy.keys
  assert not keys["nq"] & keys["popqa"] and all(
    2**30 <= step < 2**31 for step, _, _ in keys["nq"] | keys["popqa"]
  )


def test_an_answer_to_another_question_of_the_same_id_is_refused(tmp_path):
  kept = answers.Answers(tmp_path, {})
  run(kept, questions(2), Policy())
  changed = [dataclasses.replace(questions(1)[0], text="What was 0?"), *questions(2)[1:]]
  with pytest.raises(
    ValueError,
    match="nq.jsonl answers another question 'nq_0' than the data hold now; name another",
  ):
    run(kept, changed, Policy())
  with pytest.raises(ValueError, match="nq asks two questions of the id 'nq_0'"):
    run(answers.Answers(tmp_path / "twice", {}), [*questions(1), *changed], Policy())


def test_without_a_folder_the_same_rollouts_are_kept_in_memory_alone(tmp_path):
  kept = run(answers.Answers(tmp_path, {}), questions(5), Policy(), samples=2)
  assert run(None, questions(5), Policy(), samples=2) == kept
  # questions of one id are told apart by their places
  twice = [questions(1)[0], dataclasses.replace(questions(1)[0], golden_answers=("else",))]
  assert [group[0]["exact_match"] for group in run(None, twice, Policy())] == [1.0, 0.0]


def test_two_processes_that_exchange_their_shares_get_the_rows_of_one(monkeypatch):
  """What phases.py does with processes.mine and processes.exchange, in one process."""
  alone = run(None, questions(7), Policy())
  monkeypatch.setattr(runner, "CHUNK", 3)
  collected = lambda policy: functools.partial(
    loop.collect,
    sampler=policy,
    tools=(search.Search(Search(), 1),),
    tokenizer=Tokenizer(),
    protocol=tags.short(),
    limits=LIMITS,
  )

  def exchanged(asked, *, indices, **options):
    parts = [
      collected(Policy())(asked[p::2], indices=indices[p::2], **options) if asked[p::2] else []
      for p in range(2)
    ]
    return [parts[q % 2][q // 2] for q in range(len(asked))]

  assert runner.run("nq", questions(7), exchanged, active=False) == alone


def test_a_row_has_scores_intervals_and_an_average(tmp_path):
  groups = run(answers.Answers(tmp_path, {}), questions(10), Policy(), samples=2)
  row = runner.table_row("x", {"nq": groups, "popqa": groups[:4]})
  nq = row["sets"]["nq"]
  assert (
    nq["exact_match"] == 0.5
    and nq["exact_match_any"] == 1.0
    and nq["count"] == 20
    and nq["searches_mean"] == 1.0
  )
  assert nq["exact_match_interval"] == [0.5, 0.5] and row["average"]["exact_match_interval"] == [
    0.5,
    0.5,
  ]
  assert set(nq["by_hops"]) == {"1", "2"} and json.dumps(row)


def test_a_row_has_the_means_that_make_sets_of_unequal_size_comparable(tmp_path):
  groups = run(answers.Answers(tmp_path, {}), questions(12), Policy())  # all right
  wrong = [[dict(group[0], exact_match=0.0)] for group in groups]
  sets = {"nq": groups + wrong[:4], "popqa": wrong[:2], "bamboogle": groups[:2]}
  average = runner.table_row("x", sets, "one context")["average"]
  assert average["exact_match"] == pytest.approx((0.75 + 0 + 1) / 3)
  assert average["exact_match_without_bamboogle"] == pytest.approx((0.75 + 0) / 2)
  assert average["exact_match_micro"] == pytest.approx(14 / 20)
  assert runner.table_row("x", {})["average"] == {}


def test_paired_runs_over_the_questions_that_both_answered(tmp_path):
  ours = run(answers.Answers(tmp_path / "a", {}), questions(6), Policy())
  theirs = [dict(row[0], exact_match=0.0) for row in ours[2:]]
  theirs[-1]["fault"] = "lost"
  found = paired.differences(
    {"nq": ours}, {"nq": {(row["id"], 0): row for row in theirs}, "popqa": {}}
  )
  assert (
    found["nq"]["count"] == 3 and found["nq"]["difference"] == 1.0 and found["nq"]["only_a"] == 3
  )
  assert "average" not in found
  with pytest.raises(ValueError, match="no answered question in common"):
    paired.differences({"nq": ours}, {"popqa": {}})
  asked = {"nq": questions(2)}
  paired.check_shared(asked, {"other": {"nq": {("nq_1", 0): {}}}})
  with pytest.raises(ValueError, match="--compare=other holds no answer to any of these questions"):
    paired.check_shared(asked, {"other": {"nq": {("nq_7", 0): {}}, "popqa": {("nq_1", 0): {}}}})
  theirs[0]["question"] = "Else?"
  with pytest.raises(ValueError, match="question 'nq_2' of nq is not the same in both"):
    paired.differences({"nq": ours}, {"nq": {(row["id"], 0): row for row in theirs}})


###  What is asked, and what the answers depend on  ###


def files_config(folder, **changes):
  (folder / "questions").mkdir()
  for name in ("popqa", "nq", "zoo"):
    lines = [
      {
        "id": f"{i}",
        "question": f"{name} {i}?",
        "golden_answers": ["x"],
        "data_source": name,
        "split": split,
      }
      for i in range(8)
      for split in ["dev" if i < 5 else "train"]
    ]
    (folder / "questions" / f"{name}.jsonl").write_text(
      "".join(json.dumps(line) + "\n" for line in lines)
    )
  config = search_r1.get_config("smollm2")
  config.update_from_flattened_dict(
    {"data.questions": str(folder / "questions"), "policy.checkpoint": ""} | changes
  )
  return config


def test_sets_by_name_in_the_papers_order_and_a_count_that_only_cuts(tmp_path, monkeypatch):
  config = files_config(tmp_path)
  monkeypatch.setattr(search_qa, "search", lambda config: search.Search(None))
  monkeypatch.setattr(search_qa.base, "from_checkpoint", lambda config: Tokenizer())
  task = search_qa.make(config)
  found = evaluations.question_sets(task, ["all"], None)
  assert list(found) == ["nq", "popqa", "zoo"] and all(
    len(asked) == 5 for asked, _ in found.values()
  )
  few = evaluations.question_sets(task, ["popqa"], 3)
  assert list(few) == ["popqa"] and few["popqa"][0] == found["popqa"][0][:3]
  (asked, tools) = evaluations.question_sets(task, None, 3)["held_out"]
  assert len(asked) == 3 and tools is task.tools
  with pytest.raises(
    ValueError, match="--sets names musique, but there are questions of nq, popqa, zoo only"
  ):
    evaluations.question_sets(task, ["nq", "musique"], 3)


def test_the_folder_of_benchmarks_replaces_the_training_questions(tmp_path):
  config = evaluations.for_evaluation(
    files_config(
      tmp_path,
      **{
        "data.evaluation": str(tmp_path / "questions"),
        "data.questions": str(tmp_path / "absent"),
      },
    )
  )
  assert (
    len(search_qa.evaluation_questions(config)) == 24
  )  # all splits: the folder holds what is to be evaluated on
  assert config.data.questions == str(tmp_path / "questions")


def test_all_questions_of_a_world_without_end_are_refused():
  with pytest.raises(
    ValueError, match="--questions=-1 is all questions, but this task's are made without end"
  ):
    evaluations.question_sets(types.SimpleNamespace(endless=True), None, None)


def test_settings_hold_what_an_answer_depends_on_and_no_more(tmp_path):
  config = search_r1.get_config("tiny")
  base = evaluations.settings(config, step=3, samples=1, temperature=0.0, forced=None)
  changed = lambda **more: _differing(base, config, more)
  assert (
    changed(
      **{"mesh.data": 2},
      **{"loss.clip_ratio": 9.0},
      **{"sampler.lanes": 3},
      **{"rollout.temperature": 0.3},
    )
    == []
  )
  assert changed(**{"rollout.max_turns": 1}) == ["rollout.max_turns"]
  assert changed(**{"data.entities": 5, "policy.width": 8}) == ["data.entities", "policy.width"]
  hot = evaluations.settings(config, step=3, samples=4, temperature=0.5, forced=None)
  assert {key for key in hot if base.get(key) != hot[key]} == {
    "samples",
    "temperature",
    "rollout.top_p",
  }


def _differing(base, config, changes):
  copy = config.copy_and_resolve_references()
  copy.update_from_flattened_dict(changes)
  other = evaluations.settings(copy, step=3, samples=1, temperature=0.0, forced=None)
  return sorted(key for key in base.keys() | other if base.get(key) != other.get(key))


def test_a_fingerprint_tells_other_weights_of_the_same_name(tmp_path):
  path = tmp_path / "model.safetensors"
  path.write_bytes(b"x" * 5000)
  first = evaluations.fingerprint([path])
  path.write_bytes(b"x" * 4999 + b"y")
  assert evaluations.fingerprint([path]) != first


###  The methods as presets  ###


@pytest.mark.parametrize("name", baselines.INFERENCE)
def test_a_method_is_a_preset_with_another_protocol(name):
  small, large = baselines.get_config(name), baselines.get_config(f"{name}:instruct")
  assert small.rollout.protocol == f"{name}_few_shot" and large.rollout.protocol == name
  assert (
    small.policy.checkpoint == search_r1.get_config("smollm2").policy.checkpoint
    and large.rollout.chat_template
  )
  for config in (small, large):
    protocol = base.TAGS[config.rollout.protocol](render=None)
    assert protocol.searches[0] <= config.rollout.max_turns


def test_every_protocol_takes_a_chat_template():
  for name, make in base.TAGS.items():
    assert "<user>" in make(render=lambda message, system="": f"<user>{message}").prompt("Who?"), (
      name
    )


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      {"rollout.protocol": "rag"},
      "rollout.protocol='rag' must be 'short' with warm_start.num_steps=600",
    ),
    ({"rollout.chat_template": True}, "rollout.chat_template=True needs policy.checkpoint"),
    (
      {"rollout.protocol": "rags"},
      "rollout.protocol='rags' is unknown; choose one of autorefine, autorefine_few_shot, ",
    ),
  ],
)
def test_what_a_method_cannot_do_is_refused(changes, message):
  config = search_r1.get_config("tiny")
  config.update_from_flattened_dict(changes)
  with pytest.raises(ValueError) as error:
    build.build(config, task=False)
  assert message in str(error.value)


def test_a_method_needs_a_preset_that_exists():
  with pytest.raises(ValueError, match="choose one of grpo, .*direct, cot, rag, ircot, search_o1"):
    baselines.get_config("raq")
  with pytest.raises(ValueError, match="preset 'huge' is unknown"):
    baselines.get_config("rag:huge")


###  The command  ###


TINY = {
  "policy.width": 16,
  "policy.num_layers": 1,
  "policy.num_heads": 2,
  "policy.num_kv_heads": 1,
  "policy.mlp_width": 16,
  "policy.unroll": 1,
  "data.entities": 60,
  "eval.questions": 24,
  "rollout.max_tokens": 128,
  "packing.row_length": 128,
  "packing.rows": 2,
  "sampler.lanes": 4,
  "sampler.rows": 2,
  "sampler.block": 2,
}


def command(workdir, *more, **changes):
  flags = [f"--config.{name}={value}" for name, value in (TINY | changes).items()]
  return [
    sys.executable,
    "experiments/evaluate.py",
    "--config=configs/search_r1.py:tiny",
    f"--workdir={workdir}",
    *flags,
    *more,
  ]


def call(*arguments, **changes):
  return programs.run(*command(*arguments, **changes)[1:])


@pytest.mark.long
def test_the_command_survives_a_kill_compares_and_refuses_other_settings(tmp_path):
  folder = tmp_path / "a" / "evaluation" / "samples"
  more = ["--questions=24", "--samples=2", "--temperature=1.5", "--name=samples"]
  running = subprocess.Popen(
    command(tmp_path / "a", *more),
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    env=os.environ | {"XLA_FLAGS": cpu_devices.flags(1)},
  )
  try:
    deadline = time.monotonic() + 300
    while not (path := folder / "held_out.jsonl").exists() or path.read_bytes().count(b"\n") < 5:
      assert running.poll() is None or running.returncode == 0 and path.exists(), running.returncode
      assert time.monotonic() < deadline
      if running.poll() is not None:
        break
      time.sleep(0.01)
  finally:
    running.send_signal(signal.SIGKILL)
    running.wait()
  before = answers.read(path) if path.read_bytes().endswith(b"\n") else {}

  done = call(tmp_path / "a", *more)
  assert done.returncode == 0, done.stderr[-3000:]
  for name in ("table.md", "table.tex", "table.json", "settings.json"):
    assert (folder / name).exists()
  assert "| exact match x 100 | held_out | second_encyclopedia | average |" in done.stdout
  rows = answers.open_folder(tmp_path / "a")
  assert {name: len(found) for name, found in rows.items()} == {
    "held_out": 48,
    "second_encyclopedia": 48,
  }
  assert all(rows["held_out"][key] == row for key, row in before.items())
  for row in rows["held_out"].values():
    assert row["exact_match"] == rewards.exact_match(row["answer"], row["golden_answers"])
  scores = json.loads((tmp_path / "a" / "evaluation.json").read_text())["samples"]["sets"][
    "held_out"
  ]
  assert scores["count"] == 48 and {
    "exact_match",
    "f1",
    "searches_mean",
    "exact_match_interval",
  } <= set(scores)

  # the whole in another folder, without a kill: the same rollouts, and no difference to the first
  again = call(tmp_path / "b", *more, f"--compare={tmp_path / 'a'}")
  assert again.returncode == 0, again.stderr[-3000:]
  assert answers.open_folder(tmp_path / "b") == rows
  table = json.loads((tmp_path / "b/evaluation/samples/table.json").read_text())
  (found,) = table["paired"].values()
  assert found["average"]["difference"] == 0 and found["average"]["count"] == 48

  path = tmp_path / "coverage.jsonl"
  ids = sorted({id for of in rows.values() for id, _ in of})
  known = {id: i % 2 == 0 for i, id in enumerate(ids)}
  path.write_text("".join(json.dumps({"id": i, "covered": c}) + "\n" for i, c in known.items()))
  both = call(
    *(tmp_path / "a", "--questions=24", "--temperature=0,1.5", f"--coverage={path}"), "--label=it"
  )
  assert both.returncode == 0, both.stderr[-3000:]
  last = both.stdout.splitlines()[-6:]
  assert last[0].endswith("| average | micro | family |")
  assert [line.split(" | ")[0] for line in last[2:]] == [
    *("| it, temperature 0", "| it, temperature 0, covered"),
    *("| it, temperature 1.5", "| it, temperature 1.5, covered"),
  ]
  assert all(line.endswith("| one context |") for line in last[2:])
  names = {folder.name for folder in (tmp_path / "a" / "evaluation").iterdir()}
  assert names == {"samples", "as_given", "as_given_samples_1_temperature_1.5"}
  table = json.loads((tmp_path / "a/evaluation/as_given/table.json").read_text())
  counts = [sum(part["count"] for part in row["sets"].values()) for row in table["rows"]]
  asked = [id for of in rows.values() for id, sample in of if sample == 0]
  assert counts == [48, sum(known[id] for id in asked)] and 10 < counts[1] < 38

  other = call(tmp_path / "b", *more, **{"rollout.topk": 2})
  assert (
    other.returncode == 1
    and "rollout.topk was 1 and is 2" in other.stderr
    and "--name" in other.stderr
  )


def test_flags_that_cannot_be_are_refused_before_any_work(tmp_path):
  done = call(tmp_path, "--samples=2", "--temperature=0")
  assert (
    done.returncode == 1
    and "would be the same rollout 2 times" in done.stderr
    and not list(tmp_path.iterdir())
  )
  done = call(tmp_path, "--temperature=0,hot")
  assert done.returncode == 1 and "--temperature=0,hot must be numbers" in done.stderr
