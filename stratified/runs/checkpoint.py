"""Saves and restores checkpoints of a run (Orbax), checked by the digest of each array."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import logging
import os
import pathlib
import shutil
from typing import Any

from absl import logging as absl_logging
import jax
import orbax.checkpoint as ocp

from stratified.config import setting, Settings
from stratified.learner import processes
from stratified.runs import on_disk, unchanging
from stratified.runs.stop import Unusable


@dataclasses.dataclass(frozen=True)
class CheckpointSettings(Settings):
  """When a run saves."""

  SECTION = "checkpoint"
  every: int = setting(10, "steps between two checkpoints", low=1, affects=[])
  keep_best: bool = setting(
    True, "keeps the one that was best on held-out questions, besides the newest two", affects=[]
  )


def abstract(tree: Any) -> Any:
  """The tree's shapes, dtypes and shardings without its values: what `restore_latest` asks for."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree
  )


class Checkpointer:
  """Saves and restores the whole training state under workdir/checkpoints.

  A checkpoint is written beside its place and renamed into it when it is whole: a process killed at
  any moment leaves the checkpoint before. Saving copies the arrays to the host, since a training
  step may donate them right after, and writes them in the background; `close` waits for the last.
  Each array's digest is kept beside it and compared when it is read. Where a write fails, for want
  of space or else, this and the next call raise Unusable, one sentence.

  Args:
    workdir: the run's folder.
    every: steps between two checkpoints.
    keep: how many of the newest stay; the best stays besides (see `save`).
    once: fields of the state that never change: stored once, beside the checkpoints.
  """

  def __init__(
    self, workdir: str | os.PathLike, every: int, keep: int = 2, *, once: Sequence[str] = ()
  ):
    if every < 1 or keep < 1:
      raise ValueError(f"checkpoint.every = {every} and keep = {keep} must both be at least 1")
    absl_logging.get_absl_logger().addFilter(_worth_hearing)
    self._every = every
    self._path = pathlib.Path(workdir).absolute() / "checkpoints"
    self._best: int | None = None
    self._once = tuple(once)
    self._manager = self._opened(keep)

  def _opened(self, keep: int) -> ocp.CheckpointManager:
    newest = ocp.checkpoint_managers.LatestN(n=keep)
    make = lambda: ocp.CheckpointManager(
      self._path,
      item_handlers=ocp.StandardCheckpointHandler(),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy([newest, self]),
        cleanup_tmp_directories=True,
      ),
    )
    try:
      return make()
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # it reads all metadata
      self._put_unreadable_aside(error)
      return make()

  def _put_unreadable_aside(self, error: Exception) -> None:
    """Moves checkpoints whose metadata can't be read out of the way, if others are left."""
    steps, unreadable = ocp.utils.checkpoint_steps(self._path), {}
    for step in steps:
      try:
        with on_disk.reading(self._path / str(step), ""), ocp.StandardCheckpointer() as reader:
          reader.metadata(self._path / str(step))
      except ValueError as damage:
        unreadable[step] = damage
    if not unreadable or len(unreadable) == len(steps):
      raise Unusable(
        f"the checkpoints {self._path} are damaged ({' '.join(str(error).split())[:200]}): bring "
        "them back from a copy, or remove that folder and the run starts anew"
      ) from error
    self._move_aside(unreadable, max(set(steps) - set(unreadable)))

  @property
  def latest_step(self) -> int | None:
    return self._manager.latest_step()

  @property
  def steps(self) -> list[int]:
    """Those that have a checkpoint."""
    return list(self._manager.all_steps())

  def scores(self, step: int) -> list[tuple[int, float]]:
    """The held-out scores that `save` was given with that step."""
    known = self._manager.metadata(step).custom_metadata or {}
    return [(int(at), score) for at, score in known.get(_SCORES, [])]

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    """Tells Orbax which checkpoints stay, the newest apart."""
    return [checkpoint.step == self._best for checkpoint in checkpoints]

  def due(self, step: int) -> bool:
    """Whether `save` would save that step unforced; otherwise nothing need be prepared for it."""
    return step % self._every == 0

  def save(self, step: int, state: Any, *, force: bool = False, scores=(), best=None) -> bool:
    """Saves `state` under `step` if that is a multiple of `every`, or forced; says whether it did.

    A step that is there already is not saved again, so a run may force its last step unasked.

    Args:
      scores: (step, held-out score) so far, kept with the state.
      best: the step, this one or an earlier, whose checkpoint stays besides the newest. The one
        that was best before goes once this save is whole.
    """
    if not (self.due(step) or force) or step == self.latest_step:
      return False
    self._best = best
    found = on_disk.digests(state)
    known = {on_disk.DIGESTS: found, _SCORES: list(scores), _BEST: best}
    with on_disk.writing(self._path):
      known[_ONCE] = {
        name: unchanging.store(self._path, name, getattr(state, name), found) for name in self._once
      }
      state = unchanging.without(state, self._once)
      return self._manager.save(
        step, args=ocp.args.StandardSave(state), force=True, custom_metadata=known
      )

  def restore_latest(
    self, abstract_state: Any, remade: Mapping[str, Callable[[], Any]] = {}
  ) -> tuple[Any, int] | None:
    """Restores (state, step) of the newest checkpoint that is good; None if there is none at all.

    Those after it are damaged: each is named in a printed sentence and moved to STEP.damaged.

    Args:
      abstract_state: a tree of jax.ShapeDtypeStruct (see `abstract`); each leaf's sharding is where
        its array goes, whatever mesh it was saved from.
      remade: {field: a function that makes it again}, for what is stored once.

    Raises:
      ValueError: the newest checkpoint has other arrays than `abstract_state` (all are named) or is
        damaged, and no earlier one is good.
    """
    self._manager.wait_until_finished()
    refused = {}
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        try:
          state = self._restore(step, abstract_state)
        except on_disk.Damaged as error:
          if not unchanging.store_again(self._path, error, remade):
            raise
          state = self._restore(step, abstract_state)
      except (on_disk.Damaged, on_disk.Foreign) as error:
        refused[step] = error
        continue
      self._put_aside(refused, step)
      return state, step
    if refused:
      raise refused[max(refused)]
    return None

  def _restore(self, step: int, abstract_state: Any) -> Any:
    path = self._path / str(step)
    with on_disk.reading(path, "remove that folder and the run starts anew"):
      known = self._manager.metadata(step).custom_metadata or {}
      once = known.get(_ONCE, {})
      saved = on_disk.shapes(self._manager.item_metadata(step).tree)
      saved |= unchanging.shapes(self._path, once)
      if not (differences := on_disk.differences(saved, on_disk.shapes(abstract_state))):
        wanted = unchanging.without(abstract_state, once)
        state = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        on_disk.check(state, known, path)
        read = unchanging.read(self._path, once, abstract_state, known) if once else {}
        return state._replace(**read) if read else state
    raise on_disk.Foreign(
      f"the checkpoint {path} is of another model or optimizer:\n"
      + "\n".join(differences)
      + "\nUse the config that it was saved with, or a new workdir."
    )

  def _put_aside(self, refused: Mapping[int, ValueError], good: int) -> None:
    """Moves damaged checkpoints out of the way, so that their steps can be saved again."""
    self._move_aside(refused, good)
    if refused:
      self._manager.reload()

  def _move_aside(self, refused: Mapping[int, ValueError], good: int) -> None:
    for step, error in refused.items():
      path = self._path / str(step)
      aside = path.with_name(f"{step}.damaged")

      def move(path=path, aside=aside, error=error):
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
        print(
          f"the checkpoint of step {path.name} is damaged ({on_disk.reason(error)}) and now in "
          f"{aside}, which may be removed; the run goes on from the one of step {good}",
          flush=True,
        )

      processes.first_then_all(move, f"damaged {step}")

  def wait(self) -> None:
    """Waits until the last checkpoint is whole."""
    with on_disk.writing(self._path):
      self._manager.wait_until_finished()

  def close(self) -> None:
    try:
      self.wait()
    finally:
      self._manager.close()

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *unused) -> None:
    self.close()


