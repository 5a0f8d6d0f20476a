"""The objects that flow through a training step; plain Python before `batching`, arrays after it.

Shape letters used as suffixes in kernels and policy code:

    q  question of the step           k  rollout (sample) of one question, a group
    a  micro-batch                    r  packed row of it
    m  mini-batch, one update each
    t  token position in a row        l  layer
    s  stratum                        b  lane of the sampler
    d  model width                    v  vocabulary
    h  attention head                 n  number of devices or processes

This module imports no jax: a NamedTuple is a pytree as it stands.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

Origin = Literal["prompt", "policy", "observation"]
Outcome = Literal["hit", "empty", "error"]


@dataclasses.dataclass(frozen=True)
class Question:
  """A question and every string that counts as its answer.

  `hops` is the number of facts that must be chained, None where nobody knows.
  """

  id: str
  text: str
  golden_answers: tuple[str, ...]
  source: str = ""
  hops: int | None = None


@dataclasses.dataclass(frozen=True)
class Segment:
  """Token ids of one origin in a row, exactly as sampled (policy) or as fed (prompt, observation).

  log_probs: the sampler's log-prob of each token after temperature; policy segments only.
  weight_versions: the training step whose parameters sampled each token. Empty where the sampler
    keeps one version for a whole generation, which is then the trajectory's.
  """

  token_ids: tuple[int, ...]
  origin: Origin
  log_probs: tuple[float, ...] = ()
  weight_versions: tuple[int, ...] = ()

  def __post_init__(self):
    expected = len(self.token_ids) if self.origin == "policy" else 0
    if len(self.log_probs) != expected:
      raise ValueError(
        f"a {self.origin} segment of {len(self.token_ids)} tokens carries {len(self.log_probs)} "
        "log-probs; "
        f"it needs {expected}: sampled tokens are never trained on with missing log-probs"
      )
    if self.weight_versions and len(self.weight_versions) != expected:
      raise ValueError(
        f"a {self.origin} segment of {len(self.token_ids)} tokens carries "
        f"{len(self.weight_versions)} "
        f"weight versions; it needs {expected} or none"
      )


@dataclasses.dataclass(frozen=True)
class Call:
  """One executed call of a tool.

  argument: its text: a query, an expression.
  outcome: hit (it brought something), empty, or error (the tool refused it, or was lost).
  results: what it brought: ids of passages, or texts.
  """

  tool: str
  argument: str
  outcome: Outcome
  results: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Turn:
  """One generation of the policy and what it was taken for.

  `text` is the decoded policy text of the turn; `calls` are the calls that it executed, in their
  order (none when the turn came too late to call a tool).
  """

  action: Literal["call", "answer", "invalid"]
  text: str
  calls: tuple[Call, ...] = ()


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One rollout of one question.

  answer: the last answer in the policy's own text; None when it gave none.
  stop: what ended the rollout: "answer", "turns", "length" or "fault".
  fault: the sentence that says what broke; a rollout with one is masked out of every statistic and
    never scored.
  weight_version: the training step whose parameters sampled it.
  side_tokens: number of tokens sampled beside the rollout (a pass that condenses what was found):
    part of its cost, no part of its tokens, never trained on.
  """

  question: Question
  sample: int
  segments: tuple[Segment, ...]
  turns: tuple[Turn, ...] = ()
  answer: str | None = None
  stop: str = "answer"
  fault: str | None = None
  weight_version: int = 0
  side_tokens: int = 0

  @property
  def oldest_weight_version(self) -> int:
    """The oldest step whose parameters sampled a token of this rollout."""
    return min(
      (version for segment in self.segments for version in segment.weight_versions),
      default=self.weight_version,
    )

  @property
  def token_ids(self) -> list[int]:
    return [token for segment in self.segments for token in segment.token_ids]

  @property
  def calls(self) -> tuple[Call, ...]:
    """Every executed call, in order."""
    return tuple(call for turn in self.turns for call in turn.calls)

  def num_calls(self, tool: str | None = None) -> int:
    """How many calls of the tool were executed, refused and empty ones too; None is every tool."""
    return sum(tool is None or call.tool == tool for call in self.calls)

  @property
  def num_searches(self) -> int:
    return self.num_calls("search")

  @property
  def num_invalid(self) -> int:
    return sum(turn.action == "invalid" for turn in self.turns)

  @property
  def num_policy_tokens(self) -> int:
    return sum(len(segment.token_ids) for segment in self.segments if segment.origin == "policy")


class Batch(NamedTuple):
  """What one step's updates see: packed rows in micro-batches, and what belongs to the rollouts.

  Arrays over tokens are [A, R, T]; those over rollouts are [Q, K]:

  token_art, position_art, segment_art: int32; segment 0 is padding, positions restart in each.
  policy_art: float32, 1 where token_art was sampled by the policy (its log-prob comes from t - 1).
  sampler_logp_art: float32, the sampler's log-prob there, 0 elsewhere.
  trajectory_art: int32, index q * K + k of the token's trajectory, 0 on padding.
  stream_art: {name: float32}, the numbers that the method gives each token (`Algorithm.streams`); a
    loss counts its token as much as the stream of its name says.
  first_m: int32 [M + 1]; mini-batch m is the micro-batches from first_m[m] to first_m[m + 1] - 1,
    and those from first_m[M] on hold nothing.
  mass_qk: {name: float32}, the sum of each stream over a rollout's tokens.
  array_qk: {name: [Q, K, ...]}, what else the method takes from the rollouts (`Algorithm.arrays`).
  teacher_art: {} where a method has no teacher. A teacher reads the same rollouts after prompts of
    its own, in rows of its own length T', int32: "token", "position", "segment" [A, R, T'], and
    "at" [A, R, T], where in the teacher's row the token of the rollout's row stands; 0 where it is
    not read by both.
  reward_qk, valid_qk: float32; stratum_qk: int32; valid 0 marks a rollout lost to a fault.
  """

  token_art: Any
  position_art: Any
  segment_art: Any
  policy_art: Any
  sampler_logp_art: Any
  trajectory_art: Any
  stream_art: dict[str, Any]
  first_m: Any
  mass_qk: dict[str, Any]
  array_qk: dict[str, Any]
  reward_qk: Any
  stratum_qk: Any
  valid_qk: Any
  teacher_art: dict[str, Any] = {}


class TrainState(NamedTuple):
  """Everything that a checkpoint holds. `step` counts rollout batches, the position in the data.

  params: the policy alone. critic: what a method trains beside it; None for most. With a critic
    opt_state is {"policy": ..., "critic": ...}.
  """

  step: Any
  params: Any
  opt_state: Any
  reference: Any
  skipped_in_a_row: Any
  critic: Any = None
