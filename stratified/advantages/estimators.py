"""Builds an estimator from its name and options: one function of [Q, K] rewards and strata."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from stratified import outside
from stratified.advantages import batch, group
from stratified.config import setting, Settings

GROUP = group.ESTIMATORS
BATCH = {"reinforce_batch": batch.reinforce_batch, "gn_batch": batch.gn_batch}
PARTS = {"gdpo": batch.gdpo}  # estimators that take the reward's parts
# What every estimator may be given: `match_rms` wraps it, and every config has an alpha.
COMMON = ("match_rms", "alpha")
SCHEDULE = ("alpha_end", "alpha_steps")

option = functools.partial(setting, affects=("training",))


@dataclasses.dataclass(frozen=True)
class AdvantageSettings(Settings):
  """The estimator of the advantage, and its options; None leaves the estimator's own default."""

  SECTION: ClassVar[str] = "advantage"
  name: str = option(
    "blend", "the estimator: gn, san, blend, loo, dr_grpo, ... (advantages/estimators.py)"
  )
  alpha: float | None = option(0.6, "blend: weight of SAN against GN", low=0, high=1)
  eps: float = option(1e-6, "added to a standard deviation, in units of reward", low=0)
  ddof: int = option(0, "a standard deviation divides by n - ddof", low=0)
  alpha_end: float | None = option(
    None, "blend: alpha moves linearly to this over alpha_steps", low=0, high=1
  )
  alpha_steps: int | None = option(None, "blend: steps that alpha moves for", low=1)
  kappa: float | None = option(
    None, "blend, shrunk, san: a stratum of n_k is trusted n_k / (n_k + kappa)", low=0
  )
  lam: float | None = option(
    None, "two_term: weight of the part between strata", low=-1e9, high=1e9
  )
  over: str | None = option(
    None, "statistics of one question's group, or of the whole batch", choices=("question", "batch")
  )
  fallback: str | None = option(
    None, "san: value of a stratum without spread", choices=("zero", "gn", "shrink")
  )
  fallback_on: str | None = option(
    None, "san: which strata fall back", choices=("singleton", "constant")
  )
  match_rms: str | None = option(
    None, "scale to GN's root mean square, by question or batch", choices=("question", "batch")
  )

  def __post_init__(self):
    super().__post_init__()
    for name in self.given:
      if name not in options(self.name):
        raise ValueError(
          f"advantage.{name}={getattr(self, name)!r}, but {self.name} has no such option; leave it "
          f"out, or choose from {', '.join(options(self.name))}"
        )
    if (self.alpha_end is None) != (self.alpha_steps is None):
      raise ValueError(
        "advantage.alpha_end and advantage.alpha_steps make one schedule; set both or neither"
      )

  @property
  def given(self) -> dict[str, Any]:
    """The options that are not None."""
    values = dataclasses.asdict(self)
    return {key: value for key, value in values.items() if key != "name" and value is not None}

  def check_samples(self, samples_per_question: int) -> None:
    """Raises ValueError where groups of K rollouts are too small for these options."""
    if self.ddof >= samples_per_question:
      raise ValueError(
        f"advantage.ddof={self.ddof}, but the standard deviation of a group divides by K - ddof "
        f"and K is {samples_per_question}; lower it below rollout.samples_per_question (0 is the "
        "paper's)"
      )
    if samples_per_question == 1 and self.is_relative:
      raise ValueError(
        f"rollout.samples_per_question=1 leaves advantage.name={self.name!r} nothing to compare a "
        "rollout with, so that every advantage is 0; sample at least 2, or choose one of "
        f"reinforce, {', '.join(sorted(BATCH))}"
      )

  @property
  def is_relative(self) -> bool:
    """Whether a rollout is compared with others of its question alone."""
    return self.name not in (*BATCH, "reinforce") and self.over != "batch"

  @property
  def wants_parts(self) -> bool:
    """Whether the estimator takes the reward's parts in place of their sum."""
    return self.name in PARTS

  @property
  def crosses_questions(self) -> bool:
    """Whether other questions' rollouts decide if a group's advantages are all 0."""
    return self.name == "reinforce_batch" or self.over == "batch"

  @property
  def zero_where_equal(self) -> bool:
    """Whether a question whose rewards are all equal has advantages of 0, whatever its strata."""
    return self.is_relative and self.name in GROUP


def kernel_of(name: str) -> Callable:
  """The kernel of that name; raises ValueError, one sentence, where there is none."""
  known = GROUP | BATCH | PARTS
  if name in known:
    return known[name]
  if ":" in name:
    return from_outside(name)
  hint = "; gae and gigpo work on turns or tokens: algorithm.name=ppo, gigpo"
  raise ValueError(
    f"advantage.name={name!r} is no estimator over rewards; choose one of "
    f"{', '.join(sorted(known))}, or name your own as module:function"
    f"{hint if name in ('gae', 'gigpo') else ''}"
  )