_SCORES, _BEST, _ONCE = "scores", "best", "once"


def restore_part(
  workdir: str | os.PathLike, abstract_part: Mapping[str, Any], step: int | None = None
) -> tuple[dict[str, Any], int] | None:
  """Restores some fields of the saved state alone: ({field: tree}, step); None before the first.

  Args:
    abstract_part: field of the state -> its tree of jax.ShapeDtypeStruct.
    step: which checkpoint; unless given the newest that is good, with a printed sentence for each
      damaged one after it.

  Raises:
    ValueError: there is no such step (those that are there are named), or these fields hold other
      arrays, or the checkpoint is damaged and no earlier one may stand in for it.
  """
  path = pathlib.Path(workdir).absolute() / "checkpoints"
  absl_logging.get_absl_logger().addFilter(_worth_hearing)
  steps = sorted(ocp.utils.checkpoint_steps(path), reverse=True) if path.is_dir() else []
  if not steps:
    return None
  if step is not None and step not in steps:
    raise ValueError(
      f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(steps)))}"
    )
  refused = None
  for one in steps if step is None else [step]:
    try:
      found = _read_part(path / str(one), dict(abstract_part))
    except (on_disk.Damaged, on_disk.Foreign) as error:
      refused = refused or error
      continue
    if refused:
      print(
        f"checkpoints after step {one} in {path} are damaged ({on_disk.reason(refused)}); "
        f"the one of step {one} is used",
        flush=True,
      )
    return found, one
  raise refused


