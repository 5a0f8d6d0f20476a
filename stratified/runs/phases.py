"""What surrounds the training loop: orderly stops, the warm start, evaluation before, during and
after."""

import concurrent.futures
import json
import pathlib
import signal
import time

import jax

from stratified import files
from stratified.agents import loop
from stratified.evaluation import score as scoring
from stratified.learner import batching, processes, update
from stratified.policy import decoder
from stratified.progress import Progress
from stratified.runs import build
from stratified.runs.checkpoint import Checkpointer
from stratified.tasks import worlds

EVALUATION_STEP = (
  2**30
)  # names the random keys of evaluation, which greedy decoding never draws from
CHUNK = 256  # held-out questions in flight; more would only delay the progress line


class Diverged(RuntimeError):
  """Updates that are not finite, again and again; the sentence says what was kept and what
  helps."""


class Stop:
  """`asked` turns true at Ctrl-C or SIGTERM, `interrupted` at Ctrl-C; a second one interrupts at
  once."""

  def __init__(self):
    self.asked = self.interrupted = False
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._ask)

  def agreed(self) -> bool:
    """Whether any process of the run was asked; all of them must call this at the same step."""
    self.asked = processes.any_of(self.asked)
    return self.asked

  def _ask(self, number, frame):
    if self.asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.asked = True
    self.interrupted = number == signal.SIGINT
    print("\nstopping after this step, then saving", flush=True)


def warm_start(
  config,
  mesh,
  world,
  model: decoder.DecoderConfig,
  optimizer,
  writer,
  checkpointer: Checkpointer,
  stop: Stop,
):
  """Parameters after supervised training on scripted demonstrations; goes on from its own newest
  checkpoint."""
  total = config.warm_start.num_steps
  restored = checkpointer.restore_latest(
    update.abstract_state(mesh, model, optimizer, with_reference=False)
  )
  if restored:
    state, step = restored
  else:
    params = build.initial_params(config, model, mesh)
    state, step = update.init_state(mesh, model, params, optimizer, with_reference=False), 0
  learn = build.supervised_update(config, mesh, model, optimizer)
  shape = build.packing(config, mesh, config.warm_start.demonstrations_per_step)
  batch_at = worlds.demonstration_batches(config, world, shape)
  with Progress(total, "warm-start steps", done=step, active=processes.is_first()) as progress:
    while step < total and not stop.agreed():
      state, stats = learn(state, batching.place(mesh, batch_at(step)))
      step += 1
      loss = float(stats["warm_start/loss"])
      writer.write(
        {"warm_start/step": step, "warm_start/loss": loss, "grad/norm": float(stats["grad/norm"])}
      )
      if int(state.skipped_in_a_row) >= 3:
        raise Diverged(
          f"the warm start's loss is not finite at step {step}; "
          "lower --config.warm_start.learning_rate in a new workdir"
        )
      checkpointer.save(step, state, force=step == total)
      progress.update(1, note=f"loss {loss:.3f}")
  checkpointer.save(step, state, force=True)
  return state.params


def collect(
  world: worlds.World,
  questions,
  *,
  sampler,
  retriever,
  limits,
  samples_per_question: int,
  step: int,
  weight_version: int | None = None,
):
  """[n][K] rollouts of this process's share of the questions; `processes.exchange` makes all of
  them of every process's."""
  indices = processes.mine(len(questions))
  return loop.collect(
    [questions[q] for q in indices],
    indices=indices,
    sampler=sampler,
    retriever=retriever,
    tokenizer=world.tokenizer,
    protocol=world.protocol,
    limits=limits,
    samples_per_question=samples_per_question,
    step=step,
    weight_version=weight_version,
  )


