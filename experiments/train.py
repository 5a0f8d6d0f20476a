"""Trains a search agent: questions -> rollouts -> rewards -> strata -> advantages -> update, until
num_steps.

    python experiments/train.py --config=configs/search_r1.py:tiny --workdir=runs/tiny
    [--config.advantage.alpha=0.4]

The same command again goes on from the newest checkpoint. Ctrl-C and SIGTERM save first and end it
cleanly.

Several processes train together, each with its own devices and questions, over one workdir that all
of them see:

    ... --processes=2 --process=0 --coordinator=HOST:PORT     # and the same with --process=1, and
                                                              so on
"""

import pathlib
import sys
import time

from absl import flags
import jax
from ml_collections import config_flags
import numpy as np

from stratified import rewards
from stratified.evaluation import score as scoring
from stratified.learner import batching, processes
from stratified.learner.weights import Weights
from stratified.progress import Progress
from stratified.reports import run_page
from stratified.retrieval import retrievers
from stratified.retrieval.client import RetrieverDown
from stratified.runs import build, command_line, explain, phases, samplers, settings
from stratified.runs import writer as metrics
from stratified.runs.checkpoint import check_config, Checkpointer
from stratified.sampling.sglang.errors import SamplerError
from stratified.tasks import worlds

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train, and how.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run's files go.")
_EXPLAIN = command_line.define_choice(
  "explain", "text", ["text", "markdown"], "Print every field of the config, and do nothing."
)

_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes that train together.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process", 0, "Which of them this is.", lower_bound=0)
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of the first of them.")

WARM_START_EVERY = 200  # steps between the warm start's own checkpoints
MOST_SKIPPED = 3  # updates in a row without a finite loss or gradient before a run stops


