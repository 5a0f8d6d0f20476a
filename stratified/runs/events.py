"""Writes curves of a run for a viewer beside the report: TensorBoard's event files.

A backend is one class: `write` a step's numbers, `close`. The writer opens one for each TensorBoard
run (the warm start and training count steps of their own).
"""

from collections.abc import Mapping
import pathlib
import time
from typing import Protocol

from stratified.imports import unavailable

# tensorboardX loads torch where it finds it, a second and more of every start
with unavailable("torch"):
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto import event_pb2, summary_pb2


class Backend(Protocol):
  """Takes the numbers of a run's rows; made with (workdir, name of the curve's run, first)."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Takes the numbers of a step, flushed before this returns."""

  def close(self) -> None: ...


class TensorBoard:
  """Event files in WORKDIR/tensorboard/RUN, one event a row.

  first: the step that is written next by a run that was resumed; TensorBoard forgets what earlier
    files hold of it and later ones. None where nothing was written before.
  """

  def __init__(self, workdir: pathlib.Path, run: str, first: int | None):
    folder = workdir / "tensorboard" / run
    folder.mkdir(parents=True, exist_ok=True)
    # Two processes started within one second would otherwise share a file name and overwrite each
    # other.
    self._events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
    if first is not None:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._write(first, session_log=start)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    value = summary_pb2.Summary.Value
    self._write(
      step,
      summary=summary_pb2.Summary(
        value=[value(tag=key, simple_value=number) for key, number in values.items()]
      ),
    )
    self._events.flush()

  def _write(self, step: int, **content) -> None:
    self._events.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

  def close(self) -> None:
    self._events.close()
