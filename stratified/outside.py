"""Loads what a config names from outside the project, as `module:name`.

The module is looked for on the Python path, then in the working directory. Every mistake ends in a
ValueError of one sentence that names the field, before any work.
"""

from collections.abc import Callable
import importlib
import inspect
import os
import re
import sys
from typing import Any

_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def load(field: str, spec: str) -> Any:
  """Loads the object that `spec` names.

  field: the config field it stands in, for the error. Raises ValueError for a wrong form, and for a
  module or a name that does not exist.
  """
  if not _SPEC.fullmatch(spec):
    raise ValueError(
      f"{field} is {spec!r}; something of your own is named module:name, as in "
      "my_module:my_function"
    )
  module_name, _, name = spec.partition(":")
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    missing = error.name or ""
    if missing != module_name and not module_name.startswith(f"{missing}."):
      raise ValueError(
        f"{field} is {spec!r}, which imports {missing!r}, and there is no such module; install it"
      ) from error
    raise ValueError(
      f"{field} is {spec!r}, but there is no module {missing!r} on the Python path or in "
      f"{os.getcwd()}; add its folder to PYTHONPATH"
    ) from error
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"{field} is {spec!r}, whose module failed to import with {type(error).__name__}: "
      f"{_short(error)}"
    ) from error
  if not hasattr(module, name):
    where = getattr(module, "__file__", None) or f"the module {module_name}"
    raise ValueError(f"{field} is {spec!r}, but {where} has no {name!r}; define it there")
  return getattr(module, name)


def function(field: str, spec: str, *arguments: str, named: tuple[str, ...] = ()) -> Callable:
  """Loads the function that `spec` names, sure to take these arguments.

  arguments: what it is called with, in words, for the error. named: keyword arguments beside them.
  Raises ValueError as `load` does, and for what can't be called like that.
  """
  found = load(field, spec)
  if not callable(found):
    raise ValueError(f"{field} is {spec!r}, which is {_short(found)} and no function; name one")
  wanted = ", ".join([*arguments, *(f"{name}=" for name in named)])
  try:
    signature = inspect.signature(found)
  except (TypeError, ValueError):  # some built-ins have none; the trial call tells
    return found
  try:
    signature.bind(*arguments, **dict.fromkeys(named))
  except TypeError as error:
    raise ValueError(
      f"{field} is {spec!r}, whose signature is {signature}; it is called with {wanted} ({error})"
    ) from error
  return found


def trial(
  field: str, spec: str, call: Callable[[], Any], check: Callable[[Any], str | None]
) -> Any:
  """Runs a function once before any work.

  call: calls it on something made up. check: says what is wrong with the result, None where nothing
  is. Raises ValueError where the function raises, or returns something wrong.
  """
  try:
    value = call()
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"{field} is {spec!r}, which failed on a made-up rollout with {type(error).__name__}: "
      f"{_short(error)}"
    ) from error
  if (wrong := check(value)) is not None:
    raise ValueError(f"{field} is {spec!r}, which returned {_short(repr(value))}: {wrong}")
  return value


def _short(value: Any) -> str:
  text = " ".join(str(value).split())
  return text if len(text) <= 100 else text[:97] + "..."
