"""From a configuration's name and options to one callable over [Q, K], or one clear sentence of
refusal."""

from collections.abc import Callable
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp

from stratified.advantages import batch, group

GROUP = {
  "gn": group.gn,
  "san": group.san,
  "blend": group.blend,
  "centered": group.centered,
  "stratified": group.stratified,
  "loo": group.loo,
  "stratified_loo": group.stratified_loo,
  "shrunk": group.shrunk,
  "two_term": group.two_term,
  "dr_grpo": group.dr_grpo,
  "reinforce": group.reinforce,
  "san_rms": group.san_rms,
}
BATCH = {"reinforce_batch": batch.reinforce_batch, "gn_batch": batch.gn_batch}

# One option, its rule in words, and the rule. The estimators' signatures say which of them takes
# which.
_RULES = {
  "alpha": (
    "a number in [0, 1] or a function of the step",
    lambda x: callable(x) or _number(x) and 0 <= x <= 1,
  ),
  "alpha_end": ("in [0, 1]", lambda x: _number(x) and 0 <= x <= 1),
  "alpha_steps": ("a whole number of steps, 1 or more", lambda x: _whole(x) and x >= 1),
  "kappa": ("0 or more", lambda x: _number(x) and x >= 0),
  "lam": ("a finite number", lambda x: _number(x)),
  "eps": ("0 or more", lambda x: _number(x) and x >= 0),
  "ddof": ("a whole number, 0 or more", lambda x: _whole(x) and x >= 0),
  "over": ("'question' or 'batch'", lambda x: x in ("question", "batch")),
  "fallback": ("'zero', 'gn' or 'shrink'", lambda x: x in ("zero", "gn", "shrink")),
  "fallback_on": ("'singleton' or 'constant'", lambda x: x in ("singleton", "constant")),
  "match_rms": ("'question' or 'batch'", lambda x: x in ("question", "batch")),
}


def _number(x) -> bool:
  return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _whole(x) -> bool:
  return isinstance(x, int) and not isinstance(x, bool)


def options(name: str) -> list[str]:
  """The options that `make(name, ...)` takes."""
  taken = set(inspect.signature({**GROUP, **BATCH}[name]).parameters) & set(_RULES)
  taken |= {"match_rms", "alpha"}  # every configuration has an alpha; only `blend` reads it
  return sorted(taken | ({"alpha_end", "alpha_steps"} if name == "blend" else set()))


def validate(name: str, samples_per_question: int, kwargs: dict[str, Any]) -> None:
  """Raises ValueError, one sentence with the value, the rule and the way out, if `make` could not
  serve this.

  samples_per_question  K, the rollouts of a group; kwargs  the options, None where one is left at
                        its default
  """
  if name not in GROUP and name not in BATCH:
    hint = (
      "; gae and gigpo work on turns or tokens, as functions" if name in ("gae", "gigpo") else ""
    )
    raise ValueError(
      f"advantage.name is {name!r}, which is no estimator over rewards; choose one of "
      f"{', '.join(sorted(GROUP | BATCH))}{hint}"
    )
  kwargs = {key: value for key, value in kwargs.items() if value is not None}
  for key, value in kwargs.items():
    if key not in options(name):
      raise ValueError(
        f"advantage.{key} is {value!r}, but {name} has no such option; leave it out, or "
        f"choose from {', '.join(options(name))}"
      )
    words, rule = _RULES[key]
    if not rule(value):
      raise ValueError(f"advantage.{key} is {value!r}; it must be {words}")
  if kwargs.get("ddof", 0) >= samples_per_question:
    raise ValueError(
      f"advantage.ddof is {kwargs['ddof']}, but the standard deviation of a group divides by "
      f"K - ddof and K is {samples_per_question}; lower it below rollout.samples_per_question "
      "(0 is the paper's)"
    )
  if ("alpha_end" in kwargs) != ("alpha_steps" in kwargs):
    raise ValueError(
      "advantage.alpha_end and advantage.alpha_steps make one schedule; set both or neither"
    )
  if "alpha_steps" in kwargs and callable(kwargs.get("alpha")):
    raise ValueError(
      "advantage.alpha is already a function of the step; leave alpha_end and alpha_steps out"
    )


def alpha_at(step, alpha=1.0, alpha_end=None, alpha_steps=None):
  """alpha at a step: the constant, the function's value, or linear from alpha at step 0 to
  alpha_end."""
  if callable(alpha):
    return alpha(step)
  if alpha_end is None:
    return alpha
  return alpha + (alpha_end - alpha) * jnp.clip(step / alpha_steps, 0.0, 1.0)


def make(
  name: str, *, num_strata: int, samples_per_question: int | None = None, **kwargs
) -> Callable:
  """Builds `estimate(reward_qk, stratum_qk, valid_qk, step) -> advantage_qk`, jittable, from a
  configuration.

  name        a group kernel (vmapped over questions) or a batch kernel
  num_strata  stratum ids lie in [0, num_strata)
  kwargs      the kernel's own options (None means its default), and
    alpha, alpha_end, alpha_steps   for blend: alpha a constant or a function of the step; or linear
                                    from
                                    alpha to alpha_end over alpha_steps steps. The other estimators
                                    pass over alpha
    over="batch"                    statistics of a group kernel over the whole batch
    match_rms="question" | "batch"  any estimator scaled to gn's root mean square, for comparing
                                    directions

  Raises ValueError as `validate` does, where samples_per_question is given.
  """
  validate(name, math.inf if samples_per_question is None else samples_per_question, kwargs)
  own = {key: value for key, value in kwargs.items() if value is not None}
  matched = own.pop("match_rms", None)
  schedule = {key: own.pop(key) for key in ("alpha", "alpha_end", "alpha_steps") if key in own}
  kernel = {**GROUP, **BATCH}[name]
  by_question = name in GROUP and own.get("over", "question") == "question"

  def estimate(reward_qk, stratum_qk, valid_qk, step):
    scheduled = (
      {"alpha": alpha_at(step, **schedule)} if name == "blend" and "alpha" in schedule else {}
    )

    def one(reward, stratum, valid):
      return kernel(reward, stratum, num_strata=num_strata, mask_k=valid, **own, **scheduled)

    advantage_qk = (jax.vmap(one) if by_question else one)(reward_qk, stratum_qk, valid_qk)
    if matched is None:
      return advantage_qk
    gn = lambda r_k, s_k, valid_k: group.gn(r_k, s_k, num_strata=num_strata, mask_k=valid_k)
    match = jax.vmap(group.match_rms) if matched == "question" else group.match_rms
    return match(advantage_qk, jax.vmap(gn)(reward_qk, stratum_qk, valid_qk), valid_qk)

  return estimate
