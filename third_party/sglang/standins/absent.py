"""Modules whose names exist and whose contents don't: importing them works, calling anything in
them raises.

An SGLang server on CPU imports two packages that need CUDA and calls nothing in them. Put on
PYTHONPATH by `launch.sh` for a server on CPU only, never on a GPU host.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class Absent:
  """A name of an absent package: it may be passed around, subclassed and asked for further names;
  used, it raises."""

  def __init__(self, name: str = "a base class", *_, **__):
    self._name = name

  def __call__(self, *_, **__):
    raise RuntimeError(f"{self._name} was called, but this server runs on CPU with a stand-in that "
                       "holds names only; "
                       "choose settings that don't need it, or run the server on a GPU with the "
                       "real package")

  def __getattr__(self, name: str):
    if name.startswith("__"):
      raise AttributeError(name)
    return Absent(f"{self._name}.{name}")

  def __mro_entries__(self, bases):
    return (object,)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds every submodule of one package."""

  def __init__(self, package: str):
    self._package = package

  def find_spec(self, name, path=None, target=None):
    if name.startswith(self._package + "."):
      return importlib.machinery.ModuleSpec(name, self, is_package=True)
    return None

  def create_module(self, spec):
    return types.ModuleType(spec.name)

  def exec_module(self, module):
    module.__getattr__ = names_of(module.__name__)


def names_of(package: str):
  """A module's `__getattr__`: every public name is absent."""
  def absent(name: str):
    if name.startswith("__"):
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return Absent(f"{package}.{name}")
  return absent


def stand_in(package: str):
  """Makes every submodule of `package` importable; returns the package's own `__getattr__`."""
  sys.meta_path.append(_Submodules(package))
  return names_of(package)
