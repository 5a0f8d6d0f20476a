"""Trains an agent: questions -> rollouts -> rewards -> strata -> credit -> update, until num_steps.

    python experiments/train.py --config=configs/search_r1.py:tiny --workdir=runs/tiny \\
        [--config.advantage.alpha=0.4]

The same command again goes on from the newest checkpoint. Ctrl-C and SIGTERM save first and end it
cleanly.

Several processes train together, each with its own devices and questions, over one workdir that all
of them see:

    ... --processes=2 --process=0 --coordinator=HOST:PORT     # and the same with --process=1
"""

import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from stratified.evaluation import score as scoring
from stratified.learner import processes
from stratified.reports import run_page
from stratified.retrieval import retrievers
from stratified.retrieval.client import RetrieverDown
from stratified.runs import build, command_line, explain, on_disk, trackers, trainer
from stratified.runs.claim import check_config, Claim, record_start
from stratified.runs.stop import Diverged, Early, OutsideFailed, Stop, Unusable
from stratified.sampling.sglang.errors import SamplerError

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train, and how.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run's files go.")
_EXPLAIN = command_line.define_choice(
  "explain",
  "text",
  ["text", "markdown"],
  "Print every field of the config, or what is wrong in it, and do nothing.",
)

_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes that train together.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process", 0, "Which of them this is.", lower_bound=0)
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of the first of them.")


def main(_) -> None:
  config = _CONFIG.value
  if _EXPLAIN.value:
    build.leave_devices()
    try:
      build.check(config)
    except ValueError as error:
      sys.exit(f"{error}")
    print({"text": explain.text, "markdown": explain.markdown}[_EXPLAIN.value](config), end="")
    return
  if _WORKDIR.value is None:
    command_line.refuse("--workdir is missing: where the run's files go, such as runs/tiny")
  if _PROCESSES.value > 1:
    try:
      processes.start(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    except ValueError as error:
      sys.exit(f"{error}")
  stop = Stop()
  try:
    with Claim() as claim:
      run(config, pathlib.Path(_WORKDIR.value), stop, claim)
  except Early:
    trainer.say("stopped before the first step; the same command goes on")
  except BaseException as error:
    processes.leave(error)
    raise
  if stop.interrupted:
    sys.exit(command_line.INTERRUPTED)


def run(config, workdir: pathlib.Path, stop: Stop, claim: Claim) -> None:
  try:
    # Before any work, and before the workdir belongs to this config: everything that can be
    # refused.
    trackers.check(config)
    with stop.at_once():
      made = build.build(config)
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  try:

    def begin():
      claim.take(workdir)  # of several processes of one run, the first alone
      check_config(workdir, made.workdir_config, made.rules)
      retrievers.check_same(workdir, made.task)
      record_start(workdir, sys.argv, **made.facts)

    processes.first_then_all(begin, "workdir")
  except ValueError as error:
    sys.exit(f"{error}")
  except OSError as error:
    sys.exit(f"--workdir={workdir} can't be used as a folder to write to: {error}")
  build.enable_compilation_cache()
  try:
    trainer.train(made, workdir, stop)
    if processes.is_first():
      trainer.say(f"report: {run_page.write(workdir)}")
  except (RetrieverDown, SamplerError, scoring.AllLost, Diverged, OutsideFailed, Unusable) as error:
    sys.exit(f"{error}")
  except OSError as error:
    if error.errno not in on_disk.NO_ROOM:
      raise
    sys.exit(
      f"a file of the run could not be written ({error}); {on_disk.free_space(workdir)}. Make "
      "room, and the same command goes on from the last checkpoint"
    )


if __name__ == "__main__":
  command_line.run(main, config="configs/search_r1.py:tiny")
