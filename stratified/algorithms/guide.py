"""Writes a reference rollout into the prompt of a teacher: its expert guide.

A teacher reads `question + before + what is shown of the reference + after` where the policy reads
the question alone, in the same instruction.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import ClassVar

from stratified.config import setting, Settings
from stratified.types import Question, Segment, Trajectory


@dataclasses.dataclass(frozen=True)
class GuideSettings(Settings):
  """What a teacher is shown, and the wording around it."""

  SECTION: ClassVar[str] = "guide"
  before: str = setting(
    "\n\nHere is how an expert answered this question:\n",
    "stands before the reference in the teacher's prompt",
    affects=("training", "warm_start"),
  )
  after: str = setting(
    "\nNow answer the question in your own way.",
    "stands after the reference in the teacher's prompt",
    affects=("training", "warm_start"),
  )
  shown: str = setting(
    "full",
    "of the reference: all, what stands before its answer, all but retrieved text, or its calls",
    choices=("full", "no_answer", "no_documents", "queries_only"),
    affects=("training", "warm_start"),
  )
  share: float = setting(
    0.0,
    "share of the warm start's demonstrations shown in their own prompt, to teach guides",
    low=0,
    high=1,
    affects=("warm_start",),
  )


def shown(reference: Trajectory, settings: GuideSettings, decode: Callable, eos_id: int) -> str:
  """Writes what the settings show of a rollout as text, without its prompt.

  decode: token ids -> text. eos_id: the token that ends a text, left out: in a chat template it
  would end the message.
  """
  if settings.shown == "queries_only":
    return "\n".join(call.argument for call in reference.calls)
  wanted = ("policy",) if settings.shown == "no_documents" else ("policy", "observation")
  ids = [
    token
    for segment in reference.segments
    if segment.origin in wanted
    for token in segment.token_ids
    if token != eos_id
  ]
  text = decode(ids)
  if settings.shown == "no_answer" and reference.answer:
    before, found, _ = text.rpartition(reference.answer)
    return before if found else text
  return text


def prompt(
  question: Question,
  reference: Trajectory,
  settings: GuideSettings,
  *,
  write: Callable[[str], str],
  encode: Callable[[str], Sequence[int]],
  decode: Callable,
  eos_id: int,
) -> tuple[int, ...]:
  """The token ids of a teacher's prompt.

  write: question's text -> the whole prompt's (a protocol's `prompt`).
  """
  guide = shown(reference, settings, decode, eos_id)
  return tuple(encode(write(question.text + settings.before + guide + settings.after)))


def guided(trajectory: Trajectory, settings: GuideSettings, **how) -> Trajectory:
  """The rollout after a prompt in which it is its own guide; how: as of `prompt`."""
  ids = prompt(trajectory.question, trajectory, settings, **how)
  rest = tuple(segment for segment in trajectory.segments if segment.origin != "prompt")
  return dataclasses.replace(trajectory, segments=(Segment(ids, "prompt"), *rest))


def weights(
  trajectory: Trajectory, span: str, decode: Callable, prefix: float = 1.0
) -> tuple[float, ...]:
  """1 for each token that counts, else 0.

  span: "all" policy tokens; "think_search", those of turns that called a tool; "search", those of
    the calls' arguments alone.
  prefix: the share of those, from the first on, that counts; rounded up.
  """
  turns, found = iter(trajectory.turns), []
  for segment in trajectory.segments:
    size = len(segment.token_ids)
    if segment.origin != "policy":
      found += [0.0] * size
      continue
    turn = next(turns, None)
    calls = turn.calls if turn else ()
    if span == "all":
      found += [1.0] * size
    elif span == "think_search" or not calls:
      found += [float(bool(calls))] * size
    else:
      found += _within(segment.token_ids, [call.argument for call in calls], decode)
  counted = [i for i, weight in enumerate(found) if weight]
  for i in counted[math.ceil(prefix * len(counted) - 1e-9) :]:
    found[i] = 0.0
  return tuple(found)


def _within(ids: Sequence[int], arguments: Sequence[str], decode: Callable) -> list[float]:
  """1 for each token of which a character lies in the last occurrence of an argument."""
  ends = [len(decode(list(ids[: i + 1]))) for i in range(len(ids))]
  text, counts = decode(list(ids)), [0.0] * len(ids)
  for argument in arguments:
    first = text.rfind(argument)
    if first < 0 or not argument:
      continue
    for i, end in enumerate(ends):
      begin = ends[i - 1] if i else 0
      if begin < first + len(argument) and end > first:
        counts[i] = 1.0
  return counts
