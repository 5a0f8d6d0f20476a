"""Sweeps: how they expand, what is resumed, how a run's failure or a signal is borne, what a shared
warm start is."""

import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import pytest

from configs import baselines, search_r1
from experiments import sweep
from stratified import files
from stratified.runs import sweeps
from stratified.runs import writer as metrics

ROOT = pathlib.Path(__file__).parents[1]
SEARCH_R1 = "configs/search_r1.py"

# Stands in for experiments/train.py: writes the rows of a run, one step a call of `--slow`, fails
# where it is told to.
TRAIN = """
import json, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
flags = dict(one.removeprefix("--").split("=", 1) for one in sys.argv[1:])
workdir = pathlib.Path(flags["workdir"])
if flags.get("config.advantage.alpha") == "0.4":
  print("work"); print("RuntimeError: three updates were not finite", file=sys.stderr); sys.exit(1)
config = json.loads((workdir / "wanted.json").read_text())
(workdir / "config.json").write_text(json.dumps(config))
path = workdir / "metrics.jsonl"
rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
first = max((row["step"] for row in rows if "step" in row), default=0) + 1
with path.open("a") as file:
  for step in range(first, config["num_steps"] + 1):
    print("step", step, flush=True)
    file.write(json.dumps({"step": step, "reward/mean": 0.5, "rollout/searches_mean": 1.0}) + "\\n")
    file.flush()
    time.sleep(float(flags.get("slow", 0)))
    if asked:
      print("saved", flush=True); sys.exit(0)
  row = {"step": config["num_steps"], "eval/exact_match": config["advantage"]["alpha"]}
  file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def train(tmp_path):
  script = tmp_path / "train.py"
  script.write_text(TRAIN)
  return [sys.executable, str(script)]


class Idle(sweeps.Relay):
  """A relay that installs no signal handler: the tests' process keeps its own."""

  def __init__(self):
    self.asked = self.interrupted = False
    self.process = None


def planned(folder, names=("alpha",), seeds=None, file=SEARCH_R1, argument="tiny", **given):
  """The jobs of a sweep; what train.py would store as config.json lies ready in each folder."""
  made = sweep.plan(str(ROOT / file), argument, {"num_steps": 3, **given}, names, seeds, folder)
  for job, config in made:
    job.workdir.mkdir(parents=True, exist_ok=True)
    (job.workdir / "wanted.json").write_text(config.to_json())
  return [job for job, _ in made]


# --- Expansion ---


def test_alpha_goes_from_grpo_to_san_in_steps_of_a_fifth(tmp_path):
  jobs = planned(tmp_path)
  assert [job.name for job in jobs] == [
    "alpha-0",
    "alpha-0.2",
    "alpha-0.4",
    "alpha-0.6",
    "alpha-0.8",
    "alpha-1",
  ]
  assert [job.config["advantage.alpha"] for job in jobs] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
  assert all(job.config["num_steps"] == 3 for job in jobs)
  assert "--config.num_steps=3" in jobs[1].flags and "--config.advantage.alpha=0.2" in jobs[1].flags
  assert jobs[1].flags[0] == f"--config={ROOT / SEARCH_R1}:tiny"


def test_seeds_multiply_a_sweep_seed_by_seed(tmp_path):
  jobs = planned(tmp_path, seeds=2, seed=5)
  assert len(jobs) == 12
  assert [job.config["seed"] for job in jobs] == [5] * 6 + [6] * 6
  assert jobs[7].name == "alpha-0.2_seed-6" and jobs[7].setting == jobs[1].setting == "alpha-0.2"


def test_more_seeds_keep_the_names_of_those_before(tmp_path):
  names = [{job.name for job in planned(tmp_path, seeds=seeds)} for seeds in (1, 3)]
  assert names[0] < names[1]


def test_seeds_alone_are_one_setting(tmp_path):
  jobs = planned(tmp_path, names=(), seeds=3)
  assert [(job.name, job.setting) for job in jobs] == [(f"seed-{i}", "all") for i in range(3)]


