"""What surrounds the training loop: orderly stops, the warm start, evaluation before, during and after."""

import json
import pathlib
import signal

import jax

from experiments import build, worlds
from stratified import batching, evaluate as scoring, metrics, processes, update
from stratified.checkpoint import Checkpointer
from stratified.policy import decoder
from stratified.progress import Progress
from stratified.rollout import loop

EVALUATION_STEP = 2**30  # names the random keys of evaluation, which greedy decoding never draws from
CHUNK = 256  # held-out questions in flight; more would only delay the progress line


class Stop:
  """`asked` turns true at Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""

  def __init__(self):
    self.asked = False
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
    print("\nstopping after this step, then saving", flush=True)


def warm_start(config, mesh, world, model: decoder.DecoderConfig, writer, checkpointer: Checkpointer, stop: Stop):
  """Parameters after supervised training on scripted demonstrations; goes on from its own newest checkpoint."""
  optimizer = build.optimizer(config, warm_start=True)
  total = config.warm_start.num_steps
  restored = checkpointer.restore_latest(update.abstract_state(mesh, model, optimizer, with_reference=False))
  if restored:
    state, step = restored
  else:
    params = build.initial_params(config, model, mesh)
    state, step = update.init_state(mesh, model, params, optimizer, with_reference=False), 0
  learn = build.supervised_update(config, mesh, model, optimizer)
  batch_at = worlds.demonstration_batches(config, world)
  with Progress(total, "warm-start steps", done=step, active=processes.is_first()) as progress:
    while step < total and not stop.agreed():
      state, stats = learn(state, batching.place(mesh, batch_at(step)))
      step += 1
      loss = float(stats["warm_start/loss"])
      writer.write({"warm_start/step": step, "warm_start/loss": loss, "grad/norm": float(stats["grad/norm"])})
      if int(state.skipped_in_a_row) >= 3:
        raise RuntimeError(f"the warm start's loss is not finite at step {step}; "
                           "lower --config.warm_start.learning_rate in a new workdir")
      checkpointer.save(step, state, force=step == total)
      progress.update(1, note=f"loss {loss:.3f}")
  checkpointer.save(step, state, force=True)
  return state.params


def collect(world: worlds.World, questions, *, sampler, retriever, limits, samples_per_question: int, step: int):
  """[Q][K] rollouts of the questions, each process sampling its own; the same in all of them."""
  indices = processes.mine(len(questions))
  groups = loop.collect(
      [questions[q] for q in indices], indices=indices, sampler=sampler, retriever=retriever, tokenizer=world.tokenizer,
      protocol=world.protocol, limits=limits, samples_per_question=samples_per_question, step=step)
  return processes.exchange(groups, len(questions))


def evaluate(config, params, world: worlds.World, sampler, *, count: int, forced: int | None = None,
             only: str | None = None) -> dict:
  """{set: scores} of every held-out set, or of `only` one; `forced` makes each rollout search exactly that often."""
  sampler.load(params, EVALUATION_STEP)
  scores = {}
  for name, (questions, retriever) in world.held_out(count).items():
    if only not in (None, name):
      continue
    what = f"questions of {name}" + ("" if forced is None else f" with {forced} searches each")
    groups = []
    with Progress(len(questions), what, active=processes.is_first()) as progress:
      for at in range(0, len(questions), CHUNK):
        part = questions[at:at + CHUNK]
        groups += collect(world, part, sampler=sampler, retriever=retriever, samples_per_question=1,
                          step=EVALUATION_STEP + at, limits=worlds.limits(config, forced_searches=forced))
        progress.update(len(part))
    scores[name] = scoring.summary(groups)
  return scores


def evaluate_start(config, params, world, sampler, writer, workdir: pathlib.Path) -> None:
  """The policy before reinforcement learning: by its own choice, and made to search 0, 1, 2, ... times."""
  scores = evaluate(config, params, world, sampler, count=config.eval.questions)
  parts = {"warm_start": {"sets": scores}}
  if config.eval.forced:
    parts["warm_start_forced"] = {
        str(n): {"sets": evaluate(config, params, world, sampler, count=config.eval.questions, forced=n, only="held_out")}
        for n in range(config.rollout.max_turns + 1)}
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
  known = json.loads(path.read_text()) if path.exists() else {}
  metrics.write_atomic(path, json.dumps(known | parts, indent=2) + "\n")


def enable_compilation_cache() -> None:
  """Compiled programs are kept beside the project, so that a second run or a resumed one starts at once."""
  jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(".cache/jax").absolute()))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
