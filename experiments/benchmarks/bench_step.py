"""Measures where a training step's time goes: rollout, retrieval, update, the rest; and padding.

    python experiments/benchmarks/bench_step.py --workdir=runs/tiny    # a run that exists
    python experiments/benchmarks/bench_step.py [--steps=20] [--warm-start=300]    # a run of `tiny`

A share is a sum of seconds over the sum of whole steps. Left out are the first step, which
compiles, and each step right after an evaluation, whose time is no part of training.
"""

import argparse
import json
import subprocess
import sys
import tempfile

from stratified import files

PARTS = {"rollout": "time/rollout_s", "retrieval": "time/search_s", "update": "time/update_s"}


def short_run(workdir, steps: int, warm_start: int) -> None:
  """Trains `tiny` into `workdir` with a short warm start; it prints to standard error."""
  changes = {
    "num_steps": steps,
    "warm_start.num_steps": warm_start,
    "eval.questions": 8,
    "eval.forced": False,
    "eval.every": 0,
  }
  subprocess.run(
    [
      sys.executable,
      "experiments/train.py",
      "--config=configs/search_r1.py:tiny",
      f"--workdir={workdir}",
      *(f"--config.{name}={value}" for name, value in changes.items()),
    ],
    check=True,
    stdout=sys.stderr,
  )


def counted(rows) -> list[dict]:
  """Picks the rows of training steps but the first, and those right after an evaluation."""
  evaluated = {row["step"] for row in rows if "eval/exact_match" in row}
  steps = [row for row in rows if "time/step_s" in row]
  return [row for row in steps[1:] if row["step"] - 1 not in evaluated]


def shares(rows) -> dict[str, float]:
  whole = sum(row["time/step_s"] for row in rows)
  part = {name: sum(row.get(key, 0.0) for row in rows) / whole for name, key in PARTS.items()}
  return part | {"everything else": 1 - sum(part.values())}


def summarize(workdir) -> dict:
  rows = counted(files.read_rows(f"{workdir}/metrics.jsonl")[0])
  if not rows:
    raise ValueError(
      f"{workdir}/metrics.jsonl holds no training step to measure; at least 2 in a row are needed"
    )
  mean = lambda key: sum(row[key] for row in rows) / len(rows)
  return dict(
    steps=len(rows),
    step_s=mean("time/step_s"),
    shares=shares(rows),
    padding=mean("update/padding_share"),
    rollout_tokens_per_second=mean("rollout/tokens_per_second"),
    update_tokens_per_second=mean("update/tokens_per_second"),
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--workdir", help="a run's folder; a short run is made if not given")
  parser.add_argument("--steps", type=int, default=20, help="training steps of the short run")
  parser.add_argument(
    "--warm-start", type=int, default=300, help="warm-start steps of the short run"
  )
  parser.add_argument("--json", help="write the measurements to this file")
  a = parser.parse_args()
  if a.workdir:
    found = summarize(a.workdir)
  else:
    with tempfile.TemporaryDirectory() as workdir:
      short_run(workdir, a.steps, a.warm_start)
      found = summarize(workdir)
  print(f"{found['steps']} steps of {found['step_s']:.2f} s")
  for name, share in found["shares"].items():
    print(f"  {name:16} {share:6.1%}")
  print(
    f"padding {found['padding']:.1%} of the update's positions; tokens a second: "
    f"{found['rollout_tokens_per_second']:,.0f} sampled during rollouts, "
    f"{found['update_tokens_per_second']:,.0f} in the update"
  )
  if a.json:
    with open(a.json, "w", encoding="utf-8") as file:
      json.dump(found, file, indent=1)


if __name__ == "__main__":
  main()