def test_two_sweeps_are_crossed(tmp_path):
  jobs = planned(tmp_path, names=("alpha", "strata"))
  assert len(jobs) == 6 * 6 and len({job.name for job in jobs}) == 36
  assert "alpha-0.2_strata-searches-x-outcome" in {job.name for job in jobs}


def test_a_sweep_over_presets_keeps_what_follows_the_second_colon(tmp_path):
  jobs = planned(tmp_path, names=("table",), file="configs/baselines.py", argument="grpo:instruct")
  assert [job.name for job in jobs] == ["grpo", "san", "stratified_grpo"]
  assert [job.config["advantage.name"] for job in jobs] == ["gn", "san", "blend"]
  assert {job.config["advantage.alpha"] for job in jobs} == {0.8}
  assert jobs[2].flags[0].endswith("configs/baselines.py:stratified_grpo:instruct")


def test_settings_that_would_share_a_name_do_not_share_a_folder():
  points = [{"strata.name": "my mod:f"}, {"strata.name": "my-mod:f"}, {"strata.name": "x"}]
  assert [name for name, _ in sweep.named(points)] == [
    "strata-my-mod-f",
    "strata-my-mod-f_again-1",
    "strata-x",
  ]


@pytest.mark.parametrize("module", [search_r1, baselines], ids=["search_r1", "baselines"])
def test_every_sweep_of_the_configs_fits_them(module, tmp_path):
  names = [name.removeprefix("sweep_") for name in vars(module) if name.startswith("sweep_")]
  assert {"alpha", "strata", "seeds"} < set(names)
  for name in names:
    file, argument = (
      f"{module.__name__.replace('.', '/')}.py",
      "tiny" if module is search_r1 else "grpo",
    )
    jobs = planned(tmp_path / name, names=(name,), file=file, argument=argument)
    assert len({json.dumps(job.config, sort_keys=True) for job in jobs}) == len(jobs) > 1


@pytest.mark.parametrize(
  "names, seeds, given, sentence",
  [
    (
      ("beta",),
      None,
      {},
      r"--sweep=beta is unknown; .*search_r1\.py has alpha, estimators, seeds, strata",
    ),
    ((), None, {}, r"nothing to sweep over: name --sweep \(one or more of alpha, .*or --seeds"),
    (
      ("alpha", "estimators"),
      None,
      {},
      r"advantage\.name is set twice, by --sweep=alpha,estimators; leave one",
    ),
    (("seeds",), 2, {}, r"seed is set twice, by --sweep=seeds and --seeds"),
    (
      ("alpha",),
      None,
      {"advantage.alpha": 0.3},
      r"--config\.advantage\.alpha is what the sweep sets itself; leave",
    ),
  ],
)
def test_a_sweep_that_makes_no_sense_is_refused_in_words(names, seeds, given, sentence, tmp_path):
  with pytest.raises(ValueError, match=sentence):
    planned(tmp_path, names=names, seeds=seeds, **given)


@pytest.mark.parametrize(
  "change, sentence",
  [
    ({"advantage.beta": 1.0}, r"advantage\.beta is no field of a config; did you mean"),
    ({"num_steps": "many"}, r"num_steps='many' must be a whole number"),
  ],
)
def test_a_sweep_over_a_key_or_type_that_the_config_lacks_is_refused(change, sentence):
  with pytest.raises(ValueError, match=sentence):
    sweep.configure(search_r1, "tiny", change)


# --- Methods ---


@pytest.mark.parametrize("method", [*baselines.METHODS, *baselines.PUBLISHED])
def test_a_method_changes_what_it_says_and_nothing_else(method):
  base = files.flatten(json.loads(search_r1.get_config("tiny").to_json()))
  made = files.flatten(json.loads(baselines.get_config(method).to_json()))
  changed = {key for key in base | made if base.get(key) != made.get(key)}
  fields = baselines.METHODS.get(method) or baselines.PUBLISHED[method]("tiny")
  of_presets = {"loss.filter_groups"} if method in baselines.PUBLISHED else set()
  allowed = set(fields) | of_presets | {"advantage.alpha_steps", "retriever.noise_steps"}
  assert changed <= allowed
  for key, value in fields.items():
    assert made[key] == (list(value) if isinstance(value, tuple) else value)


