"""Shows a rollout of trajectories/step_NNNNNN.jsonl on a page: facts, segments, calls of tools.

It reads records leniently and bounds every length: a page with answers of megabytes stays small.
"""

from collections.abc import Mapping, Sequence
import re
from typing import Any

from markupsafe import Markup

from stratified import rewards
from stratified.reports.text import counted, cut, fixed, LONGEST, visible
from stratified.runs.workdir import is_number

Record = Mapping[str, Any]

_TAGS = ("think", "search", "answer", "information", "tool_call", "tool_response", "refine")
_TAGS += ("documents", "result", "observation", "calculator", "box")
_CALLS = ("search", "tool_call", "calculator")
_TAG = re.compile(rf"&lt;(/?)({'|'.join(_TAGS)})&gt;")
_INSIDE = re.compile(rf"(&lt;({'|'.join(_CALLS)}|answer)&gt;)(.*?)(?=&lt;/\2&gt;|\Z)", re.DOTALL)
_TITLE = re.compile(r"Doc \d+\(Title: (.{1,100}?)\)(?=\s|$)")
# What is shown of a rollout: characters of all its segments together, segments, calls of a turn,
# results of a call.
_MOST_TEXT, _MOST_SEGMENTS, _MOST_CALLS, _MOST_RESULTS = 20_000, 40, 8, 5
_LEAST_TEXT = 100  # characters of a segment that are shown also when all room is taken
_KINDS = {"right": "good", "wrong": "bad"}  # the looks of a verdict
_MOST_GOLDEN = 20
_SHORT = 240  # an observation up to here is shown open


def choose(records: Sequence[Record], count: int) -> list[Record]:
  """Picks up to `count` rollouts that differ in stratum and success, the first of each kind.

  Then the first of each kind and number of hops, as far as there is room.
  """
  kinds, finer = {}, {}
  for record in records:
    kind = (record.get("fault") is not None, str(record.get("stratum")), succeeded(record))
    kinds.setdefault(kind, record)
    finer.setdefault((*kind, str(record.get("hops"))), record)
  wins = [kinds[key] for key in sorted(kinds) if key[2]]
  losses = [kinds[key] for key in sorted(kinds) if not key[2]]
  pairs = [record for pair in zip(wins, losses) for record in pair]
  rest = [record for record in wins + losses if not any(record is taken for taken in pairs)]
  order = lambda record: (str(record.get("stratum")), -_reward(record))
  more = [one for one in finer.values() if not any(one is taken for taken in pairs + rest)]
  return sorted((pairs + rest + more)[:count], key=order)


def view(record: Record) -> dict[str, Any]:
  """What the template `rollout` shows: question, answer, golden, right, chips, segments, ..."""
  golden = record.get("golden_answers")
  golden = ", ".join(map(cut, golden[:_MOST_GOLDEN])) if isinstance(golden, list) else golden
  segments, left_out = _segments(record)
  return {
    "question": record.get("question"),
    "answer": record.get("answer"),
    "golden": golden or "–",
    "verdict": verdict(record),
    "chips": _chips(record),
    "segments": segments,
    "left_out": left_out,
    "picks": "",
  }


def calls_by_tool(record: Record) -> dict[str, int]:
  """{tool: number of calls}; of records before there were other tools the searches."""
  known = record.get("calls")
  if not isinstance(known, Mapping):
    known = {"search": record.get("searches")}
  return {str(tool): count for tool, count in known.items() if is_number(count)}


def told_calls(record: Record) -> str:
  """`search 2, calculator 1`, or `none`."""
  made = [(tool, count) for tool, count in calls_by_tool(record).items() if count]
  return ", ".join(f"{cut(tool, 40)} {count:g}" for tool, count in made[:_MOST_CALLS]) or "none"


def calls_of(turn: Any) -> list[dict[str, Any]]:
  """A turn's calls, each {tool, argument, outcome, results}, also of the older form `searches`."""
  if not isinstance(turn, Mapping):
    return []
  calls = turn.get("calls")
  if not isinstance(calls, list):
    searches = turn.get("searches")
    calls = [
      {
        "tool": "search",
        "argument": one.get("query"),
        "outcome": one.get("outcome"),
        "results": one.get("passage_ids"),
      }
      for one in (searches if isinstance(searches, list) else [])
      if isinstance(one, Mapping)
    ]
  return [
    {
      "tool": call.get("tool", "a tool"),
      "argument": call.get("argument"),
      "outcome": call.get("outcome"),
      "results": call["results"] if isinstance(call.get("results"), list) else [],
    }
    for call in calls
    if isinstance(call, Mapping)
  ]


def succeeded(record: Record) -> bool:
  """Whether a rollout answered right; where nobody knows, whether it earned anything."""
  told = verdict(record)
  return told == "right" if told else _reward(record) > 0


