"""Flipped bits in checkpoints, and kills of a run: nothing wrong is loaded, nothing is lost."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.attacks.count import Count
from stratified.runs import checkpoint
from stratified.types import TrainState

ROOT = pathlib.Path(__file__).parents[3]
# The smallest run with live advantages: its rewards differ between rollouts of a policy that is
# never right.
SMALLEST = {
  "num_steps": 6,
  "warm_start.num_steps": 4,
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
  "reward.name": "exact_match + tests.live_reward:varied",
}


def state_of(step: int) -> TrainState:
  keys = jax.random.split(jax.random.key(step), 2)
  params = {
    "kernel": jax.random.normal(keys[0], (64, 32)),
    "scale": jnp.ones(3, jnp.bfloat16) * step,
  }
  moments = jax.tree.map(lambda x: jnp.zeros_like(x) + step, params)
  reference = {"kernel": jnp.ones((64, 32), jnp.bfloat16)}
  return TrainState(jnp.int32(step), params, moments, reference, jnp.int32(0))


def flips(count: int, seed: int = 0) -> Count:
  """Flips a bit of a file of the newest of two checkpoints, or of what both share, and restores."""
  chance, found = random.Random(seed), Count()
  with tempfile.TemporaryDirectory() as made:
    whole = pathlib.Path(made) / "whole"
    with checkpoint.Checkpointer(whole, every=1, once=["reference"]) as saved:
      for step in (1, 2):
        saved.save(step, state_of(step))
    paths = [
      path
      for path in sorted((whole / "checkpoints").rglob("*"))
      if path.is_file() and path.stat().st_size and path.parts[len(whole.parts) + 1] != "1"
    ]
    for number in range(count):
      run = pathlib.Path(made) / f"run{number}"
      shutil.copytree(whole, run)
      path = run / chance.choice(paths).relative_to(whole)
      data = bytearray(path.read_bytes())
      place = chance.randrange(len(data))
      data[place] ^= 1 << chance.randrange(8)
      path.write_bytes(data)
      outcome, problem = _restored(run)
      found.note(outcome)
      where = f"byte {place} of {path.relative_to(run)}"
      found.add(problem and f"{problem} after a flip in {where}")
      shutil.rmtree(run)
  return found


def _restored(workdir: pathlib.Path) -> tuple[str, str | None]:
  """(what became of it, what is wrong) where a damaged workdir is restored."""
  try:
    with checkpoint.Checkpointer(workdir, every=1, once=["reference"]) as saved:
      found = saved.restore_latest(checkpoint.abstract(state_of(0)))
  except ValueError as error:
    return "refused in a sentence", None if "damaged" in f"{error}" else f"{error}"[:200]
  except Exception as error:
    return "failed", f"{type(error).__name__} {error}"[:200]
  if found is None:
    return "failed", "nothing was found"
  state, step = found
  same = jax.tree.map(
    lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), state, state_of(step)
  )
  outcome = "harmless" if step == 2 else "the one before restored"
  return outcome, None if jax.tree.all(same) else "wrong values were loaded"


def kills(count: int, seed: int = 0) -> Count:
  """Kills the smallest run (SIGKILL) so often, at random moments, each time after it went on.

  At the end it must equal a run that nothing stopped: rows of metrics.jsonl, rollouts, digests of
  the last checkpoint.
  """
  chance, found = random.Random(seed), Count()
  with tempfile.TemporaryDirectory() as made:
    whole, killed = pathlib.Path(made) / "whole", pathlib.Path(made) / "killed"
    if problem := _finish(whole):
      found.add(problem)
      return found
    lines = len(_rows(whole))
    for number in range(count):
      after = chance.randint(1, max(1, lines - 2))
      status = _kill(killed, after, chance.uniform(0, 0.4))
      found.note("killed" if status == -signal.SIGKILL else "ended before")
      found.add(None if status in (0, -signal.SIGKILL) else f"kill {number}: status {status}")
    problem = _finish(killed)
    if problem is None and _rows(killed) != _rows(whole):
      problem = "other rows than the run that nothing stopped"
    if problem is None and _rollouts(killed) != _rollouts(whole):
      problem = "other rollouts than the run that nothing stopped"
    if problem is None and _digests(killed) != _digests(whole):
      problem = "other parameters than the run that nothing stopped"
    found.add(problem)
    live = [row for row in _rows(whole) if row.get("advantage/rms", 0) > 0]
    found.add(None if len(live) > 2 else "the run's own advantages are zero: this proves nothing")
  return found


def _command(workdir: pathlib.Path) -> list[str]:
  settings = [f"--config.{name}={value}" for name, value in SMALLEST.items()]
  preset = "--config=configs/search_r1.py:tiny"
  return [sys.executable, "experiments/train.py", preset, f"--workdir={workdir}", *settings]


def _start(workdir: pathlib.Path) -> subprocess.Popen:
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.Popen(
    _command(workdir), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
  )


def _finish(workdir: pathlib.Path) -> str | None:
  process = _start(workdir)
  _, errors = process.communicate()
  if process.returncode:
    return f"status {process.returncode}: {errors.decode(errors='replace')[-300:]}"
  return None


def _kill(workdir: pathlib.Path, after: int, wait: float) -> int:
  """Kills the run `wait` seconds after it has written a row and has `after` of them."""
  path = workdir / "metrics.jsonl"
  count = lambda: path.read_bytes().count(b"\n") if path.exists() else 0
  process, before, end = _start(workdir), count(), time.monotonic() + 900
  while process.poll() is None and time.monotonic() < end:
    if (now := count()) != before and now >= after:
      time.sleep(wait)
      process.kill()
      break
    time.sleep(0.005)
  process.communicate()
  return process.returncode


def _rows(workdir: pathlib.Path) -> list[dict]:
  timed = lambda key: key.startswith("time/") or key.endswith("_per_second")
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if not timed(k)} for line in lines]


def _rollouts(workdir: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in (workdir / "trajectories").iterdir()}


def _digests(workdir: pathlib.Path) -> dict[str, str]:
  folder = workdir / "checkpoints"
  newest = max(
    (path for path in folder.iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
  )
  known = json.loads((newest / "_CHECKPOINT_METADATA").read_text())
  return known["custom_metadata"]["digests"]
