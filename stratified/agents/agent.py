"""Runs one rollout as a generator: it yields what it needs and is sent the result.

    yield Request(...)  -> is sent the Completion
    yield Use(...)      -> is sent one Result per call, or the ToolError that lost them
    return Trajectory

The generator holds the context, the budgets and the turns of one rollout. It waits for nothing
itself, so `loop.collect` runs many of them against one sampler and one set of tools. Another kind
of agent (retrieve first, then answer; search after each sentence) is another generator with the
arguments of `run`; agents/baselines has them. A protocol may bring

    rollout     its generator in place of `run`
    parts       `parts(question)`: the prompt's text in pieces, of which `prompt` is the first
    searches    (least, most) calls of a rollout; most is None where max_turns bounds them
    ends_turns  True where each turn ends with the end-of-text token, which is fed where the policy
                did not come to it
    goes_on     `goes_on(text)`: whether a turn that met a stop string is not over (it is in the
                middle of a thought), and is sampled on
    last_words  fed before the generation that may only answer

A request's key names the rollout that it continues. A generation beside the rollout, with a context
of its own, has a `side_key`, which no rollout has.

Token ids are kept as sampled and as fed: text is decoded to find tags, never encoded again.
"""

from collections.abc import Callable, Generator
import dataclasses
from typing import Any

from stratified.agents.limits import fit, Limits, smallest_observation
from stratified.agents.rollout_setting import forced_action, opening, Setting
from stratified.agents.tags import Action, ANSWER
from stratified.sampling.interface import Completion, Request
from stratified.tools.base import Result, ToolError
from stratified.types import Call, Origin, Question, Segment, Trajectory, Turn

Calls = tuple[tuple[str, str], ...]  # (tool, argument) each


@dataclasses.dataclass(frozen=True)
class Use:
  """Calls of tools to run, each of them executed."""

  calls: Calls


Rollout = Generator[Request | Use, Any, Trajectory]
# The turns of a rollout; they return the answer, None where there is none, and what ended the
# rollout.
Turns = Generator[Request | Use, Any, tuple[str | None, str]]


class Fault(Exception):
  """Something outside the policy broke; the sentence becomes the trajectory's `fault`."""


def side_key(key: tuple[int, int, int], number: int, limits: Limits) -> tuple[int, int, int]:
  """The key of the `number`-th generation beside a rollout: its own, and no rollout's."""
  step, question, sample = key
  return step, question, -1 - (sample * (limits.max_turns + 2) + number)


def run(
  setting: Setting, question: Question, key: tuple[int, int, int], prompt_ids: tuple[int, ...]
) -> Rollout:
  """Generates, acts, observes, until an answer, the last turn or the end of a budget: the agent.

  Turns 0 to max_turns - 1 may call tools; the generation after them may only answer. A turn that
  neither calls nor answers gets the protocol's corrective observation and costs a turn; where the
  protocol has none, it ends the rollout. A call for which no turn or no room is left is not run and
  does not count.
  """
  agent = Agent(setting, question, key, prompt_ids)
  return (yield from agent.to_end(agent.take_turns()))


