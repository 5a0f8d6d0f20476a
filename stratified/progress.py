"""Shows how far a long command is and when it will be done, in one line on standard error.

Written here because most runs log to a file. In 10 s of 200 steps with a redraw a second, tqdm 4.70
writes one line with 12 carriage returns there, and rich 15 nothing but the last state. This writes
a readable line every `every_s` seconds, with the time left by the last 50 updates.
"""

from collections import deque
from collections.abc import Callable
import os
import sys
import time
from typing import TextIO

_BAR_WIDTH = 24
# updates that the rate is measured over
_WINDOW = 50


class Progress:
  """Shows count, rate and time left: a bar on a terminal, elsewhere a line now and then.

  Args:
    total: how many units make the whole, None where nobody knows (no bar, no time left then).
    what: what is counted, as it reads after a number: "steps", "questions".
    done: units done before this process began (a resumed run); they do not count towards the rate.
    every_s: seconds between two lines where standard error is no terminal.
    active: False shows nothing (every process of a run but the first).
    whole: (units done, seconds that one takes now) -> what to say of the work that this is a part
      of.
    stream, clock: standard error and time.monotonic unless a test replaces them.

  Use as a context manager, or call `close`, which shows the final state.
  """

  def __init__(
    self,
    total: int | None,
    what: str,
    *,
    done: int = 0,
    every_s: float = 10.0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    active: bool = True,
    whole: Callable[[int, float], str] | None = None,
  ):
    self._whole = whole
    self._total, self._what, self._done = total, what, done
    self._stream = open(os.devnull, "w") if not active else sys.stderr if stream is None else stream
    self._clock = clock
    self._tty = self._stream.isatty()
    self._every_s = 0.2 if self._tty else every_s
    self._start = clock()
    self._start_done = done
    self._shown_at = self._start
    self._note = ""
    self._marks = deque([(self._start, done)], maxlen=_WINDOW)
    self._first = True

  def update(self, count: int = 1, note: str = "") -> None:
    """`count` more units are done; `note` is shown beside them (a loss, a reward)."""
    now = self._clock()
    self._done += count
    self._note = note or self._note
    self._marks.append((now, self._done))
    if self._first and len(self._marks) == 3:  # the first unit compiled, too
      self._marks.popleft()
      self._first = False
    if now - self._shown_at >= self._every_s and self._done != self._total:  # `close` shows the end
      self._show(now)

  def close(self) -> None:
    self._show(self._clock(), final=True)
    if self._tty:
      self._stream.write("\n")
      self._stream.flush()

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _show(self, now: float, final: bool = False) -> None:
    line = self._line(now, final)
    self._stream.write(f"\r\x1b[K{line}" if self._tty else line + "\n")
    self._stream.flush()
    self._shown_at = now

  def _line(self, now: float, final: bool) -> str:
    (first_time, first_done), (last_time, last_done) = self._marks[0], self._marks[-1]
    if final:  # the whole of it, not the last stretch
      first_time, first_done, last_time = self._start, self._start_done, now
    seconds, units = last_time - first_time, last_done - first_done
    rate = units / seconds if seconds > 0 else 0.0
    parts = [f"{self._what} {self._done:,}" + ("" if self._total is None else f"/{self._total:,}")]
    if self._tty and self._total:
      filled = min(_BAR_WIDTH, _BAR_WIDTH * self._done // self._total)
      parts.insert(0, "█" * filled + "░" * (_BAR_WIDTH - filled))
    if rate > 0:
      parts.append(f"{rate:.2f}/s" if rate >= 0.1 else f"{1 / rate:.1f} s each")
    if final:
      parts.append(f"took {duration(now - self._start)}")
    elif rate > 0 and self._total is not None:
      parts.append(f"{duration((self._total - self._done) / rate)} left")
      if self._whole:
        parts.append(self._whole(self._done, 1 / rate))
    return "  ".join(parts + [self._note] * bool(self._note))


def duration(seconds: float) -> str:
  """Seconds as a person reads them: 8 s, 3 min 20 s, 2 h 05 min."""
  seconds = max(0, round(seconds))
  if seconds < 60:
    return f"{seconds} s"
  if seconds < 3600:
    return f"{seconds // 60} min {seconds % 60:02d} s"
  return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