def test_every_method_is_one_that_training_accepts():
  from stratified.runs import build

  for method in (*baselines.METHODS, *baselines.PUBLISHED):
    build.build(baselines.get_config(method), task=False)


@pytest.mark.parametrize("preset", ["smollm2", "base", "instruct"])
def test_every_published_method_is_a_config_on_every_preset(preset):
  from stratified.runs import refusals

  base = search_r1.get_config(preset)
  for method in baselines.PUBLISHED:
    config = baselines.get_config(f"{method}:{preset}")
    refusals.check_settings(config)
    if config.rollout.protocol != base.rollout.protocol:
      assert config.rollout.protocol.endswith("_few_shot") == (preset == "smollm2")
    assert config.policy.checkpoint == base.policy.checkpoint


def test_every_published_method_names_its_row_and_its_source():
  assert not set(baselines.PUBLISHED) & set(baselines.METHODS)
  for method, make in baselines.PUBLISHED.items():
    assert "row" in make.__doc__ or "|" in make.__doc__ or "average" in make.__doc__, method
    assert "stratified" in method or re.search(r"\d{4}\.\d{5}|tinker|LLDS", make.__doc__), method


def test_search_r1s_ppo_takes_as_many_rollouts_and_a_critic_ten_times_as_fast():
  for preset, rollouts in (("tiny", 256), ("smollm2", 8), ("base", 512)):
    plain, ppo = search_r1.get_config(preset), baselines.get_config(f"search_r1_ppo:{preset}")
    assert (ppo.data.questions_per_step, ppo.rollout.samples_per_question) == (rollouts, 1)
    assert ppo.ppo.learning_rate == 10 * plain.optimizer.learning_rate


def test_the_noise_rises_over_the_run_however_long_it_is():
  config = baselines.get_config("zerosearch")
  config.num_steps = 20
  assert config.retriever.noise_steps == 20


def test_annealing_ends_with_the_run_however_long_it_is():
  config = baselines.get_config("annealed")
  config.num_steps = 20
  assert (config.advantage.alpha, config.advantage.alpha_end, config.advantage.alpha_steps) == (
    1.0,
    0.0,
    20,
  )


def test_an_unknown_method_or_preset_names_the_choices():
  with pytest.raises(
    ValueError, match=r"method 'ppo' is unknown; choose one of grpo, san, stratified_grpo, "
  ):
    baselines.get_config("ppo")
  with pytest.raises(ValueError, match=r"preset 'huge' is unknown"):
    baselines.get_config("san:huge")


# --- Running ---


def test_a_failing_run_is_reported_and_stops_no_other(tmp_path, train, capsys):
  jobs = planned(tmp_path / "runs")
  failed = sweeps.run_all(jobs, Idle(), train=train)
  assert list(failed) == ["alpha-0.4"]
  assert (
    "status 1" in failed["alpha-0.4"]
    and "RuntimeError: three updates were not finite" in failed["alpha-0.4"]
  )
  assert [sweeps.where(job) for job in jobs] == ["finished"] * 2 + ["not started"] + [
    "finished"
  ] * 3
  assert (jobs[0].workdir / "train.log").read_text() == "step 1\nstep 2\nstep 3\n"
  assert "=== run 6 of 6: alpha-1 (not started, about " in capsys.readouterr().out


