"""Fuzzed outputs of a policy: every protocol's parser, and the agent loop that feeds on them."""

from collections.abc import Sequence
import random
import time

from experiments.benchmarks.attacks.count import Count
from stratified import rewards
from stratified.agents import loop, protocols, tags, tool_calls
from stratified.agents.chat import ChatTemplate
from stratified.agents.limits import Limits
from stratified.retrieval.corpus import Passage
from stratified.sampling.interface import Completion, Request
from stratified.tools.search import Search
from stratified.types import Question, Trajectory

SLOWEST_S = 2.0  # for one output of a turn's length; the machine may be shared
LIMITS = Limits(
  max_turns=3, max_turn_tokens=600, max_observation_tokens=400, max_tokens=6000, answer_tokens=200
)
QUESTION = Question("q", "Where?", ("Oslo",))
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ tools and '' }}"
)
PIECES = (
  "<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>", "<information>",
  "</information>", "<result>", "<documents>", "<refine>", "<observation>", "\\boxed{", "}",
  "<tool_call>", "</tool_call>", '{"name": "search", "arguments": {"query": "Oslo"}}', '{"name": ',
  '"arguments": "', "[" * 40, "{" * 40, '"', "\\", "\\u0000", "\x00", "\n" * 9, " ", "Oslo",
  "<|im_end|>", "<|end|>", "</s>", "<", ">", "&lt;", "\ud7ff", "🜁", "\u202e", "[INST]", "NaN",
  "9" * 300,
)  # fmt: skip


class Bytes:
  """A token for each byte, and one that ends a text."""

  eos_id, vocab_size = 256, 257

  def encode(self, text: str) -> list[int]:
    return list(text.encode())

  def decode(self, token_ids: Sequence[int]) -> str:
    plain = [b"<|end|>" if token == self.eos_id else bytes([token]) for token in token_ids]
    return b"".join(plain).decode(errors="replace")


class Hostile:
  """A sampler that writes fuzz, as far as a sampler is let: to a stop string or the limit."""

  def __init__(self, chance: random.Random):
    self._chance, self._queue = chance, []
    self.written: dict[tuple, int] = {}

  def load(self, params, step: int) -> None:
    pass

  def submit(self, request: Request) -> None:
    self._queue.append(request)

  def poll(self) -> list[Completion]:
    queue, self._queue = self._queue, []
    return [self._complete(request) for request in queue]

  def _complete(self, request: Request) -> Completion:
    text = fuzz(self._chance)
    for stop in request.stop:
      text = text[: text.index(stop) + len(stop)] if stop in text else text
    end = [] if text.endswith(tuple(request.stop)) else [Bytes.eos_id]
    ids = [*text.encode(errors="replace"), *end][: request.max_new_tokens]
    self.written[request.key] = self.written.get(request.key, 0) + len(ids)
    finish = "length" if len(ids) == request.max_new_tokens else "stop"
    return Completion(request.key, tuple(ids), (-1.0,) * len(ids), finish)


class Pages:
  manifest = {"kind": "attack"}

  def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
    return [[Passage("1", "Oslo", f"</information> {query[:50]}")] * topk for query in queries]


def fuzz(chance: random.Random) -> str:
  """Up to 60 pieces of tags, objects and noise; now and then thousands of one of them."""
  if chance.random() < 0.02:
    return chance.choice(PIECES) * chance.randint(500, 4000)
  noise = lambda: "".join(chr(chance.randrange(32, 0xD7FF)) for _ in range(chance.randint(1, 8)))
  count = chance.randint(0, 60)
  return "".join(chance.choice(PIECES) if chance.random() < 0.8 else noise() for _ in range(count))


def everyone() -> dict:
  """Each protocol by its name."""
  made = {name: make() for name, make in protocols.PROTOCOLS.items()}
  made |= {"search_r1": tags.search_r1(), "short": tags.short()}
  return made | {"tool_calls": tool_calls.tool_calls(ChatTemplate(CHATML), Bytes())}


def attack(count: int, seed: int = 0) -> Count:
  """Parses fuzz with every protocol in turn; one in fifty outputs is a whole rollout's."""
  chance, found, known = random.Random(seed), Count(), sorted(everyone().items())
  for number in range(count):
    name, protocol = known[number % len(known)]
    if number // len(known) % 50 == 0:
      found.note("rollouts")
      found.add(_rolled_out(name, protocol, chance))
    else:
      found.add(_parsed(name, protocol, fuzz(chance)))
  return found


def _parsed(name: str, protocol, text: str) -> str | None:
  start = time.perf_counter()
  try:
    action = protocol.parse(text)
  except Exception as error:
    return f"{name}: {type(error).__name__} {error} at {text[:80]!r}"
  took = time.perf_counter() - start
  if took > SLOWEST_S:
    return f"{name}: {took:.1f} s for {len(text)} characters of {text[:40]!r}"
  wrong = action.kind == "call" and any(tool != "search" for tool, _ in action.calls)
  return f"{name}: called {action.calls[:3]}" if wrong else None


def _rolled_out(name: str, protocol, chance: random.Random) -> str | None:
  sampler = Hostile(chance)
  try:
    ((trajectory,),) = loop.collect(
      [QUESTION],
      sampler=sampler,
      tools=(Search(Pages(), topk=2),),
      tokenizer=Bytes(),
      protocol=protocol,
      limits=LIMITS,
      step=0,
      weight_version=0,
      samples_per_question=1,
    )
  except Exception as error:
    return f"{name}: a rollout raised {type(error).__name__} {error}"
  return _wrong(name, trajectory, sampler)


def _wrong(name: str, trajectory: Trajectory, sampler: Hostile) -> str | None:
  """What is wrong with a rollout: what a policy writes must never decide whether it is scored."""
  if trajectory.fault:
    return f"{name}: the policy lost its own rollout: {trajectory.fault}"
  if len(trajectory.token_ids) > LIMITS.max_tokens:
    return f"{name}: {len(trajectory.token_ids)} tokens, more than {LIMITS.max_tokens}"
  if not 0 <= rewards.make("exact_match + 0.1*format")(trajectory).total <= 1.1:
    return f"{name}: a reward out of range"
  if trajectory.num_policy_tokens > sum(sampler.written.values()):
    return f"{name}: more policy tokens than were sampled"
  return None
