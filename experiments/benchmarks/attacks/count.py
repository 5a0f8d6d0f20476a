"""Counts attacks: how many were tried, how many the product held, what became of the others."""

import dataclasses


@dataclasses.dataclass
class Count:
  """failed: a sentence for each attack that was not held. notes: further numbers, by name."""

  tried: int = 0
  held: int = 0
  failed: list[str] = dataclasses.field(default_factory=list)
  notes: dict[str, int] = dataclasses.field(default_factory=dict)

  def add(self, problem: str | None) -> None:
    """Counts one attack; `problem` is what went wrong, None where nothing did."""
    self.tried += 1
    if problem is None:
      self.held += 1
    else:
      self.failed.append(problem)

  def note(self, name: str) -> None:
    self.notes[name] = self.notes.get(name, 0) + 1