class Agent:
  """One rollout's state (context, segments, turns), and the moves that generators are made of."""

  def __init__(self, setting, question, key, prompt_ids):
    self.setting, self.question, self.key = setting, question, key
    self.context = prompt_ids
    self.segments = [Segment(prompt_ids, "prompt")]
    self.turns = []
    self.num_side, self.side_tokens = 0, 0
    self.last_words = ()  # what is fed after the next observation, for which room is kept

  def to_end(self, turns: Turns) -> Rollout:
    """Runs the turns and returns the trajectory, also where something outside the policy broke."""
    try:
      answer, stop = yield from turns
    except Fault as fault:
      return self.trajectory(None, "fault", str(fault))
    return self.trajectory(answer, stop)

  def take_turns(self, digest: Callable | None = None) -> Turns:
    """Takes turns until an answer, the last turn or the end of a budget.

    digest: a generator of (agent, calls, items of each) that makes the Information to feed.
    """
    limits = self.setting.limits
    self.feed(opening(self.setting, 0))
    for turn in range(limits.max_turns + 1):
      text, action = yield from self.generate(final=turn == limits.max_turns)
      if action.kind == "answer":
        self.turns.append(Turn("answer", text))
        return action.answer, "answer"
      given_up = action.kind == "invalid" and not self.setting.protocol.corrective
      if turn == limits.max_turns or given_up:
        self.turns.append(Turn(action.kind, text))
        break
      if turn + 1 == limits.max_turns:
        self.last_words = self.setting.encode(getattr(self.setting.protocol, "last_words", ""))
      if action.kind == "call":
        observation = yield from self.use(text, action.calls, digest, action.sizes)
      else:
        observation = self.correct(text)
      if observation is None:
        return None, "length"
      self.feed(observation + self.last_words)
      self.feed(opening(self.setting, self.num_calls()))
    return None, "turns" if self.room() else "length"

  def generate(
    self, final: bool, forced: str | None = None
  ) -> Generator[Request, Completion, tuple[str, Action]]:
    """Generates once; returns the text and what it asks for.

    forced: the action whose opening has been fed; by default the one that the limits force.
    """
    protocol = self.setting.protocol
    forced = forced or forced_action(self.setting, self.num_calls())
    stops = (protocol.closing(forced),) if forced else protocol.stops
    goes_on = None if forced else getattr(protocol, "goes_on", None)
    text = yield from self.sample(stops, last=final or forced == ANSWER, goes_on=goes_on)
    if not forced:
      return text, protocol.parse(text)
    begun = protocol.opening(forced) + text
    action = protocol.parse(begun, forced)
    if action.kind == "invalid":
      # begun for the policy and not closed by it: closed here, so that exactly the forced calls
      # are made
      closing = self.setting.encode(protocol.closing(forced))
      self.feed(closing if len(closing) <= self.room() else ())
      action = protocol.parse(begun + protocol.closing(forced), forced)
    return text, action

  def sample(
    self,
    stops: tuple[str, ...],
    *,
    last: bool = False,
    reserve: int = 0,
    goes_on: Callable[[str], bool] | None = None,
  ):
    """Samples up to one of `stops`, or to `reserve` tokens before the budget's end; the text.

    goes_on: says of the text up to a stop string that the turn is not over: it is sampled on.
    """
    longest = min(self.setting.limits.max_turn_tokens, self.room() - reserve)
    token_ids = ()
    while True:
      left = longest - len(token_ids)
      request = Request(self.key, self.context, left, stops, last and not goes_on)
      new = self.sampled((yield request), joined=bool(token_ids))
      self.check_end(new, request)
      token_ids += new
      text = self.decode(token_ids)
      met_stop = new and new[-1] not in self.setting.ends and len(new) < left
      if not (goes_on and met_stop and goes_on(text)):
        return text

  def sampled(self, completion: Completion, joined: bool = False) -> tuple[int, ...]:
    """Keeps what was sampled, also the beginning of a lost generation.

    joined: it goes on with the segment before it, and becomes a part of that.
    """
    token_ids, log_probs = tuple(completion.token_ids), tuple(completion.log_probs)
    lost = completion.finish == "fault"
    if token_ids and not (lost and len(log_probs) != len(token_ids)):
      self.context += token_ids
      new = Segment(token_ids, "policy", log_probs, tuple(completion.weight_versions))
      self.segments += [_join(self.segments.pop(), new) if joined else new]
    if lost:
      raise Fault(completion.fault or "the sampler lost this generation without saying why")
    return token_ids

  def beside(self, context: tuple[int, ...], max_new_tokens: int, stops: tuple[str, ...]):
    """Generates in a context of its own, beside the rollout's; returns the text."""
    request = Request(
      side_key(self.key, self.num_side, self.setting.limits),
      context,
      max_new_tokens,
      stops,
      last=True,
    )
    self.num_side += 1
    completion = yield request
    token_ids = tuple(completion.token_ids)
    self.side_tokens += len(token_ids)
    if completion.finish == "fault":
      raise Fault(
        completion.fault or "the sampler lost a generation beside the rollout without saying why"
      )
    self.check_end(token_ids, request)
    return self.decode(token_ids)

  def use(
    self, text: str, calls: Calls, digest: Callable | None = None, sizes: tuple[int, ...] = ()
  ):
    """Runs a turn's calls; returns the observation's token ids, None where it has no room.

    digest: see `take_turns`. sizes: see `tags.Action`.
    """
    setting, ending = self.setting, self.turn_ending()
    room = min(
      self.room_to_observe(len(calls)) - len(ending), setting.limits.max_observation_tokens
    )
    if room < smallest_observation(setting.protocol.information([]), setting.encode):
      self.turns.append(Turn("call", text))
      return None
    items = yield from self.run(text, calls)
    if digest:
      information = yield from digest(self, calls, items)
    else:
      information = setting.protocol.information(items, *([sizes] if sizes else []))
    return ending + fit(information, room, setting.encode, setting.decode)

  def run(self, text: str, calls: Calls):
    """Runs a turn's calls and records the turn; returns the items that each call brought.

    An empty argument brings nothing: no tool is asked, since it might return anything for it.
    """
    asked = tuple(call for call in calls if call[1])
    results = dict.fromkeys(calls, Result())
    if asked:
      found = yield Use(asked)
      if isinstance(found, ToolError):
        self.turns.append(Turn("call", text, tuple(Call(*call, "error") for call in calls)))
        raise Fault(f"the {asked[0][0]} for {asked[0][1]!r} failed: {found}")
      results.update(zip(asked, found, strict=True))
    made = tuple(Call(*call, results[call].outcome, results[call].names) for call in calls)
    self.turns.append(Turn("call", text, made))
    return [results[call].items for call in calls]

  def correct(self, text: str) -> tuple[int, ...] | None:
    """The corrective observation's token ids, None where there is no room for it."""
    self.turns.append(Turn("invalid", text))
    corrective = self.turn_ending() + self.setting.encode(self.setting.protocol.corrective)
    return corrective if len(corrective) <= self.room_to_observe() else None

  def turn_ending(self) -> tuple[int, ...]:
    """The end-of-text token to feed where the protocol's turns end with it and this one did not."""
    ends = (
      getattr(self.setting.protocol, "ends_turns", False)
      and self.context[-1] not in self.setting.ends
    )
    return (self.setting.eos_id,) if ends else ()

  def room(self) -> int:
    return self.setting.limits.max_tokens - len(self.context)

  def room_to_observe(self, new_calls: int = 0) -> int:
    """Tokens that an observation may take and leave room for an answer and its forced opening."""
    forced = opening(self.setting, self.num_calls() + new_calls)
    kept = self.setting.limits.answer_tokens + len(forced) + len(self.last_words)
    return self.room() - kept

  def num_calls(self) -> int:
    return sum(len(turn.calls) for turn in self.turns)

  def feed(self, token_ids: tuple[int, ...], origin: Origin = "observation"):
    if token_ids:
      self.context += token_ids
      self.segments.append(Segment(token_ids, origin))

  def decode(self, token_ids: tuple[int, ...]) -> str:
    """Text of a turn, without the end-of-text token that may end it."""
    ended = token_ids and token_ids[-1] in self.setting.ends
    return self.setting.decode(token_ids[:-1] if ended else token_ids)

  def check_end(self, token_ids: tuple[int, ...], request: Request):
    """Raises Fault where the sampler went on after a stop: that text must not be trained on."""
    if len(token_ids) > request.max_new_tokens:
      raise Fault(
        f"the sampler returned {len(token_ids)} tokens where at most {request.max_new_tokens} "
        "were asked for"
      )
    before_last = token_ids[:-1]
    text = self.setting.decode(before_last)
    passed = [stop for stop in request.stop if stop in text]
    if any(end in before_last for end in self.setting.ends):
      passed.append("the end-of-text token")
    if passed:
      raise Fault(f"the sampler went on after {passed[0]}, where it was to stop")

  def trajectory(self, answer: str | None, stop: str, fault: str | None = None) -> Trajectory:
    return Trajectory(
      self.question,
      self.key[2],
      tuple(self.segments),
      tuple(self.turns),
      answer,
      stop,
      fault,
      self.setting.weight_version,
      side_tokens=self.side_tokens,
    )


def _join(before: Segment, after: Segment) -> Segment:
  """One policy segment of two that follow each other."""
  versions = before.weight_versions + after.weight_versions
  if bool(before.weight_versions) != bool(after.weight_versions):
    raise Fault("the sampler told the weight versions of one part of a turn only")
  return Segment(
    before.token_ids + after.token_ids, "policy", before.log_probs + after.log_probs, versions
  )
