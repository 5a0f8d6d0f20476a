"""Defines what a method is: which tokens feed which loss, how rewards become credit, the losses.

The learner is blind to the method. A step's loss is a sum of components; component `name` is

    sum over tokens of  weight(token) x loss(token)
    weight = stream / (what aggregation divides by)

The stream of that name says, on the host, how much each token counts. A step is

    before = outputs under the parameters of before the step       (only if `looks_before`)
    credit = algorithm.credit(batch, before, step)                 advantages, targets, statistics
    for each epoch and mini-batch:
      losses = algorithm.losses(outputs, before, credit, micro)    differentiated in the outputs

A method is one file: a subclass of `Algorithm` whose fields are its settings, with `make`, which
builds it from a config (see algorithms/__init__.py).
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stratified import sharding
from stratified.types import Batch, Trajectory


class Outputs(NamedTuple):
  """What the policy says of tokens, float32; arrays are [R, T] of a micro-batch or [A, R, T].

  logp, entropy: of each token given those before it, at the sampling temperature.
  reference_logp: the frozen reference's; None without one.
  heads: {name: value} of the critic's heads, read off what stands before the token; [R, T, N] of
    one with N > 1 numbers.
  divergence: between a teacher and the policy, for a method that has one (policy/divergence.py);
    all else is then None.
  """

  logp: Any
  entropy: Any
  reference_logp: Any
  heads: dict[str, Any]
  divergence: Any = None


class Credit(NamedTuple):
  """What a method makes of the rewards before the first update; no gradient flows through it.

  advantage_qk: [Q, K], each rollout's advantage for the records; the mean over its tokens where
    they differ.
  token: {name: [A, R, T] or [Q, K]}. `losses` gets each by token; a [Q, K] value stands at every
    token of its rollout.
  stats: {metric key: scalar}.
  valid: {stream: [Q, K]}, 1 on the rollouts that count in the loss of that stream and in what it is
    divided by; a stream that is not named counts all that were not lost.
  """

  advantage_qk: Any
  token: dict[str, Any]
  stats: dict[str, Any]
  valid: dict[str, Any] = {}


class Loss(NamedTuple):
  """One component's loss of each token, [R, T].

  means: {metric key: [R, T]}, averaged with the stream's weights.
  maxima: likewise, of which the largest value where the stream is above 0 is kept.
  aggregation: what the sum over tokens is divided by (see `losses.token_weights`).
  max_tokens: the constant of "constant".
  """

  value: Any
  means: dict[str, Any] = {}
  maxima: dict[str, Any] = {}
  aggregation: str = "token_mean"
  max_tokens: int = 1


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Base of the methods; a subclass says what differs.

  STREAMS: the names of the per-token numbers that `streams` gives.
  TAKES_STEPS: whether `streams` takes a third argument, the rewards of single turns.
  """

  STREAMS: ClassVar[tuple[str, ...]] = ("policy",)
  TAKES_STEPS: ClassVar[bool] = False

  def stages(self, num_steps: int) -> tuple["Stage", ...]:
    """The parts of a run after its warm start; by default `num_steps` of reinforcement."""
    return (Stage("reinforcement", "rollouts", num_steps, self),)

  @property
  def teacher(self) -> "Teacher | None":
    """Whom the policy is compared with; None for a method without a teacher."""
    return None

  @property
  def num_parts(self) -> int:
    """How many parts of the reward `credit` reads, in array_qk["reward_parts"] [Q, K, P]."""
    return 0

  @property
  def critic(self) -> "Critic | None":
    """What is trained beside the policy; None for a method without."""
    return None

  @property
  def looks_before(self) -> bool:
    """Whether `credit` or `losses` read what the policy said before the step's first update."""
    return False

  @property
  def learns_entropy(self) -> bool:
    """Whether a loss sends gradient through the entropy; without it none is computed."""
    return False

  def streams(self, trajectory: Trajectory, reward: float) -> dict[str, Sequence[float]]:
    """{name: one number a token} of a rollout, on the host; by default 1 on policy tokens."""
    return {"policy": by_origin(trajectory, policy=1.0)}

  def arrays(
    self, groups: Sequence[Sequence[Trajectory]], rewards: Sequence[Sequence[float]]
  ) -> dict[str, np.ndarray]:
    """{name: [Q, K, ...]} of whatever else `credit` needs; shapes must not change over a run."""
    return {}

  def has_signal(self, groups, rewards, strata, step: int, parts=None) -> list[bool]:
    """Whether each question's rollouts have an advantage that is not 0, on the host.

    A group without is sampled anew where `loss.resample_groups` says so. rewards, strata: [Q][K];
    parts: [Q][K][P], for a method that reads the reward's parts.
    """
    return [True] * len(groups)

  def idle(self, reward_qk: np.ndarray, valid_qk: np.ndarray) -> np.ndarray:
    """Marks the rollouts [Q, K] that count in no loss: they take no room in a batch's rows.

    It sees rewards on the host, before anything is packed; by default every rollout counts.
    """
    return np.zeros(reward_qk.shape, bool)

  def credit(self, batch: Batch, before: Outputs | None, step: Any) -> Credit:
    """Advantages and targets from the batch's rewards, in the jitted step."""
    raise TypeError(f"{type(self).__name__} defines no credit")

  def losses(
    self, outputs: Outputs, before: Outputs | None, credit: dict[str, Any], micro: Batch
  ) -> dict[str, Loss]:
    """{stream: Loss} of one micro-batch, in the jitted step; `micro` has [R, T] arrays."""
    raise TypeError(f"{type(self).__name__} defines no losses")


