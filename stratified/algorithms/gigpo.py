"""GiGPO (arXiv 2505.10978): the advantage of a rollout, plus that of each turn among like states.

Its second part compares turns: those of a question's rollouts that stood in the same state, by
their discounted return.
"""

from collections.abc import Sequence
import dataclasses
import difflib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from stratified import advantages, sharding
from stratified.algorithms.base import Algorithm, Credit, Loss
from stratified.algorithms.policy_loss import policy_loss, PolicyLossSettings
from stratified.config import setting, Settings
from stratified.types import Trajectory

TRAINING = ("training",)


@dataclasses.dataclass(frozen=True)
class GigpoSettings(Settings):
  """The step-level groups."""

  SECTION: ClassVar[str] = "gigpo"
  gamma: float = setting(0.95, "gigpo: discount of a later turn", low=0, high=1, affects=TRAINING)
  omega: float = setting(1.0, "gigpo: weight of the turn's advantage", low=0, affects=TRAINING)
  similarity: float = setting(
    0.9,
    "gigpo: observations at least so alike are one state; 1 is equal",
    above=0,
    high=1,
    affects=TRAINING,
  )
  normalize: bool = setting(True, "gigpo: divide by standard deviations", affects=TRAINING)


@dataclasses.dataclass(frozen=True)
class Gigpo(Algorithm):
  """A(turn) = A_episode(rollout) + omega A_step(turn), for every token of the turn alike."""

  STREAMS: ClassVar[tuple[str, ...]] = ("policy", "turn")
  SETTINGS: ClassVar[tuple[type, ...]] = (GigpoSettings, PolicyLossSettings)

  groups: GigpoSettings
  loss: PolicyLossSettings
  max_tokens: int
  max_turns: int

  @classmethod
  def make(cls, read, facts) -> "Gigpo":
    """Raises ValueError for groups of one rollout, which is compared with nothing."""
    if facts.samples_per_question == 1:
      raise ValueError(
        "rollout.samples_per_question=1 leaves algorithm.name='gigpo' nothing to compare a rollout "
        "with; sample at least 2"
      )
    loss = read(PolicyLossSettings)
    loss.refuse("gigpo", "filter_groups", "resample_groups", "kl_in", "overlong_tokens")
    return cls(read(GigpoSettings), loss, facts.max_tokens, facts.max_turns)

  @property
  def learns_entropy(self) -> bool:
    return self.loss.entropy_coefficient > 0

  def streams(self, trajectory, reward) -> dict[str, list[float]]:
    """1 on policy tokens, and the number of the turn that each belongs to."""
    policy, turn = [], []
    number = -1
    for segment in trajectory.segments:
      number += segment.origin == "policy"
      size = len(segment.token_ids)
      policy += [float(segment.origin == "policy")] * size
      turn += [float(min(max(number, 0), self.max_turns - 1))] * size
    return {"policy": policy, "turn": turn}

  def arrays(self, groups, rewards) -> dict[str, np.ndarray]:
    """Gives reward, state and presence of each turn, [Q, K, T]; the last turn has the reward."""
    shape = (len(groups), len(groups[0]), self.max_turns)
    state, seen = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    reward = np.zeros(shape, np.float32)
    for q, group in enumerate(groups):
      ids = state_ids([anchors(t) for t in group], self.groups.similarity)
      for k, trajectory in enumerate(group):
        turns = min(len(ids[k]), self.max_turns)
        if trajectory.fault is None and turns:
          state[q, k, :turns], seen[q, k, :turns] = ids[k][:turns], 1
          reward[q, k, turns - 1] = rewards[q][k]
    return {"state": state, "seen": seen, "reward": reward}

  def credit(self, batch, before, step) -> Credit:
    g, turns = self.groups, batch.array_qk
    advantage_qkt = jax.vmap(
      lambda reward, state, seen: advantages.gigpo(
        reward, state, seen, gamma=g.gamma, omega=g.omega, normalize=g.normalize
      )
    )(turns["reward"], turns["state"], turns["seen"])
    count_qk = jnp.maximum(turns["seen"].sum(-1), 1)
    advantage_qk = advantage_qkt.sum(-1) / count_qk
    index = batch.trajectory_art * self.max_turns + batch.stream_art["turn"].astype(jnp.int32)
    whole = sharding.replicate(advantage_qkt).reshape(-1)
    by_token = sharding.take(whole, index, None, "row", None)
    return Credit(advantage_qk, {"advantage": by_token}, {})

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    return {
      "policy": policy_loss(
        self.loss, outputs, before, credit["advantage"], micro, max_tokens=self.max_tokens
      )
    }


def anchors(trajectory: Trajectory) -> list[tuple[int, ...]]:
  """Lists what stood before each turn: nothing before the first, then the observation's tokens."""
  found, last = [], ()
  for segment in trajectory.segments:
    if segment.origin == "policy":
      found.append(last)
    elif segment.origin == "observation":
      last = segment.token_ids
  return found


def state_ids(group: Sequence[Sequence[tuple[int, ...]]], similarity: float) -> list[list[int]]:
  """Numbers the states of a question's turns, [K] lists; a turn joins the first one that is alike.

  Alike means that difflib's ratio over token ids, 2 x matches / length, reaches `similarity`. The
  question's own state, before any observation, is 0.
  """
  known: list[tuple[int, ...]] = [()]
  exact = {(): 0}

  def identify(anchor: tuple[int, ...]) -> int:
    if anchor not in exact:
      matcher = difflib.SequenceMatcher(None, b=anchor, autojunk=False)
      exact[anchor] = next(
        (i for i, other in enumerate(known) if i and _alike(matcher, other, similarity)), len(known)
      )
      if exact[anchor] == len(known):
        known.append(anchor)
    return exact[anchor]

  return [[identify(anchor) for anchor in turns] for turns in group]


def _alike(matcher: difflib.SequenceMatcher, other: tuple[int, ...], similarity: float) -> bool:
  matcher.set_seq1(other)
  bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # cheap ones first
  return all(bound() >= similarity for bound in bounds)
