"""Imports a library with another one out of its sight."""

from collections.abc import Iterator
import contextlib
import sys


@contextlib.contextmanager
def unavailable(name: str) -> Iterator[None]:
  """Makes `import name` fail inside, as if it were not installed; afterwards all is as it was."""
  known = sys.modules.get(name)
  sys.modules[name] = None
  try:
    yield
  finally:
    del sys.modules[name]
    if known is not None:
      sys.modules[name] = known
