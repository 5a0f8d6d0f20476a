"""The command for a large model, whole, with paths and sizes made small: a Qwen2.5 policy with the
real vocabulary's size on a mesh of eight devices, a real SGLang server, passages behind HTTP, real
questions; killed, resumed, exported."""

import gzip
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import small_checkpoint

from experiments.benchmarks.soak_sglang import RealServer
from stratified.policy.files import hugging_face

ROOT = pathlib.Path(__file__).parents[2]
TOKENIZER = ROOT / ".cache" / "models" / "smollm2-135m-instruct" / "tokenizer.json"
DATA = os.environ.get("STRATIFIED_DATA")
VOCABULARY = 151936
SIZES = {
  "num_steps": 3,
  "policy.dtype": "float32",
  "data.questions_per_step": 8,
  "rollout.samples_per_question": 2,
  "rollout.max_turns": 2,
  "rollout.max_turn_tokens": 12,
  "rollout.max_observation_tokens": 128,
  "rollout.max_tokens": 512,
  "packing.row_length": 512,
  "policy.logit_chunk": 128,
  "eval.questions": 4,
  "checkpoint.every": 1,
  "sampler.in_flight": 16,
  "optimizer.learning_rate": 1e-3,
  "data.split": "",
  "data.held_out_split": "",
  "rollout.topk": 1,
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
  """(model directory, questions, retriever's URL, sampler's URL) of servers that run."""
  if not DATA or not TOKENIZER.exists():
    pytest.skip("needs STRATIFIED_DATA and a real tokenizer (make smollm2)")
  folder = tmp_path_factory.mktemp("parts")
  model = folder / "Qwen2.5-small"
  small_checkpoint.write(model, vocabulary=VOCABULARY)
  shutil.copy(TOKENIZER, model / "tokenizer.json")
  with gzip.open(pathlib.Path(DATA) / "corpus.jsonl.gz", "rt") as source:
    (folder / "passages.jsonl").write_text("".join(line for line, _ in zip(source, range(3000))))
  search = subprocess.Popen(
    [
      sys.executable,
      "experiments/serve_retriever.py",
      f"--corpus={folder / 'passages.jsonl'}",
      "--port=0",
    ],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  sampler = RealServer(model, folder)
  try:
    said = next(line for line in search.stdout if "http://" in line)
    yield (
      model,
      pathlib.Path(DATA) / "questions" / "nq.jsonl",
      "http://" + said.split("http://")[1].split()[0],
      sampler.ready().url,
    )
  finally:
    sampler.kill()
    search.terminate()
    search.wait(20)


def command(parts, workdir):
  model, questions, search, sampler = parts
  flags = SIZES | {
    "policy.checkpoint": model,
    "data.questions": questions,
    "data.evaluation": questions,
    "retriever.name": "http",
    "retriever.url": search,
    "sampler.name": "sglang",
    "sampler.urls": sampler,
  }
  return [
    sys.executable,
    "experiments/train.py",
    "--config=configs/search_r1.py:base",
    f"--workdir={workdir}",
    *(f"--config.{name}={value}" for name, value in flags.items()),
  ]


def rows(workdir):
  path = workdir / "metrics.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  return [row for row in map(json.loads, lines) if "reward/mean" in row]


def test_the_command_for_a_large_model_trains_survives_a_kill_and_exports(parts, tmp_path):
  workdir, environment = (
    tmp_path / "run",
    os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
  )
  with (tmp_path / "log").open("w") as log:
    first = subprocess.Popen(
      command(parts, workdir), cwd=ROOT, env=environment, stdout=log, stderr=log
    )
    give_up = time.monotonic() + 400
    while not rows(workdir) and first.poll() is None and time.monotonic() < give_up:
      time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert rows(workdir), (tmp_path / "log").read_text()[-3000:]
    done = subprocess.run(
      command(parts, workdir), cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=400
    )
  assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
  trained = rows(workdir)
  assert [row["step"] for row in trained] == [1, 2, 3]
  assert all(row["rollout/failed"] == 0 and row["update/skipped"] == 0 for row in trained)
  assert (
    max(row["policy/logp_gap_max"] for row in trained) < 1e-4
  )  # float32, server against trainer
  exported = subprocess.run(
    [
      sys.executable,
      "experiments/export.py",
      f"--workdir={workdir}",
      f"--output={tmp_path / 'out'}",
    ],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert exported.returncode == 0, exported.stderr[-3000:]
  config = hugging_face.load_config(tmp_path / "out")
  before, after = (
    hugging_face.load_params(path, config, dtype="float32") for path in (parts[0], tmp_path / "out")
  )
  assert config.vocab_size == VOCABULARY and config.qkv_bias
  assert before.keys() == after.keys() and any(
    (before[name] != after[name]).any() for name in before
  )
