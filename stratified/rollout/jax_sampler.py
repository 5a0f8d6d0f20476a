"""The in-process sampler: jitted prefill and decode over a fixed set of lanes that are refilled as rollouts end.

A lane holds the key-value cache of one rollout. `poll` admits what is queued, runs what each rollout has been fed
since its last turn, and decodes a block of tokens for every lane until some generation ends. The samples of a
question share one prefill of their prompt. What is sampled depends on (seed, step, question, sample, position)
alone: lanes, blocks and the clock have no part in it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratified import sharding
from stratified.policy import decoder
from stratified.rollout.sampler import Completion, Request

# Lengths that new context is padded to, so that few shapes are compiled.
BUCKETS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
CHUNK = 1024  # tokens of a context that one call runs; a longer one takes several, so that its scores stay small


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """lanes: rollouts decoded side by side. length: tokens a lane can hold. block: tokens decoded between two looks.

  temperature 0 is greedy decoding (log-probs are then at temperature 1). rows: lanes that one prefill call serves, fewer
  where their tokens would be more than prefill_tokens (its scores take prefill_tokens x length x heads x 4 bytes).
  """

  lanes: int
  length: int
  block: int = 8
  rows: int = 16
  prefill_tokens: int = 4096
  temperature: float = 1.0
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self):
    rules = {
        "lanes": self.lanes >= 1, "length": self.length >= 2, "block": self.block >= 1, "rows": self.rows >= 1,
        "prefill_tokens": self.prefill_tokens >= 1, "temperature": self.temperature >= 0, "top_p": 0 < self.top_p <= 1,
    }
    for name, holds in rules.items():
      if not holds:
        raise ValueError(f"sampler {name}={getattr(self, name)} is out of range; lanes, block, rows and prefill_tokens are at least 1, "
                         "length at least 2, temperature at least 0, top_p in (0, 1]")


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
  """Implements stratified.rollout.sampler.Sampler on one device."""

  def __init__(self, config: decoder.DecoderConfig, sampler: SamplerConfig, tokenizer, device=None):
    self._model, self._config, self._tokenizer = config, sampler, tokenizer
    self._device = device or jax.local_devices()[0]
    self._params = None
    self._cache = None
    self._lanes: list[_Lane | None] = [None] * sampler.lanes
    self._by_key: dict[tuple[int, int, int], int] = {}
    self._queue: list[Request] = []
    self._round = 0
    self.stats = {"decoded": 0, "lane_steps": 0, "prefilled": 0, "prefill_slots": 0}

  def load(self, params: Any, step: int) -> None:
    """Samples from `params` (the trainer's, sharded or not) from now on; every cached prefix is forgotten."""
    del step
    if self._busy():
      raise RuntimeError("load() while generations are running: poll them to their end first")
    whole = {name: sharding.local_copy(value, self._device, decoder.seen_dtype(self._model, name))
             for name, value in params.items()}
    self._params = _unstack(self._model, whole)
    if self._cache is None:
      with jax.default_device(self._device):
        self._cache = decoder.empty_cache(self._model, self._config.lanes, self._config.length)
    self._lanes = [None] * self._config.lanes
    self._by_key.clear()

  def release(self) -> None:
    """Frees the device of weights and caches; `load` brings them back."""
    if self._busy():
      raise RuntimeError("release() while generations are running: poll them to their end first")
    self._params = self._cache = None
    self._lanes = [None] * self._config.lanes
    self._by_key.clear()

  def _busy(self) -> bool:
    return bool(self._queue) or any(lane and lane.request for lane in self._lanes)

  def submit(self, request: Request) -> None:
    if self._params is None:
      raise RuntimeError("submit() before load(): there are no parameters to sample from")
    if not request.token_ids or request.max_new_tokens < 1:
      raise ValueError(f"request {request.key}: needs a context and max_new_tokens of at least 1")
    if len(request.token_ids) + request.max_new_tokens > self._config.length:
      raise ValueError(f"request {request.key}: {len(request.token_ids)} tokens and {request.max_new_tokens} new ones "
                       f"exceed the lane length {self._config.length}; raise it or lower rollout.max_tokens")
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
      if lane.cached == context[:len(lane.cached)]:
        rest = context[len(lane.cached):]
      else:
        lane.cached, rest = [], context
      if not lane.cached and context:
        shared.setdefault(request.token_ids[:-1], []).append(index)
      elif rest:
        jobs.append((index, len(lane.cached), rest))
      lane.cached = context
    self._queue = waiting
    self._prefill(jobs + [(indices[0], 0, list(context)) for context, indices in shared.items()])
    self._share(shared)

  def _lane_for(self, request: Request) -> int | None:
    """The rollout's own lane, else a free one, else that of the rollout that has waited longest for its next turn."""
    if request.key in self._by_key:
      return self._by_key[request.key]
    free = [i for i, lane in enumerate(self._lanes) if lane is None]
    if not free:
      queued = {r.key for r in self._queue}
      idle = [i for i, lane in enumerate(self._lanes) if lane.request is None and lane.key not in queued]
      free = sorted(idle, key=lambda i: self._lanes[i].last_used)[:1]
    if not free:
      return None
    index = free[0]
    if self._lanes[index]:
      del self._by_key[self._lanes[index].key]
    self._lanes[index] = _Lane(request.key, [])
    self._by_key[request.key] = index
    return index

  def _prefill(self, jobs) -> None:
    """Runs (lane, start, tokens) jobs, those of like length together."""
    jobs = sorted(jobs, key=lambda job: (len(job[2]), job[0]))
    length, longest = self._config.length, max((len(tokens) for _, _, tokens in jobs), default=0)
    if longest > CHUNK:
      for first in range(0, longest, CHUNK):
        self._prefill([(index, start + first, tokens[first:first + CHUNK]) for index, start, tokens in jobs if len(tokens) > first])
      return
    while jobs:
      width = bucket(len(jobs[-1][2]))
      rows = self._config.rows_for(width)
      jobs, part = jobs[:-rows], jobs[-rows:]
      lane = np.full(rows, self._config.lanes, np.int32)
      token = np.zeros((rows, width), np.int32)
      position = np.full((rows, width), length, np.int32)
      for row, (index, start, tokens) in enumerate(part):
        lane[row] = index
        token[row, :len(tokens)] = tokens
        position[row, :len(tokens)] = np.arange(start, start + len(tokens))
        self.stats["prefilled"] += len(tokens)
      self.stats["prefill_slots"] += rows * width
      self._cache = _prefill(self._model, self._params, self._cache, lane, token, position)

  def _share(self, shared) -> None:
    """Copies a prompt's keys and values from the lane that ran it to the other samples of the question."""
    pairs = [(indices[0], other) for indices in shared.values() for other in indices[1:]]
    if pairs:
      source, target = (np.full(self._config.lanes, self._config.lanes, np.int32) for _ in range(2))
      source[:len(pairs)], target[:len(pairs)] = zip(*pairs)
      self._cache = _copy_lanes(self._cache, source, target)

  def _decode_block(self) -> list[Completion]:
    c = self._config
    token, key = np.zeros(c.lanes, np.int32), np.zeros((c.lanes, 3), np.int32)
    position = np.full(c.lanes, c.length, np.int32)
    active = [i for i, lane in enumerate(self._lanes) if lane and lane.request]
    for i in active:
      lane = self._lanes[i]
      token[i] = lane.tokens[-1] if lane.tokens else lane.request.token_ids[-1]
      position[i], key[i] = len(lane.cached), lane.key
    self._cache, tokens, log_probs = _decode(
        self._model, c.block, c.temperature, c.top_p, c.seed, self._params, self._cache, token, position, key)
    tokens, log_probs = np.asarray(tokens), np.asarray(log_probs)
    self.stats["lane_steps"] += c.block * c.lanes
    return [done for i in active if (done := self._take(i, tokens[:, i].tolist(), log_probs[:, i].tolist()))]

  def _take(self, index: int, tokens: list[int], log_probs: list[float]) -> Completion | None:
    """Appends a block's tokens to a lane as far as they count; the completion where its generation ends."""
    lane = self._lanes[index]
    request = lane.request
    room = request.max_new_tokens - len(lane.tokens)
    count, finish = self._stop_at(lane.tokens, tokens[:room], request.stop)
    if finish is None and count == room:
      finish = "length"
    # The last token has been sampled but not run: it opens the next block or the next turn's context.
    fed = [lane.tokens[-1] if lane.tokens else request.token_ids[-1]] + tokens[:count - 1]
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
      # Attention weighs what it may not see with 0, and 0 x NaN is NaN: the lane's next rollout needs it clean.
      self._cache = jax.tree.map(lambda x: x.at[index].set(0), self._cache)
      lane.cached.clear()
      return Completion(lane.key, tuple(lane.tokens), tuple(lane.log_probs), "fault",
                        fault="the sampler's log-probs are not finite: the parameters have diverged")
    return Completion(lane.key, tuple(lane.tokens), tuple(lane.log_probs), finish)

  def _stop_at(self, before: list[int], new: list[int], stop: tuple[str, ...]) -> tuple[int, str | None]:
    """How many of the new tokens count, and whether the last of them ends the generation."""
    eos = self._tokenizer.eos_id
    if eos in new:
      new = new[:new.index(eos) + 1]
    # A stop string may begin in earlier tokens: one that adds text per token spans at most its own length of them.
    window = before[-max(map(len, stop), default=0):] if stop else []
    found = lambda n: any(s in self._tokenizer.decode(window + new[:n]) for s in stop)
    if stop and found(len(new)):
      low, high = 0, len(new)
      while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
      return high, "stop"
    return len(new), "stop" if new and new[-1] == eos else None


def bucket(length: int) -> int:
  """The length that new context of `length` tokens is padded to."""
  return next((bucket for bucket in BUCKETS if bucket >= length), -(-length // 1024) * 1024)


@functools.partial(jax.jit, static_argnums=0)
def _unstack(model, params):
  return decoder.unstack(model, params)


def lower_prefill(model, params, cache, lane_b, token_bt, position_bt):
  """What a compiler sees of a prefill call: arguments as `JaxSampler` passes them, real or abstract."""
  return _prefill.lower(model, params, cache, lane_b, token_bt, position_bt)


def lower_decode(model, config: SamplerConfig, params, cache, token_b, position_b, key_b3):
  """The same of a block of decoding."""
  return _decode.lower(model, config.block, config.temperature, config.top_p, config.seed, params, cache, token_b,
                       position_b, key_b3)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(model, params, cache, lane_b, token_bt, position_bt):
  return decoder.extend(model, params, token_bt, position_bt, cache, lane_b)[1]


@functools.partial(jax.jit, donate_argnums=0)
def _copy_lanes(cache, source_b, target_b):
  return jax.tree.map(lambda x: x.at[target_b].set(x[source_b], mode="drop"), cache)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=6)
def _decode(model, block, temperature, top_p, seed, params, cache, token_b, position_b, key_b3):
  """`block` tokens for every lane: (cache, tokens [block, B], log-probs [block, B])."""
  fold = jax.vmap(lambda k, x: jax.random.fold_in(k, x))
  keys = jnp.broadcast_to(jax.random.key(seed), token_b.shape)
  for part in range(3):
    keys = fold(keys, key_b3[:, part])

  def step(carry, _):
    cache, token, position = carry
    x, cache = decoder.extend(model, params, token[:, None], position[:, None], cache)
    z = decoder.logits(model, params, x)[:, 0]
    if temperature > 0:
      z = z / temperature
      token = sample(fold(keys, position + 1), nucleus(z, top_p))
    else:
      token = _argmax(z)
    logp = jnp.take_along_axis(jax.nn.log_softmax(z), token[:, None], -1)[:, 0]
    return (cache, token, position + 1), (token, logp)

  (cache, _, _), (tokens, log_probs) = jax.lax.scan(step, (cache, token_b, position_b), length=block)
  return cache, tokens, log_probs


def sample(keys_b, logits_bv):
  """One draw from each lane's softmax with its own key (Gumbel-max)."""
  gumbel = jax.vmap(lambda key: jax.random.gumbel(key, logits_bv.shape[1:]))(keys_b)
  return _argmax(logits_bv + gumbel)


def _argmax(x_bv):
  """jnp.argmax along v as two plain reductions: XLA's CPU backend runs a reduction of pairs 4 times as slowly."""
  x_bv = jax.lax.optimization_barrier(x_bv)  # or each reduction would draw the noise again
  index = jnp.arange(x_bv.shape[1], dtype=jnp.int32)
  return jnp.min(jnp.where(x_bv >= x_bv.max(-1, keepdims=True), index, x_bv.shape[1] - 1), axis=-1)


def nucleus(logits_bv, top_p: float):
  """Logits with everything outside the smallest set of mass top_p at -inf; the identity at 1."""
  if top_p >= 1:
    return logits_bv
  high_bv = jnp.sort(logits_bv, axis=-1)[:, ::-1]
  before = jnp.cumsum(jax.nn.softmax(high_bv), -1) - jax.nn.softmax(high_bv)
  least = jnp.min(jnp.where(before < top_p, high_bv, jnp.inf), axis=-1, keepdims=True)
  return jnp.where(logits_bv >= least, logits_bv, -jnp.inf)
