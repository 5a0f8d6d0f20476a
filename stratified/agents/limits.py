"""Budgets of a rollout, and how an observation is made to fit one."""

from collections.abc import Callable
import dataclasses

from stratified.agents.tags import Information
from stratified.config import setting, Settings

Encode = Callable[[str], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Limits(Settings):
  """What a rollout may use.

  max_turns: turns that may call a tool, invalid ones included; one final generation follows, which
    may only answer.
  max_observation_tokens: tokens of one observation, tags included.
  max_tokens: wins over the others: an observation is shortened to leave room for answer_tokens.
  forced_searches: None lets the policy choose. n makes every rollout call the protocol's first tool
    (search, where the task searches) n times, then answer. Each turn is begun for the policy by
    feeding the opening tag (masked, in place of any reasoning); where the policy does not close it
    within the turn, the closing tag is fed too. A call that max_tokens has no room for still ends
    the rollout.

  Raises ValueError where a value is out of its range.
  """

  SECTION = "rollout"
  max_turns: int = setting(4, "turns of a rollout that may call a tool", low=0, high=1000)
  max_turn_tokens: int = setting(500, "tokens sampled in one turn", low=1, high=2**20)
  max_observation_tokens: int = setting(500, "tokens of one observation", low=1, high=2**20)
  max_tokens: int = setting(
    4096, "tokens of prompt, turns and observations together", low=2, high=2**20
  )
  answer_tokens: int = setting(32, "tokens kept free for the answer", low=1, high=2**20)
  forced_searches: int | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.answer_tokens >= self.max_tokens:
      raise ValueError(
        f"rollout.answer_tokens={self.answer_tokens} leaves nothing of "
        f"rollout.max_tokens={self.max_tokens} for the prompt; lower it or raise max_tokens"
      )
    if self.forced_searches is not None and not 0 <= self.forced_searches <= self.max_turns:
      raise ValueError(
        f"forced_searches is {self.forced_searches}; it must lie between 0 and max_turns "
        f"({self.max_turns}), since each search takes a turn"
      )


def smallest_observation(information: Information, encode: Encode) -> int:
  """Tokens that an observation needs to hold its tags and one token between them."""
  return len(encode(information.opening)) + len(encode(information.closing)) + 1


def fit(information: Information, limit: int, encode: Encode, decode: Callable) -> tuple[int, ...]:
  """Encodes an observation in at most `limit` tokens, its closing tag always among them.

  Drops whole passages from the end; where the first alone is too long, it keeps its leading tokens,
  up to a whole character. Each part is encoded on its own, so a cut changes no token before it.
  `limit` is at least `smallest_observation`.
  """
  opening, closing = encode(information.opening), encode(information.closing)
  room = limit - len(opening) - len(closing)
  body = ()
  for i, piece in enumerate(information.pieces):
    token_ids = encode(piece)
    if len(body) + len(token_ids) > room:
      if i == 0:
        body = _whole_characters(token_ids[:room], decode)
      break
    body += token_ids
  return opening + body + closing


def _whole_characters(token_ids: tuple[int, ...], decode: Callable) -> tuple[int, ...]:
  """Drops trailing tokens that are only part of a UTF-8 character (at most three bytes of one)."""
  for end in range(len(token_ids), max(len(token_ids) - 4, -1), -1):
    if not decode(list(token_ids[:end])).endswith("\N{REPLACEMENT CHARACTER}"):
      return token_ids[:end]
  return token_ids