def test_finished_runs_are_skipped_and_unfinished_ones_go_on(tmp_path, train, capsys):
  jobs = planned(tmp_path / "runs")[:2]
  sweeps.run_all(jobs, Idle(), train=train)
  path = jobs[1].workdir / "metrics.jsonl"
  path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
  before = (jobs[0].workdir / "metrics.jsonl").read_bytes()
  capsys.readouterr()
  assert sweeps.where(jobs[1]) == "step 1 of 3"
  assert sweeps.run_all(jobs, Idle(), train=train) == {}
  said = capsys.readouterr().out
  assert (
    "1 of 2 runs are finished already" in said and "run 1 of 1: alpha-0.2 (step 1 of 3)" in said
  )
  assert "step 1\n" not in said and "step 2\n" in said
  assert (jobs[0].workdir / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_of_another_config_is_not_taken_for_this_one(tmp_path, train):
  sweeps.run_all(planned(tmp_path / "runs")[:1], Idle(), train=train)

  def state(**given):
    return sweeps.where(
      sweep.plan(
        str(ROOT / SEARCH_R1),
        "tiny",
        {"num_steps": 3, **given},
        ("alpha",),
        None,
        tmp_path / "runs",
      )[0][0]
    )

  assert state() == state(**{"checkpoint.every": 7, "mesh.data": 4}) == "finished"
  assert state(**{"optimizer.learning_rate": 0.123}) == "another config"
  assert state(num_steps=4) == "step 3 of 4"


def test_the_table_has_a_row_a_setting_and_names_what_is_missing(tmp_path, train):
  jobs = planned(tmp_path / "runs", seeds=2)
  sweeps.run_all(jobs[:8], Idle(), train=train)
  text = sweep.write_table(jobs, tmp_path / "runs")
  assert text == (tmp_path / "runs" / "sweep.md").read_text()
  rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
  assert "| alpha-0.2 | 2 | 20.0 [20.0, 20.0] | +20.0 [+20.0, +20.0] |" in rows["alpha-0.2"]
  assert "| 1 of 2 | 60.0 |" in rows["alpha-0.6"] and "| 0 of 2 | – |" in rows["alpha-0.4"]
  assert "alpha-0.4_seed-0 has no training step yet" in text
  made = json.loads((tmp_path / "runs" / "sweep.json").read_text())
  assert made["groups"]["alpha-0.2"]["end"]["eval/exact_match"]["mean"] == 0.2
  assert sorted(path.name for path in (tmp_path / "runs").glob("sweep*")) == [
    "sweep.json",
    "sweep.md",
  ]


SLEEPER = """
import pathlib, sys
from experiments import sweep
from stratified.runs import sweeps
folder = pathlib.Path(sys.argv[1])
plan = sweep.plan({file!r}, "tiny", {{"num_steps": 400}}, ("alpha",), None, folder)
jobs = [job for job, _ in plan]
relay = sweeps.Relay()
print(sweeps.run_all(jobs, relay, train=[sys.executable, {train!r}, "--slow=0.02"]), relay.asked)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_run_at_work_save_and_ends_the_sweep(number, tmp_path, train):
  jobs = planned(tmp_path / "runs", num_steps=400)
  code = SLEEPER.format(file=str(ROOT / SEARCH_R1), train=train[1])
  command = [sys.executable, "-c", code, str(tmp_path / "runs")]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
    first = jobs[0].workdir / "metrics.jsonl"
    end = time.monotonic() + 240
    while not first.exists() and time.monotonic() < end and process.poll() is None:
      time.sleep(0.02)
    process.send_signal(number)
    said, _ = process.communicate(timeout=240)
  assert process.returncode == 0
  assert said.splitlines()[-2:] == ["saved", "{} True"]
  assert not (jobs[1].workdir / "metrics.jsonl").exists()


# --- The shared warm start ---


def warm(job, steps=2, seed=None):
  """A finished warm start as a run leaves it."""
  config = json.loads((job.workdir / "wanted.json").read_text())
  (job.workdir / "config.json").write_text(json.dumps(config))
  with metrics.Writer(job.workdir) as writer:
    for step in range(1, steps + 1):
      writer.write({"warm_start/step": step, "warm_start/loss": 1 / 3 / step})
    writer.write({"step": 0, "eval/exact_match": 0.25})
  folder = job.workdir / "warm_start" / "checkpoints" / str(steps)
  folder.mkdir(parents=True)
  (folder / "arrays").write_bytes(b"\0\1\2")


def test_a_run_takes_the_warm_start_that_it_would_repeat(tmp_path):
  jobs = planned(tmp_path, **{"warm_start.num_steps": 2})
  warm(jobs[0])
  assert sweeps.share_warm_start(jobs[3]) == jobs[0].workdir
  assert (jobs[3].workdir / "warm_start/checkpoints/2/arrays").read_bytes() == b"\0\1\2"
  lines = (jobs[0].workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
  assert (jobs[3].workdir / "metrics.jsonl").read_text() == "".join(lines[:2])
  assert list((jobs[3].workdir / "tensorboard/warm_start").iterdir())
  assert sweeps.share_warm_start(jobs[3]) is None  # it has begun now


@pytest.mark.parametrize(
  "change",
  [
    {"seed": 1},
    {"policy.width": 64},
    {"data.entities": 100},
    {"warm_start.learning_rate": 0.123},
    {"optimizer.clip_norm": 2.0},
    {"rollout.max_turns": 2},
    {"packing.rows": 6},
    {"mesh.data": 2},
    {"warm_start.num_steps": 3},
  ],
  ids=lambda change: next(iter(change)),
)
def test_a_warm_start_of_another_seed_or_setting_is_not_taken(change, tmp_path):
  donor = planned(tmp_path, **{"warm_start.num_steps": 2})[0]
  warm(donor)
  other = planned(tmp_path, **({"warm_start.num_steps": 2} | change))[1]
  assert sweeps.share_warm_start(other) is None
  assert not (other.workdir / "warm_start").exists()


def test_an_unfinished_warm_start_is_not_taken(tmp_path):
  jobs = planned(tmp_path, **{"warm_start.num_steps": 2})
  warm(jobs[0], steps=1)
  assert sweeps.share_warm_start(jobs[1]) is None


class Watched:
  """A config that notes which dotted keys are read."""

  def __init__(self, config, seen, prefix=""):
    self.__dict__.update(_config=config, _seen=seen, _prefix=prefix)

  def __getattr__(self, name):
    return self[name]

  def __contains__(self, name):
    return name in self._config

  def __getitem__(self, name):
    value = self._config[name]
    if hasattr(value, "to_dict"):
      return Watched(value, self._seen, f"{self._prefix}{name}.")
    self._seen.add(self._prefix + name)
    return value


def test_the_warm_start_reads_none_of_the_keys_in_which_it_may_be_shared(monkeypatch, tmp_path):
  """The stage itself is built and run, on a config that notes what is read; only the jitted step is
  left out."""
  from test_train import config as smallest

  from stratified.retrieval import retrievers
  from stratified.runs import build, settings, stage_parts, trainer
  from stratified.runs.surroundings import Surroundings
  from stratified.runs.timetable import Part, Timetable
  from stratified.tasks import base, named

  seen = set()
  plain = smallest(**{"warm_start.mixture": (0.5, 0.5)})
  watched = Watched(plain, seen)
  steps = []

  def learn(state, batch):
    steps.append(batch)
    return state, {"warm_start/loss": 1.0, "grad/norm": 1.0}

  monkeypatch.setattr(stage_parts, "update_of", lambda *args, **kwargs: learn)
  # The warm start searches in practice encyclopedias; the run's own retriever is not its concern.
  open_retriever = retrievers.open_retriever
  monkeypatch.setattr(
    retrievers, "open_retriever", lambda config, passages: open_retriever(plain, passages)
  )
  # Neither is noise in training's searches, see test_noise.
  monkeypatch.setattr(base, "noisy", lambda config, tools: tools)
  mesh, model = build.mesh_of(watched), build.model_config(watched)
  parts = stage_parts.warm_start(watched, mesh, model)
  run = build.Run(watched, mesh, model, None, None, (parts, None), named.make(watched))
  with trainer.seat_of(run, parts, tmp_path) as seat, metrics.Writer(tmp_path) as writer:
    times = Timetable([Part("warm-start steps", 1, 1.0)])
    around = Surroundings(run, tmp_path, None, None, writer, None, times)
    params = build.initial_params(watched, model, mesh, dtype=seat.weights.start_dtype)
    state = seat.weights.begin(params)
    never = types.SimpleNamespace(asked=False, agreed=lambda: False)
    trainer.run_stage(seat, around, state, 0, never, fresh=True)
    assert seat.saved.latest_step == len(steps) == plain.warm_start.num_steps
  assert {
    "seed",
    "warm_start.num_steps",
    "policy.width",
    "data.hop_shares",
    "optimizer.clip_norm",
  } <= seen
  assert sorted(seen & set(settings.not_in_warm_start())) == []
