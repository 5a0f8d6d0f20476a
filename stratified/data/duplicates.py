"""Finds questions that stand in training and in a benchmark, or twice in one set.

Case and punctuation make no difference.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any
import unicodedata

Record = Mapping[str, Any]
_ACCENT = re.compile("[\u0300-\u036f]")


def key(question: str) -> str:
  """The words of a question in order: NFKC, case folded, without accents or punctuation.

  A question of no word at all is its own key, so that two of them are not taken for one.
  """
  folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", question).casefold())
  bare = unicodedata.normalize("NFKC", _ACCENT.sub("", folded))
  # letters, numbers and marks: Hindi and Thai write vowels as marks
  words = "".join(c if unicodedata.category(c)[0] in "LNM" else " " for c in bare).split()
  return " ".join(words) or question


@dataclasses.dataclass(frozen=True)
class Report:
  """What was found.

  across: {"TRAIN SET / BENCHMARK": training questions of the first that also stand in the second}.
  within: {"train SET" or "benchmark SET": questions that an earlier one of the same set repeats}.
  between: {"SET / SET": questions of the first training set that also stand in the second}.
  kept: {training set: its records without those that stand in any benchmark}.
  removed: {training set: how many were left out of `kept`}.
  """

  across: dict[str, int]
  within: dict[str, int]
  between: dict[str, int]
  kept: dict[str, list[Record]]
  removed: dict[str, int]


def find(
  train: Mapping[str, Sequence[Record]], benchmarks: Mapping[str, Sequence[Record]]
) -> Report:
  """Compares records by their `question`; {set: records} on both sides."""
  train_keys = {
    name: [key(record["question"]) for record in records] for name, records in train.items()
  }
  test_keys = {
    name: Counter(key(record["question"]) for record in records)
    for name, records in benchmarks.items()
  }
  held = set().union(*test_keys.values())
  across, between, kept = {}, {}, {}
  for name, keys in train_keys.items():
    for other, known in test_keys.items():
      _note(across, f"{name} / {other}", sum(k in known for k in keys))
    for other, others in train_keys.items():
      if other > name:
        others = set(others)
        _note(between, f"{name} / {other}", sum(k in others for k in keys))
    kept[name] = [record for record, k in zip(train[name], keys, strict=True) if k not in held]
  within = {}
  for label, counts in [
    *((f"train {name}", Counter(keys)) for name, keys in train_keys.items()),
    *((f"benchmark {name}", known) for name, known in test_keys.items()),
  ]:
    _note(within, label, sum(count - 1 for count in counts.values()))
  removed = {name: len(train[name]) - len(records) for name, records in kept.items()}
  return Report(across, within, between, kept, removed)


def _note(found: dict[str, int], label: str, count: int):
  if count:
    found[label] = count