def best_step(workdir: str | os.PathLike) -> int | None:
  """The step that was best on held-out questions, by what the newest checkpoint says.

  None where there is no checkpoint, none of them was scored, or the best was not kept.
  """
  path = pathlib.Path(workdir).absolute() / "checkpoints"
  steps = ocp.utils.checkpoint_steps(path) if path.is_dir() else []
  if not steps:
    return None
  newest = path / str(max(steps))
  with (
    on_disk.reading(newest, "name a step, or remove that folder"),
    ocp.StandardCheckpointer() as reader,
  ):
    found = (reader.metadata(newest).custom_metadata or {}).get(_BEST)
  return found if found in steps else None


def step_of(workdir: str | os.PathLike, named: int | str | None) -> int | None:
  """The step that "best" names, any other as it is; ValueError where no best one is kept."""
  if named != "best":
    return named
  found = best_step(workdir)
  if found is None:
    raise ValueError(
      f"{workdir} keeps no checkpoint that is known as the best on held-out questions: none was "
      "scored yet, or checkpoint.keep_best is False; leave --step out for the newest, or name one"
    )
  return found


def _read_part(path: pathlib.Path, part: dict[str, Any]) -> dict[str, Any]:
  with (
    on_disk.reading(path, "name another step, or remove that folder"),
    ocp.Checkpointer(
      ocp.CompositeCheckpointHandler(default=ocp.PyTreeCheckpointHandler())
    ) as reader,
  ):
    stored = reader.metadata(path)
    once = (stored.custom_metadata or {}).get(_ONCE, {})
    once = {name: where for name, where in once.items() if name in part}
    tree = stored.item_metadata["default"].tree
    saved = on_disk.shapes({name: tree.get(name) for name in part})
    saved |= unchanging.shapes(path.parent, once)
    differences = on_disk.differences(saved, on_disk.shapes(part))
    if not differences:
      beside = unchanging.read(path.parent, once, part, stored.custom_metadata)
      part = {name: value for name, value in part.items() if name not in once}
      if not part:
        return beside
      wanted = ocp.args.PyTreeRestore(
        part, restore_args=ocp.checkpoint_utils.construct_restore_args(part), partial_restore=True
      )
      found = reader.restore(path, args=ocp.args.Composite(default=wanted))["default"]
      on_disk.check(found, stored.custom_metadata, path)
      return found | beside
  raise on_disk.Foreign(
    f"the checkpoint {path} is of another model:\n"
    + "\n".join(differences)
    + "\nUse the config that it was saved with."
  )


def _worth_hearing(record: logging.LogRecord) -> bool:
  """Orbax reports every file that it opens through absl's logger; its warnings are enough."""
  return record.levelno >= logging.WARNING or "orbax" not in record.pathname
