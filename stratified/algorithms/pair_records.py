"""Makes pairs of rollouts the rows of a JSONL file that a person can read, and reads them back.

rows = records(pairs, decode, weights_hash)
pairs = restore(rows, weights_hash)
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from stratified.algorithms.pairs import distance, Pair, queries
from stratified.types import Call, Question, Segment, Trajectory, Turn


def records(
  pairs: Sequence[Pair], decode: Callable[[Sequence[int]], str], weights_hash: str
) -> list[dict[str, Any]]:
  """Makes each pair a JSON object that a person can read and `restore` can read back.

  decode: token ids -> text, special tokens kept. weights_hash: of the weights that sampled them.
  """
  return [
    {
      "question_id": pair.reference.question.id,
      "question": pair.reference.question.text,
      "golden_answers": list(pair.reference.question.golden_answers),
      "source": pair.reference.question.source,
      "hops": pair.reference.question.hops,
      "weights": weights_hash,
      "distance": dict(zip(("searches", "queries", "policy_tokens"), pair.distance)),
      "right_share": pair.right_share,
      "reference": _rollout(pair.reference, pair.reference_reward, decode),
      "student": _rollout(pair.student, pair.student_reward, decode),
    }
    | ({"contrast": _rollout(pair.contrast, None, decode)} if pair.contrast else {})
    for pair in pairs
  ]


def _rollout(trajectory: Trajectory, reward: float | None, decode) -> dict[str, Any]:
  return {
    "sample": trajectory.sample,
    "reward": None if reward is None else float(reward),
    "searches": trajectory.num_searches,
    "queries": queries(trajectory),
    "answer": trajectory.answer,
    "stop": trajectory.stop,
    "weight_version": trajectory.weight_version,
    "segments": [
      {
        "origin": segment.origin,
        "text": decode(list(segment.token_ids)),
        "token_ids": list(segment.token_ids),
      }
      for segment in trajectory.segments
    ],
    "turns": [dataclasses.asdict(turn) for turn in trajectory.turns],
  }


def restore(rows: Sequence[Mapping[str, Any]], weights_hash: str | None = None) -> list[Pair]:
  """Makes pairs of the rows of `records` again; the sampler's log-probs are not kept, and are 0.

  weights_hash: what every row must carry. Raises ValueError, naming the row, for one that is
  damaged, is of other weights, or has one rollout as both.
  """
  pairs = []
  for number, row in enumerate(rows, 1):
    try:
      pairs.append(_pair(row))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise ValueError(
        f"row {number} of the pairs is damaged ({type(error).__name__}: {error}); mine them again"
      ) from error
    if weights_hash is not None and row["weights"] != weights_hash:
      raise ValueError(
        f"row {number} of the pairs was made by the weights {row['weights']}, not by "
        f"{weights_hash}; mine them again"
      )
    if pairs[-1].reference.sample == pairs[-1].student.sample:
      raise ValueError(f"row {number} of the pairs has one rollout as both; mine them again")
  return pairs


def _pair(row) -> Pair:
  question = Question(
    row["question_id"], row["question"], tuple(row["golden_answers"]), row["source"], row["hops"]
  )
  reference, student = (_trajectory(question, row[part]) for part in ("reference", "student"))
  rewards = float(row["reference"]["reward"]), float(row["student"]["reward"])
  contrast = _trajectory(question, row["contrast"]) if "contrast" in row else None
  found = Pair(
    reference, student, *rewards, distance(reference, student), float(row["right_share"]), contrast
  )
  if found.distance != tuple(row["distance"].values()):
    raise ValueError(f"its distance is {found.distance}")
  return found


def _trajectory(question: Question, row) -> Trajectory:
  segments = tuple(
    Segment(
      tuple(one["token_ids"]),
      one["origin"],
      (0.0,) * len(one["token_ids"]) if one["origin"] == "policy" else (),
    )
    for one in row["segments"]
  )
  turns = tuple(
    Turn(
      turn["action"],
      turn["text"],
      tuple(Call(**{**call, "results": tuple(call["results"])}) for call in turn["calls"]),
    )
    for turn in row["turns"]
  )
  return Trajectory(
    question,
    row["sample"],
    segments,
    turns,
    row["answer"],
    row["stop"],
    weight_version=row["weight_version"],
  )
