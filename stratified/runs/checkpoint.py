"""Saves and restores checkpoints of a run (Orbax); holds a workdir to one config."""

from collections.abc import Mapping
import dataclasses
import json
import logging
import os
import pathlib
from typing import Any

from absl import logging as absl_logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from stratified.config import changed, free, public, Rule, setting, Settings
from stratified.files import flatten, read_object, write_atomic


@dataclasses.dataclass(frozen=True)
class CheckpointSettings(Settings):
  """When a run saves."""

  SECTION = "checkpoint"
  every: int = setting(10, "steps between two checkpoints", low=1, affects=[])


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

  Args:
    workdir: the run's folder.
    every: steps between two checkpoints.
    keep: how many of the newest stay.
  """

  def __init__(self, workdir: str | os.PathLike, every: int, keep: int = 2):
    if every < 1 or keep < 1:
      raise ValueError(f"checkpoint.every = {every} and keep = {keep} must both be at least 1")
    absl_logging.get_absl_logger().addFilter(_worth_hearing)
    self._every = every
    self._path = pathlib.Path(workdir).absolute() / "checkpoints"
    self._manager = ocp.CheckpointManager(
      self._path,
      item_handlers=ocp.StandardCheckpointHandler(),
      options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
    )

  @property
  def latest_step(self) -> int | None:
    return self._manager.latest_step()

  def due(self, step: int) -> bool:
    """Whether `save` would save that step unforced; otherwise nothing need be prepared for it."""
    return step % self._every == 0

  def save(self, step: int, state: Any, *, force: bool = False) -> bool:
    """Saves `state` under `step` if that is a multiple of `every`, or forced; says whether it did.

    A step that is there already is not saved again, so a run may force its last step unasked.
    """
    if not (self.due(step) or force) or step == self.latest_step:
      return False
    return self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

  def restore_latest(self, abstract_state: Any) -> tuple[Any, int] | None:
    """Restores (state, step) of the newest whole checkpoint; None if there is none.

    Args:
      abstract_state: a tree of jax.ShapeDtypeStruct (see `abstract`); each leaf's sharding is where
        its array goes, whatever mesh it was saved from.

    Raises:
      ValueError: the checkpoint has other arrays than `abstract_state` (all are named), or is
        damaged.
    """
    self._manager.wait_until_finished()
    step = self.latest_step
    if step is None:
      return None
    path = self._path / str(step)
    try:
      saved = _arrays(self._manager.item_metadata(step).tree)
      differences = _differences(saved, _arrays(abstract_state))
      if not differences:
        state = self._manager.restore(step, args=ocp.args.StandardRestore(abstract_state))
        _check_finite(state)
        return state, step
    except Exception as error:
      earlier = [other for other in self._manager.all_steps() if other < step]
      fallback = f"from step {max(earlier)}" if earlier else "from the start"
      raise ValueError(
        f"the checkpoint {path} is damaged ({type(error).__name__}: {str(error)[:300]}): "
        f"remove that folder and the run resumes {fallback}"
      ) from error
    raise ValueError(
      f"the checkpoint {path} is of another model or optimizer:\n"
      + "\n".join(differences)
      + "\nUse the config that it was saved with, or a new workdir."
    )

  def close(self) -> None:
    """Waits until the last checkpoint is whole."""
    self._manager.wait_until_finished()
    self._manager.close()

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *unused) -> None:
    self.close()


def restore_part(
  workdir: str | os.PathLike, abstract_part: Mapping[str, Any], step: int | None = None
) -> tuple[dict[str, Any], int] | None:
  """Restores some fields of the saved state alone: ({field: tree}, step); None before the first.

  Args:
    abstract_part: field of the state -> its tree of jax.ShapeDtypeStruct.
    step: which checkpoint; the newest unless given.

  Raises:
    ValueError: there is no such step (those that are there are named), or these fields hold other
      arrays, or the checkpoint is damaged.
  """
  path = pathlib.Path(workdir).absolute() / "checkpoints"
  absl_logging.get_absl_logger().addFilter(_worth_hearing)
  steps = sorted(ocp.utils.checkpoint_steps(path)) if path.is_dir() else []
  if not steps:
    return None
  if step is not None and step not in steps:
    raise ValueError(
      f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}"
    )
  step, part = steps[-1] if step is None else step, dict(abstract_part)
  path = path / str(step)
  try:
    with ocp.Checkpointer(
      ocp.CompositeCheckpointHandler(default=ocp.PyTreeCheckpointHandler())
    ) as reader:
      saved = reader.metadata(path).item_metadata["default"].tree
      differences = _differences(_arrays({name: saved.get(name) for name in part}), _arrays(part))
      if not differences:
        wanted = ocp.args.PyTreeRestore(
          part, restore_args=ocp.checkpoint_utils.construct_restore_args(part), partial_restore=True
        )
        found = reader.restore(path, args=ocp.args.Composite(default=wanted))["default"]
        _check_finite(found)
        return found, step
  except Exception as error:
    raise ValueError(
      f"the checkpoint {path} is damaged ({type(error).__name__}: {str(error)[:300]}); "
      "name another step, or remove that folder"
    ) from error
  raise ValueError(
    f"the checkpoint {path} is of another model:\n"
    + "\n".join(differences)
    + "\nUse the config that it was saved with."
  )


def _check_finite(tree: Any) -> None:
  """A step with values that are not finite is never saved, so such values are damage."""
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if getattr(leaf.sharding, "memory_kind", None) == "pinned_host":
      leaf = jax.device_put(leaf, jax.memory.Space.Device)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(_finite(leaf)):
      raise ValueError(
        f"{jax.tree_util.keystr(path, simple=True, separator='.')} holds values that are not finite"
      )


@jax.jit
def _finite(x):
  return jnp.isfinite(x).all()


def _arrays(tree: Any) -> dict[str, str]:
  """Each array's dotted path -> its dtype and shape, as text that can be compared and shown."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}"
    for path, leaf in leaves
  }


