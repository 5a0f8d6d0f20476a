"""Claims a workdir for one writer at a time, by a lock of the operating system on a file in it.

The system frees the lock when the process that holds it ends, however it ends, so a killed run
blocks nothing.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import time

from stratified import files

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
