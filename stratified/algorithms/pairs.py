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
# student over the share of those that broke the format.
SKIPPED = ("all_wrong", "single", "no_search", "one_wrong", "lost", "invalid")


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
      "random_correct",
      "random_wrong",
    ),
    affects=["training"],
  )
  student: str = setting(
    "most_different",
    "the wrong rollout that is corrected: the one that differs most from the reference, or least, "
    "or any",
    choices=("most_different", "least_different", "random_wrong"),
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


class Pair(NamedTuple):
  """Two rollouts of a question, their rewards and how they differ (`distance`)."""

  reference: Trajectory
  student: Trajectory
  reference_reward: float
  student_reward: float
  distance: Distance


class Mined(NamedTuple):
  """Pairs in the order of the groups, and metrics of them all and by hops (`_hops_H`)."""

  pairs: list[Pair]
  stats: dict[str, float]


class _Question(NamedTuple):
  """What became of a group: a pair, or why there is none."""

  question: Question
  pair: Pair | None
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
  """Makes at most one pair of each group.

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
  return Mined([one.pair for one in found if one.pair], stats)


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
  result = lambda pair, skipped: _Question(
    question, pair, skipped, 0 < len(right) == len(valid), len(group) - len(valid)
  )
  if not right:
    return result(None, "all_wrong" if valid else "lost")
  wrong = [one for one in valid if reward_of[one.sample] < settings.correct_at]
  if len(valid) == 1:
    return result(None, "single")
  if settings.reference == "random_wrong":
    if len(wrong) < 2:
      return result(None, "one_wrong")
    reference = wrong[_draw(seed, question.id, "reference") % len(wrong)]
  else:
    reference = _reference(valid, right, settings.reference, seed)
  if reference is None:
    return result(None, "no_search")
  others, wrong = (
    [one for one in some if one.sample != reference.sample] for some in (valid, wrong)
  )
  student = _student(wrong or others, reference, settings.student, seed)
  rewards = reward_of[reference.sample], reward_of[student.sample]
  return result(Pair(reference, student, *rewards, distance(reference, student)), "")


def _reference(valid, right, rule: str, seed: int) -> Trajectory | None:
  """The right rollout that a rule takes, of equal ones the first sample; None if no one fits."""
  if rule == "random_correct":
    return right[_draw(seed, right[0].question.id, "reference") % len(right)]
  if rule == "stratified":
    searches = best_stratum(valid, right)
    of_stratum = [one for one in right if one.num_searches == searches]
    return min(of_stratum, key=lambda one: one.num_policy_tokens)
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
  pairs = [one for one in found if one.pair]
  invalid = [one for one in pairs if not well_formed(one.pair.student)]
  valid = len(pairs) - len(invalid)
  allowed = len(invalid) if most == 1 else math.floor(valid * most / (1 - most) + 1e-9)
  order = sorted(invalid, key=lambda one: _draw(seed, one.question.id, "invalid"))
  dropped = {id(one) for one in order[allowed:]}
  return [
    one._replace(pair=None, skipped="invalid") if id(one) in dropped else one for one in found
  ]


def _stats(found: Sequence[_Question]) -> dict[str, float]:
  """`pairs/count`, shares of the questions and, where there are pairs, means over them."""
  pairs = [one.pair for one in found if one.pair]
  share = lambda flags: sum(flags) / max(len(found), 1)
  stats = {
    "pairs/count": float(len(pairs)),
    "pairs/lost": float(sum(one.num_lost for one in found)),  # rollouts
    "pairs/all_right": share(one.all_right for one in found),
    "pairs/skipped_share": share(one.pair is None for one in found),
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
