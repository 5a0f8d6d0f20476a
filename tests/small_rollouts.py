"""Small decoders, tokenizers and rollouts that several test files share."""

import dataclasses

import jax
import numpy as np

from stratified import advantages
from stratified.algorithms.grpo import Grpo, PolicyLossSettings
from stratified.learner import batching
from stratified.learner.packing import Packing
from stratified.policy import decoder, weights
from stratified.types import Call, Question, Segment, Trajectory, Turn

QUESTION = Question("q", "Who?", ("Ada",))


def decoder_config(**changes) -> decoder.DecoderConfig:
  """Two layers of width 16, vocabulary 32."""
  sizes = dict(
    vocab_size=32, width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=24
  )
  return decoder.DecoderConfig(**sizes | changes)


def parameters(config: decoder.DecoderConfig, seed: int = 0, scale: float = 1.0):
  """Initial parameters as NumPy arrays; norms and biases moved off their starting values, the rest
  times `scale`."""
  rng = np.random.default_rng(seed)
  start = {
    name: np.asarray(value) for name, value in decoder.init(config, jax.random.key(seed)).items()
  }
  special = lambda name: weights.kind(name) in ("norm", "bias")
  return {
    name: value + 0.1 * rng.standard_normal(value.shape, np.float32)
    if special(name)
    else value * np.float32(scale)
    for name, value in start.items()
  }


def family(
  name: str = "gn", *, alpha: float = 0.6, num_strata: int = 3, max_tokens: int = 1, **loss
):
  """A method of the group family: its estimator and its loss."""
  return Grpo(
    advantages.AdvantageSettings(name=name, alpha=alpha),
    PolicyLossSettings(**loss),
    num_strata,
    max_tokens,
  )


def trajectory(*parts, searches: int = 0, **fields) -> Trajectory:
  """A rollout from (origin, token ids) or ("policy", token ids, log-probs) parts, with that many
  searches."""
  segments = []
  for origin, tokens, *log_probs in parts:
    known = log_probs[0] if log_probs else [-1.0] * len(tokens) if origin == "policy" else ()
    segments.append(Segment(tuple(tokens), origin, tuple(known)))
  turns = tuple(Turn("call", "", (Call("search", "who", "hit"),)) for _ in range(searches))
  return Trajectory(
    fields.pop("question", QUESTION), fields.pop("sample", 0), tuple(segments), turns, **fields
  )


def random_groups(
  questions: int, samples: int, *, vocab: int = 32, longest: int = 14, seed: int = 0
):
  """[Q][K] rollouts of prompt, turn, observation, turn, of random lengths, with random
  log-probs."""
  rng = np.random.default_rng(seed)
  groups = []
  for q in range(questions):
    prompt = ("prompt", rng.integers(1, vocab, rng.integers(1, 5)).tolist())
    groups.append([])
    for k in range(samples):
      sizes = rng.integers(1, longest // 3, 3)
      turn, seen, answer = (rng.integers(1, vocab, size).tolist() for size in sizes)
      logp = lambda tokens: (-rng.uniform(0.5, 4, len(tokens))).tolist()
      groups[-1].append(
        trajectory(
          prompt,
          ("policy", turn, logp(turn)),
          ("observation", seen),
          ("policy", answer, logp(answer)),
          sample=k,
        )
      )
  return groups


def resampled(groups, log_prob_of):
  """The groups with the log-probs that `log_prob_of(trajectory)` gives each of a rollout's
  tokens."""

  def renewed(one):
    logp, at, segments = np.asarray(log_prob_of(one)), 0, []
    for segment in one.segments:
      size = len(segment.token_ids)
      known = tuple(logp[at : at + size].tolist()) if segment.origin == "policy" else ()
      segments.append(dataclasses.replace(segment, log_probs=known))
      at += size
    return dataclasses.replace(one, segments=tuple(segments))

  return [[renewed(one) for one in group] for group in groups]


def collate(
  groups,
  *,
  rows: int = 2,
  length: int = 24,
  rewards=None,
  strata=None,
  num_strata: int = 3,
  micro=None,
  mini_batches: int = 1,
  algorithm=None,
  parts=None,
  steps=None,
):
  """A batch with rewards and strata of a fixed pattern unless given."""
  count = len(groups) * len(groups[0])
  shape = (len(groups), len(groups[0]))
  rewards = (
    (np.arange(count) % 3 == 0).astype(np.float32).reshape(shape) if rewards is None else rewards
  )
  strata = (np.arange(count) % num_strata).reshape(shape) if strata is None else strata
  packing = Packing.for_rollouts(count, length=length, rows=rows, mini_batches=mini_batches)
  if micro is not None:
    packing = dataclasses.replace(packing, micro=micro)
  return batching.collate(
    groups,
    packing=packing,
    algorithm=algorithm or family(),
    rewards=rewards,
    strata=strata,
    num_strata=num_strata,
    parts=parts,
    steps=steps,
  )


class OneCharacterEach:
  """A tokenizer whose token i is the character i, as bytes are; the last id of the vocabulary ends
  a text."""

  def __init__(self, vocab_size: int = 257, eos_id: int | None = None):
    self.vocab_size, self.eos_id = vocab_size, vocab_size - 1 if eos_id is None else eos_id

  def encode(self, text: str) -> list[int]:
    return list(text.encode("latin-1"))

  def decode(self, token_ids) -> str:
    return "".join("" if i == self.eos_id else chr(i) for i in token_ids)


class ThreeCharactersEach(OneCharacterEach):
  """A tokenizer whose tokens are three characters long, so that a string may begin and end inside
  them."""

  def decode(self, token_ids) -> str:
    return "".join(
      "" if i == self.eos_id else "".join(chr(97 + i // d % 3) for d in (1, 3, 9))
      for i in token_ids
    )
