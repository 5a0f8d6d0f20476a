"""Runs several processes as one (jax.distributed): each samples its questions, all update together.

Process p of n takes every n-th question of a step from the p-th on, with a replica of the policy of
its own. Finished rollouts are exchanged, so that every process makes the same batch and puts its
own part of it on its devices. What a run computes does not depend on n: random keys name questions,
not processes.

With one process everything here is the identity and costs nothing.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import socket
import sys
import time
import traceback
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from stratified.types import Call, Question, Segment, Trajectory, Turn

START_S = 240  # how long a process waits for the first one
HEARTBEAT_S = 20  # a process that says nothing for so long is taken for dead


def start(coordinator: str, count: int, index: int) -> None:
  """Joins the run's other processes; before anything else asks jax for devices.

  coordinator: HOST:PORT of the first process, reachable by all.
  count, index: how many processes there are, and which this is.

  Raises ValueError for an index outside [0, count), an address without a port, or one where nobody
  answers in time.
  """
  host, _, port = coordinator.rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(
      f"--coordinator={coordinator} must be HOST:PORT of the first process, such as 127.0.0.1:9876"
    )
  if not 0 <= index < count:
    raise ValueError(f"--process={index} must be at least 0 and below --processes={count}")
  if index:
    _wait_for(coordinator, host, int(port))
  jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=HEARTBEAT_S)


def _wait_for(coordinator: str, host: str, port: int) -> None:
  """Returns once something listens there: jax's own wait ends the process with a core dump."""
  print(f"waiting for the first process at {coordinator}", file=sys.stderr, flush=True)
  end = time.monotonic() + START_S
  while True:
    try:
      socket.create_connection((host, port), timeout=5).close()
      return
    except OSError as error:
      if time.monotonic() > end:
        raise ValueError(
          f"no first process answers at --coordinator={coordinator} after {START_S} s ({error}); "
          "start the one with "
          "--process=0, or correct the address"
        ) from error
    time.sleep(0.5)


def is_first() -> bool:
  """Whether this process writes metrics, prints progress and draws the report."""
  return jax.process_index() == 0


def alone() -> bool:
  """Whether this process is the whole run."""
  return jax.process_count() == 1


def mine(count: int) -> list[int]:
  """The indices below `count` that this process takes."""
  return list(range(jax.process_index(), count, jax.process_count()))


def any_of(flag: bool) -> bool:
  """Whether the flag is set in any process; the same answer in all of them."""
  if jax.process_count() == 1:
    return flag
  return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def total(numbers: dict[str, int]) -> dict[str, int]:
  """The sums of whole numbers over all processes, by name."""
  if jax.process_count() == 1:
    return numbers
  own = np.asarray(list(numbers.values()), np.int32)
  sums = multihost_utils.process_allgather(own).sum(axis=0)
  return dict(zip(numbers, map(int, sums)))


def exchange(groups: Sequence[Sequence[Trajectory]], count: int) -> list[list[Trajectory]]:
  """Exchanges groups: all `count` in the order of their questions, from each process's (`mine`)."""
  if jax.process_count() == 1:
    return list(groups)
  parts = [decoded(part) for part in _gather(encoded(groups))]
  return [parts[q % len(parts)][q // len(parts)] for q in range(count)]


def _gather(text: bytes) -> list[bytes]:
  """Every process's bytes, in the processes' order."""
  sizes = multihost_utils.process_allgather(np.asarray(len(text)))
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: len(text)] = np.frombuffer(text, np.uint8)
  return [
    row[:size].tobytes() for row, size in zip(multihost_utils.process_allgather(padded), sizes)
  ]


def encoded(groups: Sequence[Sequence[Trajectory]]) -> bytes:
  """Groups as compressed JSON; Python writes a float so that it reads back the same."""
  plain = [[dataclasses.asdict(trajectory) for trajectory in group] for group in groups]
  return zlib.compress(json.dumps(plain, separators=(",", ":")).encode(), 1)


def decoded(data: bytes) -> list[list[Trajectory]]:
  """The inverse of `encoded`."""
  return [[_trajectory(fields) for fields in group] for group in json.loads(zlib.decompress(data))]


def _trajectory(fields) -> Trajectory:
  tuples = lambda value: tuple(value) if isinstance(value, list) else value
  make = lambda kind, plain: kind(**{name: tuples(value) for name, value in plain.items()})
  turn = lambda plain: make(Turn, plain | {"calls": [make(Call, call) for call in plain["calls"]]})
  return make(
    Trajectory,
    fields
    | {
      "question": make(Question, fields["question"]),
      "segments": [make(Segment, plain) for plain in fields["segments"]],
      "turns": [turn(plain) for plain in fields["turns"]],
    },
  )


def first_then_all(work: Callable[[], None], name: str) -> None:
  """Runs `work` in the first process and lets the others wait until it is done."""
  if is_first():
    work()
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def refuse(message: str) -> None:
  """Ends the process with a sentence on standard error and status 1."""
  if jax.process_count() == 1:
    sys.exit(message)
  print(message, file=sys.stderr, flush=True)
  os._exit(1)  # a normal exit would first wait minutes for the other processes


def leave(error: BaseException) -> None:
  """Ends a process of several after an error, at once, saying why: the others notice and end too.

  Returns where the run is of one process alone.
  """
  if jax.process_count() == 1:
    return
  which = f"process {jax.process_index()} of {jax.process_count()}"
  if isinstance(error, (jax.errors.JaxRuntimeError, multihost_utils.ProcessFailureError)):
    refuse(
      f"{which} ends: another process of this run is gone or out of reach "
      f"({str(error).splitlines()[0][:200]}); "
      "start all of them again and the run goes on from its last checkpoint"
    )
  if not isinstance(error, SystemExit):
    traceback.print_exception(error)
  refuse(
    f"{which} ends: {error}; start all processes again and the run goes on from its last checkpoint"
  )
