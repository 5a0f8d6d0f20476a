"""Ends a run before its last step: asked to, or because its updates are not finite."""

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


class Stop:
  """Listens: `asked` at Ctrl-C or SIGTERM, `interrupted` at Ctrl-C; a second one ends at once."""

  def __init__(self):
    self.asked = self.interrupted = False
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._ask)

  def agreed(self) -> bool:
    """Whether any process of the run was asked; all of them must call this at the same step."""
    self.asked = processes.any_of(self.asked)
    return self.asked

  def _ask(self, number, frame):
    if self.asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.asked = True
    self.interrupted = number == signal.SIGINT
    print("\nstopping after this step, then saving", flush=True)
