"""Samples in this process: jitted prefill and decode over lanes that are refilled as rollouts end.

A lane holds the key-value cache of one rollout. `poll` admits what is queued, runs what each
rollout has been fed since its last turn, and decodes blocks of tokens for every lane until some
generation ends. The samples of a question share one prefill of their prompt. What is sampled
depends on (seed, step, question, sample, position) alone, never on lanes, blocks or the clock.
"""

import collections
import dataclasses
from typing import Any

import jax
import numpy as np

from stratified import sharding
from stratified.config import setting, Settings
from stratified.policy import decoder
from stratified.sampling import lane_programs
from stratified.sampling.interface import check_sampling, Completion, Request

# Lengths that new context is padded to, so that few shapes are compiled.
BUCKETS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# tokens of a context that one call runs; a longer one takes several, so that its scores stay small
CHUNK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig(Settings):
  """What the in-process sampler is made of.

  length: tokens that a lane can hold. temperature: 0 is greedy decoding, with log-probs at
  temperature 1. A prefill call serves fewer lanes than `rows` where their tokens would be more than
  prefill_tokens (its scores take prefill_tokens x length x heads x 4 bytes).
  """

  SECTION = "sampler"
  lanes: int = setting(
    64, "rollouts side by side on each device", low=1, high=65536, affects=["training"]
  )
  block: int = setting(
    16, "tokens decoded between two looks", low=1, high=4096, affects=["training"]
  )
  rows: int = setting(
    16, "lanes that one prefill call serves", low=1, high=65536, affects=["training"]
  )
  prefill_tokens: int = setting(
    4096, "tokens of one prefill call, padding included", low=1, high=2**20, affects=["training"]
  )
  length: int
  temperature: float = 1.0
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self):
    super().__post_init__()
    check_sampling(self.temperature, self.top_p)
    if self.length < 2:
      raise ValueError(f"a lane of length={self.length} tokens is too short; it needs at least 2")

  def rows_for(self, width: int) -> int:
    """Rows of a prefill call of `width` tokens each."""
    return max(1, min(self.rows, self.lanes, self.prefill_tokens // width))


@dataclasses.dataclass
class _Lane:
  """A rollout's place: `cached` are the tokens whose keys and values the lane holds."""

  key: tuple[int, int, int]
  cached: list[int]
  request: Request | None = None
  tokens: list[int] = dataclasses.field(default_factory=list)
  log_probs: list[float] = dataclasses.field(default_factory=list)
  last_used: int = 0


class JaxSampler:
  """Implements sampling.interface.Sampler on this process's first device, or those given.

  Lane i lies on device i // lanes of them. The samples of a question go to one device where it has
  room, to share the prefill of their prompt.
  """

  def __init__(
    self, config: decoder.DecoderConfig, sampler: SamplerConfig, tokenizer, devices=None
  ):
    self._model, self._config, self._tokenizer = config, sampler, tokenizer
    self._mesh = lane_programs.make_mesh(devices or jax.local_devices()[:1])
    # a padded vocabulary's ids without a token
    gaps = getattr(tokenizer, "gaps", lambda size: ())
    self._gaps = gaps(config.vocab_size)
    self._params = None
    self._cache = None
    self._forget()
    self._queue: list[Request] = []
    self._round = 0
    self.stats = {"decoded": 0, "lane_steps": 0, "prefilled": 0, "prefill_slots": 0}

  def load(self, params: Any, step: int) -> None:
    """Samples from `params` (the trainer's, sharded or not) from now on; forgets prefixes."""
    del step
    if self._busy():
      raise RuntimeError("load() while generations are running: poll them to their end first")
    place = lane_programs.replicated(self._mesh)
    self._params = None  # a device need not have room for those before beside the new ones
    copies = (
      (name, sharding.replica(value, place, decoder.seen_dtype(self._model, name)))
      for name, value in params.items()
    )
    self._params = lane_programs.unstack(self._model, copies)
    if self._cache is None:
      self._cache = lane_programs.empty_cache(
        self._mesh, self._model, self._config.lanes, self._config.length
      )
    self._forget()

  def release(self) -> None:
    """Frees the device of weights and caches; `load` brings them back."""
    if self._busy():
      raise RuntimeError("release() while generations are running: poll them to their end first")
    self._params = self._cache = None
    self._forget()

  def _forget(self) -> None:
    self._lanes: list[_Lane | None] = [None] * (self._config.lanes * self._mesh.size)
    self._by_key: dict[tuple[int, int, int], int] = {}
    self._home: dict[
      tuple[int, int], int
    ] = {}  # question -> the device that its samples should share

  def _busy(self) -> bool:
    return bool(self._queue) or any(lane and lane.request for lane in self._lanes)

  def submit(self, request: Request) -> None:
    if self._params is None:
      raise RuntimeError("submit() before load(): there are no parameters to sample from")
    if not request.token_ids or request.max_new_tokens < 1:
      raise ValueError(f"request {request.key}: needs a context and max_new_tokens of at least 1")
    if len(request.token_ids) + request.max_new_tokens > self._config.length:
      raise ValueError(
        f"request {request.key}: {len(request.token_ids)} tokens and {request.max_new_tokens} new "
        "ones "
        f"exceed the lane length {self._config.length}; raise it or lower rollout.max_tokens"
      )
    self._queue.append(request)

  def generate(self, requests: list[Request]) -> list[Completion]:
    """Submits all, polls to the end, returns in the order of the requests."""
    for request in requests:
      self.submit(request)
    done = {}
    while len(done) < len(requests):
      done |= {completion.key: completion for completion in self.poll()}
    return [done[request.key] for request in requests]

  def poll(self) -> list[Completion]:
    if not self._busy():
      return []
    while True:
      self._round += 1
      self._admit()
      done = self._decode_block()
      if done:
        return done

  def _admit(self) -> None:
    """Gives queued requests lanes, oldest first, and runs their context up to its last token."""
    jobs, waiting, shared = [], [], {}
    for request in self._queue:
      index = self._lane_for(request)
      if index is None:
        waiting.append(request)
        continue
      lane = self._lanes[index]
      lane.request, lane.tokens, lane.log_probs, lane.last_used = request, [], [], self._round
      context = list(request.token_ids[:-1])
      if lane.cached == context[: len(lane.cached)]:
        rest = context[len(lane.cached) :]
      else:
        lane.cached, rest = [], context
      if not lane.cached and context:
        shared.setdefault((index // self._config.lanes, request.token_ids[:-1]), []).append(index)
      elif rest:
        jobs.append((index, len(lane.cached), rest))
      lane.cached = context
    self._queue = waiting
    self._prefill(
      jobs + [(indices[0], 0, list(context)) for (_, context), indices in shared.items()]
    )
    self._share(shared.values())

  def _lane_for(self, request: Request) -> int | None:
    """The rollout's own lane, else a free one, else that of who has waited longest for a turn."""
    if request.key in self._by_key:
      return self._by_key[request.key]
    free = self._free(request.key[:2])
    if not free:
      queued = {r.key for r in self._queue}
      idle = [
        i for i, lane in enumerate(self._lanes) if lane.request is None and lane.key not in queued
      ]
      free = sorted(idle, key=lambda i: self._lanes[i].last_used)[:1]
    if not free:
      return None
    index = free[0]
    if self._lanes[index]:
      del self._by_key[self._lanes[index].key]
    self._lanes[index] = _Lane(request.key, [])
    self._by_key[request.key] = index
    self._home[request.key[:2]] = index // self._config.lanes
    return index

  def _free(self, question: tuple[int, int]) -> list[int]:
    """Free lanes: the question's own device first, then the device that has most of them."""
    free = [i for i, lane in enumerate(self._lanes) if lane is None]
    if self._mesh.size == 1:
      return free
    device_of = lambda i: i // self._config.lanes
    count = collections.Counter(map(device_of, free))
    home = self._home.get(question)
    return sorted(free, key=lambda i: (device_of(i) != home, -count[device_of(i)], i))

  def _prefill(self, jobs) -> None:
    """Runs (lane, start, tokens) jobs, those of like length together."""
    jobs = sorted(jobs, key=lambda job: (len(job[2]), job[0]))
    length, longest = self._config.length, max((len(tokens) for _, _, tokens in jobs), default=0)
    if longest > CHUNK:
      for first in range(0, longest, CHUNK):
        self._prefill(
          [
            (index, start + first, tokens[first : first + CHUNK])
            for index, start, tokens in jobs
            if len(tokens) > first
          ]
        )
      return
    c, size = self._config, self._mesh.size
    of = [[job for job in jobs if job[0] // c.lanes == device] for device in range(size)]
    while any(of):
      width = bucket(max(len(jobs[-1][2]) for jobs in of if jobs))
      rows = c.rows_for(width)
      lane = np.full(size * rows, c.lanes, np.int32)
      token = np.zeros((size * rows, width), np.int32)
      position = np.full((size * rows, width), length, np.int32)
      for device, jobs in enumerate(of):
        of[device], part = jobs[:-rows], jobs[-rows:]
        for row, (index, start, tokens) in enumerate(part, device * rows):
          lane[row] = index % c.lanes
          token[row, : len(tokens)] = tokens
          position[row, : len(tokens)] = np.arange(start, start + len(tokens))
          self.stats["prefilled"] += len(tokens)
      self.stats["prefill_slots"] += token.size
      self._cache = lane_programs.prefill(
        self._mesh, self._model, self._params, self._cache, lane, token, position
      )

  def _share(self, shared) -> None:
    """Copies a prompt's keys and values from the lane that ran it to its question's other lanes."""
    lanes = self._config.lanes
    source, target = (np.full(len(self._lanes), lanes, np.int32) for _ in range(2))
    used = collections.Counter()
    for first, *others in shared:
      for other in others:
        device = other // lanes
        at = device * lanes + used[device]
        source[at], target[at] = first % lanes, other % lanes
        used[device] += 1
    if used:
      self._cache = lane_programs.copy_lanes(self._mesh, self._cache, source, target)

  def _decode_block(self) -> list[Completion]:
    c = self._config
    lanes = len(self._lanes)
    token, key = np.zeros(lanes, np.int32), np.zeros((lanes, 3), np.int32)
    position = np.full(lanes, c.length, np.int32)
    active = [i for i, lane in enumerate(self._lanes) if lane and lane.request]
    for i in active:
      lane = self._lanes[i]
      token[i] = lane.tokens[-1] if lane.tokens else lane.request.token_ids[-1]
      position[i], key[i] = len(lane.cached), lane.key
    self._cache, tokens, log_probs = lane_programs.decode(
      self._mesh,
      self._model,
      c.block,
      c.temperature,
      c.top_p,
      c.seed,
      self._params,
      self._cache,
      token,
      position,
      key,
      gaps=self._gaps,
    )
    tokens, log_probs = np.asarray(tokens), np.asarray(log_probs)
    self.stats["lane_steps"] += c.block * lanes
    return [
      done
      for i in active
      if (done := self._take(i, tokens[:, i].tolist(), log_probs[:, i].tolist()))
    ]

  def _take(self, index: int, tokens: list[int], log_probs: list[float]) -> Completion | None:
    """Appends a block's tokens to a lane as far as they count; returns a completion at the end."""
    lane = self._lanes[index]
    request = lane.request
    room = request.max_new_tokens - len(lane.tokens)
    count, finish = self._stop_at(lane.tokens, tokens[:room], request.stop)
    if finish is None and count == room:
      finish = "length"
    # The last token has been sampled but not run: it opens the next block or the next turn's
    # context.
    fed = [lane.tokens[-1] if lane.tokens else request.token_ids[-1]] + tokens[: count - 1]
    lane.cached.extend(fed)
    lane.tokens.extend(tokens[:count])
    lane.log_probs.extend(log_probs[:count])
    self.stats["decoded"] += count
    if finish is None:
      return None
    lane.request, lane.last_used = None, self._round
    if request.last:
      del self._by_key[lane.key]
      self._lanes[index] = None
    if not np.all(np.isfinite(lane.log_probs)):
      # Attention weighs what it may not see with 0, and 0 x NaN is NaN: the lane's next rollout
      # needs it clean.
      self._cache = jax.tree.map(lambda x: x.at[index].set(0), self._cache)
      lane.cached.clear()
      return Completion(
        lane.key,
        tuple(lane.tokens),
        tuple(lane.log_probs),
        "fault",
        fault="the sampler's log-probs are not finite: the parameters have diverged",
      )
    return Completion(lane.key, tuple(lane.tokens), tuple(lane.log_probs), finish)

  def _stop_at(
    self, before: list[int], new: list[int], stop: tuple[str, ...]
  ) -> tuple[int, str | None]:
    """How many of the new tokens count, and whether the last of them ends the generation."""
    ends = (self._tokenizer.eos_id, *getattr(self._tokenizer, "other_ends", ()))
    ended = [new.index(end) for end in ends if end in new]
    if ended:
      new = new[: min(ended) + 1]
    # A stop string may begin in earlier tokens: one that adds text per token spans at most its own
    # length of them.
    window = before[-max(map(len, stop), default=0) :] if stop else []
    found = lambda n: any(s in self._tokenizer.decode(window + new[:n]) for s in stop)
    if stop and found(len(new)):
      low, high = 0, len(new)
      while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
      return high, "stop"
    return len(new), "stop" if new and new[-1] in ends else None


def bucket(length: int) -> int:
  """The length that new context of `length` tokens is padded to."""
  return next((bucket for bucket in BUCKETS if bucket >= length), -(-length // 1024) * 1024)
