"""Samples through real SGLang servers and kills one after another, for as long as asked.

    python experiments/benchmarks/soak_sglang.py [--minutes=10] [--rollouts=200] [--servers=2] \\
        [--sync=disk] [--json=FILE]
    python experiments/benchmarks/soak_sglang.py --model=DIR --launch="--gpus 0,1" \\
        --tolerance=0.1 --dtype=bfloat16          # on GPUs

Each step gives the servers other weights and runs rollouts with two searches each, while at random
times one server is killed with all its processes and started again, which leaves it with the
directory's weights. After each step every log-prob of every rollout is compared with the trainer's.
The run fails (status 1) where a rollout is lost, holds another version of the weights, has
log-probs of other weights, or repeats another sample of its question.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import numpy as np

from stratified.agents import loop, tags
from stratified.agents.limits import Limits
from stratified.policy.files import hugging_face
from stratified.retrieval.bm25 import BM25
from stratified.sampling.sglang import probe
from stratified.sampling.sglang.members import FleetConfig
from stratified.sampling.sglang.publish import PublishConfig, Publisher
from stratified.sampling.sglang.sampler import Sampling, Servers, SglangSampler
from stratified.tasks.encyclopedia import pages as encyclopedia
from stratified.tasks.encyclopedia import questions as generated
from stratified.tasks.encyclopedia import vocabulary
from stratified.tools.search import Search

THIRD_PARTY = pathlib.Path(__file__).parents[2] / "third_party" / "sglang"
SAMPLES, LENGTH, STATES = 4, 256, 5
LIMITS = Limits(
  max_turns=3,
  max_turn_tokens=24,
  max_observation_tokens=64,
  max_tokens=LENGTH,
  answer_tokens=10,
  forced_searches=2,
)


class RealServer:
  """A server on a free port of 127.0.0.1, with its processes in a session of their own."""

  def __init__(self, model: pathlib.Path, logs: pathlib.Path, launch: str = "--cpu"):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      self.port = free.getsockname()[1]
    self.model, self.logs, self.launch, self.url = (
      model,
      logs,
      launch,
      f"http://127.0.0.1:{self.port}",
    )
    self.start()

  def start(self) -> None:
    self.process = subprocess.Popen(
      [
        "nice",
        "-n",
        "5",
        THIRD_PARTY / "launch.sh",
        self.model,
        *shlex.split(self.launch),
        "--port",
        str(self.port),
        "--logs",
        self.logs,
      ],
      start_new_session=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )

  def signal(self, number: int) -> None:
    os.killpg(self.process.pid, number)

  def kill(self) -> None:
    with contextlib.suppress(ProcessLookupError):
      self.signal(signal.SIGKILL)
    self.process.wait()

  def ready(self, seconds: float = 600.0) -> "RealServer":
    """Waits until it is up; else raises RuntimeError with the end of its log."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and self.process.poll() is None:
      with contextlib.suppress(OSError):
        if urllib.request.urlopen(self.url + "/health", timeout=5).status == 200:
          return self
      time.sleep(0.5)
    log = self.logs / f"server-{self.port}.log"
    told = log.read_text(errors="replace")[-3000:] if log.exists() else "it wrote no log"
    raise RuntimeError(f"the server on port {self.port} is not ready; its log ends with\n{told}")


class Killer(threading.Thread):
  """Kills a random server about every `every` seconds, at random times, and starts it again."""

  def __init__(self, servers: list[RealServer], fleet: Servers, every: float, seed: int):
    super().__init__(daemon=True)
    self._servers, self._fleet, self._every, self._random = (
      servers,
      fleet,
      every,
      random.Random(seed),
    )
    self.kills, self._ended = 0, threading.Event()

  def run(self) -> None:
    while not self._ended.wait(self._random.expovariate(1 / self._every)):
      if len(self._fleet.usable) < len(self._servers):
        continue  # one at a time: with none left the run would rightly stop
      victim = self._random.choice(self._servers)
      victim.kill()
      self.kills += 1
      self._ended.wait(self._random.uniform(0, 5))
      victim.start()

  def end(self) -> None:
    self._ended.set()
    self.join()


def faults_of(model, params, groups, step: int, tolerance: float) -> tuple[list[str], float]:
  """Finds what is wrong with a step's rollouts, and the largest log-prob gap to the trainer."""
  flat = [one for group in groups for one in group]
  wrong = [f"{one.question.id}, sample {one.sample}: {one.fault}" for one in flat if one.fault]
  whole = [one for one in flat if not one.fault]
  token_rt = np.ones((len(flat), LENGTH), np.int32)
  for row, one in enumerate(whole):
    token_rt[row, : len(one.token_ids)] = one.token_ids
  known, gap = np.asarray(probe.row_log_probs(model, params, token_rt)), 0.0
  for row, one in enumerate(whole):
    at = 0
    for segment in one.segments:
      end = at + len(segment.token_ids)
      if segment.origin == "policy":
        gap = max(gap, float(np.max(np.abs(known[row, at:end] - segment.log_probs))))
        if set(segment.weight_versions) != {step}:
          wrong.append(
            f"{one.question.id}, sample {one.sample}: tokens of step "
            f"{set(segment.weight_versions)}, not {step}"
          )
      at = end
  if gap > tolerance:
    wrong.append(f"a log-prob differs by {gap:.2g} from the trainer's")
  clones = sum(
    len({tuple(one.token_ids) for one in group if not one.fault})
    < sum(not one.fault for one in group)
    for group in groups
  )
  return wrong + [f"{clones} questions have equal samples"] * bool(clones), gap


