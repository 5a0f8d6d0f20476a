"""Shows one rollout on a terminal: what the policy wrote, what came back, its answer.

Texts of a policy and of passages are hostile: characters that steer a terminal are shown by their
code.
"""

from collections.abc import Mapping
from typing import Any

from stratified.reports import transcripts
from stratified.reports.text import counted, plain

_CODES = {"soft": "2", "policy": "34", "found": "33", "right": "1;32", "wrong": "1;31", "bold": "1"}
_MOST_TEXT = 4_000  # characters of a segment


def show(record: Mapping[str, Any], color: bool = False) -> str:
  """The rollout of a record as lines; `color` marks them with a terminal's escapes."""
  parts = [_painted("bold", _block("question | ", record["question"]), color)]
  turns = iter(record.get("turns") or ())
  for segment in record["segments"]:
    if segment["origin"] == "policy":
      parts.append(_painted("policy", _block("policy   | ", segment["text"]), color))
      parts += [_painted("bold", line, color) for line in _calls(next(turns, None))]
    elif segment["origin"] == "observation":
      parts.append(_painted("found", _block("found    | ", segment["text"]), color))
  if record.get("fault"):
    parts.append(_painted("wrong", f"lost: {plain(record['fault'])}", color))
    return "\n".join(parts)
  return "\n".join([*parts, _answer(record, color), _painted("soft", _facts(record), color)])


def _block(head: str, text: str) -> str:
  """A text's lines, each behind the name of who wrote it."""
  lines = plain(text.strip("\n"), _MOST_TEXT).split("\n")
  return "\n".join(head + line for line in lines)


def _calls(turn: Any) -> list[str]:
  told = "{tool}: {argument} ({outcome})".format
  return [" ".join(plain(told(**call), 400).split("\n")) for call in transcripts.calls_of(turn)]


def _answer(record: Mapping[str, Any], color: bool) -> str:
  told, answer = transcripts.verdict(record), record.get("answer")
  said = "no answer" if answer is None else f"answer: {plain(answer)}".replace("\n", " ")
  shown = _painted(told or "bold", said + f" ({told})" * bool(told), color)
  if told == "wrong":
    shown += f"\nright would be: {plain(', '.join(record['golden_answers'][:5]))}"
  return shown


def _facts(record: Mapping[str, Any]) -> str:
  tokens = sum(part["tokens"] for part in record["segments"] if part["origin"] == "policy")
  made = f"calls: {transcripts.told_calls(record)}"
  stop = record.get("stop")
  ended = f"; stopped by {stop}" if stop not in (None, "answer") else ""
  return f"{made}; {counted(tokens, 'token', 'tokens')} of the policy{ended}"


def _painted(kind: str, text: str, color: bool) -> str:
  return f"\033[{_CODES[kind]}m{text}\033[0m" if color and text else text
