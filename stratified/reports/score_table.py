"""evaluation.json and the eval/* keys of metrics.jsonl, brought into one form and shown as
tables."""

from collections.abc import Mapping, Sequence
import re
from typing import Any

from stratified.reports.transcripts import visible

Score = dict[
  str, Any
]  # count, exact_match, f1, searches_mean, by_hops: {"0": Score, ...}; any may be absent
Sets = dict[str, Score]

HELD_OUT, SECOND = "held_out", "second_encyclopedia"


def before_and_after(
  rows: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]
) -> tuple[Sets, Sets]:
  """Scores by question set of the warm-started policy and of the trained one.

  evaluation.json leads; without it the first and the last evaluation in metrics.jsonl stand in, the
  first only if it is not the last as well.
  """
  evaluated = [row for row in rows if isinstance(row.get("eval/exact_match"), (int, float))]
  before, after = sets_of(evaluation.get("warm_start")), sets_of(evaluation)
  if HELD_OUT not in after and evaluated:
    after = {HELD_OUT: _from_row(evaluated[-1])} | after
  if HELD_OUT not in before and len(evaluated) > 1:
    before = {HELD_OUT: _from_row(evaluated[0])} | before
  return before, after


def forced(evaluation: Mapping[str, Any]) -> dict[str, Sets]:
  """Scores of the warm-started policy held to 0, 1, 2, ... searches, by that number."""
  block = evaluation.get("warm_start_forced")
  block = block if isinstance(block, Mapping) else {}
  return {str(count): sets_of(sets) for count, sets in sorted(block.items())}


def sets_of(block: Any) -> Sets:
  """The question sets of {"sets": {...}} or of {set: score, ...}."""
  if not isinstance(block, Mapping):
    return {}
  sets = block.get("sets", block)
  sets = sets if isinstance(sets, Mapping) else {}
  return {
    str(name): dict(score)
    for name, score in sets.items()
    if isinstance(score, Mapping) and isinstance(score.get("exact_match"), (int, float))
  }


def value(
  score: Mapping[str, Any] | None, key: str = "exact_match", hops: str | None = None
) -> float | None:
  """A score's number, of its questions of `hops` hops if given; None where it is not recorded."""
  if hops is not None and score:
    by_hops = score.get("by_hops")
    score = by_hops.get(hops) if isinstance(by_hops, Mapping) else None
  found = score.get(key) if isinstance(score, Mapping) else None
  return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def best_forced(forced_sets: Mapping[str, Sets], name: str = HELD_OUT) -> tuple[str, float] | None:
  """(number, exact match) of the fixed number of searches that does best, None if none was run."""
  known = {count: value(sets.get(name)) for count, sets in forced_sets.items()}
  known = {count: score for count, score in known.items() if score is not None}
  return max(known.items(), key=lambda item: item[1]) if known else None


def percent(number: float | None) -> str:
  return "–" if number is None else f"{100 * number:.1f}"


def table(before: Sets, after: Sets, forced_sets: Mapping[str, Sets]) -> str:
  """Exact match x 100 by set and hops, columns only for what was measured; nothing for no set at
  all."""
  names = sorted(after | before, key=lambda name: (name != HELD_OUT, name != SECOND, name))
  if not names:
    return ""
  searches = any(value(s, "searches_mean") is not None for s in (before | after).values())
  f1 = any(value(s, "f1") is not None for s in after.values())
  counted = any(value(s, "count") is not None for s in (before | after).values())
  # What a phone shows without scrolling comes first.
  head = ["questions"] + ["warm start"] * bool(before) + ["trained"] + ["gain"] * bool(before)
  head += [f"forced to {count}" for count in forced_sets]
  head += ["F1"] * f1 + ["searches"] * searches + ["number"] * counted
  body = []
  for name in names:
    hops = sorted({h for sets in (before, after) for h in _hops(sets.get(name))})
    for hop in [None] + hops:
      label = visible(title(name)) if hop is None else f"{visible(hop)} hop{'s' * (hop != '1')}"
      fixed = [sets.get(name) for sets in forced_sets.values()]
      cells = _cells(
        before.get(name), after.get(name), fixed, hop, bool(before), f1, searches, counted
      )
      body.append(f'<tr class="{"set" if hop is None else "hop"}"><th>{label}</th>{cells}</tr>')
  head = "".join(f"<th>{visible(name)}</th>" for name in head)
  return (
    f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
    f"<tbody>{''.join(body)}</tbody></table></div>"
  )


def title(name: str) -> str:
  return name.replace("_", " ").capitalize()


def _cells(before, after, forced_scores, hop, with_before, f1, searches, counted) -> str:
  first, last = value(before, hops=hop), value(after, hops=hop)
  count = value(after, "count", hop) or value(before, "count", hop)
  fixed = [value(score, hops=hop) for score in forced_scores]
  best = max((score for score in fixed if score is not None), default=None)
  share = 100 * min(1.0, max(0.0, last or 0.0))
  gain = None if first is None or last is None else 100 * (last - first)
  cells = [f"<td>{percent(first)}</td>"] * with_before
  cells.append(f'<td class="trained" style="--share:{share:.1f}%">{percent(last)}</td>')
  cells += [f"<td>{'–' if gain is None else f'{gain:+.1f}'}</td>"] * with_before
  cells += [
    "<td>–</td>" if score is None else f"<td{' class=best' * (score == best)}>{percent(score)}</td>"
    for score in fixed
  ]
  cells += [f"<td>{percent(value(after, 'f1', hop))}</td>"] * f1
  if searches:
    counts = [value(before, "searches_mean", hop), value(after, "searches_mean", hop)]
    shown = " → ".join(f"{count:.2f}" for count in counts if count is not None)
    cells.append(f"<td>{shown or '–'}</td>")
  cells += [f"<td>{count:,.0f}</td>" if count else "<td>–</td>"] * counted
  return "".join(cells)


def _hops(score: Mapping[str, Any] | None) -> list[str]:
  by_hops = score.get("by_hops") if score else None
  return [str(hop) for hop in by_hops] if isinstance(by_hops, Mapping) else []


def _from_row(row: Mapping[str, Any]) -> Score:
  """One metrics.jsonl row's evaluation as a score."""
  hops = {
    key.rpartition("_")[2]: {"exact_match": number}
    for key, number in row.items()
    if re.fullmatch(r"eval/exact_match_hops_\d+", key) and isinstance(number, (int, float))
  }
  searches = row.get("eval/searches_mean")
  return {"exact_match": row["eval/exact_match"], "by_hops": hops} | (
    {"searches_mean": searches} if isinstance(searches, (int, float)) else {}
  )
