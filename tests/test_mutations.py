"""Negative controls: a copy of the kernels with one deliberate fault must fail the check of each
theorem that it breaks.

Faults of three kinds, sign, divisor and wrong stratum, are written into the copied source, so that
what fails is what would run. A check that a fault could not break (a variance under a changed sign)
meets the fault in its own terms.
"""

import importlib
import pathlib
import sys
import types

import pytest
import theorem_checks

from stratified import advantages

_PACKAGE = pathlib.Path(advantages.__file__).parent

# fault: (file, the right code, the faulty code); each right code occurs exactly once.
FAULTS = {
  "sign of stratified": (
    "group.py",
    "return g.stratum.center(g.reward)",
    "return -g.stratum.center(g.reward)",
  ),
  "sign of centered": (
    "group.py",
    "return g.group.center(g.reward)",
    "return -g.group.center(g.reward)",
  ),
  "sign of GN's share": (
    "group.py",
    "alpha * _san(g, eps, ddof) + (1 - alpha)",
    "alpha * _san(g, eps, ddof) - (1 - alpha)",
  ),
  "sign of the offset": (
    "theory.py",
    "segments.over_deviation(between_k, std, eps)",
    "segments.over_deviation(-between_k, std, eps)",
  ),
  "sign of Term A": ("theory.py", "mean(jnp.square(between_k))", "mean(-jnp.square(between_k))"),
  "sign of Term B": ("theory.py", "mean(effect_k)", "mean(-effect_k)"),
  "sign of leave-one-out": ("group.py", "centered * count /", "-centered * count /"),
  "divisor of a mean": (
    "segments.py",
    "return difference_k / count_k",
    "return x_k - total(x_k) / (count_k + 1)",
  ),
  "divisor of the group's mean": (
    "segments.py",
    "shifted - total(shifted) / count",
    "shifted - total(shifted) / (count + 1)",
  ),
  "divisor of the deviation": (
    "segments.py",
    "free = sums.count - ddof",
    "free = sums.count - ddof - 1",
  ),
  "divisor of the parts": ("theory.py", "weight_k, score_k) / n", "weight_k, score_k) / (n + 1)"),
  "divisor of Term A": ("theory.py", "x_k, 0)) / g.group.count", "x_k, 0)) / (g.group.count + 1)"),
  "wrong stratum": (
    "segments.py",
    "[segment_k == segment_k[j] for",
    "[segment_k == segment_k[j - 1] for",
  ),
  "stratum of the group": (
    "segments.py",
    "_pairwise(jnp.where(mask, stratum, num_strata)",
    "_pairwise(jnp.where(mask, 0, num_strata)",
  ),
  "wrong stratum in a large group": (
    "segments.py",
    "return per_group(x, stratum)[stratum]",
    "return per_group(x, stratum)[(stratum + 1) % num_strata]",
  ),
  "eps left out": ("segments.py", "std + eps, 1)", "std, 1)"),
  "mask ignored": ("segments.py", "jnp.asarray(mask) > 0", "jnp.asarray(mask) > -1"),
}

BROKEN = {
  "proposition_1": ("sign of stratified", "divisor of a mean", "wrong stratum", "mask ignored"),
  "proposition_2": (
    "sign of stratified",
    "divisor of the deviation",
    "wrong stratum",
    "mask ignored",
  ),
  "proposition_3": (
    "sign of the offset",
    "divisor of the deviation",
    "stratum of the group",
    "eps left out",
  ),
  "theorem_1": ("sign of Term A", "divisor of Term A", "wrong stratum", "mask ignored"),
  "theorem_1_equality": ("sign of Term A", "divisor of a mean", "stratum of the group"),
  "theorem_2": ("sign of Term B", "divisor of the deviation", "wrong stratum", "eps left out"),
  "theorem_3": ("sign of stratified", "divisor of the deviation", "wrong stratum", "eps left out"),
  "equation_6": ("sign of centered", "divisor of the parts", "wrong stratum"),
  "theorem_4": (
    "sign of centered",
    "divisor of the group's mean",
    "wrong stratum in a large group",
  ),
  "theorem_5": ("sign of centered", "divisor of the deviation", "wrong stratum in a large group"),
  "definition_2": ("sign of GN's share", "divisor of the deviation", "wrong stratum"),
  "attenuation": ("sign of leave-one-out", "divisor of a mean", "stratum of the group"),
  "choice_of_stratum": ("sign of GN's share", "divisor of a mean", "wrong stratum"),
}


@pytest.fixture
def mutant(tmp_path, monkeypatch):
  """Gives a function: fault -> kernels that carry it, as a package of their own."""

  def make(fault):
    name = "mutant_" + "".join(c if c.isalnum() else "_" for c in fault)
    root = tmp_path / name
    root.mkdir()
    file, right, wrong = FAULTS[fault]
    for source in _PACKAGE.glob("*.py"):
      text = source.read_text().replace("from stratified.advantages", f"from {name}")
      if source.name == file:
        assert text.count(right) == 1, f"{right!r} occurs {text.count(right)} times in {file}"
        text = text.replace(right, wrong)
      (root / source.name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return types.SimpleNamespace(
      advantages=importlib.import_module(name), theory=importlib.import_module(f"{name}.theory")
    )

  yield make
  for name in [name for name in sys.modules if name.startswith("mutant_")]:
    del sys.modules[name]


@pytest.mark.parametrize(
  "check,fault", [(check, fault) for check in BROKEN for fault in BROKEN[check]]
)
def test_check_fails_on(check, fault, mutant):
  with pytest.raises(AssertionError):
    theorem_checks.CHECKS[check](mutant(fault))


def test_a_copy_without_a_fault_passes(mutant, monkeypatch):
  # Else every failure above could be the copying's.
  monkeypatch.setitem(
    FAULTS,
    "none",
    ("group.py", "return g.stratum.center(g.reward)", "return g.stratum.center(g.reward)"),
  )
  kernels = mutant("none")
  assert kernels.advantages.san is not advantages.san
  for check in ("theorem_2", "theorem_4"):
    theorem_checks.CHECKS[check](kernels)


def test_every_check_and_every_fault_is_used():
  assert set(BROKEN) == set(theorem_checks.CHECKS)
  assert {fault for faults in BROKEN.values() for fault in faults} == set(FAULTS)
