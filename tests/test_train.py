"""experiments/train.py end to end on the smallest run there is: what it writes, and that no stop
changes it."""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import programs
import pytest

from configs import search_r1
from stratified.runs import build, claim, held_out, settings

ROOT = pathlib.Path(__file__).parents[1]
SETTINGS = {
  "num_steps": 4,
  "warm_start.num_steps": 2,
  "warm_start.demonstrations_per_step": 4,
  "policy.width": 16,
  "policy.num_layers": 1,
  "policy.num_heads": 2,
  "policy.num_kv_heads": 1,
  "policy.mlp_width": 16,
  "policy.unroll": 1,
  "data.entities": 60,
  "data.questions_per_step": 2,
  "rollout.samples_per_question": 3,
  "advantage.name": "blend",
  "loss.filter_groups": False,
  "rollout.max_turns": 3,
  "rollout.max_turn_tokens": 20,
  "rollout.max_observation_tokens": 24,
  "rollout.max_tokens": 128,
  "packing.row_length": 128,
  "packing.rows": 2,
  "sampler.lanes": 6,
  "sampler.block": 6,
  "sampler.rows": 2,
  "eval.questions": 3,
  "eval.every": 2,
  "eval.forced": False,
  "checkpoint.every": 2,
  # An untrained policy is never right: a reward that differs between its rollouts keeps every
  # advantage alive, and four updates a step make the clip act.
  "reward.name": "exact_match + tests.live_reward:varied",
  "update.epochs": 2,
  "update.mini_batches": 2,
  "loss.clip_ratio": 0.001,
}
KEYS = """
    step reward/mean reward/exact_match rollout/searches_mean rollout/tokens_per_second
    rollout/failed rollout/invalid_actions rollout/staleness advantage/zero_share advantage/rms
    strata/count strata/singleton_share strata/share_0 strata/share_1
    theory/between_stratum_variance theory/normalization_effect theory/cross_stratum_offset_rms
    loss/policy loss/kl policy/entropy policy/clip_share policy/logp_gap_mean
    policy/logp_gap_max grad/norm time/rollout_s time/update_s update/tokens_per_second
    update/padding_share update/skipped""".split()


def command(workdir, preset="configs/search_r1.py:tiny", **changes):
  flags = [f"--config.{name}={value}" for name, value in (SETTINGS | changes).items()]
  return [
    sys.executable,
    "experiments/train.py",
    f"--config={preset}",
    f"--workdir={workdir}",
    *flags,
  ]


def run(workdir, **changes):
  return programs.run(*command(workdir, **changes)[1:])


def config(preset="tiny", **changes):
  made = search_r1.get_config(preset)
  made.update_from_flattened_dict(SETTINGS | changes if preset == "tiny" else changes)
  return made


