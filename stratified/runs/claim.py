"""Claims a workdir for one config, and for one writer at a time.

The writer holds a lock of the operating system on a file of the workdir, which frees it when the
process ends, however it ends: a killed run blocks nothing.
"""

from collections.abc import Mapping, Sequence
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shlex
import socket
import time
from typing import Any

import stratified
from stratified import files
from stratified.config import changed, free, public, Rule
from stratified.runs import workdir as workdirs

NAME = "writer.lock"
# what a file system answers that has no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Claim(contextlib.AbstractContextManager):
  """Holds a workdir from `take` to the end of the block, or of the process."""

  def __init__(self):
    self._file: int | None = None

  def take(self, workdir: str | os.PathLike) -> None:
    """Makes this process the workdir's writer; makes the folder.

    On a file system without locks it says so and goes on without.

    Raises:
      ValueError: another process is; its id, host and start are named.
      OSError: the folder can't be written to.
    """
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in (errno.EAGAIN, errno.EACCES):
        holder = _holder(file)
        os.close(file)
        raise ValueError(
          f"--workdir={workdir} is being written by {holder}; wait for that run or stop it (Ctrl-C "
          "there), or name another --workdir"
        ) from None
      if error.errno not in _NO_LOCKS:
        os.close(file)
        raise
      print(
        f"the file system of {workdir} has no locks ({error.strerror}): nothing will stop a second "
        "run from writing there too",
        flush=True,
      )
    own = {
      "pid": os.getpid(),
      "host": socket.gethostname(),
      "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, (json.dumps(own) + "\n").encode(), 0)
    self._file = file

  def __exit__(self, *unused) -> None:
    if self._file is not None:
      os.close(self._file)  # and with it goes the lock
      self._file = None


def _holder(file: int) -> str:
  said = files.parse_object(os.pread(file, 4096, 0)) or {}
  if "pid" not in said:
    return "another process"
  return f"process {said['pid']} on {said.get('host')}, since {said.get('since')}"


def check_config(
  workdir: str | os.PathLike, config: Mapping[str, Any], rules: Mapping[str, Rule]
) -> None:
  """Writes workdir/config.json the first time; later refuses a config that changes results.

  Fields that change no more than rounding may change, and those that grow may grow; config.json
  then takes the new values. Passwords are not written.

  Args:
    workdir: the run's folder.
    config: nested values.
    rules: {dotted name: rule} of its fields; a field without one may not change.

  Raises:
    ValueError: another field changed, appeared with a value that is not its default, or vanished
      (all are named with both values), or a value is not JSON.
  """
  path = pathlib.Path(workdir) / "config.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  try:
    text = json.dumps(public(config, rules), indent=2, sort_keys=True, allow_nan=False) + "\n"
  except (TypeError, ValueError) as error:
    raise ValueError(f"the config cannot be stored as JSON: {error}") from error
  if path.exists():
    before, after = files.flatten(files.read_object(path)), files.flatten(json.loads(text))
    # A field that came after the run was made had the effect of its default there.
    defaults = {name: rule.default for name, rule in rules.items() if name in after}
    before = json.loads(json.dumps(defaults)) | before
    refused = [key for key in changed(before, after) if not _may_change(key, before, after, rules)]
    if refused:
      lines = [
        f"  {key}: {_show(before, key)} in the workdir, {_show(after, key)} now" for key in refused
      ]
      raise ValueError(
        f"{path} belongs to a run with another config:\n"
        + "\n".join(lines)
        + "\nUse a new --workdir for the new config, or the old values to resume this run."
      )
  files.write_atomic(path, text)


def record_start(workdir: str | os.PathLike, argv: Sequence[str], **facts: Any) -> None:
  """Writes workdir/run.json the first time: when and by which command the run began, and `facts`.

  The command is written without passwords.
  """
  path = pathlib.Path(workdir) / "run.json"
  if not path.exists():
    command = re.sub(r"(?<=://)[^/@\s,]*@", "***@", shlex.join(["python", *argv]))
    version = stratified.__version__
    began = workdirs.moment(time.time())
    files.write_json(path, {"began": began, "command": command, "version": version} | facts)


def _may_change(key: str, before: Mapping, after: Mapping, rules: Mapping[str, Rule]) -> bool:
  if key in rules and rules[key].grows and key in before and key in after:
    return after[key] > before[key]
  return key in free(rules)


def _show(flat: Mapping[str, Any], key: str) -> str:
  return json.dumps(flat[key]) if key in flat else "absent"