def soak(a, servers: list[RealServer]) -> dict:
  """Steps until the time is over; returns the figures."""
  tokenizer, model = vocabulary.build(), hugging_face.load_config(a.model, dtype=a.dtype)
  first = hugging_face.load_params(a.model, model, dtype="float32")
  states = [
    {n: v * (1 + 0.05 * i) if v.ndim > 2 else v for n, v in first.items()} for i in range(STATES)
  ]
  book = encyclopedia.make(encyclopedia.EncyclopediaConfig(entities=400), 0)
  search = BM25(book.passages)
  helper = (
    str(THIRD_PARTY.parents[1] / ".venv-sglang/bin/python"),
    str(THIRD_PARTY / "broadcast.py"),
  )
  cpu = (
    "env",
    f"PYTHONPATH={THIRD_PARTY / 'standins'}",
    "SGLANG_USE_CPU_ENGINE=1",
    "OMP_NUM_THREADS=1",
  )
  on_cpu = "--cpu" in a.launch
  publisher = Publisher(
    model,
    PublishConfig(
      sync=a.sync,
      dtype=a.dtype,
      group_command=(*cpu, *helper) if on_cpu else helper,
      group_backend="gloo" if on_cpu else "nccl",
    ),
    avoid=tokenizer.eos_id,
  )
  config = FleetConfig(
    tuple(server.url for server in servers),
    in_flight=a.in_flight,
    retries=8,
    outage_s=600,
    health_s=20,
    start_s=600,
    probe_tolerance=a.tolerance,
  )
  rows, wrong, longest, gap = [], [], 0.0, 0.0
  with Servers(
    config, publisher, vocab_size=model.vocab_size, eos_id=tokenizer.eos_id, max_tokens=LENGTH
  ) as fleet:
    sampler = SglangSampler(fleet, Sampling(1.0))
    killer = Killer(servers, fleet, a.kill_every, a.seed)
    began = time.monotonic()
    while time.monotonic() - began < 60 * a.minutes:
      step, start = len(rows), time.monotonic()
      params = states[step % STATES]
      sampler.load(params, step)
      loaded = time.monotonic()
      if step == 0 and a.kill_every:
        killer.start()
      groups = loop.collect(
        generated.training_questions(
          book, seed=a.seed, step=step, count=a.rollouts // SAMPLES, hop_shares=(0.25,) * 4
        ),
        sampler=sampler,
        tools=(Search(search, topk=1),),
        tokenizer=tokenizer,
        protocol=tags.short(),
        limits=LIMITS,
        samples_per_question=SAMPLES,
        step=step,
      )
      end = time.monotonic()
      found, difference = faults_of(model, params, groups, step, a.tolerance)
      tokens = sum(one.num_policy_tokens for group in groups for one in group)
      wrong, longest, gap = wrong + found, max(longest, end - start), max(gap, difference)
      rows.append((tokens, end - loaded, loaded - start))
      print(
        f"step {step}: {tokens} tokens in {end - loaded:.1f} s, load {loaded - start:.2f} s, kills "
        f"{killer.kills}, "
        f"usable {len(fleet.usable)}, gap {difference:.1e}, wrong {len(found)}",
        flush=True,
      )
    if killer.is_alive():
      killer.end()
    stats = fleet.stats
  tokens, seconds, loads = map(sum, zip(*rows))
  return {
    "steps": len(rows),
    "rollouts": len(rows) * (a.rollouts // SAMPLES) * SAMPLES,
    "policy_tokens": tokens,
    "tokens_per_second": tokens / seconds,
    "load_mean_s": loads / len(rows),
    "longest_step_s": longest,
    "kills": killer.kills,
    "servers_lost": stats.get("lost", 0),
    "servers_returned": stats.get("returned", 0),
    "generations_retried": stats.get("retries", 0),
    "largest_gap": gap,
    "wrong": wrong,
  }


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--minutes", type=float, default=10)
  parser.add_argument("--rollouts", type=int, default=200, help="of a step, four of each question")
  parser.add_argument("--servers", type=int, default=2)
  parser.add_argument(
    "--in_flight", type=int, default=64, help="generations that a server is given at once"
  )
  parser.add_argument(
    "--kill_every", type=float, default=60, help="seconds between kills on average; 0 kills none"
  )
  parser.add_argument("--sync", choices=("disk", "tensor", "group"), default="disk")
  parser.add_argument("--dtype", default="float32")
  parser.add_argument(
    "--tolerance", type=float, default=1e-4, help="of a log-prob; about 0.1 in bfloat16"
  )
  parser.add_argument(
    "--model",
    type=pathlib.Path,
    help="a directory with the encyclopedia's vocabulary; made where not given",
  )
  parser.add_argument(
    "--launch", default="--cpu", help="options of third_party/sglang/launch.sh for each server"
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--json", type=pathlib.Path)
  a = parser.parse_args()
  with tempfile.TemporaryDirectory(prefix="soak-") as folder:
    logs = pathlib.Path(folder)
    if a.model is None:
      a.model = logs / "model"
      subprocess.run([sys.executable, THIRD_PARTY / "small_checkpoint.py", a.model], check=True)
    servers = [RealServer(a.model, logs, a.launch) for _ in range(a.servers)]
    try:
      for server in servers:
        server.ready()
      figures = soak(a, servers)
    finally:
      for server in servers:
        server.kill()
  print(json.dumps(figures, indent=2))
  if a.json:
    a.json.write_text(json.dumps(figures, indent=2) + "\n")
  return 1 if figures["wrong"] else 0


if __name__ == "__main__":
  sys.exit(main())