def _differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
  return [
    f"  {name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} now"
    for name in sorted(saved | wanted)
    if saved.get(name) != wanted.get(name)
  ]


def _worth_hearing(record: logging.LogRecord) -> bool:
  """Orbax reports every file that it opens through absl's logger; its warnings are enough."""
  return record.levelno >= logging.WARNING or "orbax" not in record.pathname


def check_config(
  workdir: str | os.PathLike, config: Mapping[str, Any], rules: Mapping[str, Rule]
) -> None:
  """Writes workdir/config.json the first time; later refuses a config that changes results.

  Fields that change no more than rounding may change, and those that grow may grow; config.json
  then takes the new values. Passwords are not written.

  Args:
    workdir: the run's folder.
    config: nested values.
    rules: {dotted name: rule} of its fields; a field without one may not change.

  Raises:
    ValueError: another field changed, appeared with a value that is not its default, or vanished
      (all are named with both values), or a value is not JSON.
  """
  path = pathlib.Path(workdir) / "config.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  try:
    text = json.dumps(public(config, rules), indent=2, sort_keys=True, allow_nan=False) + "\n"
  except (TypeError, ValueError) as error:
    raise ValueError(f"the config cannot be stored as JSON: {error}") from error
  if path.exists():
    before, after = flatten(read_object(path)), flatten(json.loads(text))
    # A field that came after the run was made had the effect of its default there.
    defaults = {name: rule.default for name, rule in rules.items() if name in after}
    before = json.loads(json.dumps(defaults)) | before
    refused = [key for key in changed(before, after) if not _may_change(key, before, after, rules)]
    if refused:
      lines = [
        f"  {key}: {_show(before, key)} in the workdir, {_show(after, key)} now" for key in refused
      ]
      raise ValueError(
        f"{path} belongs to a run with another config:\n"
        + "\n".join(lines)
        + "\nUse a new --workdir for the new config, or the old values to resume this run."
      )
  write_atomic(path, text)


def _may_change(key: str, before: Mapping, after: Mapping, rules: Mapping[str, Rule]) -> bool:
  if key in rules and rules[key].grows and key in before and key in after:
    return after[key] > before[key]
  return key in free(rules)


def _show(flat: Mapping[str, Any], key: str) -> str:
  return json.dumps(flat[key]) if key in flat else "absent"
