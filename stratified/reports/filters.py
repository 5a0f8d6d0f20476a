"""Filters of the rollouts on a page, without a script: radio buttons that switch style rules."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from stratified.reports import transcripts
from stratified.runs.workdir import natural

_MOST = 12  # values of a facet that have a button
Record = Mapping[str, Any]


def outcome(record: Record) -> str:
  """`right`, `wrong` or `lost`."""
  if record.get("fault"):
    return "lost"
  return "right" if transcripts.succeeded(record) else "wrong"


FACETS = {
  "stratum": lambda record: transcripts.short(record.get("stratum")),
  "answer": outcome,
  "hops": lambda record: transcripts.short(record.get("hops")),
}


@dataclasses.dataclass(frozen=True)
class Filters:
  """facets: name -> {value: id of its button}; the ids hold nothing of the values."""

  facets: Mapping[str, Mapping[str, str]]

  def classes(self, record: Record) -> str:
    """The classes of what shows this rollout: the ids of its buttons."""
    found = [self.facets.get(name, {}).get(of(record)) for name, of in FACETS.items()]
    return " ".join(one for one in found if one)

  @property
  def buttons(self) -> list[tuple[str, list[tuple[str, str]]]]:
    """(facet, [(id, value)]) of the facets that tell rollouts apart."""
    return [
      (name, [(button, value) for value, button in values.items()])
      for name, values in self.facets.items()
    ]

  @property
  def ids(self) -> list[str]:
    return [button for values in self.facets.values() for button in values.values()]


def make(records: Iterable[Record]) -> Filters:
  """Makes a button of each value that the rollouts have, for facets with more than one."""
  records, facets = list(records), {}
  for name, of in FACETS.items():
    values: Sequence[str] = sorted({of(record) for record in records}, key=natural)[:_MOST]
    if len(values) > 1:
      facets[name] = {value: f"{name}-{i}" for i, value in enumerate(values)}
  return Filters(facets)
