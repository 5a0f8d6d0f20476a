"""Mines pairs of the policy's own rollouts at the start of a stage, and gives their batches.

    workdir/pairs/cycle_C.jsonl       a line of counts and hashes, then a pair a line

The rollouts are made once, by the policy that the stage begins with. A stage that begins refuses a
file of other weights; one that goes on reads it again, and refuses one that was changed.
"""

from collections.abc import Callable
import functools
import hashlib
import json
import pathlib
import zlib

import numpy as np

from stratified import files
from stratified.algorithms import guide, pair_records, pairs
from stratified.algorithms.search_e1 import Student
from stratified.learner import batching, processes
from stratified.policy import lora
from stratified.progress import Progress
from stratified.runs import rollouts
from stratified.runs.stage_parts import StageParts
from stratified.runs.stop import Stopped, Unusable
from stratified.runs.surroundings import (
  blame,
  evaluate_first,
  evaluate_if_due,
  Surroundings,
  unrewarded,
  write_update,
  writing,
)
from stratified.types import Batch, TrainState, Trajectory

# Beyond every step of training: rollouts for pairs draw with random keys of their own.
FIRST_KEY = 500_000_000
EVERY_ROW = ("pairs/count", "pairs/skipped_share")


class Pairs:
  """Pairs of the policy's own rollouts; a step takes the next of them, shuffled anew each pass."""

  label, rate = "distillation steps", "distillation.learning_rate"

  def __init__(self, parts: StageParts, around: Surroundings, policy: Callable):
    self._parts, self._around, self._policy = parts, around, policy
    self._algorithm = parts.stage.algorithm
    self._mined: pairs.Mined | None = None

  def start(self, state: TrainState) -> bool:
    return evaluate_first(self._around, self._parts, functools.partial(self._policy, state))

  def take(self, step: int, state: TrainState) -> tuple[Batch, dict]:
    """Takes a step's batch; before the first, mines. Raises Stopped where asked to meanwhile."""
    if self._mined is None:
      self._mined = self._read_or_mine(step, state)
    chosen = self._chosen(step - self._parts.first)
    whole = step == self._parts.first  # the first row has all that is known of them
    row = {k: v for k, v in self._mined.stats.items() if whole or k in EVERY_ROW}
    return self._batch(chosen), row

  def finish(self, step: int, state, stats: dict, batch: Batch, row: dict) -> str:
    sampled = row.get("pairs/sampled_tokens", 0)  # in the first row alone
    row = write_update(self._around, self._parts, step, stats, batch, row, sampled=sampled)
    evaluate_if_due(self._around, self._parts, self._policy, step, state)
    return f"loss {row['distillation/loss']:.4f}, {row['pairs/count']:.0f} pairs"

  def __enter__(self) -> "Pairs":
    return self

  def __exit__(self, *unused) -> None:
    pass

  ###  Batches  ###

  def _chosen(self, number: int) -> list[pairs.Pair]:
    """The pairs of a step of this stage: each pass over all of them in an order of its own."""
    found, count = self._mined.pairs, self._parts.stage.trained.rollouts
    if not found:
      return []
    seed = self._around.run.config.seed
    order = lambda epoch: np.random.default_rng([seed, self._parts.stage.cycle, epoch]).permutation(
      len(found)
    )
    first = number * count
    epochs = range(first // len(found), (first + count - 1) // len(found) + 1)
    indices = np.concatenate([order(epoch) for epoch in epochs])
    first -= epochs[0] * len(found)
    return [found[i] for i in indices[first : first + count]]

  def _batch(self, chosen: list[pairs.Pair]) -> Batch:
    """The pairs as a batch [n][1]; without any pair, of lost rollouts that change nothing."""
    count, teacher = self._parts.stage.trained.rollouts, self._algorithm.teacher
    groups = [[self._weighted(pair)] for pair in chosen] or [[batching.LOST]] * count
    if not teacher:
      return unrewarded(groups, self._parts)
    prompts = lambda hints: [[self._prompt(hint)] for hint in hints] or [[()]] * count
    others = prompts([pair.contrast for pair in chosen]) if teacher.contrast else None
    return unrewarded(groups, self._parts, prompts([pair.reference for pair in chosen]), others)

  def _weighted(self, pair: pairs.Pair) -> Student:
    """The rollout of the pair that is trained on."""
    trained = pair.student if self._algorithm.teacher else pair.reference
    decode, s = self._around.run.task.tokenizer.decode, self._algorithm.settings
    fields = {name: getattr(trained, name) for name in trained.__dataclass_fields__}
    return Student(
      **fields,
      weights=guide.weights(trained, s.span, decode, s.prefix),
      weight=self._algorithm.weight_of(pair.right_share),
    )

  def _prompt(self, hint: Trajectory) -> tuple[int, ...]:
    how = writing(self._around.run.task)
    return guide.prompt(hint.question, hint, self._algorithm.guide, **how)

  ###  Mining  ###

  def _read_or_mine(self, step: int, state: TrainState) -> pairs.Mined:
    path = self._around.workdir / "pairs" / f"cycle_{self._parts.stage.cycle}.jsonl"
    if step > self._parts.first:
      return read(path, None)
    made_by = hash_of(self._policy(state))
    if path.exists():
      return read(path, made_by)
    mined = self._mine(functools.partial(self._policy, state))
    decode = self._around.run.task.tokenizer.decode
    processes.first_then_all(lambda: write(path, mined, decode, made_by), f"{path}")
    return read(path, made_by)  # as a run that goes on will find them

  def _mine(self, policy: Callable) -> pairs.Mined:
    """Rolls out training questions with the policy, rewards them, and picks the pairs."""
    run, settings = self._around.run, self._algorithm.pairs
    config, task, sampler = run.config, run.task, self._around.sampler
    if self._algorithm.kept_steps:
      groups = kept(self._around.workdir, self._parts.first, self._algorithm.kept_steps)
      return self._picked(groups[: settings.num_questions])
    sampler.load(policy(), self._parts.first)
    groups, each = [], config.data.questions_per_step
    samples = settings.samples_per_question or config.rollout.samples_per_question
    with Progress(
      settings.num_questions, "questions for pairs", active=processes.is_first()
    ) as progress:
      while len(groups) < settings.num_questions:
        if self._around.stop.agreed():
          raise Stopped
        step = self._parts.first + len(groups) // each
        asked = task.questions_at(step)[: settings.num_questions - len(groups)]
        groups += rollouts.collect(
          task,
          asked,
          sampler=sampler,
          tools=task.tools,
          limits=task.limits,
          step=FIRST_KEY + step,
          weight_version=self._parts.first,
          samples_per_question=samples,
        )
        progress.update(len(asked))
    if config.sampler.release:
      sampler.release()
    sampled = sum(t.num_policy_tokens + t.side_tokens for group in groups for t in group)
    mined = self._picked(groups)
    return mined._replace(stats=mined.stats | {"pairs/sampled_tokens": sampled})

  def _picked(self, groups) -> pairs.Mined:
    run = self._around.run
    with blame("reward.name", run.config.reward.name):
      rewards = [[0.0 if t.fault else run.reward(t).total for t in group] for group in groups]
    return pairs.mine(groups, rewards, self._algorithm.pairs, seed=run.config.seed)


###  Files  ###


def hash_of(policy) -> str:
  """A short name of weights, the same on any mesh."""
  return hashlib.sha256(np.asarray(lora.fingerprint(policy)).tobytes()).hexdigest()[:16]


def keep(workdir: pathlib.Path, step: int, groups) -> None:
  """Keeps the rollouts of a reinforcement step for the pairs of the distillation after it."""
  path = _kept_path(workdir, step)
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomic(path, processes.encoded(groups))


def kept(workdir: pathlib.Path, end: int, count: int) -> list:
  """Reads the rollouts of the last `count` steps up to `end`; Unusable where one is gone."""
  groups = []
  for step in range(end - count + 1, end + 1):
    path = _kept_path(workdir, step)
    try:
      groups += processes.decoded(path.read_bytes())
    except (OSError, ValueError, zlib.error) as error:
      raise Unusable(
        f"the rollouts of step {step}, {path}, which pairs are made of, can't be read ({error}); "
        "bring the file back, or train in a new workdir"
      ) from error
  return groups


def _kept_path(workdir: pathlib.Path, step: int) -> pathlib.Path:
  return workdir / "pairs" / "rollouts" / f"step_{step:06d}.json.zlib"


def write(path: pathlib.Path, mined: pairs.Mined, decode: Callable, made_by: str) -> None:
  """Writes pairs as JSON lines: one with their number, hashes and statistics, then a pair each."""
  rows = "".join(
    json.dumps(row, ensure_ascii=False) + "\n"
    for row in pair_records.records(mined.pairs, decode, made_by)
  )
  head = {
    "pairs": len(mined.pairs),
    "weights": made_by,
    "sha256": hashlib.sha256(rows.encode()).hexdigest(),
    "stats": mined.stats,
  }
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomic(path, json.dumps(head) + "\n" + rows)


def read(path: pathlib.Path, made_by: str | None) -> pairs.Mined:
  """Reads pairs again; `made_by` is None where nobody knows which weights made them.

  Raises Unusable where they are gone, damaged, or of other weights.
  """
  try:
    first, _, rows = path.read_bytes().partition(b"\n")
    head = files.parse(first)
    if hashlib.sha256(rows).hexdigest() != head["sha256"]:
      raise ValueError("its lines are not those that were written")
    found = pair_records.restore([files.parse(row) for row in rows.splitlines()], head["weights"])
    stats, weights = head["stats"], head["weights"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise Unusable(
      f"the pairs of this stage, {path}, can't be read ({error}); bring the file back, or train in "
      "a new workdir"
    ) from error
  if made_by not in (None, weights):
    raise Unusable(
      f"{path} holds pairs of the weights {weights}, while this stage begins with {made_by}; "
      "remove it, and they are made again"
    )
  return pairs.Mined(found, stats)
