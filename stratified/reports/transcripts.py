"""A rollout of trajectories/step_NNNNNN.jsonl as HTML for people. Every text is hostile until
escaped."""

from collections.abc import Mapping, Sequence
import html
import re
from typing import Any
import unicodedata

STYLE = """
.roll{border:1px solid var(--grid);border-radius:12px;background:var(--card);margin:10px 0;overflow:hidden}
.roll>summary{cursor:pointer;padding:12px 14px;list-style-position:inside}
.roll>summary b{font-weight:600}.roll .body{padding:0 14px 12px}
.chips{display:flex;flex-wrap:wrap;gap:6px;margin-top:6px}
.chip{font-size:12px;padding:1px 8px;border-radius:9px;background:var(--grid);color:var(--ink)}
.chip.good{background:var(--c2);color:var(--card)}.chip.bad{background:var(--c4);color:var(--card)}
.seg{border-left:3px solid var(--grid);padding:4px 0 4px 10px;margin:8px 0;font-size:13.5px}
.seg.policy{border-color:var(--c0)}.seg.observation{border-color:var(--c2)}
.seg>small,.seg>summary{color:var(--soft);font-size:12px;display:block}.seg>summary{cursor:pointer;
display:list-item;margin-left:16px}
.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}
.tag{color:var(--soft);font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}
.tag.search{color:var(--c1)}.tag.answer{color:var(--c2)}.tag.think{color:var(--c3)}
.query{background:color-mix(in srgb,var(--c1) 18%,transparent);border-radius:4px;padding:0 3px}
.reply{background:color-mix(in srgb,var(--c2) 22%,transparent);border-radius:4px;padding:0 3px;
font-weight:600}
.hidden{color:var(--c4);font-size:11px;border:1px solid;border-radius:3px;padding:0 2px}
"""
_TAGS = "think|search|answer|information|tool_call|tool_response|refine|documents|result"
_TAG = re.compile(rf"&lt;(/?)({_TAGS})&gt;")
_INSIDE = re.compile(r"(&lt;(search|tool_call|answer)&gt;)(.*?)(?=&lt;/\2&gt;|\Z)", re.DOTALL)
_TITLE = re.compile(r"Doc \d+\(Title: (.{1,100}?)\)(?=\s|$)")
_LONGEST = 20_000  # characters shown of one segment
_SHORT = 240  # an observation up to here is shown open


def visible(text: Any) -> str:
  """Escaped text in which characters that hide or reorder others are shown by their code.

  Directional overrides can make a passage read as something else, and reach beyond it.
  """
  return "".join(
    f'<span class="hidden">U+{ord(c):04X}</span>'
    if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co")
    and c not in "\n\t\u200c\u200d"
    else html.escape(c, quote=True)
    for c in str(text).replace("\r\n", "\n")
  )


def choose(records: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
  """At most `count` rollouts that differ in stratum and success, the first of each kind, strata in
  order."""
  kinds = {}
  for record in records:
    kind = (
      record.get("fault") is not None,
      str(record.get("stratum")),
      _number(record, "reward") > 0,
    )
    kinds.setdefault(kind, record)
  wins = [kinds[key] for key in sorted(kinds) if key[2]]
  losses = [kinds[key] for key in sorted(kinds) if not key[2]]
  turns = [record for pair in zip(wins, losses) for record in pair]
  rest = [record for record in wins + losses if not any(record is taken for taken in turns)]
  chosen = (turns + rest)[:count]
  return sorted(chosen, key=lambda record: (str(record.get("stratum")), -_number(record, "reward")))


def render(record: Mapping[str, Any], is_open: bool = False) -> str:
  """One rollout as a <details> element: question and numbers outside, the transcript inside."""
  golden = record.get("golden_answers")
  golden = ", ".join(map(str, golden)) if isinstance(golden, list) else str(golden or "–")
  answer = record.get("answer")
  facts = "".join(
    [
      _chip(
        f"reward {_short(record.get('reward'))}", "good" if _number(record, "reward") > 0 else "bad"
      ),
      _chip(f"advantage {_short(record.get('advantage'), signed=True)}"),
      _chip(f"stratum {_short(record.get('stratum'))}"),
      _chip(_count(record.get("searches"), "search", "searches")),
      _chip(_count(record.get("hops"), "hop", "hops")) if record.get("hops") is not None else "",
      _chip(f"fault: {record['fault']}", "bad") if record.get("fault") else "",
      _chip(f"stopped by {record['stop']}")
      if record.get("stop") not in (None, "answer", "fault")
      else "",
    ]
  )
  said = "no answer" if answer is None else f'answered <b class="text">{visible(answer)}</b>'
  segments = record.get("segments")
  segments = segments if isinstance(segments, list) else []
  body = "".join(_segment(segment) for segment in segments if isinstance(segment, Mapping))
  correct = f'<span class="text">{visible(golden)}</span>'
  return (
    f'<details class="roll"{" open" if is_open else ""}><summary>'
    f'<b class="text">{visible(record.get("question"))}</b>'
    f'<div class="chips">{facts}</div><div class="said">{said} · correct: {correct}</div></summary>'
    f'<div class="body">{body or "<p>no segments recorded</p>"}</div></details>'
  )


def _segment(segment: Mapping[str, Any]) -> str:
  text = str(segment.get("text", "")).strip("\n")
  origin = segment.get("origin")
  size = f"{segment['tokens']} tokens" if isinstance(segment.get("tokens"), int) else ""
  more = f"\n… {len(text) - _LONGEST:,} more characters" if len(text) > _LONGEST else ""
  shown = (
    f'<div class="text">{_highlight(visible(text[:_LONGEST] + more), origin == "policy")}</div>'
  )
  if origin == "policy":
    return f'<div class="seg policy"><small>policy · {size}</small>{shown}</div>'
  if origin == "prompt":
    return f'<details class="seg"><summary>prompt · {size}</summary>{shown}</details>'
  titles = [title.strip(" \"'") for title in _TITLE.findall(text)]
  summary = "observation"
  if titles:
    summary = f"{_count(len(titles), 'passage', 'passages')}: {visible(' · '.join(titles))}"
  is_open = " open" if len(text) <= _SHORT and not titles else ""
  return f'<details class="seg observation"{is_open}><summary>{summary} · {size}</summary>{shown}</details>'


def _highlight(escaped: str, by_policy: bool) -> str:
  """Marks tags, and the policy's queries and answers, in text that is escaped already."""
  css = {"search": "query", "tool_call": "query", "answer": "reply"}
  if by_policy:
    escaped = _INSIDE.sub(lambda m: f'{m[1]}<span class="{css[m[2]]}">{m[3]}</span>', escaped)
  return _TAG.sub(lambda m: f'<span class="tag {m[2]}">&lt;{m[1]}{m[2]}&gt;</span>', escaped)


def _chip(text: str, kind: str = "") -> str:
  return f'<span class="chip {kind}">{visible(text)}</span>'


def _count(value: Any, one: str, many: str) -> str:
  return f"{'–' if value is None else value} {one if value == 1 else many}"


def _number(record: Mapping[str, Any], key: str) -> float:
  value = record.get(key)
  return value if isinstance(value, (int, float)) else 0.0


def _short(value: Any, signed: bool = False) -> str:
  if isinstance(value, float):
    return f"{value:+.2f}" if signed else f"{value:.3g}"
  return "–" if value is None else str(value)
