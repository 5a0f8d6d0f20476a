"""Search-E1 (arXiv 2605.22511): cycles of reinforcement and self-distillation.

    for each cycle:
      reinforcement    GRPO, or any estimator of the group family, from the policy as it is
      rollouts         of the policy that came out, and pairs of them (algorithms/pairs.py):
                       a better one, the reference, and a worse one of the same question
      distillation     the policy, given the reference in its prompt, is the teacher of adapters
                       that see the question alone; both read the worse rollout's own tokens
      merge            the adapters into the policy

A distillation step minimises, over the weighted policy tokens R of each pair,

    1 / |R|  sum over tokens of  D(teacher's next token, policy's next token)

with D as policy/divergence.py has it. In place of it, `distillation.loss=imitation` trains on the
reference itself: the same pairs, without a teacher.

Neighbours by other settings of the same parts: SSOPD (2605.17497) by pairs, `distillation.prefix`
and `distillation.weight`; RLCSD (2606.11709) by `pairs.contrast`, whose teacher's logits are those
with the reference, less what a wrong rollout in its place changes.
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from stratified.algorithms.base import Algorithm, Credit, Loss, Stage, Teacher, Trained
from stratified.algorithms.grpo import Grpo
from stratified.algorithms.guide import GuideSettings
from stratified.algorithms.pairs import PairSettings
from stratified.config import setting, Settings
from stratified.losses import DivergenceSettings
from stratified.types import Trajectory

TRAINING = ("training",)


@dataclasses.dataclass(frozen=True)
class SearchE1Settings(Settings):
  """How the stages alternate."""

  SECTION: ClassVar[str] = "search_e1"
  cycles: int = setting(
    2, "turns of reinforcement and distillation", low=1, high=1000, affects=TRAINING
  )
  distillation_steps: int = setting(
    100,
    "steps of each distillation; a cycle's others are reinforcement; 0 is the control without any",
    low=0,
    affects=TRAINING,
  )
  optimizer: str = setting(
    "reset",
    "what a later reinforcement begins with: new moments, or those of the last one",
    choices=("reset", "keep"),
    affects=TRAINING,
  )
  reference: str = setting(
    "cycle",
    "the KL's reference: the policy at the start of the cycle, or of the first",
    choices=("cycle", "first"),
    affects=TRAINING,
  )

  def reinforcement_steps(self, num_steps: int) -> int:
    """Steps of reinforcement in a cycle; ValueError where the cycles do not come out even."""
    each, rest = divmod(num_steps, self.cycles)
    if rest or each < self.distillation_steps or not each:
      raise ValueError(
        f"num_steps={num_steps} does not make search_e1.cycles={self.cycles} equal cycles with "
        f"search_e1.distillation_steps={self.distillation_steps} in each; set num_steps to cycles "
        "x (reinforcement + distillation steps)"
      )
    return each - self.distillation_steps


@dataclasses.dataclass(frozen=True)
class DistillationSettings(Settings):
  """Who teaches, what is trained, on which tokens."""

  SECTION: ClassVar[str] = "distillation"
  loss: str = setting(
    "divergence",
    "from the teacher's distributions, or imitation of the reference itself",
    choices=("divergence", "imitation"),
    affects=TRAINING,
  )
  span: str = setting(
    "all",
    "the policy tokens that count: all, those of turns that search, or the queries alone",
    choices=("all", "think_search", "search"),
    affects=TRAINING,
  )
  prefix: float = setting(
    1.0,
    "share of a rollout's tokens that count, from the first on",
    above=0,
    high=1,
    affects=TRAINING,
  )
  weight: str = setting(
    "equal",
    "a pair's weight: equal, or mixed, 4 p (1 - p), p the share of its question's right rollouts",
    choices=("equal", "mixed"),
    affects=TRAINING,
  )
  teacher: str = setting(
    "frozen",
    "the teacher's weights: as the stage began, their moving average, or as they are",
    choices=("frozen", "ema", "current"),
    affects=TRAINING,
  )
  teacher_decay: float = setting(
    0.99, "decay of the moving average at a step", low=0, high=1, affects=TRAINING
  )
  rank: int = setting(64, "rank of the adapters; 0 trains every weight", low=0, affects=TRAINING)
  alpha: float = setting(128.0, "an adapter counts alpha / rank", above=0, affects=TRAINING)
  optimizer: str = setting(
    "adamw", "the update rule", choices=("adamw", "muon", "sgd"), affects=TRAINING
  )
  learning_rate: float = setting(5e-6, "its constant rate", above=0, affects=TRAINING)
  clip_norm: float = setting(0.1, "most that the gradient's norm may be", above=0, affects=TRAINING)
  pairs_per_step: int = setting(32, "pairs of a step", low=1, high=1_000_000, affects=TRAINING)
  row_length: int = setting(
    0, "tokens of a teacher's packed row; 0 is twice packing.row_length", low=0, affects=TRAINING
  )

  def __post_init__(self):
    super().__post_init__()
    if self.teacher == "ema" and self.rank:
      raise ValueError(
        f"distillation.teacher='ema' with distillation.rank={self.rank}: frozen weights can't "
        "follow the policy; train every weight with --config.distillation.rank=0"
      )


@dataclasses.dataclass(frozen=True)
class SearchE1(Algorithm):
  """The alternation; its reinforcement is `Grpo`."""

  SETTINGS: ClassVar[tuple[type, ...]] = (
    SearchE1Settings,
    DistillationSettings,
    DivergenceSettings,
    PairSettings,
    GuideSettings,
    *Grpo.SETTINGS,
  )

  alternation: SearchE1Settings
  reinforcement: Grpo
  distillation: "Distillation"
  questions_per_step: int

  @classmethod
  def make(cls, read, facts) -> "SearchE1":
    """Raises ValueError where a setting, or several together, can't be."""
    distillation = Distillation(
      read(DistillationSettings), read(DivergenceSettings), read(PairSettings), read(GuideSettings)
    )
    found, samples = distillation.pairs, facts.samples_per_question
    if found.source == "last_steps" and found.samples_per_question not in (0, samples):
      raise ValueError(
        f"pairs.samples_per_question={found.samples_per_question} with pairs.source='last_steps' "
        f"must be 0 or rollout.samples_per_question={samples}, which those steps have"
      )
    reinforcement = Grpo.make(read, facts)
    return cls(read(SearchE1Settings), reinforcement, distillation, facts.questions_per_step)

  def stages(self, num_steps: int) -> tuple[Stage, ...]:
    """Reinforcement and distillation of each cycle in turn; either may have no step."""
    steps, found = self.alternation.reinforcement_steps(num_steps), []
    keeps = self._kept_steps(steps) if self.alternation.distillation_steps else 0
    distillation = dataclasses.replace(self.distillation, kept_steps=keeps)
    for cycle in range(1, self.alternation.cycles + 1):
      if steps:
        found.append(self._reinforcement(steps, cycle, keeps))
      if self.alternation.distillation_steps:
        found.append(self._on_pairs(distillation, cycle))
    return tuple(found)

  def _kept_steps(self, steps: int) -> int:
    """The reinforcement steps whose rollouts make the pairs; 0 where fresh ones do."""
    asked = self.distillation.pairs
    if asked.source == "fresh":
      return 0
    kept = -(-asked.num_questions // self.questions_per_step)
    if kept > steps:
      raise ValueError(
        f"pairs.num_questions={asked.num_questions} with pairs.source='last_steps' are those of "
        f"{kept} steps, and a cycle has {steps} of reinforcement; lower it, or set pairs.source to "
        "fresh"
      )
    return kept

  def _reinforcement(self, steps: int, cycle: int, keeps: int) -> Stage:
    a, earlier = self.alternation, "reinforcement_{}".format
    return Stage(
      earlier(cycle),
      "rollouts",
      steps,
      self.reinforcement,
      cycle=cycle,
      keeps=keeps,
      optimizer_of=earlier(cycle - 1) if cycle > 1 and a.optimizer == "keep" else None,
      reference_of=earlier(1) if cycle > 1 and a.reference == "first" else None,
    )

  def _on_pairs(self, distillation: "Distillation", cycle: int) -> Stage:
    return Stage(
      f"distillation_{cycle}",
      "pairs",
      self.alternation.distillation_steps,
      distillation,
      cycle=cycle,
      trained=distillation.trained,
    )


@dataclasses.dataclass(frozen=True)
class Student(Trajectory):
  """A rollout with the weight of each of its tokens in the distillation, and its own."""

  weights: tuple[float, ...] = ()
  weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Distillation(Algorithm):
  """Learns from pairs: towards the teacher on the student's tokens, or to write the reference."""

  STREAMS: ClassVar[tuple[str, ...]] = ("distillation",)

  settings: DistillationSettings
  between: DivergenceSettings
  pairs: PairSettings
  guide: GuideSettings
  kept_steps: int = 0  # of the reinforcement before, whose rollouts make the pairs; 0 is fresh ones

  @property
  def teacher(self) -> Teacher | None:
    s = self.settings
    if s.loss == "imitation":
      return None
    return Teacher(self.between, s.teacher, s.teacher_decay, s.row_length, self.pairs.contrast)

  @property
  def trained(self) -> Trained:
    """What a distillation trains: adapters of its own, with a rate of its own."""
    s = self.settings
    return Trained(
      optimizer={"name": s.optimizer, "learning_rate": s.learning_rate, "clip_norm": s.clip_norm},
      adapter={"rank": s.rank, "alpha": s.alpha} if s.rank else None,
      rollouts=s.pairs_per_step,
    )

  def streams(self, trajectory: Student, reward: float) -> dict[str, Any]:
    return {"distillation": trajectory.weights}

  def weight_of(self, right_share: float) -> float:
    """How much a pair counts, by the share of its question's rollouts that are right."""
    return 4 * right_share * (1 - right_share) if self.settings.weight == "mixed" else 1.0

  def arrays(self, groups, rewards) -> dict[str, np.ndarray]:
    return {"weight": np.float32([[getattr(t, "weight", 0.0) for t in group] for group in groups])}

  def credit(self, batch, before, step) -> Credit:
    """Gives each pair its weight; the loss is divided by their sum."""
    weight_qk = batch.array_qk["weight"] * batch.valid_qk
    return Credit(batch.valid_qk, {}, {}, {"distillation": weight_qk})

  def losses(self, outputs, before, credit, micro) -> dict[str, Loss]:
    """The divergence of each token, or -log p; averaged within a pair, then over pairs."""
    if outputs.divergence is None:
      loss, means = -outputs.logp, {"policy/entropy": outputs.entropy}
    else:
      found = outputs.divergence
      loss = found.loss
      means = {
        "distillation/kl": found.value,
        "distillation/clipped_share": found.clipped_share,
        "distillation/kept_mass": found.kept_mass,
        "distillation/reversed_share": found.reversed,
      }
    means |= {"distillation/loss": loss}
    return {"distillation": Loss(loss, means, aggregation="sequence_mean")}
