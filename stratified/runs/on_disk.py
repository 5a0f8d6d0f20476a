"""Names the arrays of a saved state, their shapes and digests, and what is wrong with the files."""

from collections.abc import Mapping
import contextlib
import errno
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from stratified.learner import processes
from stratified.policy import digest
from stratified.runs.stop import Unusable

DIGESTS = "digests"  # in a checkpoint's metadata


class Damaged(ValueError):
  """A checkpoint that can't be read as it was written; the sentence says why."""


class Foreign(ValueError):
  """A checkpoint of other arrays than those asked for; the sentence names them."""


# what a file system answers that takes no more
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# in what TensorStore raises: the machine's state, not the files'
_NOT_DAMAGE = ("RESOURCE_EXHAUSTED", "Too many open files", "Permission denied")


@contextlib.contextmanager
def reading(path: pathlib.Path, way_out: str):
  """Turns what reading a checkpoint raises into Damaged, unless that says nothing of its files."""
  try:
    yield
  except (Damaged, MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    if any(word in str(error) for word in _NOT_DAMAGE):
      raise
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    damage = Damaged(f"the checkpoint {path} is damaged ({said}): {way_out}")
    damage.reason = said
    # of several processes another may have read it well, and would wait for this one's answer
    raise (damage if processes.alone() else ValueError(f"{damage}")) from error


def reason(error: ValueError) -> str:
  return getattr(error, "reason", "it says that it is of another model")


@contextlib.contextmanager
def writing(folder: pathlib.Path):
  """Turns what writing a checkpoint raises into a sentence: why, the space left, what is whole."""
  try:
    yield
  except Exception as error:
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
      raise  # a device is full, not a disk
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
    whole = f"the last good one is of step {max(steps)}" if steps else "none is whole yet"
    raise Unusable(
      f"a checkpoint could not be written to {folder} ({said}); {free_space(folder)}; {whole}. "
      "Make room, or mend what it says, and the same command goes on from there"
    ) from error


def free_space(path: pathlib.Path) -> str:
  """Says how much room is left where a path lies."""
  while not path.exists() and path != path.parent:
    path = path.parent
  return f"{shutil.disk_usage(path).free / 1e9:.3g} GB are free there"


def named(tree: Any) -> dict[str, Any]:
  """{dotted path: leaf}."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def digests(tree: Any) -> dict[str, str]:
  """{dotted path: digest} of each array."""
  leaves = named(tree)
  return dict(zip(leaves, digest.texts(list(leaves.values())), strict=True))


def check(tree: Any, metadata: Mapping[str, Any] | None, path: pathlib.Path) -> None:
  """Raises ValueError, naming an array, where one is not what was saved.

  A step with values that are not finite is never saved, so such values are damage too.
  """
  wanted = (metadata or {}).get(DIGESTS)
  if isinstance(wanted, Mapping):
    for name, found in digests(tree).items():
      if wanted.get(name) != found:
        raise ValueError(f"{name} is not what was saved: its digest differs")
  elif processes.is_first():
    print(f"the checkpoint {path} has no digests: its arrays can't be checked", flush=True)
  for name, leaf in named(tree).items():
    leaf = digest.on_device(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(_finite(leaf)):
      raise ValueError(f"{name} holds values that are not finite")


@jax.jit
def _finite(x):
  return jnp.isfinite(x).all()


def shapes(tree: Any) -> dict[str, str]:
  """Each array's dotted path -> its dtype and shape, as text that can be compared and shown."""
  return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named(tree).items()}


def differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
  return [
    f"  {name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} now"
    for name in sorted(saved | wanted)
    if saved.get(name) != wanted.get(name)
  ]
