"""The propositions and theorems of arXiv 2510.06214 on the library's kernels, the closed forms, and the diagnostics."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from stratified import advantages
from stratified import theory
import theorem_checks

KERNELS = types.SimpleNamespace(advantages=advantages, theory=theory)


@pytest.mark.parametrize("name", theorem_checks.CHECKS)
def test_holds(name):
  theorem_checks.CHECKS[name](KERNELS)