class Rollouts:
  """The rollouts of one training step after another.

  With rollout.max_staleness 0 a step's are sampled from its own parameters. With 1 they are sampled
  from those before, while that update runs: the first step of a process alone, also of a resumed
  one, waits for its own.
  """

  def __init__(self, config, world: worlds.World, sampler):
    self._config, self._world, self._sampler = config, world, sampler
    self._pool = (
      concurrent.futures.ThreadPoolExecutor(1, "rollouts") if config.rollout.max_staleness else None
    )
    self._next = None

  def take(self, step: int, params) -> tuple[list, dict[str, float]]:
    """([Q][K] trajectories of the step, their seconds); `params` are what the step updates."""
    groups, times = self._next.result() if self._next else self._begin(step, step, params)()
    self._next = None
    if self._pool and step + 1 < self._config.num_steps:
      self._next = self._pool.submit(self._begin(step + 1, step, params))
    elif self._config.sampler.release:
      self._sampler.release()
    return processes.exchange(groups, self._config.data.questions_per_step), times

  def _begin(self, step: int, version: int, params):
    """Loads the parameters; what then samples the step's rollouts, in any thread."""
    start = time.perf_counter()
    self._sampler.load(params, version)
    load_s = time.perf_counter() - start

    def run():
      start, searched = time.perf_counter(), self._world.retriever.seconds
      groups = collect(
        self._world,
        self._world.questions_at(step),
        sampler=self._sampler,
        retriever=self._world.retriever,
        limits=self._world.limits,
        step=step,
        weight_version=version,
        samples_per_question=self._config.rollout.samples_per_question,
      )
      search_s = self._world.retriever.seconds - searched
      return groups, {
        "rollout_s": load_s + time.perf_counter() - start - search_s,
        "load_s": load_s,
        "search_s": search_s,
      }

    return run

  def settle(self) -> None:
    """Waits for rollouts under way, so that the retriever and a server are free for an
    evaluation."""
    if self._next:
      concurrent.futures.wait([self._next])

  def __enter__(self) -> "Rollouts":
    return self

  def __exit__(self, *unused) -> None:
    if self._pool:
      self._pool.shutdown(cancel_futures=True)


def evaluate(
  config,
  params,
  world: worlds.World,
  sampler,
  *,
  count: int,
  forced: int | None = None,
  only: str | None = None,
) -> dict:
  """{set: scores} of every held-out set, or of `only` one; `forced` makes each rollout search
  exactly that often."""
  sampler.load(params, EVALUATION_STEP)
  scores = {}
  for name, (questions, retriever) in world.held_out(count).items():
    if only not in (None, name):
      continue
    what = f"questions of {name}" + ("" if forced is None else f" with {forced} searches each")
    groups = []
    with Progress(len(questions), what, active=processes.is_first()) as progress:
      for at in range(0, len(questions), CHUNK):
        part = questions[at : at + CHUNK]
        groups += processes.exchange(
          collect(
            world,
            part,
            sampler=sampler,
            retriever=retriever,
            samples_per_question=1,
            step=EVALUATION_STEP + at,
            limits=worlds.limits(config, forced_searches=forced),
          ),
          len(part),
        )
        progress.update(len(part))
    scores[name] = scoring.summary(groups)
  return scores


def evaluate_start(config, params, world, sampler, writer, workdir: pathlib.Path) -> None:
  """The policy before reinforcement learning: by its own choice, and made to search 0, 1, 2, ...
  times."""
  scores = evaluate(config, params, world, sampler, count=config.eval.questions)
  parts = {"warm_start": {"sets": scores}}
  if config.eval.forced:
    parts["warm_start_forced"] = {
      str(n): {
        "sets": evaluate(
          config, params, world, sampler, count=config.eval.questions, forced=n, only="held_out"
        )
      }
      for n in range(config.rollout.max_turns + 1)
    }
  writer.write({"step": 0} | scoring.metrics_row(scores))
  record(workdir, parts)


def evaluate_at(config, params, world, sampler, writer, workdir: pathlib.Path, step: int) -> None:
  """The policy now; evaluation.json keeps the newest."""
  scores = evaluate(config, params, world, sampler, count=config.eval.questions)
  writer.write({"step": step} | scoring.metrics_row(scores))
  record(workdir, {"step": step, "sets": scores})


def record(workdir: pathlib.Path, parts: dict) -> None:
  """Adds parts to workdir/evaluation.json."""
  if not processes.is_first():
    return
  path = workdir / "evaluation.json"
  known = files.read_object(path) if path.exists() else {}
  files.write_atomic(path, json.dumps(known | parts, indent=2) + "\n")


def enable_compilation_cache() -> None:
  """Compiled programs are kept beside the project, so that a second run or a resumed one starts at
  once."""
  jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(".cache/jax").absolute()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
