"""Fixtures that several test files share."""

import jax
import pytest

from stratified import sharding


@pytest.fixture(scope="session")
def mesh():
  """A mesh of one device, whatever the machine has."""
  return sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
