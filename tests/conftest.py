"""Fixtures that several test files share, and in which order the files run."""

import gc
import os
import pathlib
import sys
import types

import cpu_devices

# Before anything imports jax; processes that tests start have it too. What was compiled lies where
# runs from this folder keep it.
CACHE = pathlib.Path(__file__).parents[1] / ".cache" / "jax"
os.environ.setdefault("XLA_FLAGS", cpu_devices.COMPILE_QUICKLY)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

from absl import (
  flags,
  logging,  # noqa: F401  its flags are defined here, before any program imports it
)
import jax
import pytest

from stratified import sharding


@pytest.fixture(scope="session")
def mesh():
  """A mesh of one device, whatever the machine has."""
  return sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])


# The files that take longest come first, so that workers side by side end at about the same time.
LONGEST = (
  "processes",
  "sharding",
  "train",
  "stages",
  "search_e1_run",
  "update",
  "examples",
  "decoder",
  "retriever_faults",
  "advantages",
  "checkpoint",
  "export",
  "indexes",
  "ppo",
  "ppo_run",
  "hugging_face",
  "weights",
  "compile_check",
)


def pytest_collection_modifyitems(items):
  order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
  items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish():
  """Keeps Python's collector off what libraries made: tracing makes millions of small objects,
  and the collector, left alone, takes a twelfth of a test file's time."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


FLAGS_OF = {}  # (program's module, flag's name) -> flag


def pytest_configure():
  """Programs are imported side by side here, though each has its process and its flags to
  itself."""
  define = flags.FlagValues.__setitem__

  def replace(values, name, flag):
    if name in values:
      delattr(values, name)
    define(values, name, flag)
    frame = sys._getframe(1)
    while frame and not frame.f_globals["__name__"].startswith("experiments."):
      frame = frame.f_back
    if frame:
      FLAGS_OF[frame.f_globals["__name__"], name] = flag

  flags.FlagValues.__setitem__ = replace


@pytest.fixture(scope="module", autouse=True)
def flags_of_its_programs(request):
  """Each test file finds the flags of the programs that it imports, not those of a file read
  later."""
  programs = {
    value.__name__ for value in vars(request.module).values() if isinstance(value, types.ModuleType)
  }
  own = {name: flag for (module, name), flag in FLAGS_OF.items() if module in programs}
  others = {name: flags.FLAGS[name] for _, name in FLAGS_OF if name in flags.FLAGS}
  _exchange(others, own)
  yield
  _exchange(own, others)


def _exchange(old, new):
  for name in old:
    delattr(flags.FLAGS, name)
  for name, flag in new.items():
    flags.FLAGS[name] = flag