@functools.cache
def from_outside(spec: str) -> Callable:
  """A group estimator of your own, `module:function`, tried on a made-up group.

  It is called as f(reward_k, stratum_k, *, num_strata, mask_k, eps, ddof) under jit and vmap.
  """
  named = ("num_strata", "mask_k", "eps", "ddof")
  kernel = outside.function("advantage.name", spec, "reward_k", "stratum_k", named=named)
  stratum_k = jnp.int32([0, 1, 1, 1])

  def call(reward_k, mask_k):
    options = dict(num_strata=2, mask_k=jnp.float32(mask_k), eps=1e-6, ddof=0)
    return jax.jit(lambda r, s: kernel(r, s, **options))(jnp.float32(reward_k), stratum_k)

  def wrong(value):
    if getattr(value, "shape", None) != (4,) or not jnp.issubdtype(value.dtype, jnp.floating):
      return "it must return one number a rollout, [K]"
    return None if bool(jnp.isfinite(value).all()) else "advantages must be finite"

  # Groups that differ, are all equal, have a lost rollout, are all lost.
  for reward_k, mask_k in (
    ([1, 0, 0, 1], [1, 1, 1, 1]),
    ([1, 1, 1, 1], [1, 1, 1, 1]),
    ([1, 0, 0, 1], [1, 1, 1, 0]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
  ):
    outside.trial("advantage.name", spec, functools.partial(call, reward_k, mask_k), wrong)
  return kernel


def options(name: str) -> list[str]:
  """Names the options of an estimator: its kernel's keywords and what all may be given."""
  fields = {field.name for field in dataclasses.fields(AdvantageSettings)} - {"name"}
  taken = set(inspect.signature(kernel_of(name)).parameters) & fields
  return sorted(taken | set(COMMON) | (set(SCHEDULE) if name == "blend" else set()))


def alpha_at(step, alpha=1.0, alpha_end=None, alpha_steps=None):
  """alpha at a step: a constant, a function's value, or linear from alpha to alpha_end."""
  if callable(alpha):
    return alpha(step)
  if alpha_end is None:
    return alpha
  return alpha + (alpha_end - alpha) * jnp.clip(step / alpha_steps, 0.0, 1.0)


def make(
  name: str, *, num_strata: int, samples_per_question: int | None = None, **given: Any
) -> Callable:
  """Makes estimate(reward_qk, stratum_qk, valid_qk, step, length_qk=None, ...) -> advantage_qk.

  It is jittable; length_qk, the policy tokens of each rollout, is read by `opo` alone; parts_qkp
  and weight_p, the reward's parts and their weights, by `gdpo`.

  name        a group kernel (vmapped over questions) or a batch kernel
  num_strata  stratum ids lie in [0, num_strata)
  given       the fields of AdvantageSettings; alpha may also be a function of the step

  Raises ValueError, one sentence with the value, the rule and the way out, for what can't be
  estimated; with samples_per_question also for groups too small.
  """
  alpha = given.get("alpha")
  settings = AdvantageSettings(name=name, **given | {"alpha": None if callable(alpha) else alpha})
  if samples_per_question is not None:
    settings.check_samples(samples_per_question)
  if callable(alpha) and settings.alpha_steps:
    raise ValueError(
      "advantage.alpha is already a function of the step; leave alpha_end and alpha_steps out"
    )
  return estimator(settings, num_strata=num_strata, alpha=alpha)


def estimator(settings: AdvantageSettings, *, num_strata: int, alpha: Any = None) -> Callable:
  """Builds what `make` returns from checked settings.

  alpha: a function of the step that takes the place of theirs; None keeps theirs.
  """
  name, kernel = settings.name, kernel_of(settings.name)
  parameters = inspect.signature(kernel).parameters
  own = {key: value for key, value in settings.given.items() if key in parameters}
  own.pop("alpha", None)
  schedule = {"alpha": settings.alpha if alpha is None else alpha}
  schedule |= {key: getattr(settings, key) for key in SCHEDULE}
  scheduled = name == "blend" and schedule["alpha"] is not None
  by_question = name not in BATCH and own.get("over", "question") == "question"
  gn = functools.partial(group.gn, num_strata=num_strata, eps=settings.eps, ddof=settings.ddof)

  by_length = "length_k" in parameters

  def estimate(
    reward_qk, stratum_qk, valid_qk, step, length_qk=None, parts_qkp=None, weight_p=None
  ):
    now = {"alpha": alpha_at(step, **schedule)} if scheduled else {}

    def one(reward, stratum, valid, *length):
      more = {"length_k": length[0]} if length else {}
      return kernel(reward, stratum, num_strata=num_strata, mask_k=valid, **own, **now, **more)

    lengths = (length_qk,) if by_length and length_qk is not None else ()
    each = jax.vmap(one) if by_question else one
    if settings.wants_parts:
      parts_qkp = jnp.asarray(reward_qk)[..., None] if parts_qkp is None else parts_qkp
      advantage_qk = kernel(parts_qkp, valid_qk, weight_p=weight_p, **own)
    else:
      advantage_qk = each(reward_qk, stratum_qk, valid_qk, *lengths)
    if settings.match_rms is None:
      return advantage_qk
    target_qk = jax.vmap(lambda r_k, s_k, valid_k: gn(r_k, s_k, mask_k=valid_k))(
      reward_qk, stratum_qk, valid_qk
    )
    match = jax.vmap(group.match_rms) if settings.match_rms == "question" else group.match_rms
    return match(advantage_qk, target_qk, valid_qk)

  return estimate
