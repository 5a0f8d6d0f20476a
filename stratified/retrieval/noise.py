"""Mixes noise into a training search, more of it step by step: ZeroSearch's curriculum.

ZeroSearch (arXiv 2505.04588) lets a language model write useful or noisy documents while it trains,
and searches for real when it evaluates. Here both come from the corpus that is searched:

    useful   what the query finds, passages that hold a golden answer of the question first
    noisy    hard negatives: what the query finds next best, of that what holds no golden answer

A search at step i is noisy with the probability

    P(i) = start + (base^(i/m) - 1) / (base - 1) x (end - start)

the paper's with base 4, start 0 and end 0.5. Whether it is depends on (seed, step, question, query)
alone, so a resumed run meets the same noise, and rollouts of a question that ask the same read the
same.
"""

from collections.abc import Sequence
import dataclasses
import hashlib

from stratified.config import setting, Settings
from stratified.retrieval.corpus import Passage, RetrieverError
from stratified.rewards.matching import holds
from stratified.types import Question


@dataclasses.dataclass(frozen=True)
class NoiseSettings(Settings):
  """How much of a training search is noise; evaluations search without it."""

  SECTION = "retriever"
  noise_start: float = setting(
    0.0, "share of noisy searches at the first step", low=0, high=1, affects=["training"]
  )
  noise_end: float = setting(
    0.0,
    "share of noisy searches after noise_steps; 0 and 0 is none",
    low=0,
    high=1,
    affects=["training"],
  )
  noise_steps: int = setting(200, "steps that the share moves for", low=1, affects=["training"])
  noise_base: float = setting(
    4.0, "how late the share moves: near 1 is a line", above=1, high=1e6, affects=["training"]
  )
  noise_depth: int = setting(
    20,
    "passages of a query that useful and noisy ones are taken from",
    low=2,
    high=1000,
    affects=["training"],
  )

  @property
  def active(self) -> bool:
    return bool(self.noise_start or self.noise_end)

  def probability(self, step: int) -> float:
    """P(step), held at its end after `noise_steps`."""
    done = min(step / self.noise_steps, 1.0)
    risen = (self.noise_base**done - 1) / (self.noise_base - 1)
    return self.noise_start + risen * (self.noise_end - self.noise_start)


class Noisy:
  """Stands in front of a retriever for the rollouts of training, which tell their question."""

  def __init__(self, retriever, settings: NoiseSettings, seed: int):
    self.retriever, self.settings, self._seed = retriever, settings, seed

  @property
  def manifest(self) -> dict:
    return getattr(self.retriever, "manifest", {})

  def row_at(self, step: int) -> dict[str, float]:
    """What a step's row says of the search."""
    return {"rollout/noise_probability": self.settings.probability(step)}

  def is_noisy(self, query: str, step: int, question: Question) -> bool:
    """Draws whether a search is noisy."""
    key = "\0".join([str(self._seed), str(step), question.id, query])
    drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64
    return drawn < self.settings.probability(step)

  def search(self, queries: Sequence[str], topk: int):
    """Searches without noise, where nobody says who asks."""
    return self.retriever.search(queries, topk)

  def search_for(
    self, asked: Sequence[tuple[str, int, Question]], topk: int
  ) -> list[list[Passage] | RetrieverError]:
    """Searches for (query, step, question) each: at most `topk` passages, useful or noisy."""
    queries = list(dict.fromkeys(query for query, *_ in asked))
    depth = max(self.settings.noise_depth, 2 * topk)
    found = dict(zip(queries, self.retriever.search(queries, depth), strict=True))
    return [self._chosen(found[query], topk, query, *of) for query, *of in asked]

  def _chosen(self, found, topk: int, query: str, step: int, question: Question):
    if isinstance(found, RetrieverError):
      return found
    holding = [
      holds(f"{passage.title}\n{passage.text}", question.golden_answers) for passage in found
    ]
    if self.is_noisy(query, step, question):
      return [found[i] for i in range(topk, len(found)) if not holding[i]][:topk]
    order = sorted(range(len(found)), key=lambda i: not holding[i])  # stable: by rank within
    return [found[i] for i in order[:topk]]
