"""Brings evaluation.json and the eval/* keys of metrics.jsonl into one table."""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

from stratified.reports.text import cut, fixed, percent
from stratified.runs.workdir import is_number

# count, exact_match, f1, searches_mean, by_hops: {"0": Score, ...}; any may be absent
Score = dict[str, Any]
Sets = dict[str, Score]

HELD_OUT, SECOND = "held_out", "second_encyclopedia"
_MOST_ROWS = 200


@dataclasses.dataclass(frozen=True)
class Scores:
  """Scores by question set before and after training, and before with 0, 1, ... forced searches.

  `step` is where "after" was measured.
  """

  before: Sets
  after: Sets
  forced: Mapping[str, Sets]
  step: int | None


def scores_of(rows: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> Scores:
  """Reads evaluation.json; without it, takes step 0's and the newest rows of metrics.jsonl."""
  evaluated = [row for row in rows if is_number(row.get("eval/exact_match"))]
  start = [row for row in evaluated if row.get("step") == 0]
  later = [row for row in evaluated if row.get("step") != 0]
  before, after = sets_of(evaluation.get("warm_start")), sets_of(evaluation)
  step = evaluation.get("step")
  if step == 0 and HELD_OUT not in before:
    before, after = after, {}
  if HELD_OUT not in after and later:
    after, step = {HELD_OUT: _from_row(later[-1])} | after, later[-1].get("step")
  if HELD_OUT not in before and start:
    before = {HELD_OUT: _from_row(start[0])} | before
  return Scores(before, after, _forced(evaluation), step if is_number(step) else None)


def _forced(evaluation: Mapping[str, Any]) -> dict[str, Sets]:
  block = evaluation.get("warm_start_forced")
  block = block if isinstance(block, Mapping) else {}
  return {str(count): sets_of(sets) for count, sets in sorted(block.items())[:20]}


def sets_of(block: Any) -> Sets:
  """The question sets of {"sets": {...}} or of {set: score, ...}."""
  if not isinstance(block, Mapping):
    return {}
  sets = block.get("sets", block)
  sets = sets if isinstance(sets, Mapping) else {}
  return {
    str(name): dict(score)
    for name, score in sets.items()
    if isinstance(score, Mapping) and is_number(score.get("exact_match"))
  }


def value(
  score: Mapping[str, Any] | None, key: str = "exact_match", hops: str | None = None
) -> float | None:
  """A score's number, of its questions of `hops` hops if given; None where it is not recorded."""
  if hops is not None and score:
    by_hops = score.get("by_hops")
    score = by_hops.get(hops) if isinstance(by_hops, Mapping) else None
  found = score.get(key) if isinstance(score, Mapping) else None
  return found if is_number(found) else None


def best_forced(scores: Scores, name: str = HELD_OUT) -> tuple[str, float] | None:
  """(number, exact match) of the fixed number of searches that does best, None if none was run."""
  known = {count: value(sets.get(name)) for count, sets in scores.forced.items()}
  known = {count: score for count, score in known.items() if score is not None}
  return max(known.items(), key=lambda item: item[1]) if known else None


def table(scores: Scores, before: str = "warm start", after: str = "trained") -> dict[str, Any]:
  """Lays out exact match x 100 by set and hops, with columns only for what was measured.

  before, after: what the two columns are called. Returns {"head": [text], "rows": [{"label",
  "is_set", "cells": [{"text", "share", "best"}]}]}; no rows without a set.
  """
  every = scores.before | scores.after
  names = sorted(every, key=lambda name: (name != HELD_OUT, name != SECOND, name))
  has = lambda key, sets: any(value(score, key) is not None for score in sets.values())
  shown = {
    "before": bool(scores.before),
    "after": bool(scores.after),
    "gain": bool(scores.before and scores.after),
    "f1": has("f1", scores.after),
    "searches": has("searches_mean", every),
    "number": has("count", every),
  }
  # What a phone shows without scrolling comes first.
  head = ["questions"] + [before] * shown["before"] + [after] * shown["after"]
  head += ["gain"] * shown["gain"] + [f"forced to {count}" for count in scores.forced]
  head += ["F1"] * shown["f1"] + ["searches"] * shown["searches"] + ["number"] * shown["number"]
  rows = []
  for name in names:
    hops = {hop: None for sets in (scores.before, scores.after) for hop in _hops(sets.get(name))}
    for hop in [None, *sorted(hops)]:
      label = title(name) if hop is None else f"{cut(hop, 20)} hop{'s' * (hop != '1')}"
      cells = _cells(scores, name, hop, shown)
      rows.append({"label": label, "is_set": hop is None, "cells": cells})
  return {"head": head, "rows": rows[:_MOST_ROWS]}


def title(name: str) -> str:
  return cut(name, 80).replace("_", " ").capitalize()


def _cells(scores: Scores, name: str, hop: str | None, shown: Mapping[str, bool]) -> list[dict]:
  before, after = scores.before.get(name), scores.after.get(name)
  first, last = value(before, hops=hop), value(after, hops=hop)
  count = value(after, "count", hop) or value(before, "count", hop)
  fixed_counts = [value(sets.get(name), hops=hop) for sets in scores.forced.values()]
  known = [score for score in fixed_counts if score is not None]
  best = max(known) if known and max(known) > min(known) else None
  gain = None if first is None or last is None else last - first
  cells = [_cell(percent(first))] * shown["before"]
  cells += [_cell(percent(last), share=100 * min(1.0, max(0.0, last or 0.0)))] * shown["after"]
  cells += [_cell(percent(gain, signed=True))] * shown["gain"]
  cells += [
    _cell(percent(score), best=score is not None and score == best) for score in fixed_counts
  ]
  cells += [_cell(percent(value(after, "f1", hop)))] * shown["f1"]
  if shown["searches"]:
    means = [value(one, "searches_mean", hop) for one in (before, after)]
    cells.append(_cell(" → ".join(fixed(mean, 2) for mean in means if mean is not None) or "–"))
  cells += [_cell(f"{count:,.0f}" if count else "–")] * shown["number"]
  return cells


def _cell(text: str, share: float | None = None, best: bool = False) -> dict[str, Any]:
  return {"text": text, "share": None if share is None else round(share, 1), "best": best}


def _hops(score: Mapping[str, Any] | None) -> list[str]:
  by_hops = score.get("by_hops") if score else None
  return [str(hop) for hop in by_hops] if isinstance(by_hops, Mapping) else []


def _from_row(row: Mapping[str, Any]) -> Score:
  """One metrics.jsonl row's evaluation as a score."""
  hops = {
    key.rpartition("_")[2]: {"exact_match": number}
    for key, number in row.items()
    if re.fullmatch(r"eval/exact_match_hops_\d+", key) and is_number(number)
  }
  searches = row.get("eval/searches_mean")
  return {"exact_match": row["eval/exact_match"], "by_hops": hops} | (
    {"searches_mean": searches} if is_number(searches) else {}
  )
