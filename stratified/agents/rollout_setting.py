"""Holds what all rollouts of a call share, makes their prompts, and checks both before any work."""

from collections.abc import Callable, Sequence
import dataclasses

from stratified.agents.limits import Limits, smallest_observation
from stratified.agents.tags import ANSWER, Tags
from stratified.types import Question


@dataclasses.dataclass(frozen=True)
class Setting:
  """What all rollouts of a call share.

  encode, decode: the tokenizer's, between text and a tuple of token ids.
  weight_version: see Trajectory.
  other_ends: tokens beside `eos_id` that end a text.
  begin_ids: what every text begins with, once.
  """

  encode: Callable[[str], tuple[int, ...]]
  decode: Callable[[tuple[int, ...]], str]
  eos_id: int
  protocol: Tags
  limits: Limits
  weight_version: int
  other_ends: tuple[int, ...] = ()
  begin_ids: tuple[int, ...] = ()

  @property
  def ends(self) -> tuple[int, ...]:
    return (self.eos_id, *self.other_ends)

  @classmethod
  def of(cls, tokenizer, protocol: Tags, limits: Limits, weight_version: int = 0, encode=None):
    """Takes what a tokenizer says of itself; `encode` in place of its own."""
    return cls(
      encode or (lambda text: tuple(tokenizer.encode(text))),
      lambda ids: tokenizer.decode(list(ids)),
      tokenizer.eos_id,
      protocol,
      limits,
      weight_version,
      getattr(tokenizer, "other_ends", ()),
      getattr(tokenizer, "begin_ids", ()),
    )


def check(setting: Setting):
  """Raises ValueError, before any work, for limits that the protocol cannot keep to.

  max_observation_tokens must hold whatever is fed whole; max_turns and forced_searches must allow
  the calls that the protocol makes.
  """
  _check_searches(setting.limits, getattr(setting.protocol, "searches", (0, None)))
  limit = setting.limits.max_observation_tokens
  fixed = {
    "the tags around one token of a passage": smallest_observation(
      setting.protocol.information([]), setting.encode
    )
  }
  if setting.protocol.tools and setting.protocol.corrective:  # else nothing is ever corrected
    fixed["the corrective observation"] = len(setting.encode(setting.protocol.corrective))
  for what, needed in fixed.items():
    if needed > limit:
      raise ValueError(
        f"rollout.max_observation_tokens is {limit}, but {what} takes {needed} tokens; "
        f"raise it to at least {max(fixed.values())}"
      )


def _check_searches(limits: Limits, searches: tuple[int, int | None]):
  least, most = searches
  if limits.max_turns < least:
    raise ValueError(
      f"rollout.max_turns is {limits.max_turns}, but the protocol searches at least {least} time"
      f"{'s' * (least != 1)}; raise it to at least {least}"
    )
  forced = limits.forced_searches
  if forced is not None and (forced < least or most is not None and forced > most):
    span = f"exactly {least}" if least == most else f"at least {least}"
    raise ValueError(
      f"forced_searches is {forced}, but a rollout of this protocol makes {span}; "
      "choose such a number or leave it None"
    )


def prompt_pieces(setting: Setting, question: str) -> list[tuple[int, ...]]:
  """Token ids of the prompt, in the pieces that the protocol cuts it into."""
  protocol = setting.protocol
  texts = protocol.parts(question) if hasattr(protocol, "parts") else (protocol.prompt(question),)
  first, *rest = [tuple(setting.encode(text)) for text in texts]
  begin = setting.begin_ids
  # a chat template may have written it already
  return [first if first[: len(begin)] == begin else begin + first, *rest]


def prompt_fault(setting: Setting, pieces: list[tuple[int, ...]]) -> str | None:
  """Says why this prompt can't be used (the question is never cut); None where it can."""
  limits, between = setting.limits, 0
  if len(pieces) > 1:
    between = smallest_observation(setting.protocol.information([]), setting.encode)
  taken = sum(map(len, pieces)) + between
  needed = taken + limits.answer_tokens + len(opening(setting, 0))
  if needed <= limits.max_tokens:
    return None
  return (
    f"the prompt takes {taken} tokens, which leaves no room for an answer of "
    f"{limits.answer_tokens} within max_tokens ({limits.max_tokens}); raise it to at least {needed}"
  )


def check_prompts(setting: Setting, questions: Sequence[Question]) -> None:
  """Raises ValueError where no prompt of these questions leaves room for an answer."""
  faults = [prompt_fault(setting, prompt_pieces(setting, question.text)) for question in questions]
  if faults and all(faults):
    raise ValueError(
      f"no question fits its budget; the first, question {questions[0].id!r}: {faults[0]}"
    )


def forced_action(setting: Setting, num_calls: int) -> str | None:
  """The tool, or "answer", forced after `num_calls` calls; None where the policy chooses."""
  forced = setting.limits.forced_searches
  if forced is None:
    return None
  # a protocol without tools of the policy's own searches for it
  return (*setting.protocol.tools, "search")[0] if num_calls < forced else ANSWER


def opening(setting: Setting, num_calls: int) -> tuple[int, ...]:
  """The text that is fed to force the action after `num_calls` calls."""
  forced = forced_action(setting, num_calls)
  return setting.encode(setting.protocol.opening(forced)) if forced else ()
