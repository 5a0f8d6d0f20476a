"""Fixtures that several test files share."""

import jax
from absl import flags
import pytest

from stratified import sharding


@pytest.fixture(scope="session")
def mesh():
  """A mesh of one device, whatever the machine has."""
  return sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])


def pytest_configure():
  """Programs are imported side by side here, though each has its process and its flags to itself: the last one's count."""
  define = flags.FlagValues.__setitem__

  def replace(values, name, flag):
    if name in values:
      delattr(values, name)
    define(values, name, flag)

  flags.FlagValues.__setitem__ = replace
