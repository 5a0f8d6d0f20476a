"""Mines pairs of rollouts of one question: a reference to learn from, and a student's to correct.

    pairs, stats = mine(groups, rewards, settings, seed=0)

Search-E1 (arXiv 2605.22511): of each question with a right rollout, the reference is the right one
with the fewest searches; the student is the wrong one that differs most from it, and if none is
wrong, the right one that does. A rollout is right when its reward is at least
`pairs.correct_at`. No rollout is both; one lost to a fault is neither. What is drawn at random is
drawn by seed and question id, so it depends on no order.

The fewest searches pull a policy towards answering from memory: `stratified` takes the stratum of
the highest share of right rollouts instead. `random_wrong` is a control: the reference is a wrong
rollout and the student another wrong one, of questions with a right one too, so that the teacher
gets a hint of the usual form that knows no answer.

Neighbours choose otherwise: `shortest_correct` and `longest_wrong` are SSOPD's (arXiv 2605.17497),
`every_correct` is rejection sampling's (each right rollout is a reference), and a pair may have a
second wrong rollout, with which RLCSD (2606.11709) contrasts the reference.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import math
from typing import NamedTuple

from stratified.config import setting, Settings
from stratified.rewards import normalize_answer, well_formed
from stratified.types import Question, Trajectory

Distance = tuple[int, float, int]

# Why a question has no pair: no right rollout; a single valid one; with `fewest_searches_some` no
# right one that searched; with `random_wrong` fewer than two wrong ones; every rollout lost; its
# student over the share of those that broke the format; no wrong one left to contrast with.
SKIPPED = ("all_wrong", "single", "no_search", "one_wrong", "lost", "invalid", "no_contrast")


@dataclasses.dataclass(frozen=True)
class PairSettings(Settings):
  """Which rollouts become pairs."""

  SECTION = "pairs"
  reference: str = setting(
    "fewest_searches",
    "the right rollout that a teacher sees; random_wrong, a control, shows a wrong one",
    choices=(
      "fewest_searches",
      "fewest_searches_some",
      "stratified",
      "shortest_correct",
      "random_correct",
      "every_correct",
      "random_wrong",
    ),
    affects=["training"],
  )
  student: str = setting(
    "most_different",
    "the wrong rollout that is corrected: least like the reference, most like it, the longest, any",
    choices=("most_different", "least_different", "longest_wrong", "random_wrong"),
    affects=["training"],
  )
  correct_at: float = setting(
    1.0, "the reward from which a rollout is right; below 1 for F1", affects=["training"]
  )
  num_questions: int = setting(
    12800, "questions that rollouts are made for", low=1, affects=["training"]
  )
  samples_per_question: int = setting(
    0, "rollouts of each; 0 is rollout.samples_per_question", low=0, affects=["training"]
  )
  max_invalid_share: float = setting(
    0.5,
    "most of the pairs whose student was cut off, gave no answer or broke the format",
    low=0,
    high=1,
    affects=["training"],
  )
  source: str = setting(
    "fresh",
    "fresh rollouts, or those of the last reinforcement steps",
    choices=("fresh", "last_steps"),
    affects=["training"],
  )
  contrast: float = setting(
    0.0,
    "how much of a wrong rollout's effect as a hint is taken off the reference's; 1 is RLCSD's",
    low=0,
    high=1,
    affects=["training"],
  )

  def __post_init__(self):
    super().__post_init__()
    if self.contrast and self.reference == "random_wrong":
      raise ValueError(
        f"pairs.contrast={self.contrast} with pairs.reference='random_wrong' would contrast one "
        "wrong rollout with another; choose a rule for right references, or contrast 0"
      )


class Pair(NamedTuple):
  """Two rollouts of a question, their rewards and how they differ (`distance`).

  right_share: of the question's rollouts that were not lost, those that are right.
  contrast: a wrong one beside the student, where a teacher is contrasted with it.
  """

  reference: Trajectory
  student: Trajectory
  reference_reward: float
  student_reward: float
  distance: Distance
  right_share: float = 0.5
  contrast: Trajectory | None = None


class Mined(NamedTuple):
  """Pairs in the order of the groups, and metrics of them all and by hops (`_hops_H`)."""

  pairs: list[Pair]
  stats: dict[str, float]


class _Question(NamedTuple):
  """What became of a group: its pairs, or why there are none."""

  question: Question
  pairs: tuple[Pair, ...]
  skipped: str  # "", one of SKIPPED
  all_right: bool
  num_lost: int


def mine(
  groups: Sequence[Sequence[Trajectory]],
  rewards: Sequence[Sequence[float | None]],
  settings: PairSettings,
  *,
  seed: int,
) -> Mined:
  """Makes at most one pair of each group, or with `every_correct` one of each right rollout.

  Pairs whose student is not well formed are dropped, drawn by seed and question, until they are at
  most `max_invalid_share` of all.

  Args:
    groups, rewards: [Q][K]; the reward of a rollout lost to a fault is never read.
    seed: of what is drawn at random.

  Raises ValueError where a rollout has no finite reward, or a group another number of them.
  """
  found = []
  for group, reward_k in zip(groups, rewards, strict=True):
    _check(group, reward_k)
    found.append(_mine_one(group, reward_k, settings, seed))
  found = _cap_invalid(found, settings.max_invalid_share, seed)
  stats = _stats(found)
  for hops in sorted({one.question.hops for one in found} - {None}):
    of_hops = _stats([one for one in found if one.question.hops == hops])
    stats |= {f"{key}_hops_{hops}": value for key, value in of_hops.items()}
  return Mined([pair for one in found for pair in one.pairs], stats)


def _check(group, reward_k):
  if len(group) != len(reward_k) or not group:
    raise ValueError(f"a group of {len(group)} rollouts has {len(reward_k)} rewards")
  for one, reward in zip(group, reward_k):
    if one.fault is None and (reward is None or not math.isfinite(reward)):
      raise ValueError(
        f"rollout {one.sample} of question {one.question.id!r} has the reward {reward}; a pair "
        "needs a finite one"
      )


def _mine_one(group, reward_k, settings: PairSettings, seed: int) -> _Question:
  question = group[0].question
  ranked = sorted(
    ((one, reward) for one, reward in zip(group, reward_k) if one.fault is None),
    key=lambda pair: pair[0].sample,
  )
  valid, reward_of = [one for one, _ in ranked], {one.sample: reward for one, reward in ranked}
  right = [one for one in valid if reward_of[one.sample] >= settings.correct_at]
  result = lambda pairs, skipped: _Question(
    question, tuple(pairs), skipped, 0 < len(right) == len(valid), len(group) - len(valid)
  )
  if not right:
    return result([], "all_wrong" if valid else "lost")
  wrong = [one for one in valid if reward_of[one.sample] < settings.correct_at]
  if len(valid) == 1:
    return result([], "single")
  if settings.reference == "random_wrong" and len(wrong) < 2:
    return result([], "one_wrong")
  if settings.contrast and len(wrong) < 2:
    return result([], "no_contrast")
  if settings.reference == "every_correct":
    references = right
  elif settings.reference == "random_wrong":
    references = [wrong[_draw(seed, question.id, "reference") % len(wrong)]]
  else:
    references = [_reference(valid, right, settings.reference, seed)]
  if references == [None]:
    return result([], "no_search")
  share = len(right) / len(valid)
  pairs = [_pair(one, valid, wrong, settings, seed) for one in references]
  rewards = lambda pair: {
    "reference_reward": reward_of[pair.reference.sample],
    "student_reward": reward_of[pair.student.sample],
  }
  return result([pair._replace(right_share=share, **rewards(pair)) for pair in pairs], "")


def _pair(reference, valid, wrong, settings: PairSettings, seed: int) -> Pair:
  """The reference with its student and what it is contrasted with; without their rewards."""
  besides = lambda some, one: [other for other in some if other.sample != one.sample]
  pool = besides(wrong, reference) or besides(valid, reference)
  student = _student(pool, reference, settings.student, seed)
  contrast = None
  if settings.contrast:
    rest = besides(wrong, student)
    contrast = rest[_draw(seed, reference.question.id, "contrast") % len(rest)]
  return Pair(reference, student, 0.0, 0.0, distance(reference, student), contrast=contrast)


def _reference(valid, right, rule: str, seed: int) -> Trajectory | None:
  """The right rollout that a rule takes, of equal ones the first sample; None if no one fits."""
  if rule == "random_correct":
    return right[_draw(seed, right[0].question.id, "reference") % len(right)]
  if rule == "stratified":
    searches = best_stratum(valid, right)
    of_stratum = [one for one in right if one.num_searches == searches]
    return min(of_stratum, key=lambda one: one.num_policy_tokens)
  if rule == "shortest_correct":
    return min(right, key=lambda one: one.num_policy_tokens)
  if rule == "fewest_searches_some":
    right = [one for one in right if one.num_searches]
  return min(right, key=lambda one: one.num_searches, default=None)


def best_stratum(valid: Sequence[Trajectory], right: Sequence[Trajectory]) -> int:
  """The number of searches whose rollouts are right most often.

  Of equal shares the one of more rollouts, then of fewer searches.
  """
  count = lambda group, searches: sum(one.num_searches == searches for one in group)
  return max(
    sorted({one.num_searches for one in valid}),
    key=lambda n: (count(right, n) / count(valid, n), count(valid, n)),
  )


def _student(pool, reference, rule: str, seed: int) -> Trajectory:
  if rule == "random_wrong":
    return pool[_draw(seed, reference.question.id, "student") % len(pool)]
  if rule == "longest_wrong":
    return max(pool, key=lambda one: one.num_policy_tokens)
  choose = {"most_different": max, "least_different": min}[rule]
  return choose(pool, key=lambda one: distance(reference, one))


def distance(one: Trajectory, other: Trajectory) -> Distance:
  """How two rollouts differ: compared as tuples, the number of searches counts before all else.

  (difference in number of searches, Jaccard distance of the sets of normalised words of their
  queries, difference in number of policy tokens). Without any word on both sides Jaccard's is 0.
  """
  words, others = query_words(one), query_words(other)
  union = words | others
  jaccard = 1 - len(words & others) / len(union) if union else 0.0
  return (
    abs(one.num_searches - other.num_searches),
    jaccard,
    abs(one.num_policy_tokens - other.num_policy_tokens),
  )


def query_words(trajectory: Trajectory) -> set[str]:
  """The normalised words of all queries of a rollout."""
  return {word for query in queries(trajectory) for word in normalize_answer(query).split()}


def queries(trajectory: Trajectory) -> list[str]:
  return [call.argument for call in trajectory.calls if call.tool == "search"]


def _draw(seed: int, question: str, what: str) -> int:
  """A random number of a question, the same wherever the question stands."""
  key = f"{seed}/{what}/{question}".encode()
  return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


def _cap_invalid(found: list[_Question], most: float, seed: int) -> list[_Question]:
  """Drops pairs whose student is not well formed, so that they are at most the share `most`."""
  pairs = [pair for one in found for pair in one.pairs]
  invalid = [pair for pair in pairs if not well_formed(pair.student)]
  valid = len(pairs) - len(invalid)
  allowed = len(invalid) if most == 1 else math.floor(valid * most / (1 - most) + 1e-9)
  order = sorted(invalid, key=lambda pair: _draw(seed, pair.reference.question.id, "invalid"))
  dropped = {id(pair) for pair in order[allowed:]}
  kept = []
  for one in found:
    left = tuple(pair for pair in one.pairs if id(pair) not in dropped)
    kept.append(one if left or not one.pairs else one._replace(skipped="invalid"))
    kept[-1] = kept[-1]._replace(pairs=left)
  return kept


def _stats(found: Sequence[_Question]) -> dict[str, float]:
  """`pairs/count`, shares of the questions and, where there are pairs, means over them."""
  pairs = [pair for one in found for pair in one.pairs]
  share = lambda flags: sum(flags) / max(len(found), 1)
  stats = {
    "pairs/count": float(len(pairs)),
    "pairs/lost": float(sum(one.num_lost for one in found)),  # rollouts
    "pairs/all_right": share(one.all_right for one in found),
    "pairs/skipped_share": share(not one.pairs for one in found),
  }
  for reason in SKIPPED:
    stats[f"pairs/skipped_{reason}"] = share(one.skipped == reason for one in found)
  if not pairs:
    return stats
  means = {
    "reference_searches": lambda pair: pair.reference.num_searches,
    "student_searches": lambda pair: pair.student.num_searches,
    "search_distance": lambda pair: pair.distance[0],
    "query_distance": lambda pair: pair.distance[1],
    "student_invalid": lambda pair: not well_formed(pair.student),
  }
  return stats | {f"pairs/{name}": sum(map(of, pairs)) / len(pairs) for name, of in means.items()}
