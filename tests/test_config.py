"""Settings: every rule of every field refuses in one sentence; what derives from them; the command
line."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys
import typing

import programs
import pytest
from test_train import config as smallest

from configs import search_r1
from stratified import config as configs
from stratified.config import setting, Settings
from stratified.runs import build, command_line, explain, refusals, settings

ROOT = pathlib.Path(__file__).parents[1]
RULES = settings.rules()


@dataclasses.dataclass(frozen=True)
class Clip(Settings):
  SECTION = "clip"
  ratio: float = setting(0.2, "how far", above=0, below=1)
  shares: tuple[float, ...] = setting((0.5, 0.5), "parts", low=0)
  name: str | None = setting(None, "which", choices=["hard", "soft"], affects=[])
  url: str = setting("http://a", "where", affects=["rounding"], secret=True)
  steps: int = setting(3, "how long", low=1, affects=["training"], grows=True)


###  One class  ###


def test_a_config_has_the_defaults_and_takes_nothing_else():
  config = configs.to_config(Clip)
  assert config.to_dict() == {
    "clip": {"ratio": 0.2, "shares": (0.5, 0.5), "name": None, "url": "http://a", "steps": 3}
  }
  with pytest.raises((AttributeError, KeyError)):
    config.clip.raito = 0.3
  config.clip.name = "soft"
  assert configs.read(Clip, config) == Clip(name="soft")


def test_a_field_declared_twice_is_an_error():
  with pytest.raises(ValueError, match="clip.ratio is declared twice"):
    configs.rules(Clip, Clip)


def test_an_effect_that_does_not_exist_is_an_error():
  with pytest.raises(ValueError, match=r"affects=\['speed'\] is unknown; choose from training"):
    setting(1, "x", affects=["speed"])


@pytest.mark.parametrize(
  "change, sentence",
  [
    ({"ratio": 0.0}, "clip.ratio=0.0 must be above 0 and below 1, and finite"),
    ({"ratio": 1}, "clip.ratio=1 must be above 0 and below 1, and finite"),
    ({"ratio": math.nan}, "clip.ratio=nan must be above 0 and below 1, and finite"),
    ({"ratio": "wide"}, "clip.ratio='wide' must be a number, above 0, below 1"),
    ({"ratio": True}, "clip.ratio=True must be a number, above 0, below 1"),
    ({"ratio": None}, "clip.ratio=None must be a number, above 0, below 1"),
    ({"shares": (0.5, -0.5)}, "clip.shares=(0.5, -0.5) must be at least 0, and finite"),
    ({"shares": 0.5}, "clip.shares=0.5 must be numbers, at least 0"),
    ({"name": "sfot"}, "clip.name='sfot' is unknown; choose one of hard, soft"),
    ({"steps": 2.5}, "clip.steps=2.5 must be a whole number, at least 1"),
  ],
  ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_construction_checks_each_rule(change, sentence):
  with pytest.raises(ValueError) as error:
    Clip(**change)
  assert str(error.value) == sentence


def test_a_number_without_a_bound_of_its_own_has_one_of_size():
  assert Clip(steps=configs.LARGEST).steps == 10**9
  with pytest.raises(
    ValueError, match="^clip.steps=1000000001 must be .* at most 1000000000 in size"
  ):
    Clip(steps=configs.LARGEST + 1)
  with pytest.raises(ValueError, match=r"^clip.ratio=1e-40 must be .* at least 1e-30"):
    Clip(ratio=1e-40)  # float32 takes it for 0


@pytest.mark.parametrize(
  "typed, found",
  [
    ("los.clip", "loss.clip_ratio or loss.clip_ratio_high"),
    ("loss.clip", "loss.clip_ratio or loss.clip_ratio_high"),
    ("advantge.alpha", "advantage.alpha"),
    ("advantage.alhpa", "advantage.alpha"),
    ("retreiver.urll", "retriever.url"),
    ("sed", "seed"),
    ("kappa", "advantage.kappa"),
    ("optimizer.lr", "optimizer.name or optimizer.learning_rate or optimizer.warmup_steps"),
    ("foo.bar", None),
  ],
)
def test_a_mistyped_name_is_answered_with_the_nearest_field(typed, found):
  wanted = f"; did you mean {found}?" if found else ""
  assert configs.suggestion(typed, RULES) == wanted


def test_what_is_free_affects_no_more_than_rounding():
  assert configs.free(configs.rules(Clip)) == ("clip.name", "clip.url")
  assert configs.unaffected(configs.rules(Clip), "training") == ("clip.name", "clip.url")


###  All settings of a run  ###


def breaking(rule: configs.Rule):
  """(kind of break, value) for each way in which a value can break the rule."""
  kind = configs._plain_kind(rule.kind)
  many = typing.get_origin(kind) is tuple
  kind = typing.get_args(kind)[0] if many else kind
  wrap = (lambda x: (x,)) if many else (lambda x: x)
  yield "type", wrap({str: 3, bool: "maybe", int: "three", float: "three"}[kind])
  if kind is int:
    yield "fraction", wrap(1.5)
  if kind in (int, float):
    yield "truth", wrap(True)
  if not configs._optional(rule.kind):
    yield "none", None
  if rule.choices:
    yield "choice", max(map(str, rule.choices)) + "x" if kind is str else max(rule.choices) + 1
  if kind is float:
    yield "nan", wrap(math.nan)
    yield "infinite", wrap(math.inf)
  if rule.low is not None:
    yield "low", wrap(kind(rule.low - 1))
  if rule.above is not None:
    yield "above", wrap(kind(rule.above))
  if rule.high is not None:
    yield "high", wrap(kind(rule.high + 1))
  if rule.below is not None:
    yield "below", wrap(kind(rule.below))
  if kind in (int, float) and not rule.choices:
    yield "huge", wrap(kind(10**30))
  if kind is int and not rule.choices:
    yield "endless", wrap(10**400)  # float() of it overflows


BREAKS = [
  pytest.param(name, value, id=f"{name}-{kind}")
  for name, rule in RULES.items()
  for kind, value in breaking(rule)
]


class Raw(dict):
  """A config whose values no type check has seen: what a preset or a stored file could hold."""

  __getattr__ = dict.__getitem__


def raw(config, name, value):
  made = json.loads(config.to_json(), object_hook=Raw)
  *path, last = name.split(".")
  part = made
  for key in path:
    part = part[key]
  part[last] = value
  return made


@pytest.mark.parametrize("name, value", BREAKS)
def test_every_broken_rule_is_one_sentence_with_field_value_and_rule(name, value, monkeypatch):
  """Nothing else is looked at before: no file, no device, no part."""
  monkeypatch.setattr(build, "mesh_of", None)
  monkeypatch.setattr(refusals, "missing_parts", None)
  with pytest.raises(ValueError) as error:
    build.build(raw(smallest(), name, value))
  said, rule = str(error.value), RULES[name]
  assert said.startswith(f"{name}=") and str(value) in said and "\n" not in said
  assert any(words in said for words in ("must be", "choose one of")), said
  bounds = [b for b in (rule.low, rule.above, rule.high, rule.below) if b is not None]
  assert all(str(bound) in said for bound in bounds), said
  assert all(str(choice) in said for choice in rule.choices or ()), said


def test_every_rule_can_be_broken_and_says_what_it_is_about():
  assert {param.values[0] for param in BREAKS} == set(RULES)
  for name, rule in RULES.items():
    assert rule.meaning and len(rule.meaning) <= 100 and "\n" not in rule.meaning, name
    configs.check(name, rule.default, rule)


def test_a_field_that_nobody_declared_is_refused_with_the_nearest():
  config = smallest()
  with config.unlocked():
    config.loss.clip_ration = 0.3
  with pytest.raises(ValueError, match="loss.clip_ration is no field .*did you mean loss.clip_rat"):
    build.build(config, task=False)


@pytest.mark.parametrize("preset", search_r1.PRESETS)
def test_presets_only_change_fields_that_are_declared(preset):
  config = search_r1.get_config(preset)
  assert set(configs.names(config)) == set(RULES)
  configs.check_all(config, RULES)
  for name, value in search_r1.PRESETS[preset].items():
    assert value != RULES[name].default, f"{preset} repeats the default of {name}"


def test_what_may_change_on_resume_is_what_the_contract_names():
  found = {name.partition(".")[0] for name in settings.free()}
  assert found == {"mesh", "memory", "logging", "checkpoint", "retriever", "sampler"}
  assert {"mesh.tensor", "checkpoint.every", "retriever.url", "sampler.urls"} <= set(
    settings.free()
  )
  assert not {"sampler.name", "retriever.name", "retriever.index", "seed", "eval.every"} & set(
    settings.free()
  )
  assert [name for name, rule in RULES.items() if rule.grows] == ["num_steps"]


###  What does not go together  ###


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"advantage.name": "gn"}, "advantage.name='gn' nothing to compare"),
    ({"advantage.name": "loo"}, "advantage.name='loo' nothing to compare"),
    ({"advantage.name": "blend", "advantage.over": "question"}, "nothing to compare"),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_group_of_one_is_refused_where_it_leaves_nothing_to_learn(changes, sentence):
  with pytest.raises(ValueError, match=f"samples_per_question=1 leaves.*{sentence}|{sentence}"):
    build.build(smallest(**{"rollout.samples_per_question": 1} | changes), task=False)


# Every refusal that looks at several fields: its changes, and the field that it must begin with.
ACROSS = [
  (
    {"algorithm.name": "gigpo", "rollout.samples_per_question": 1},
    "rollout.samples_per_question=1",
  ),
  ({"algorithm.name": "sarsa"}, "algorithm.name='sarsa'"),
  ({"advantage.name": "gae"}, "advantage.name='gae'"),
  ({"advantage.name": "gn", "advantage.kappa": 1.0}, "advantage.kappa=1.0"),
  ({"advantage.alpha_end": 0.0}, "advantage.alpha_end and advantage.alpha_steps"),
  ({"advantage.ddof": 3}, "advantage.ddof=3"),
  ({"loss.dual_clip": 0.5}, "loss.dual_clip=0.5"),
  (
    {"loss.old_log_probs": "sampler", "loss.importance_cap": 2.0},
    "loss.importance_cap=2.0 with loss.old_log_probs",
  ),
  ({"loss.importance": "sequence"}, "loss.importance='sequence'"),
  ({"rollout.max_staleness": 1}, "rollout.max_staleness=1"),
  ({"lora.targets": "q,q"}, "lora.targets='q,q'"),
  ({"lora.targets": "x"}, "lora.targets='x'"),
  ({"lora.rank": 2, "optimizer.name": "muon"}, "optimizer.name='muon'"),
  ({"lora.rank": 2, "optimizer.name": "adamw", "memory.reference": "host"}, "memory.reference="),
  ({"lora.rank": 500, "optimizer.name": "adamw"}, "lora.rank=500"),
  ({"policy.num_kv_heads": 3}, "policy.num_heads=2"),
  ({"policy.attention": "cudnn"}, "policy.attention='cudnn'"),
  ({"policy.logit_chunk": 50}, "policy.logit_chunk=50"),
  ({"packing.row_length": 64}, "packing.row_length=64"),
  ({"update.mini_batches": 3}, "update.mini_batches=3"),
  ({"update.epochs": 6000}, "update.epochs=6000"),
  ({"rollout.answer_tokens": 128}, "rollout.answer_tokens=128"),
  ({"rollout.max_observation_tokens": 2}, "rollout.max_observation_tokens is 2"),
  ({"rollout.max_turns": 2}, "warm_start.mixture="),
  ({"rollout.protocol": "tool_calls"}, "rollout.protocol='tool_calls'"),
  ({"rollout.chat_template": True}, "rollout.chat_template=True"),
  ({"rollout.protocol": "search_r1"}, "rollout.protocol='search_r1'"),
  ({"rollout.protocol": "rag", "rollout.max_turns": 0, "warm_start.num_steps": 0}, "rollout.max_t"),
  ({"data.hop_shares": (0.5, 0.5, 0.5, 0.5)}, "data.hop_shares="),
  ({"warm_start.mixture": (0.5,)}, "warm_start.mixture="),
  ({"task.name": "arithmetic", "data.largest": 200}, "data.largest=200"),
  ({"task.name": "ages", "data.entities": 2400}, "data.entities=2400"),
  ({"task.name": "cooking"}, "task.name='cooking'"),
  ({"task.name": "search_qa"}, "policy.checkpoint is empty"),
  ({"tools": "clock"}, "tools='clock'"),
  ({"tools": "search,search"}, "tools='search,search'"),
  ({"strata.name": "moods"}, "strata.name is 'moods'"),
  ({"strata.name": "calls_clock"}, "strata.name is 'calls_clock'"),
  (
    {"strata.name": "searches*calls", "strata.cap": 100},
    "strata.name='searches*calls' with strata",
  ),
  ({"reward.name": "luck"}, "reward.name is 'luck'"),
  ({"reward.name": "2000000*f1"}, "reward.name is '2000000*f1'"),
  ({"reward.name": f"{'9' * 400}*f1"}, "reward.name is '999"),
  ({"retriever.name": "http", "retriever.url": "localhost"}, "retriever.url='localhost'"),
  ({"retriever.name": "dense"}, "retriever.index=''"),
  ({"sampler.name": "sglang"}, "sampler.urls is empty"),
  ({"sampler.devices": 9}, "sampler.devices=9"),
  ({"mesh.data": 0}, "mesh.data=0"),
  ({"mesh.data": -1, "mesh.fsdp": -1}, "mesh.data=-1, mesh.fsdp=-1"),
  ({"mesh.data": 4096}, "mesh.data=4096"),
  ({"eval.questions": 2000}, "eval.questions asks for more"),
]


@pytest.mark.parametrize("changes, field", ACROSS, ids=lambda value: str(value)[:60])
def test_a_refusal_across_fields_begins_with_the_dotted_name_of_one(changes, field):
  with pytest.raises((ValueError, OSError)) as error:
    build.build(smallest(**changes))
  said = str(error.value)
  assert said.startswith(field) and "\n" not in said
  assert any(name in said for name in RULES)


class EightDevices:
  """What a refusal reads of a mesh."""

  shape = {"data": 1, "fsdp": 4, "tensor": 2}


def test_sizes_that_a_mesh_can_not_split_are_named_as_fields():
  config = smallest(**{"data.questions_per_step": 8})
  model = build.model_config(config)
  for changes, field in (
    ({}, "policy.num_kv_heads=1"),
    ({"num_kv_heads": 2, "width": 18, "vocab_size": 640}, "policy.width=18"),
  ):
    with pytest.raises(ValueError, match=f"^{field} can't be split over"):
      refusals.check_split(config, EightDevices, dataclasses.replace(model, **changes), 4)


@pytest.mark.parametrize(
  "changes",
  [
    {"advantage.name": "reinforce"},
    {"advantage.name": "reinforce_batch"},
    {"advantage.name": "blend", "advantage.over": "batch"},
  ],
  ids=lambda value: "-".join(value.values()),
)
def test_a_group_of_one_is_fine_where_the_batch_or_nothing_is_compared_with(changes):
  build.build(smallest(**{"rollout.samples_per_question": 1} | changes), task=False)


def test_limits_that_a_protocol_cannot_keep_to_are_refused_with_the_world():
  with pytest.raises(ValueError, match="max_observation_tokens is 2, but .* takes"):
    build.build(smallest(**{"rollout.max_observation_tokens": 2}))


def test_all_that_a_preset_lacks_is_listed_with_the_command_that_gets_each(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  config = search_r1.get_config("base")
  config.sampler.devices, config.retriever.url = 1, "http://me:secret@127.0.0.1:9"
  with pytest.raises(FileNotFoundError) as error:
    build.build(config)
  head, *parts = str(error.value).splitlines()
  assert head == "4 parts of this run are missing:"
  wanted = ["hf download Qwen", "prepare_data.py", "prepare_data.py", "serve_retriever.py"]
  assert len(parts) == 4 and all(a in b for a, b in zip(wanted, parts)), parts
  assert "secret" not in str(error.value) and "http://***@127.0.0.1:9" in parts[3]


def test_what_was_checked_is_what_the_run_has():
  run = build.build(smallest())
  assert run.last.packing.length == 128 and run.mesh.shape == {"data": 1, "fsdp": 1, "tensor": 1}
  assert run.partition.num_strata == 4 and run.model.width == 16
  assert run.task.held_out(3) is run.task.held_out(3)
  assert [one.stage.name for one in run.stages] == ["warm_start", "reinforcement"]
  without = build.build(smallest(**{"warm_start.num_steps": 0}), task=False)
  assert len(without.stages) == 1 and without.task is None


###  Passwords  ###


@pytest.mark.parametrize(
  "url, shown",
  [
    ("http://a:1", "http://a:1"),
    ("http://me:pw@a:1/retrieve", "http://***@a:1/retrieve"),
    ("http://me:p@w@a", "http://***@a"),
    ("http://me@[::1", "***"),
  ],
)
def test_a_password_in_a_url_is_not_shown(url, shown):
  assert configs.without_password(url) == shown


def test_a_workdir_and_the_page_of_fields_hold_no_password(tmp_path):
  from stratified.runs.claim import check_config

  config = smallest()
  config.retriever.url = "http://me:pw@127.0.0.1:1"
  config.sampler.urls = "http://127.0.0.1:2,http://me:pw@127.0.0.1:3"
  check_config(tmp_path, json.loads(config.to_json()), RULES)
  stored = json.loads((tmp_path / "config.json").read_text())
  assert stored["retriever"]["url"] == "http://***@127.0.0.1:1"
  assert stored["sampler"]["urls"] == "http://127.0.0.1:2,http://***@127.0.0.1:3"
  assert "pw@" not in explain.text(config) + explain.markdown(config)


###  The page of fields  ###


def test_the_page_in_docs_is_the_one_that_the_program_prints():
  made = explain.markdown(search_r1.get_config("tiny"))
  assert (ROOT / "docs" / "configuration.md").read_text() == made
  assert all(f"| `{name}` |" in made for name in RULES)


def test_the_page_says_what_differs_from_the_default():
  config = search_r1.get_config("tiny")
  config.advantage.kappa = 2.0
  text = explain.text(config)
  assert re.search(r"num_steps +80 \(default 200\) +steps of reinforcement", text)
  assert re.search(r"advantage.kappa +2 \(default none\)", text)
  assert "one of k1, k2, k3; changes training" in text
  assert "changes rounding (free to change)" in text and "changes training (may grow)" in text


###  The command line  ###


def start(program, *flags):
  return programs.run(f"experiments/{program}.py", *flags)


@pytest.mark.parametrize("flags, status", [(["--wrokdir=x"], 2), (["--config.strata.cap=0"], 1)])
def test_a_process_of_its_own_says_and_ends_the_same(flags, status, tmp_path):
  flags = [*flags, f"--workdir={tmp_path / 'run'}"]
  command = [sys.executable, "experiments/train.py", *flags]
  done, here = (
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True),
    start("train", *flags),
  )
  assert done.returncode == here.returncode == status
  assert done.stderr.splitlines()[-1:] == here.stderr.splitlines()[-1:] != []
  assert done.stdout == here.stdout


@pytest.mark.parametrize(
  "program, flags, sentence",
  [
    ("train", ["--config.advantage.alhpa=1"], "--config.advantage.alhpa is no field of a config; "
     "did you mean --config.advantage.alpha?"),
    ("train", ["--config.los.clip=1"], "--config.los.clip is no field of a config; did you mean "
     "--config.loss.clip_ratio or"),
    ("train", ["--config.num_steps=abc"], "--config.num_steps=abc must be a whole number, at "),
    ("train", ["--config=configs/search_r1.py:bix"], "--config=configs/search_r1.py:bix: preset "
     "'bix' is unknown; choose one of"),
    ("train", ["--config=configs/none.py"], "--config=configs/none.py names no config file"),
    ("train", ["--wrokdir=x"], "--wrokdir is no flag; did you mean --workdir?"),
    ("train", ["configs/search_r1.py:base"], "is --config=configs/search_r1.py:base meant?"),
    ("train", [], "--workdir is missing"),
    ("sweep", ["--workdir=x", "alpha"], "'alpha' is no flag, and sweep.py takes nothing else"),
    ("report", [], "--workdir is missing: The run's folder."),
  ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(program, flags, sentence):
  done = start(program, *flags)
  lines = done.stderr.strip().splitlines()
  assert done.returncode == 2 and len(lines) == 1 and sentence in lines[0], done.stderr[-2000:]
  assert done.stdout == ""


@pytest.mark.parametrize(
  "line, sentence",
  [
    ('config.update_from_flattened_dict({"search_e1.cycels": 2})', "sets search_e1.cycels, which "
     "is no field of a config; did you mean search_e1.cycles?"),
    ("config.num_stepz = 3", "sets num_stepz, which is no field of a config; did you mean "
     "num_steps?"),
    ("config.advantage.alhpa = 1.0", "sets advantage.alhpa, which is no field of a config; did you "
     "mean advantage.alpha?"),
    ('config.update_from_flattened_dict({"nothing.at_all": 2})', "sets nothing.at_all, which is no "
     "field of a config ("),
    ("config.advantage.alhpa", "'alhpa' is missing"),
    ('{}["a key"]', ": a key ("),
  ],
)  # fmt: skip
def test_a_field_that_a_config_file_gets_wrong_is_named_with_the_file(tmp_path, line, sentence):
  path = tmp_path / "mine.py"
  path.write_text(
    "from stratified.runs import settings\ndef get_config():\n"
    f"  config = settings.default_config()\n  {line}\n  return config\n"
  )
  done = start("train", f"--config={path}", "--config.advantage.alpha=0.5", "--workdir=x")
  lines = done.stderr.strip().splitlines()
  assert done.returncode == 2 and len(lines) == 1, done.stderr[-2000:]
  assert f"--config={path}" in lines[0] and sentence in lines[0], lines


def test_every_program_goes_through_the_one_command_line():
  for path in (ROOT / "experiments").glob("*.py"):
    text = path.read_text()
    if "absl" in text:
      assert "command_line.run(main" in text and "app.run" not in text, path


def test_the_page_needs_no_workdir_and_takes_overrides():
  done = start("train", "--config.seed=7", "--explain")
  assert done.returncode == 0 and re.search(r"^seed +7 \(default 0\)", done.stdout)


@pytest.mark.parametrize(
  "flags, sentence",
  [
    (["--config.strata.cap=0"], "strata.cap=0 must be at least 1 and at most 1000"),
    (["--config.advantage.name=gm"], "advantage.name='gm' is no estimator"),
    (["--config.rollout.samples_per_question=1"], "rollout.samples_per_question=1 leaves"),
    (["--config.reward.name=luck"], "reward.name is 'luck'"),
    (["--config.algorithm.name=sys:path"], "algorithm.name is 'sys:path'"),
  ],
)
def test_the_page_and_the_list_of_a_sweep_refuse_what_training_does(flags, sentence, tmp_path):
  trained = start("train", f"--workdir={tmp_path}", *flags)
  said = trained.stderr.splitlines()[-1]  # after what jax says of the devices
  assert trained.returncode == 1 and said.startswith(sentence)
  explained = start("train", "--explain", *flags)
  assert (explained.returncode, explained.stderr, explained.stdout) == (1, f"{said}\n", "")
  listed = start("sweep", "--seeds=1", f"--workdir={tmp_path}", "--list", *flags)
  assert (listed.returncode, listed.stdout) == (1, "")
  assert listed.stderr == f"seed-0: {said}\n"


def test_ctrl_c_ends_with_status_130(monkeypatch, capsys):
  def stopped(*_, **__):
    raise KeyboardInterrupt

  monkeypatch.setattr(command_line.app, "run", stopped)
  with pytest.raises(SystemExit) as status:
    command_line.run(stopped)
  assert status.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_an_evaluation_of_a_run_takes_what_changes_no_answer_and_nothing_else(tmp_path):
  (tmp_path / "config.json").write_text(smallest().to_json())
  for flags, sentence in (
    (
      ["--config.rollout.max_turns=1"],
      "--config.rollout.max_turns can't be changed for the run in",
    ),
    (["--config=configs/search_r1.py:tiny"], "--config is not used, since"),
    (["--config.sampler.lanes=0"], "sampler.lanes=0 must be at least 1"),
  ):
    done = start("evaluate", f"--workdir={tmp_path}", *flags)
    assert done.returncode == 1 and sentence in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_a_workdir_of_fewer_fields_has_the_defaults_and_of_unknown_ones_is_refused(tmp_path):
  config = smallest()
  stored = json.loads(config.to_json())
  del stored["lora"], stored["mesh"]["tensor"]
  (tmp_path / "config.json").write_text(json.dumps(stored))
  assert settings.read_workdir(tmp_path).to_dict() == config.to_dict()
  (tmp_path / "config.json").write_text(json.dumps(stored | {"lamp": 3}))
  with pytest.raises(ValueError, match="has the field lamp, which this version does not know"):
    settings.read_workdir(tmp_path)