def by_origin(
  trajectory: Trajectory, *, policy: float, observation: float = 0.0, prompt: float = 0.0
) -> list[float]:
  """One number a token of the rollout, by who wrote it."""
  of = {"policy": policy, "observation": observation, "prompt": prompt}
  return [
    of[segment.origin] for segment in trajectory.segments for _ in range(len(segment.token_ids))
  ]


def by_rollout(x_art, trajectory_art, shape: tuple[int, int]):
  """[Q, K] sums over each rollout's tokens of [A, R, T] values, whole on every device."""
  count = shape[0] * shape[1]
  local = lambda x, index: jnp.zeros(count, x.dtype).at[index.reshape(-1)].add(x.reshape(-1))
  if not sharding.meshed():
    return local(x_art, trajectory_art).reshape(shape)
  rows = sharding.spec(None, "row", None)
  summed = jax.shard_map(
    lambda x, index: jax.lax.psum(local(x, index), ("data", "fsdp")),
    in_specs=(rows, rows), out_specs=jax.P(), check_vma=False,
  )(x_art, trajectory_art)  # fmt: skip
  return sharding.constrain(summed.reshape(shape), "question", None)


class Critic(NamedTuple):
  """Weights that a method trains beside the policy's, with an optimizer of their own.

  They are in checkpoints, never in a sampler, the KL's reference or an export.

  heads: {name: how many numbers of each token} (policy/heads.py).
  optimizer: the arguments of `optimizer.make`; its warm-up counts steps.
  body: whose hidden states the heads read: "policy", which their losses train too, or "own", a
    second decoder that begins as a copy of the policy.
  alone_steps: the first steps of a stage, in which the policy stays as it is.
  """

  heads: dict[str, int]
  optimizer: dict[str, Any]
  body: str = "policy"
  alone_steps: int = 0


class Teacher(NamedTuple):
  """A teacher reads the policy's own tokens after another prompt and says what it would have done.

  settings: `losses.DivergenceSettings`, the divergence between both.
  weights: "frozen" (the state's reference), "ema" (the reference, which follows the policy), or
    "current" (the policy's own, without gradient).
  decay: of the reference at each update, reference = decay x reference + (1 - decay) x policy.
  row_length: tokens of its packed rows.
  contrast: with z its logits after its prompt, z' after another prompt and z0 after the policy's
    own, its logits are z - contrast x (z' - z0).
  """

  settings: Any
  weights: str = "frozen"
  decay: float = 1.0
  row_length: int = 0
  contrast: float = 0.0


class Trained(NamedTuple):
  """What a stage trains, where that differs from the run's own settings.

  optimizer: the arguments of `optimizer.make`.
  adapter: the arguments of `lora.LoraConfig`, adapters beside frozen weights; None trains every
    weight.
  rollouts: in a step's batch.
  """

  optimizer: dict[str, Any]
  adapter: dict[str, Any] | None
  rollouts: int


class Stage(NamedTuple):
  """A part of a run, trained to its end before the next begins.

  name: as it stands in the rows of metrics.jsonl.
  source: where its batches come from: "demonstrations" (the task's, scripted, before the run's
    first step), "rollouts" (the policy's own), "pairs" (mined from the policy's own) or "examples"
    (the golden answers, or the task's script, see `sft.targets`).
  algorithm: how it learns from them.
  cycle: which turn of an alternation it belongs to, from 1; 0 where there is none.
  keeps: of how many of its last steps the rollouts are kept, for the pairs of the stage after it.
  trained: None is what the run's own settings say.
  optimizer_of, reference_of: names of earlier stages; it goes on with the optimizer's state of the
    one, and with the KL reference of the other, instead of new moments and its own start.
  """

  name: str
  source: str
  num_steps: int
  algorithm: Algorithm
  cycle: int = 0
  keeps: int = 0
  trained: Trained | None = None
  optimizer_of: str | None = None
  reference_of: str | None = None
