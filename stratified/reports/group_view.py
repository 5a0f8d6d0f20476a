"""Shows rollouts of a question side by side: how stratum, calls and reward become an advantage."""

from collections.abc import Callable, Mapping, Sequence
import statistics
from typing import Any

from stratified.reports import transcripts
from stratified.reports.text import cut, fixed
from stratified.runs.workdir import is_number

_MOST_ROLLOUTS = 32

Record = Mapping[str, Any]


def groups(records: Sequence[Record]) -> list[list[Record]]:
  """The records by question, in order of appearance."""
  by_question: dict[str, list[Record]] = {}
  for record in records:
    key = record.get("question_id", record.get("question"))
    by_question.setdefault(cut(key), []).append(record)
  return list(by_question.values())


def choose(found: Sequence[Sequence[Record]], count: int) -> list[Sequence[Record]]:
  """Picks the groups worth a look: several strata, successes and failures; at most `count`."""
  found = [group for group in found if len(group) > 1]
  order = sorted(range(len(found)), key=lambda i: (-_interest(found[i]), i))
  return [found[i] for i in sorted(order[:count])]


def _interest(group: Sequence[Record]) -> int:
  strata = {str(record.get("stratum")) for record in group if not record.get("fault")}
  right = sum(map(transcripts.succeeded, group))
  mixed = 0 < right < len(group)
  return 10 * mixed + min(len(strata), 5) + min(right, len(group) - right, 4)


def view(
  group: Sequence[Record], classes: Callable[[Record], str] = lambda record: ""
) -> dict[str, Any]:
  """What the template `group` shows: the question, and by stratum its mean reward and rollouts.

  classes: those of a rollout's row, see filters.Filters. `bar` is the advantage's share of the
  largest in the group, -100 to 100.
  """
  shown = sorted(group[:_MOST_ROLLOUTS], key=lambda record: str(record.get("stratum")))
  size = max((abs(value) for record in shown if (value := _advantage(record))), default=1.0)
  strata: dict[str, list[Record]] = {}
  for record in shown:
    lost = bool(record.get("fault"))
    strata.setdefault("lost" if lost else transcripts.short(record.get("stratum")), []).append(
      record
    )
  golden = group[0].get("golden_answers")
  return {
    "question": group[0].get("question"),
    "golden": ", ".join(map(cut, golden[:5])) if isinstance(golden, list) else "–",
    "mean": fixed(_mean(group), 2),
    "left_out": len(group) - len(shown),
    "strata": [
      {
        "name": name,
        "mean": fixed(_mean(members), 2),
        "rollouts": [_row(record, size) | {"picks": classes(record)} for record in members],
      }
      for name, members in strata.items()
    ],
  }


def _row(record: Record, size: float) -> dict[str, Any]:
  advantage = _advantage(record)
  return {
    "sample": transcripts.short(record.get("sample")),
    "calls": transcripts.told_calls(record),
    "answer": record.get("answer"),
    "verdict": transcripts.verdict(record),
    "reward": transcripts.short(record.get("reward")),
    "advantage": transcripts.short(record.get("advantage"), signed=True),
    "bar": 0.0 if not advantage else round(100 * advantage / size, 1),
  }


def _advantage(record: Record) -> float | None:
  value = record.get("advantage")
  return value if is_number(value) else None


def _mean(members: Sequence[Record]) -> float | None:
  rewards = [record["reward"] for record in members if is_number(record.get("reward"))]
  return statistics.fmean(rewards) if rewards else None
