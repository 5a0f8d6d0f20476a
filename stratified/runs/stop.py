"""Ends a run before its last step: asked to, or because its updates are not finite."""

import contextlib
import signal

from stratified.learner import processes


class Diverged(RuntimeError):
  """Update after update was not finite; the sentence says what was kept and what helps."""


class OutsideFailed(RuntimeError):
  """A reward or a partition failed on a rollout; the sentence names it, and what was trained is
  saved."""


class Unusable(RuntimeError):
  """A workdir that can't be gone on from; the sentence names what is damaged and the way out."""


class Stopped(Exception):
  """Work between two steps was given up because the run was asked to stop."""


class Early(BaseException):
  """Asked to stop while there was nothing to save; passes what catches errors."""


class Stop:
  """Listens: `asked` at Ctrl-C or SIGTERM, `interrupted` at Ctrl-C; a second one ends at once."""

  def __init__(self):
    self.asked = self.interrupted = self._early = False
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._ask)

  def agreed(self) -> bool:
    """Whether any process of the run was asked; all of them must call this at the same step."""
    self.asked = processes.any_of(self.asked)
    return self.asked

  @contextlib.contextmanager
  def at_once(self):
    """A block, such as loading, that ends where it is when a signal comes: it raises Early."""
    self._early = processes.alone()  # of several, one must not leave the others waiting
    try:
      if self.asked and self._early:
        raise Early
      yield
    finally:
      self._early = False

  def alone(self) -> bool:
    """Whether this process was asked and no other need agree: any moment will do to end work."""
    return self.asked and processes.alone()

  def _ask(self, number, frame):
    if self.asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.asked = True
    self.interrupted = number == signal.SIGINT
    if self._early:
      self._early = False
      raise Early
    print("\nstopping after this step, then saving", flush=True)
