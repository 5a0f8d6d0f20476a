"""Rewards single searches by what they add towards the gold documents (StepSearch, 2505.15107).

    reward of a turn = scale x (gain - redundancy)
    gain        mean over the question's gold documents of the rise of the best TF-IDF cosine that
                any passage has reached so far
    redundancy  share of the turn's passages that an earlier turn brought already

Passages are read as the policy read them, from the rollout's observations. TF-IDF is fitted to the
gold documents and all passages of the rollout: idf = log((1 + n) / (1 + df)) + 1, unit vectors.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import re

from stratified import files
from stratified.config import setting, Settings
from stratified.rewards.matching import normalize_answer
from stratified.types import Trajectory

_TITLE = re.compile(r"Doc \d+\(Title: ")
_TAG = re.compile(r"<[^<>]*>")


@dataclasses.dataclass(frozen=True)
class StepSettings(Settings):
  """Rewards of single searches."""

  SECTION = "reward"
  documents: str = setting(
    "",
    "ppo: rewards each search by this JSONL file, a question's id and its gold documents a line",
    affects=["training"],
  )
  step_scale: float = setting(
    0.6, "ppo: weight of a search's reward; StepSearch's code has 1.6", low=0, affects=["training"]
  )


def of(settings: StepSettings, decode: Callable[[Sequence[int]], str]) -> "StepReward | None":
  """Makes the reward of searches; None without a file.

  Raises ValueError or OSError, one sentence, for a file that can't be read.
  """
  if not settings.documents:
    return None
  return StepReward(read_documents(settings.documents), decode, settings.step_scale)


def read_documents(path: str) -> dict[str, list[str]]:
  """Reads {question id: gold documents} from lines of {"id", "documents"}.

  Raises ValueError, naming the number of bad lines, where one is none.
  """
  rows, broken = files.read_rows(path)
  broken += sum(not _is_row(row) for row in rows)
  if broken or not rows:
    held = f"holds {broken} bad lines" if rows or broken else "holds no line"
    raise ValueError(
      f"reward.documents={path!r} {held}; each must be a question, "
      '{"id": "...", "documents": ["the text of a gold document", ...]}'
    )
  return {row["id"]: row["documents"] for row in rows}


def _is_row(row: Mapping) -> bool:
  texts = row.get("documents")
  return (
    isinstance(row.get("id"), str)
    and isinstance(texts, list)
    and bool(texts)
    and all(isinstance(text, str) for text in texts)
  )


@dataclasses.dataclass(frozen=True)
class StepReward:
  """The rewards of a rollout's turns; decode: token ids -> text."""

  documents: Mapping[str, Sequence[str]]
  decode: Callable[[Sequence[int]], str]
  scale: float = 0.6

  def __call__(self, trajectory: Trajectory) -> list[float]:
    """One number a turn, 0 for one that called nothing.

    Raises ValueError for a question that the file does not have.
    """
    gold = self.documents.get(trajectory.question.id)
    if gold is None:
      raise ValueError(f"it has no gold documents of question {trajectory.question.id!r}")
    ids = [[name for call in turn.calls for name in call.results] for turn in trajectory.turns]
    found = added(gold, passages(trajectory, self.decode))
    return [
      self.scale * (gain - repeated) for gain, repeated in zip(found, redundancy(ids), strict=True)
    ]


def passages(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[list[str]]:
  """The passages that the policy read after each turn; [] after one that called nothing."""
  read: list[list[str]] = []
  for segment in trajectory.segments:
    if segment.origin == "policy":
      read.append([])
    elif segment.origin == "observation" and read:
      text = _TAG.sub(" ", decode(list(segment.token_ids)))
      read[-1] = _TITLE.split(text)[1:] or [text]
  read += [[]] * (len(trajectory.turns) - len(read))
  return [found if turn.calls else [] for turn, found in zip(trajectory.turns, read)]


def added(gold: Sequence[str], by_turn: Sequence[Sequence[str]]) -> list[float]:
  """Of each turn the gain: how much closer its passages come to the gold documents, on average."""
  flat = [text for texts in by_turn for text in texts]
  vectors = tf_idf([*gold, *flat])
  wanted, rest = vectors[: len(gold)], iter(vectors[len(gold) :])
  best, gains = [0.0] * len(gold), []
  for texts in by_turn:
    own = [next(rest) for _ in texts]
    reached = [max([old, *(_dot(one, x) for x in own)]) for one, old in zip(wanted, best)]
    gains.append((sum(reached) - sum(best)) / len(gold))
    best = reached
  return gains


def redundancy(by_turn: Sequence[Sequence[str]]) -> list[float]:
  """Of each turn the share of its results, by id, that an earlier turn had."""
  seen: set[str] = set()
  shares = []
  for ids in by_turn:
    shares.append(sum(one in seen for one in ids) / len(ids) if ids else 0.0)
    seen.update(ids)
  return shares


def tf_idf(texts: Sequence[str]) -> list[dict[str, float]]:
  """Unit vectors {word: weight} of texts, normalised as answers are."""
  counts = [collections.Counter(normalize_answer(text).split()) for text in texts]
  held = collections.Counter(word for count in counts for word in count)
  idf = {word: math.log((1 + len(texts)) / (1 + n)) + 1 for word, n in held.items()}
  vectors = []
  for count in counts:
    weights = {word: n * idf[word] for word, n in count.items()}
    size = math.sqrt(sum(w * w for w in weights.values())) or 1.0
    vectors.append({word: w / size for word, w in weights.items()})
  return vectors


def _dot(a: Mapping[str, float], b: Mapping[str, float]) -> float:
  return sum(weight * b[word] for word, weight in a.items() if word in b)
