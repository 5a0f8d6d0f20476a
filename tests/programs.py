"""Runs programs of experiments/ in the tests' own process, as their command lines do.

A process of its own costs three seconds of imports, and traces and compiles anew what this process
has already: tests start one only where they kill it, or where it is the process that they test.
"""

from collections.abc import Iterator
import contextlib
import io
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[1]


def run(program: str, *arguments: str, cwd: pathlib.Path = ROOT) -> subprocess.CompletedProcess:
  """`python PROGRAM ARGUMENTS` from a folder: its exit status, and what it wrote."""
  out, errors = io.StringIO(), io.StringIO()
  with (
    _own_flags(),
    _own_signals(),
    _own_environment(),
    contextlib.chdir(cwd),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(errors),
    _replaced(sys, "argv", [program, *map(str, arguments)]),
    _replaced(app, "run", lambda main, flags_parser: sys.exit(main(flags_parser(sys.argv)))),
  ):
    try:
      runpy.run_path(program, run_name="__main__")
      status = 0
    except SystemExit as end:
      status = end.code or 0
      if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    except Exception:
      traceback.print_exc()
      status = 1
  return subprocess.CompletedProcess(arguments, status, out.getvalue(), errors.getvalue())


def asked_to_stop(when, program: str, *arguments: str, patience: float = 900):
  """The same, sent SIGTERM once `when()` holds."""
  ended = threading.Event()

  def watch():
    last = time.monotonic() + patience
    while not ended.is_set() and time.monotonic() < last:
      if when():
        os.kill(os.getpid(), signal.SIGTERM)
        return
      time.sleep(0.002)

  watching = threading.Thread(target=watch)
  with _own_signals():
    # Before and after the program nothing listens: a signal then must not end the tests.
    signal.signal(signal.SIGTERM, lambda *_: None)
    watching.start()
    try:
      return run(program, *arguments)
    finally:
      ended.set()
      watching.join()


@contextlib.contextmanager
def _own_flags() -> Iterator[None]:
  """The flags of libraries alone, as a new process has them; afterwards those that were there."""
  tables = flags.FLAGS.__dict__
  held = {name: _copied(table) for name, table in tables.items()}
  libraries = {
    id(flag)
    for module, found in flags.FLAGS.flags_by_module_dict().items()
    if not module.startswith("experiments")
    for flag in found
  }
  for name in list(flags.FLAGS):
    if id(flags.FLAGS[name]) not in libraries or name.startswith("config."):
      delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()
  try:
    yield
  finally:
    tables.clear()
    tables.update(held)


def _copied(table):
  """A table of flags, of lists of flags, or anything else as it is; never the flags themselves."""
  if isinstance(table, dict):
    return {name: _copied(x) for name, x in table.items()}
  return table.copy() if isinstance(table, (list, set)) else table


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
  numbers = signal.SIGINT, signal.SIGTERM
  before = [signal.getsignal(number) for number in numbers]
  try:
    yield
  finally:
    for number, handler in zip(numbers, before):
      signal.signal(number, handler)


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
  before = dict(os.environ)
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)


@contextlib.contextmanager
def _replaced(thing, name: str, value) -> Iterator[None]:
  before = getattr(thing, name)
  setattr(thing, name, value)
  try:
    yield
  finally:
    setattr(thing, name, before)
