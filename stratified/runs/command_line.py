"""Runs every program's command line alike: one sentence for a mistake, and exit statuses.

    if __name__ == "__main__":
      command_line.run(main, config="configs/search_r1.py:tiny")

Status 0 is success, 1 a refusal or failure that the program explains, 2 a command line that makes
no sense, 130 an end by Ctrl-C.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
import os
import pathlib
import re
import sys
from typing import Any, TextIO

from absl import app, flags

from stratified.config import allowed, suggestion

BAD_USAGE, INTERRUPTED = 2, 130


def run(
  main: Callable[[list[str]], Any],
  *,
  config: str | None = None,
  fields_of: str | None = None,
  words: bool = False,
) -> None:
  """Parses the command line, calls `main([program, word, ...])` and exits.

  Args:
    main: the program.
    config: the value of --config where it is not given. The program defines that flag with the
      default None: a config that is loaded while its flag is defined reports mistakes as
      tracebacks.
    fields_of: a config whose fields may be given without --config, for a program that reads the
      config of a workdir; `named` tells whether --config itself was given.
    words: whether the program takes anything beside flags.
  """
  keep_streams()
  try:
    app.run(main, flags_parser=lambda argv: parse(_with_default(argv, config, fields_of), words))
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


class Lasting:
  """A standard stream whose reader may leave (`| head`): what is written after goes nowhere."""

  def __init__(self, stream: TextIO):
    self._stream, self._number = stream, stream.fileno()

  def write(self, text: str) -> int:
    return self._kept(self._stream.write, text)

  def writelines(self, lines: Iterable[str]) -> None:
    for line in lines:
      self.write(line)

  def flush(self) -> None:
    self._kept(self._stream.flush)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def _kept(self, call: Callable, *args) -> Any:
    try:
      return call(*args)
    except OSError:
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self._number)  # what native code writes there, too
      os.close(nowhere)
      return call(*args) if not args else len(args[0])


def keep_streams() -> None:
  """Lets a program go on where standard output or error is closed, before its start or later."""
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:  # or the next file that is opened would get what is meant for the stream
      os.open(os.devnull, os.O_RDWR)
  for name, number in (("stdout", 1), ("stderr", 2)):
    stream = getattr(sys, name)
    if stream is None:
      setattr(sys, name, os.fdopen(number, "w", closefd=False))
    elif stream is getattr(sys, f"__{name}__"):  # a test's stays as it is
      setattr(sys, name, Lasting(stream))


def define_choice(name: str, bare: str, choices: Sequence[str], meaning: str) -> flags.FlagHolder:
  """Defines a flag that may stand alone: `--name` means `--name={bare}`; it is None without."""
  words = {"true": bare} | {choice: choice for choice in choices}

  class Parser(flags.ArgumentParser):
    def parse(self, argument: str) -> str:
      if argument not in words:
        raise ValueError(f"choose one of {', '.join(choices)}")
      return words[argument]

  flag = flags.Flag(Parser(), flags.ArgumentSerializer(), name, None, meaning, boolean=True)
  return flags.DEFINE_flag(flag)


def define_step(name: str, meaning: str) -> flags.FlagHolder:
  """Defines a flag for a checkpoint of a run: its step, or `best`; None without."""

  class Parser(flags.ArgumentParser):
    def parse(self, argument: str) -> int | str:
      if argument != "best" and not re.fullmatch(r"\d{1,9}", argument):
        raise ValueError("give a step of the run, or best")
      return argument if argument == "best" else int(argument)

  return flags.DEFINE(Parser(), name, None, meaning)


def parse(argv: Sequence[str], words: bool = False) -> list[str]:
  """Sets the flags; exits with status 2 and one sentence where they make no sense."""
  program = pathlib.Path(argv[0]).name
  try:
    rest = flags.FLAGS(list(argv))
    if "config" in flags.FLAGS:
      getattr(flags.FLAGS.config, "seed", None)  # where a file does not exist, this raises OSError
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    refuse(f"{sentence(error, argv)} ({program} --help lists the flags)")
  if rest[1:] and not words:
    way = f"; is --config={rest[1]} meant?" if ".py" in rest[1] else ""
    refuse(f"{rest[1]!r} is no flag, and {program} takes nothing else{way}")
  return rest


def refuse(text: str) -> None:
  """Ends the program for a command line that makes no sense."""
  print(text, file=sys.stderr)
  sys.exit(BAD_USAGE)


def sentence(error: Exception, argv: Sequence[str]) -> str:
  """Says in one line what is wrong with a command line, from an exception of its libraries."""
  while error.args and isinstance(error.args[0], Exception):
    error = error.args[0]
  text = str(error.args[0] if error.args else error)
  file = next(iter(re.findall(r"--config[= ](\S+)", " ".join(argv))), "")
  if isinstance(error, AttributeError | KeyError):
    return _missing(text, file, argv)
  if isinstance(error, OSError):
    return f"--config={file} names no config file that exists"
  if found := re.match(r"flag --(\w+)=None: Flag --\w+ must have a value", text):
    return f"--{found[1]} is missing: {flags.FLAGS[found[1]].help}"
  if found := re.match(r"flag (--config=\S+): Error whilst parsing config file", text):
    said = [line for line in text.splitlines() if line.strip()][-1]
    return f"{found[1]}: {re.sub(r'^[A-Za-z.]*Error: ', '', said)}"
  if found := re.match(r"flag --config\.([\w.]+)=(.*?): ", text):
    return _misfit(found[1], found[2])
  if found := re.match(r"Unknown command line flag '(.*?)'\.?(?: Did you mean: (.*?) \?)?", text):
    hint = f"; did you mean --{found[2].strip()}?" if found[2] else ""
    return f"--{found[1]} is no flag{hint}"
  return " ".join(text.split())


def _missing(text: str, file: str, argv: Sequence[str]) -> str:
  """Says which field does not exist, and whether the command line names it or the config file."""
  from stratified.runs import settings  # every part's module, which a right command does not need

  if written := re.match(r'Key "([\w.]+)"', text):  # what the file itself assigns
    typed = ".".join(filter(None, (_section_in(text, settings.rules()), written[1])))
    return f"--config={file} sets {typed}, which is {_no_field(typed, settings.rules())}"
  name = text.split("\n")[0].strip("'\"")
  given = [arg.split("=")[0].removeprefix("--config.") for arg in argv if "--config." in arg]
  for typed in given:
    if name in typed.split("."):
      return f"--config.{typed} is {_no_field(typed, settings.rules(), '--config.')}"
  said = f"{name!r} is missing" if re.fullmatch(r"\w+", name) else text.split("\n")[0]
  return f"--config={file}: {said}"


def _section_in(text: str, rules: Collection[str]) -> str:
  """The section that the words "Other fields present" of an error list, "" for none of them."""
  present = set(re.findall(r"'(\w+)': ", text))
  fields: dict[str, set[str]] = {}
  for rule in rules:
    section, _, name = rule.rpartition(".")
    fields.setdefault(section, set()).add(name)
  return next((section for section, names in fields.items() if section and names == present), "")


def _no_field(typed: str, rules: Collection[str], prefix: str = "") -> str:
  close = suggestion(typed, rules, prefix)
  return f"no field of a config{close}"


def _misfit(name: str, value: str) -> str:
  """Says what is wrong with a value of another type than its field."""
  from stratified.runs import settings

  if name not in settings.rules():
    return f"--config.{name}={value} is a section; give its fields, such as --config.{name}.x=1"
  return f"--config.{name}={value} must be {allowed(settings.rules()[name])}"


def named(argv: Sequence[str] | None = None) -> bool:
  """Whether the command line itself gives --config."""
  return any(re.match(r"--?config(=|$)", arg) for arg in argv or sys.argv)


def _with_default(argv: Sequence[str], config: str | None, fields_of: str | None) -> list[str]:
  fields = any(re.match(r"--?config\.", arg) for arg in argv)
  default = config or (fields_of if fields else None)
  return [*argv] if named(argv) or default is None else [argv[0], f"--config={default}", *argv[1:]]