def train(made: build.Run, workdir: pathlib.Path, stop: phases.Stop) -> None:
  ###  The parts  ###
  config, mesh, model, world = made.config, made.mesh, made.model, made.world
  assign, packing, learn = made.partition, made.packing, made.learn
  weights = Weights(config, mesh, model, made.optimizer)

  with (
    samplers.samplers(config, mesh, model, world.tokenizer) as (sampler, judge),
    Checkpointer(workdir, config.checkpoint.every) as checkpointer,
    Checkpointer(workdir / "warm_start", WARM_START_EVERY) as warm_checkpointer,
  ):
    ###  Where the run stands: at a checkpoint, or at the start  ###
    try:
      restored = weights.resume(checkpointer.restore_latest(weights.abstract()), workdir)
    except ValueError as error:  # it names what is damaged or differs, and the way out
      sys.exit(f"{error}")
    with metrics.Writer(
      workdir,
      resume_step=restored[1] if restored else None,
      warm_start_step=warm_checkpointer.latest_step or 0,
      active=processes.is_first(),
    ) as writer:
      if restored:
        state, step = restored
        say(f"going on from step {step} of {config.num_steps}", flush=True)
      else:
        if config.warm_start.num_steps:
          params = phases.warm_start(
            config, mesh, world, model, made.warm_optimizer, writer, warm_checkpointer, stop
          )
        else:
          params = build.initial_params(config, model, mesh, dtype=weights.start_dtype)
        if stop.asked:
          say("stopped during the warm start and saved; the same command goes on", flush=True)
          return
        state, step = weights.begin(params), 0
        phases.evaluate_start(config, weights.policy(state), world, judge, writer, workdir)
        checkpointer.save(0, weights.at_rest(state), force=True)

      ###  The loop  ###
      clock = time.perf_counter()
      with (
        phases.Rollouts(config, world, sampler) as rollouts,
        Progress(
          config.num_steps, "training steps", done=step, active=processes.is_first()
        ) as progress,
      ):
        while step < config.num_steps and not stop.agreed():
          try:
            groups, times = rollouts.take(step, weights.policy(state))
          except (RetrieverDown, SamplerError):
            checkpointer.save(step, weights.at_rest(state), force=True)
            raise
          reward = [[0.0 if t.fault else rewards.score(t) for t in group] for group in groups]
          row = scoring.rollout_row(groups, reward, step)
          strata = [assign.assign(group, step=step) for group in groups]
          batch = batching.collate(
            groups, packing=packing, rewards=reward, strata=strata, num_strata=assign.num_strata
          )
          placed, start = batching.place(mesh, batch), time.perf_counter()
          state, stats = jax.block_until_ready(learn(state, placed))
          update_s, step = time.perf_counter() - start, step + 1

          advantage = np.asarray(stats.pop("advantage_qk"))
          row = (
            {"step": step}
            | row
            | {name: float(value) for name, value in stats.items()}
            | {
              "rollout/tokens_per_second": row["rollout/policy_tokens"]
              / (times["rollout_s"] + times["search_s"]),
              "update/tokens_per_second": batching.num_tokens(batch) / update_s,
              "update/padding_share": batching.padding_share(batch),
              **{f"time/{name}": value for name, value in times.items()},
              "time/update_s": update_s,
              "time/step_s": time.perf_counter() - clock,
            }
          )
          clock = time.perf_counter()
          writer.write(row)
          if config.logging.trajectories_every and step % config.logging.trajectories_every == 0:
            writer.write_trajectories(
              step, worlds.records(world, groups, reward, strata, advantage)
            )
          last = step == config.num_steps
          if last or config.eval.every and step % config.eval.every == 0:
            rollouts.settle()
            phases.evaluate_at(config, weights.policy(state), world, judge, writer, workdir, step)
          # After all of the step's rows: a run killed before this repeats the step, one killed
          # after it has them.
          if last or checkpointer.due(step):  # of adapters' frozen weights it takes a hash
            checkpointer.save(step, weights.at_rest(state), force=last)
          progress.update(
            1, note=f"reward {row['reward/mean']:.3f}, searches {row['rollout/searches_mean']:.2f}"
          )
          if int(state.skipped_in_a_row) >= MOST_SKIPPED:
            checkpointer.save(step, weights.at_rest(state), force=True)
            raise phases.Diverged(
              f"{MOST_SKIPPED} updates in a row had no finite loss or gradient, the last at step "
              f"{step}; the parameters "
              f"of step {step - MOST_SKIPPED} are kept. A lower --config.optimizer.learning_rate "
              "in a new workdir usually helps"
            )

      ###  The end, or an orderly stop  ###
      checkpointer.save(step, weights.at_rest(state), force=True)
      if stop.asked:
        say(
          f"stopped at step {step} of {config.num_steps} and saved; the same command goes on",
          flush=True,
        )
    if processes.is_first():
      say(f"report: {run_page.write(workdir)}", flush=True)


def say(text: str, **options) -> None:
  """Prints where one process of the run does."""
  if processes.is_first():
    print(text, **options)


def main(_) -> None:
  config = _CONFIG.value
  if _EXPLAIN.value:
    print({"text": explain.text, "markdown": explain.markdown}[_EXPLAIN.value](config), end="")
    return
  if _WORKDIR.value is None:
    command_line.refuse("--workdir is missing: where the run's files go, such as runs/tiny")
  if _PROCESSES.value > 1:
    try:
      processes.start(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    except ValueError as error:
      sys.exit(f"{error}")
  stop = phases.Stop()
  try:
    run(config, pathlib.Path(_WORKDIR.value), stop)
  except BaseException as error:
    processes.leave(error)
    raise
  if stop.interrupted:
    sys.exit(command_line.INTERRUPTED)


def run(config, workdir: pathlib.Path, stop: phases.Stop) -> None:
  try:
    # Before any work, and before the workdir belongs to this config: everything that can be
    # refused.
    made = build.build(config)
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  try:

    def claim():
      check_config(workdir, made.workdir_config, settings.rules())
      retrievers.check_same(workdir, made.world.retriever)

    processes.first_then_all(claim, "workdir")
  except ValueError as error:
    sys.exit(f"{error}")
  except OSError as error:
    sys.exit(f"--workdir={workdir} can't be used as a folder to write to: {error}")
  phases.enable_compilation_cache()
  try:
    train(made, workdir, stop)
  except (RetrieverDown, SamplerError, scoring.AllLost, phases.Diverged) as error:
    sys.exit(f"{error}")


if __name__ == "__main__":
  command_line.run(main, config="configs/search_r1.py:tiny")