def verdict(record: Record) -> str:
  """`right` or `wrong`, by exact match with the golden answers; nothing where none are known.

  The reward does not say it: a wrong answer may earn something for its form.
  """
  golden = record.get("golden_answers")
  golden = golden[:_MOST_GOLDEN] if isinstance(golden, list) else []
  golden = [one[:LONGEST] for one in golden if isinstance(one, str)]
  answer = record.get("answer")
  if not golden or record.get("fault"):
    return ""
  told = isinstance(answer, str) and rewards.exact_match(answer[:LONGEST], golden)
  return "right" if told else "wrong"


def short(value: Any, signed: bool = False) -> str:
  """A record's number as it stands on a chip."""
  if is_number(value) and isinstance(value, float):
    return fixed(value, 2, True) if signed else f"{value:.3g}"
  odd = value is None or isinstance(value, float)  # not finite
  return "–" if odd else cut(value, 40)


def _chips(record: Record) -> list[tuple[str, str]]:
  """(text, kind) of the facts around a rollout; kind is good, bad or nothing."""
  chips = [(told, _KINDS[told])] if (told := verdict(record)) else []
  chips += [
    (f"{name} {short(record[name], signed=name == 'advantage')}", "")
    for name in ("reward", "advantage", "stratum")
    if name in record
  ]
  chips.append((f"calls: {told_calls(record)}", ""))
  if record.get("hops") is not None:
    chips.append((counted(record["hops"], "hop", "hops"), ""))
  if record.get("fault"):
    chips.append((f"fault: {cut(record['fault'], 300)}", "bad"))
  if record.get("stop") not in (None, "answer", "fault"):
    chips.append((f"stopped by {cut(record['stop'], 40)}", ""))
  return chips


def _segments(record: Record) -> tuple[list[dict[str, Any]], int]:
  """(what is shown of the segments, how many are left out); the i-th policy segment is turn i."""
  segments = record.get("segments")
  segments = segments if isinstance(segments, list) else []
  segments = [segment for segment in segments if isinstance(segment, Mapping)]
  turns = record.get("turns")
  turns = iter(turns if isinstance(turns, list) else ())
  room, shown, calls = _MOST_TEXT, [], []
  for segment in segments[:_MOST_SEGMENTS]:
    text = str(segment.get("text", "")).strip("\n")
    origin = segment.get("origin")
    if origin == "policy":
      calls = calls_of(next(turns, None))
    most = _MOST_CALLS if room > _LEAST_TEXT else 1
    made = {
      "origin": origin if origin in ("policy", "prompt") else "observation",
      "size": f"{segment['tokens']} tokens" if is_number(segment.get("tokens")) else "",
      "text": highlighted(visible(text, room), origin == "policy", verdict(record)),
      "calls": [_call(call, room) for call in calls[:most]] if origin == "policy" else [],
      "summary": "",
      "is_open": False,
    }
    if made["origin"] == "observation":
      made |= _observation(text, calls)
    room = max(_LEAST_TEXT, room - len(text) - sum(map(_size, made["calls"])))
    shown.append(made)
  return shown, len(segments) - len(shown)


def _observation(text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Sums up an observation that is folded away: the tools that it is from, its passages."""
  titles = [title.strip(" \"'") for title in _TITLE.findall(text[:_MOST_TEXT])[:8]]
  tools = ", ".join(dict.fromkeys(cut(call["tool"], 40) for call in calls[:_MOST_CALLS]))
  what = f"from {tools}" if tools else "observation"
  if titles:
    what += f" · {counted(len(titles), 'passage', 'passages')}: {' · '.join(titles)}"
  return {"summary": what, "is_open": len(text) <= _SHORT and not titles}


def _size(call: Mapping[str, str]) -> int:
  return sum(map(len, call.values()))


def _call(call: Mapping[str, Any], room: int) -> dict[str, str]:
  results, most = call["results"], min(300, room)
  told = cut(", ".join(cut(result, 120) for result in results[:_MOST_RESULTS]), most)
  told += f" and {len(results) - _MOST_RESULTS} more" * (len(results) > _MOST_RESULTS)
  return {
    "tool": cut(call["tool"], 40),
    "argument": cut("–" if call["argument"] is None else call["argument"], most),
    "outcome": cut(call["outcome"] or "", 40),
    "results": told,
  }


def highlighted(escaped: Markup, by_policy: bool, told: str) -> Markup:
  """Marks tags, and the policy's calls and answers, in text that is escaped already.

  told: the `verdict` on the answer.
  """
  span = Markup('<span class="{}">{}</span>').format
  answer = f"reply {told}"

  def mark(found: re.Match) -> str:
    kind = answer if found[2] == "answer" else "query"
    return Markup(found[1]) + span(kind, Markup(found[3]))

  text = str(escaped)
  if by_policy:
    text = _INSIDE.sub(mark, text)
  return Markup(_TAG.sub(lambda found: span(f"tag {found[2]}", Markup(found[0])), text))


def _reward(record: Record) -> float:
  value = record.get("reward")
  return value if is_number(value) else 0.0
