"""Loops over a run's stages and their steps: batch -> update -> row -> checkpoint.

Every stage has its own checkpoints and goes on from the newest. Once a later stage has begun, the
ones before are not looked at again.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time

import jax

from stratified.evaluation import runner
from stratified.learner import batching, processes
from stratified.progress import Progress
from stratified.retrieval.client import RetrieverDown
from stratified.runs import build, events, samplers, stages, timetable, trackers
from stratified.runs.checkpoint import Checkpointer, restore_part
from stratified.runs.convergence import StageScores
from stratified.runs.stage_parts import StageParts
from stratified.runs.stop import Diverged, OutsideFailed, Stop, Stopped, Unusable
from stratified.runs.surroundings import evaluate_missing, Surroundings
from stratified.runs.weights import end_of, folder_of, of_stage, Weights
from stratified.runs.writer import Writer
from stratified.sampling.sglang.errors import SamplerError
from stratified.types import TrainState

EARLIER_EVERY = 200  # steps between checkpoints of the stages before the last
MOST_SKIPPED = 3  # updates in a row without a finite loss or gradient before a run stops


@dataclasses.dataclass(frozen=True)
class Seat:
  """A stage where it is trained: its parts, the forms of its state, its checkpoints in a folder.

  keep_best: whether the checkpoint of its best held-out score stays.
  """

  parts: StageParts
  folder: pathlib.Path
  weights: Weights
  saved: Checkpointer
  scores: StageScores
  keep_best: bool = False

  def save(self, step: int, state: TrainState, *, force: bool = False) -> None:
    """Saves the state where a checkpoint is due, forced or the best so far.

    Frozen weights only cost a hash then.
    """
    best = self.scores.best([*self.saved.steps, step]) if self.keep_best else None
    force = force or best == step
    if force or self.saved.due(step):
      self.saved.save(
        step, self.weights.at_rest(state), force=force, scores=self.scores.scores, best=best
      )


def train(run: build.Run, workdir: pathlib.Path, stop: Stop) -> None:
  """Trains every stage from where it stands; returns early, all saved, where `stop` was asked.

  Raises Unusable for a damaged or foreign checkpoint; RetrieverDown, SamplerError or Diverged where
  training can't go on, with what was trained saved.
  """
  with contextlib.ExitStack() as stack:
    sampler, judge = stack.enter_context(
      samplers.samplers(run.config, run.mesh, run.model, run.task.tokenizer)
    )
    seats = [stack.enter_context(seat_of(run, parts, workdir)) for parts in run.stages]
    with stop.at_once():
      number, restored = newest(seats)
      params = None if restored else started(run, seats[0])
    resumed = restored if seats[number].parts.stage.source != "demonstrations" else None
    warm = seats[0] if seats[0].parts.stage.source == "demonstrations" else None
    try:
      writer = Writer(
        workdir,
        resume_step=seats[number].parts.first + resumed[1] if resumed else None,
        warm_start_step=(warm.saved.latest_step or 0) if warm else 0,
        active=processes.is_first(),
        backends=(events.TensorBoard, *trackers.of(run.config)),
      )
    except ValueError as error:  # a damaged line, by its number
      raise Unusable(f"{error}") from error
    times = timetable.of_run(run, what)
    say(f"{'to do' if restored is None else 'the whole run'}: {times}")
    around = Surroundings(run, workdir, sampler, judge, stack.enter_context(writer), stop, times)
    for seat in seats[number:]:
      fresh = restored is None
      state, step = (begin(seat, seats, params), 0) if fresh else restored
      params = restored = None  # the state has taken them over
      state = run_stage(seat, around, state, step, stop, fresh=fresh)
      if stop.asked:
        return
      if seat is not seats[-1]:
        params, state = handed_on(seat, state), None


def started(run: build.Run, seat: Seat):
  """The policy that the run begins with; Unusable where its files are damaged."""
  try:
    return build.initial_params(run.config, run.model, run.mesh, dtype=seat.weights.start_dtype)
  except (ValueError, OSError) as error:
    raise Unusable(f"{error}") from error


@contextlib.contextmanager
def seat_of(run: build.Run, parts: StageParts, workdir: pathlib.Path):
  """Opens the seat of a stage."""
  weights, folder = of_stage(run, parts, workdir), folder_of(run, parts, workdir)
  every = EARLIER_EVERY if parts.supervised else run.config.checkpoint.every
  keep_best = not parts.supervised and run.config.checkpoint.keep_best
  scores = StageScores.of(run.config, parts, last=parts is run.last)
  with Checkpointer(folder, every, once=weights.unchanging) as saved:
    yield Seat(parts, folder, weights, saved, scores, keep_best)


def handed_on(seat: Seat, state: TrainState):
  """Takes from a stage at its end the policy that the next one begins with."""
  if seat.scores.settings.goes_on == "last":
    return seat.weights.policy(state)
  seat.saved.wait()
  params, step = seat.weights.restore_policy(
    seat.folder, end_of(seat.weights.config, seat.parts, seat.folder)
  )
  say(f"going on with step {step} of {seat.parts.stage.name}, its best on held-out questions")
  return params


def begin(seat: Seat, seats: list[Seat], params) -> TrainState:
  """Makes the state that a stage begins with, from the policy that the stage before ended with."""
  stage = seat.parts.stage
  kept = {"opt_state": stage.optimizer_of, "reference": stage.reference_of}
  return seat.weights.begin(
    params, **{part: ended(seats, name, part) for part, name in kept.items() if name}
  )


def ended(seats: list[Seat], name: str, part: str):
  """Reads a part of the state that an earlier stage ended with from its last checkpoint."""
  seat = next(seat for seat in seats if seat.parts.stage.name == name)
  whole = seat.weights.abstract()
  step = end_of(seat.weights.config, seat.parts, seat.folder)
  found = restore_part(seat.folder, {part: getattr(whole, part)}, step)
  if found is None:
    raise Unusable(
      f"{seat.folder} holds no checkpoint any more, of which a later stage needs the {part}; bring "
      "it back, or train in a new workdir"
    )
  return found[0][part]


def newest(seats: list[Seat]) -> tuple[int, tuple[TrainState, int] | None]:
  """Finds the stage to go on with: (its number, its (state, step) or None at the very start)."""
  for number, seat in reversed(list(enumerate(seats))):
    try:
      found = seat.saved.restore_latest(seat.weights.abstract(), seat.weights.remade())
      restored = seat.weights.resume(found)
    except (ValueError, FileNotFoundError) as error:  # it names what is damaged or differs
      raise Unusable(f"{error}") from error
    if restored:
      seat.scores.scores[:] = seat.saved.scores(restored[1])
      return number, restored
  return 0, None


def run_stage(
  seat: Seat, around, state: TrainState, step: int, stop: Stop, *, fresh: bool
) -> TrainState:
  """Trains one stage from a step on, `fresh` where it only begins; returns the state at its end."""
  stage, weights, first = seat.parts.stage, seat.weights, seat.parts.first
  around = dataclasses.replace(around, scores=seat.scores)
  if step:
    say(f"going on from step {step} of {stage.num_steps} ({stage.name})")
  with (
    stages.SOURCES[stage.source](seat.parts, around, weights.policy) as source,
    Progress(
      stage.num_steps,
      what(stage),
      done=step,
      active=processes.is_first(),
      whole=functools.partial(around.times.say, around.run.stages.index(seat.parts)),
    ) as progress,
  ):
    try:
      if fresh and source.start(state):
        seat.save(0, state, force=True)
      elif step:
        policy = functools.partial(weights.policy, state)
        evaluate_missing(around, seat.parts, policy, first + step)
        del policy
    except runner.Stopped:
      say(f"stopped in the evaluation of step {first + step}; the same command goes on with it")
      return state
    while step < stage.num_steps and not seat.scores.ended and not stop.agreed():
      try:
        batch, row = source.take(first + step, state)
      except (RetrieverDown, SamplerError, OutsideFailed):
        seat.save(step, state, force=True)
        raise
      except Stopped:
        break
      placed, start = batching.place(around.run.mesh, batch), time.perf_counter()
      state, stats = jax.block_until_ready(seat.parts.learn(state, placed))
      del placed  # it need not lie there while the next rollouts are made
      row["time/update_s"], step = time.perf_counter() - start, step + 1
      try:
        note = source.finish(first + step, state, stats, batch, row)
      except runner.Stopped:  # when the run goes on, it begins with that evaluation
        note = "stopped in its evaluation"
      # After all of the step's rows: a run killed before this repeats the step, one killed after it
      # has them.
      seat.save(step, state, force=step == stage.num_steps)
      progress.update(1, note=note)
      if int(state.skipped_in_a_row) >= MOST_SKIPPED:
        seat.save(step, state, force=True)
        raise Diverged(
          f"{MOST_SKIPPED} updates in a row had no finite loss or gradient, the last at step "
          f"{step} of {stage.name}; the parameters before them are kept. A lower "
          f"--config.{source.rate} in a new workdir usually helps"
        )
  seat.save(step, state, force=True)
  if seat.scores.ended:
    say(f"{stage.name} ended at step {step} of {stage.num_steps}: its held-out score rose no more")
  if stop.asked:
    where = f"step {step} of {stage.num_steps} ({stage.name})"
    say(f"stopped at {where} and saved; the same command goes on")
  return state


def what(stage) -> str:
  """What a stage's progress counts."""
  return stages.SOURCES[stage.source].label + (f" of cycle {stage.cycle}" if stage.cycle else "")


def say(text: str) -> None:
  """Prints, in the first process of a run only."""
  if processes.is_first():
    print(text, flush=True)