def rows(workdir):
  path = workdir / "metrics.jsonl"
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def without_times(rows_):
  timed = lambda key: key.startswith("time/") or key.endswith("_per_second")
  return [{key: value for key, value in row.items() if not timed(key)} for row in rows_]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The workdir of a run that nothing interrupted."""
  workdir = tmp_path_factory.mktemp("runs") / "whole"
  done = run(workdir)
  assert done.returncode == 0, done.stderr[-3000:]
  return workdir


def test_a_run_writes_every_file_and_key_of_the_contract(whole):
  for name in ("config.json", "metrics.jsonl", "evaluation.json", "report.html", "checkpoints/4"):
    assert (whole / name).exists(), name
  assert [p.name for p in sorted((whole / "trajectories").iterdir())] == [
    f"step_00000{i}.jsonl" for i in (1, 2, 3, 4)
  ]
  assert list(whole.glob("tensorboard/train/*")) and list(whole.glob("tensorboard/warm_start/*"))
  stored = json.loads((whole / "config.json").read_text())
  assert stored["policy"]["width"] == 16 and stored["num_steps"] == 4
  found = rows(whole)
  assert [row["warm_start/step"] for row in found if "warm_start/step" in row] == [1, 2]
  assert all(row["warm_start/loss"] > 0 for row in found if "warm_start/step" in row)
  training = [row for row in found if "reward/mean" in row]
  assert [row["step"] for row in training] == [1, 2, 3, 4]
  for row in training:
    assert set(KEYS) <= row.keys(), set(KEYS) - row.keys()
    assert "not_finite" not in row and row["rollout/failed"] == 0 and row["update/skipped"] == 0
    assert row["policy/logp_gap_max"] < 1e-4 and row["grad/norm"] > 0
    assert row["advantage/zero_share"] < 1 and row["policy/clip_share"] > 0
    assert row["reward/varied"] > 0 and row["stage"] == "reinforcement"
  evaluated = [row for row in found if "eval/exact_match" in row]
  assert [row["step"] for row in evaluated] == [0, 2, 4]
  assert any(key.startswith("eval/exact_match_hops_") for key in evaluated[0])
  assert "eval/second_encyclopedia/exact_match" in evaluated[0]


def test_trajectories_hold_what_the_step_rolled_out(whole):
  step = [
    json.loads(line)
    for line in (whole / "trajectories" / "step_000003.jsonl").read_text().splitlines()
  ]
  assert len(step) == 6 and len({one["question_id"] for one in step}) == 2
  (row,) = (row for row in rows(whole) if row.get("step") == 3 and "reward/mean" in row)
  assert row["reward/mean"] == pytest.approx(sum(one["reward"] for one in step) / 6)
  assert row["rollout/searches_mean"] == pytest.approx(sum(one["searches"] for one in step) / 6)
  policy = sum(s["tokens"] for one in step for s in one["segments"] if s["origin"] == "policy")
  assert policy == row["rollout/policy_tokens"]


def interrupt(workdir, number, when, patience=900, **changes):
  """Starts the run, sends it the signal once `when(rows)` holds, and waits for its end; (exit
  status, output).

  Rows count once this process has changed their number: those of the run before may still stand at
  its start.
  """
  before, moved = rows_so_far(workdir), False
  log = workdir.parent / f"{workdir.name}-{number}.log"
  with log.open("w") as output:
    process = subprocess.Popen(
      command(workdir, **changes), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
    )
    try:
      end = time.monotonic() + patience
      while process.poll() is None and time.monotonic() < end:
        count = rows_so_far(workdir)
        moved = moved or count != before
        if moved and when(count):
          break
        time.sleep(0.002)
      assert process.poll() is None, (
        f"the run ended before it was interrupted:\n{log.read_text()[-3000:]}"
      )
      process.send_signal(number)
      return process.wait(timeout=patience), log.read_text()
    finally:
      if process.poll() is None:
        process.kill()


def asked_to_stop(workdir, after, **changes):
  """The run, sent SIGTERM once that many rows are written, in this process; counts as above."""
  counts = [rows_so_far(workdir)]

  def written():
    counts.append(rows_so_far(workdir))
    return len(set(counts)) > 1 and counts[-1] >= after

  return programs.asked_to_stop(written, *command(workdir, **changes)[1:])


def rows_so_far(workdir):
  """The number of whole lines in metrics.jsonl while another process writes it."""
  path = workdir / "metrics.jsonl"
  return path.read_bytes().count(b"\n") if path.exists() else 0


def test_runs_that_are_killed_and_asked_to_stop_add_up_to_one_that_was_not(whole, tmp_path):
  """kill -9 after a random row and a random while; SIGTERM later; the same command each time."""
  workdir, chance = tmp_path / "stopped", random.Random()
  after, wait = chance.randint(1, 5), chance.uniform(0, 0.3)

  def moment(count):
    if count >= after:
      time.sleep(wait)
    return count >= after

  status, _ = interrupt(workdir, signal.SIGKILL, moment)
  assert status == -signal.SIGKILL
  # Two rows of the warm start, the evaluation at step 0, then a row a step: the second row of
  # training is the fifth.
  done = asked_to_stop(workdir, 5)
  assert done.returncode == 0, (after, wait, done.stderr[-3000:])
  said = done.stdout + done.stderr
  assert "stopping after this step" in said and "saved; the same command goes on" in said
  stopped_at = max(row["step"] for row in rows(workdir) if "step" in row)
  assert (workdir / "checkpoints" / str(stopped_at)).exists()
  done = run(workdir)
  assert done.returncode == 0, (after, wait, done.stderr[-3000:])
  assert f"going on from step {stopped_at} of 4" in done.stdout
  assert without_times(rows(workdir)) == without_times(rows(whole)), (after, wait)
  for step in (1, 2, 3, 4):
    name = pathlib.Path("trajectories") / f"step_00000{step}.jsonl"
    assert (workdir / name).read_bytes() == (whole / name).read_bytes(), (after, wait)


def test_a_run_stopped_in_an_evaluation_makes_it_first_when_it_goes_on(
  whole, tmp_path, monkeypatch
):
  """SIGTERM as the first held-out question after step 2 ends."""
  workdir, plain = tmp_path / "run", held_out.runner.run

  def stopped(*args, **how):
    if rows_so_far(workdir) == 5:  # two of the warm start, one of step 0, two of training
      os.kill(os.getpid(), signal.SIGTERM)
    return plain(*args, **how)

  with monkeypatch.context() as patched:
    patched.setattr(held_out.runner, "run", stopped)
    done = run(workdir)
  assert done.returncode == 0, done.stderr[-3000:]
  assert "stopped at step 2 of 4 (reinforcement) and saved" in done.stdout
  assert [row["step"] for row in rows(workdir) if "eval/exact_match" in row] == [0]
  (workdir / "evaluation.json").write_text('{"step": 0, "se')  # a copy cut short
  (reference,) = (workdir / "checkpoints").glob("reference.*")
  shutil.rmtree(reference)  # it is made again, from what the warm start ended with
  done = run(workdir)
  assert done.returncode == 0, done.stderr[-3000:]
  assert "evaluation.json is not JSON" in done.stdout and "evaluation.json.damaged" in done.stdout
  assert without_times(rows(workdir)) == without_times(rows(whole))
  assert json.loads((workdir / "evaluation.json").read_text())["step"] == 4


def test_a_signal_while_a_run_loads_ends_it_there(tmp_path, monkeypatch):
  def slow(*args, **how):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    raise AssertionError("not heard")

  monkeypatch.setattr(build, "model_config", slow)
  done = run(tmp_path / "run")
  assert done.returncode == 0 and "stopped before the first step" in done.stdout, done.stderr
  assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_a_run_in_a_sentence_that_names_the_last_good_checkpoint(whole, tmp_path):
  """No file may grow beyond 16 kB, of which the arrays of a checkpoint take more."""
  workdir = tmp_path / "run"
  shutil.copytree(whole, workdir)
  shutil.rmtree(workdir / "checkpoints/4")  # step 2 is the last
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  largest = max(path.stat().st_size for path in workdir.glob("*.json*"))
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 16_000, hard))
    done = run(workdir)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert done.returncode == 1 and "report:" not in done.stdout
  assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()[-1]) < 1000
  said = done.stderr.strip().splitlines()[-1]
  assert f"a checkpoint could not be written to {workdir}/checkpoints (" in said
  assert "GB are free there; the last good one is of step 2." in said
  done = run(workdir)
  assert done.returncode == 0 and "going on from step 2" in done.stdout, done.stderr[-3000:]
  assert without_times(rows(workdir)) == without_times(rows(whole))


def test_a_finished_run_started_again_adds_nothing(whole):
  before = (whole / "metrics.jsonl").read_bytes()
  done = run(whole)
  assert done.returncode == 0, done.stderr[-3000:]
  assert (whole / "metrics.jsonl").read_bytes() == before


def test_rollouts_of_one_step_before_are_sampled_while_the_update_runs_and_say_so(tmp_path):
  done = run(
    tmp_path / "run",
    **{"rollout.max_staleness": 1, "loss.importance_cap": 2.0, "loss.importance": "sequence"},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  trained = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
  assert [row["rollout/staleness"] for row in trained] == [0, 1, 1, 1]
  assert all(row["update/skipped"] == 0 and row["rollout/failed"] == 0 for row in trained)


def test_the_command_refuses_another_config_before_any_work_and_names_the_keys(whole):
  before = (whole / "metrics.jsonl").read_bytes()
  done = run(whole, **{"advantage.alpha": 0.3, "seed": 7, "checkpoint.every": 1})
  assert done.returncode == 1
  assert "advantage.alpha: 0.6 in the workdir, 0.3 now" in done.stderr
  assert "seed: 0 in the workdir, 7 now" in done.stderr
  assert "checkpoint.every" not in done.stderr and "Traceback" not in done.stderr
  assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_larger_num_steps_and_what_changes_no_result_are_accepted(whole, tmp_path):
  (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
  changed = config(
    **{"num_steps": 9, "checkpoint.every": 7, "mesh.data": 4, "logging.trajectories_every": 3}
  )
  claim.check_config(tmp_path, json.loads(changed.to_json()), settings.rules())
  assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 9
  with pytest.raises(ValueError, match=r"num_steps: 9 in the workdir, 4 now"):
    claim.check_config(
      tmp_path,
      json.loads(
        config(**{"checkpoint.every": 7, "mesh.data": 4, "logging.trajectories_every": 3}).to_json()
      ),
      settings.rules(),
    )


# --- Refused before any work ---


def test_an_unknown_preset_is_refused_with_those_that_exist():
  with pytest.raises(
    ValueError, match=r"preset 'big' is unknown; choose one of .*'smollm2', 'tiny'"
  ):
    search_r1.get_config("big")


def test_the_smallest_run_itself_is_accepted():
  build.build(config(), task=False)


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"advantage.name": "grpo2"}, r"advantage\.name='grpo2'.*choose one of .*blend.*gn"),
    (
      {"advantage.alpha": 1.2},
      r"advantage\.alpha=1\.2 must be at least 0 and at most 1, and finite",
    ),
    ({"advantage.ddof": 3}, r"advantage\.ddof=3.*K is 3.*samples_per_question"),
    ({"strata.name": "colours"}, r"colours"),
    ({"sampler.name": "vllm"}, r"sampler\.name='vllm' is unknown; choose one of jax"),
    ({"retriever.name": "google"}, r"retriever\.name='google' is unknown"),
    ({"data.name": "web"}, r"data\.name='web' is unknown; choose one of encyclopedia, files"),
    ({"loss.kl_estimator": "k4"}, r"loss\.kl_estimator='k4' is unknown; choose one of k1, k2, k3"),
    ({"loss.aggregation": "mean"}, r"loss\.aggregation='mean' is unknown"),
    ({"loss.kl_coefficient": -0.1}, r"loss\.kl_coefficient=-0\.1 must be at least 0"),
    ({"num_steps": 0}, r"num_steps=0 must be at least 1"),
    ({"rollout.temperature": 0.0}, r"rollout\.temperature=0\.0 must be above 0"),
    ({"rollout.max_staleness": 2}, r"rollout\.max_staleness=2 is unknown; choose one of 0, 1"),
    ({"rollout.max_staleness": 1}, r"max_staleness=1 .*old_log_probs=sampler.*importance_cap"),
    (
      {"policy.attention": "splash"},
      r"policy\.attention='splash' runs on a TPU alone, and jax has a CPU here",
    ),
    ({"sampler.devices": 2}, r"sampler\.devices=2 is more than the 1 devices"),
    (
      {"memory.optimizer": "disk"},
      r"memory\.optimizer='disk' is unknown; choose one of device, host",
    ),
    ({"policy.logit_chunk": 50}, r"logit_chunk=50 does not divide packing\.row_length=128"),
    (
      {"packing.row_length": 90},
      r"packing\.row_length=90 must be at least rollout\.max_tokens=128",
    ),
    (
      {"optimizer.learning_rate": 0.0},
      r"optimizer\.learning_rate=0\.0 must be above 0, and finite",
    ),
    ({"loss.clip_ratio": float("nan")}, r"loss\.clip_ratio=nan must be at least 0, and finite"),
    ({"sampler.lanes": 0}, r"sampler\.lanes=0 must be at least 1"),
    ({"rollout.top_p": 1.5}, r"rollout\.top_p=1\.5 must be above 0 and at most 1"),
    ({"policy.num_heads": 0}, r"policy\.num_heads=0 must be at least 1"),
    ({"policy.width": 33}, r"policy\.width=33 must be an even multiple of policy\.num_heads=2"),
    ({"policy.dtype": "half"}, r"policy\.dtype='half' is unknown"),
    ({"logging.trajectories_every": -1}, r"logging\.trajectories_every=-1 must be at least 0"),
    ({"mesh.data": 4096}, r"needs 4096 devices"),
    ({"rollout.answer_tokens": 128}, r"answer_tokens=128.*max_tokens"),
    (
      {"rollout.max_turns": 2},
      r"warm_start\.mixture=.* asks for up to 3 calls, but rollout.max_turns is 2: shorten",
    ),
    ({"data.entities": 5}, r"data.entities=5 must be at least 40"),
    (
      {"warm_start.learning_rate": -1.0},
      r"warm_start\.learning_rate=-1\.0 must be above 0, and finite",
    ),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_value_out_of_range_is_refused_in_words(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    build.build(config(**changes), task=False)


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"data.hop_shares": (0.5, 0.25, 0.25, 0.25)}, "data.hop_shares="),
    ({"eval.questions": 2000}, "ask for fewer"),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_the_world_refuses_leaves_no_config_behind(changes, sentence, tmp_path):
  done = run(tmp_path / "run", **changes)
  assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", ["smollm2", "base", "instruct"])
def test_a_preset_without_its_model_names_what_is_missing(preset, tmp_path):
  missing = str(tmp_path / "smollm2-none")
  with pytest.raises(
    FileNotFoundError, match=f"policy.checkpoint='{missing}' holds no model.*to get it: "
  ):
    build.build(config(preset, **{"policy.checkpoint": missing}), task=False)


def test_a_method_of_two_stages_runs_and_resumes_in_the_second(tmp_path):
  """With adapters: the second stage's lie beside the policy that the first one ended with."""
  method = {
    "algorithm.name": "tests.two_stages:TwoStages",
    "eval.every": 0,
    "lora.rank": 2,
    "optimizer.name": "adamw",
  }
  done = run(tmp_path / "whole", **method)
  assert done.returncode == 0, done.stderr[-3000:]
  training = [row for row in rows(tmp_path / "whole") if "reward/mean" in row]
  assert [(row["step"], row["stage"]) for row in training] == [
    (1, "held"), (2, "held"), (3, "free"), (4, "free")
  ]  # fmt: skip
  assert (tmp_path / "whole" / "held" / "checkpoints" / "2").exists()
  # Two rows of the warm start, the first evaluation, two steps and their evaluation, a step of the
  # second stage.
  done = asked_to_stop(tmp_path / "stopped", 7, **method)
  assert done.returncode == 0 and "stopped at step 1 of 2 (free) and saved" in done.stdout
  done = run(tmp_path / "stopped", **method)
  assert done.returncode == 0 and "going on from step 1 of 2 (free)" in done.stdout, done.stderr[
    -3000:
  ]
  assert without_times(rows(tmp_path / "stopped")) == without_times(rows(tmp_path / "whole"))


@pytest.mark.parametrize(
  "changes, sentence",
  [
    ({"algorithm.name": "tests.two_stages:NoStage"}, "it must give one Stage at least"),
    ({"algorithm.name": "tests.two_stages:Short"}, "they must add up to num_steps=4"),
    (
      {"algorithm.name": "tests.two_stages:Unknown"},
      "'free' with reference_of='first'; name one of the stages before it: held",
    ),
    ({"algorithm.name": "tests.two_stages:OnPairs"}, "such a stage needs a Distillation"),
  ],
)
def test_stages_that_can_not_follow_each_other_are_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    build.build(config(**changes))
