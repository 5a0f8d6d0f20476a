"""LLDS: keeps the likelihood of good rollouts from falling, a loss beside the policy's.

GRPO lowers the likelihood of right rollouts too, slowly and then all at once; this loss acts where
it falls, and on nothing else (arXiv 2512.04220). It compares with the log-probs from before the
step's first update, so it needs several updates a batch.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from stratified import losses
from stratified.algorithms.base import Loss
from stratified.config import setting, Settings
from stratified.types import Trajectory

TRAINING = ("training",)


@dataclasses.dataclass(frozen=True)
class LikelihoodSettings(Settings):
  """What is kept likely, and how strongly."""

  SECTION: ClassVar[str] = "likelihood"
  coefficient: float = setting(
    0.0, "grpo: weight of LLDS beside the policy's loss (0.2 at 3B); 0 is off", low=0,
    affects=TRAINING,
  )  # fmt: skip
  gate: str = setting(
    "action",
    "grpo: LLDS acts where the likelihood fell over the turn, each token alone, or the response",
    choices=losses.GATES,
    affects=TRAINING,
  )
  normalizer: str = setting(
    "preserved",
    "grpo: LLDS is over policy tokens of rollouts with advantage >= 0 (the paper), or all (code)",
    choices=("preserved", "all"),
    affects=TRAINING,
  )
  answer_weight: str = setting(
    "full",
    "grpo: of an answering turn after V searches: 1, min(V / 2, 1) (the paper), V - 1 in 0 .. 1",
    choices=("full", "paper", "code"),
    affects=TRAINING,
  )


def answering(trajectory: Trajectory) -> list[float]:
  """1 on the tokens of the turn that answered, 0 on the others."""
  last = max((i for i, s in enumerate(trajectory.segments) if s.origin == "policy"), default=-1)
  answered = trajectory.answer is not None
  return [
    float(answered and i == last)
    for i, segment in enumerate(trajectory.segments)
    for _ in segment.token_ids
  ]


def answer_weight(settings: LikelihoodSettings, searches_qk, valid_qk):
  """The weight of answering turns from V, the mean number of calls over rollouts not lost."""
  searches = (searches_qk * valid_qk).sum() / jnp.maximum(valid_qk.sum(), 1)
  return {
    "full": lambda: jnp.ones_like(searches),
    "paper": lambda: jnp.minimum(searches / 2, 1),
    "code": lambda: jnp.clip(searches - 1, 0, 1),
  }[settings.answer_weight]()


def likelihood_loss(settings: LikelihoodSettings, logp, old_logp, credit, micro) -> Loss:
  """coefficient x what tokens of rollouts with advantage >= 0 have lost of their log-prob.

  credit: "preserved" is 1 on those rollouts' tokens; "answer_weight" the weight of answering turns.
  """
  lost = losses.lost_likelihood(
    logp, old_logp, micro.policy_art, micro.position_art, gate=settings.gate
  )
  answer = micro.stream_art.get("answer", jnp.zeros_like(logp))
  weight = 1 + answer * (credit["answer_weight"] - 1)
  loss = credit["preserved"] * weight * lost
  return Loss(settings.coefficient * loss, {"loss/likelihood": loss})
