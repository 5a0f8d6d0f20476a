"""Group estimators: the rewards of one question's K rollouts in, one advantage for each out.

Every kernel is written for one group (`vmap` over questions is the caller's) and has the signature

    name(reward_k, stratum_k, *, num_strata, mask_k=None, eps=1e-6, ddof=0, over="question", ...)

  reward_k   [K] rewards of any float or integer type; float32 inside and out (float64 stays)
  stratum_k  [K] integer stratum of each rollout, in [0, num_strata). Another one is refused with a
             ValueError; under jit, vmap and the like its rollout gets NaN
  mask_k     [K] 1 or True where the rollout counts; the others enter no statistic and get 0.
             None counts all
  eps        added to the standard deviation, in units of reward
  ddof       the standard deviation divides by n - ddof; a stratum or group with n <= ddof gets 0
  over       "question": [K], statistics of one group. "batch": the same formula over [Q, K], the
             whole batch as the group and strata that cross questions

Names in the formulas: R_g, s_g are mean and standard deviation of the group; n_k, R_k, s_k are
size, mean and standard deviation of the rollout's stratum k. A constant group or stratum (a
singleton too) deviates by exactly 0, so no kernel returns NaN for finite rewards. All raise
AssertionError for a wrong rank or shape, when traced.
"""

from collections.abc import Callable
import functools
import inspect

import jax
import jax.numpy as jnp

from stratified.advantages import segments


def estimator(formula: Callable) -> Callable:
  """Makes a kernel from its formula, `formula(g, *, eps, ddof, own options)`.

  g is the group as masked sums (`segments.prepare`). The formula names the options that it uses and
  no others. An option whose default is text is a choice, fixed when the kernel is traced; the
  others are traced numbers.
  """
  own = dict(inspect.signature(formula).parameters)
  own.pop("g")
  choices = [name for name, option in own.items() if isinstance(option.default, str)]

  @functools.wraps(formula)
  def kernel(
    reward_k, stratum_k, *, num_strata, mask_k=None, eps=1e-6, ddof=0, over="question", **options
  ):
    g = segments.prepare(reward_k, stratum_k, mask_k, num_strata, over)
    common = {name: value for name, value in (("eps", eps), ("ddof", ddof)) if name in own}
    found = formula(g, **common, **options).astype(g.reward.dtype)
    return segments.in_range(found, stratum_k, g.mask, num_strata)

  fixed = inspect.signature(kernel, follow_wrapped=False).parameters
  options = {name: option for name, option in own.items() if name not in fixed}
  kernel.__signature__ = inspect.Signature(
    [*(one for one in fixed.values() if one.kind != one.VAR_KEYWORD), *options.values()]
  )
  compiled = jax.jit(kernel, static_argnames=("num_strata", "over", *choices))

  @functools.wraps(kernel)
  def checked(reward_k, stratum_k, *, num_strata, mask_k=None, **others):
    segments.check_strata(stratum_k, mask_k, num_strata)
    return compiled(reward_k, stratum_k, num_strata=num_strata, mask_k=mask_k, **others)

  return checked


def _centered(g):
  return g.group.center(g.reward)


def _stratified(g):
  return g.stratum.center(g.reward)


def _gn(g, eps, ddof):
  centered = _centered(g)
  return segments.over_deviation(centered, segments.deviation(g.group, centered, ddof), eps)


def _san(g, eps, ddof):
  stratified = _stratified(g)
  return segments.over_deviation(stratified, segments.deviation(g.stratum, stratified, ddof), eps)


def _own_share(g, kappa):
  """n_k / (n_k + kappa), how far a stratum of n_k is trusted."""
  return g.stratum.count / (g.stratum.count + kappa)


@estimator
def gn(g, *, eps, ddof):
  """Group normalisation, GRPO's advantage: (R_i - R_g) / (s_g + eps).

  Source: arXiv 2402.03300 (outcome supervision); arXiv 2510.06214, Proposition 3.
  """
  return _gn(g, eps, ddof)


@estimator
def san(g, *, eps, ddof, fallback="zero", fallback_on="singleton", kappa=1.0):
  """Stratified advantage normalisation: (R_i - R_k) / (s_k + eps).

  A stratum without spread says nothing about the acts inside it and gets 0. `fallback` gives it
  another value:

    "zero"    0
    "gn"      group normalisation, (R_i - R_g) / (s_g + eps)
    "shrink"  kappa / (n_k + kappa) of "gn": the stratum's mean is shrunk to the group's

  `fallback_on` says which strata get it: "singleton" (n_k = 1) or "constant" (all rewards equal,
  singletons too).

  Source: arXiv 2510.06214, Definition 1; the fallbacks are ours.
  """
  stratified = _stratified(g)
  san_k = segments.over_deviation(stratified, segments.deviation(g.stratum, stratified, ddof), eps)
  if fallback == "zero":
    return san_k
  share = {"gn": lambda: 1.0, "shrink": lambda: 1 - _own_share(g, kappa)}[fallback]()
  lone = {
    "singleton": lambda: g.stratum.count == 1,
    "constant": lambda: g.stratum.total(jnp.abs(stratified)) == 0,
  }[fallback_on]()
  return jnp.where(lone & g.mask, share * _gn(g, eps, ddof), san_k)


@estimator
def blend(g, *, eps, ddof, alpha=0.6, kappa=None):
  """alpha SAN + (1 - alpha) GN, alpha in [0, 1].

  With `kappa`, stratum k has its own alpha_k = n_k / (n_k + kappa) instead. The default alpha is
  the paper's for a base model. Source: arXiv 2510.06214, Definition 2; alpha_k is ours.
  """
  alpha = alpha if kappa is None else _own_share(g, kappa)
  return alpha * _san(g, eps, ddof) + (1 - alpha) * _gn(g, eps, ddof)


@estimator
def centered(g):
  """R_i - R_g, the global advantage.

  `eps` and `ddof` change nothing. Source: arXiv 2510.06214, Proposition 1.
  """
  return _centered(g)


@estimator
def stratified(g):
  """R_i - R_k, the stratified advantage.

  `eps` and `ddof` change nothing. Source: arXiv 2510.06214, Proposition 1.
  """
  return _stratified(g)


def _leave_one_out(centered, count):
  # R_i - mean of the others = n / (n - 1) (R_i - mean of all); a sample without others gets 0.
  return jnp.where(count > 1, centered * count / jnp.maximum(count - 1, 1), 0)


@estimator
def loo(g):
  """R_i minus the mean reward of the group's other rollouts; 0 without others.

  Source: RLOO, arXiv 2402.14740.
  """
  return _leave_one_out(_centered(g), g.group.count)


@estimator
def stratified_loo(g):
  """R_i minus the mean reward of the other rollouts of its stratum; 0 for a singleton.

  RLOO (arXiv 2402.14740) inside the strata of arXiv 2510.06214. A stratum of probability p keeps
  the share 1 - (1 - p)^(K - 1) of its expected gradient; `stratified` keeps
  1 - (1 - (1 - p)^K) / (K p).
  """
  return _leave_one_out(_stratified(g), g.stratum.count)


@estimator
def shrunk(g, *, kappa=1.0):
  """R_i - (w R_k + (1 - w) R_g), w = n_k / (n_k + kappa).

  Shrinks the mean of a small stratum to the group's, as in empirical Bayes. kappa 0 is
  `stratified`, kappa to infinity `centered`. Ours.
  """
  w = _own_share(g, kappa)
  return w * _stratified(g) + (1 - w) * _centered(g)


@estimator
def two_term(g, *, lam=1.0):
  """(R_i - R_k) + lam (R_k - R_g): weighs the choice of a stratum apart from the acts inside it.

  lam 0 is `stratified`, lam 1 `centered`. The root mean squares of the two parts are logged at
  every step (theory.diagnostics). Source: the two parts of arXiv 2510.06214, Proposition 1; the
  weight is ours.
  """
  between = jnp.where(g.mask, g.stratum.total(_centered(g)) / g.stratum.count, 0)
  return _stratified(g) + lam * between


@estimator
def dr_grpo(g):
  """R_i - R_g, without the standard deviation: `centered` under its paper's name.

  The paper's second half, a loss summed over tokens and divided by a constant length, is a choice
  of loss aggregation. Source: Dr. GRPO, arXiv 2503.20783.
  """
  return _centered(g)


@estimator
def reinforce(g):
  """R_i, no baseline (Williams, 1992). `eps` and `ddof` change nothing."""
  return g.reward


@estimator
def opo(g, *, length_k=None):
  """R_i - sum_j l_j R_j / sum_j l_j, l_j the number of the rollout's policy tokens (`length_k`).

  The baseline of least variance where the squared gradient grows with length. Without lengths it is
  `centered`. Source: OPO, arXiv 2505.23585.
  """
  if length_k is None:
    return _centered(g)
  centered, weight = _centered(g), jnp.where(g.mask, length_k, 0)
  # Of differences to the mean, so that equal rewards give exactly 0.
  total = jnp.sum(weight)
  baseline = jnp.sum(weight * centered) / jnp.where(total > 0, total, 1)
  return jnp.where(g.mask, centered - baseline, 0)


@estimator
def san_rms(g, *, eps, ddof):
  """SAN scaled to GN's root mean square over the group: the same size of step, another direction.

  For comparing directions: a degenerate stratum lowers SAN's root mean square below GN's. A group
  where SAN is all 0 stays so. Ours.
  """
  return match_rms(_san(g, eps, ddof), _gn(g, eps, ddof), g.mask)


def match_rms(advantage, target, mask):
  """advantage * rms(target) / rms(advantage) over the valid entries; 0 where it is all 0.

  All three are of one shape, any shape.
  """
  own, wanted = (
    jnp.sqrt(jnp.sum(jnp.where(mask > 0, jnp.square(x), 0))) for x in (advantage, target)
  )
  return jnp.where(own == 0, 0, advantage * (wanted / jnp.where(own == 0, 1, own)))


# What `advantage.name` may say.
ESTIMATORS = {
  "gn": gn,
  "san": san,
  "blend": blend,
  "centered": centered,
  "stratified": stratified,
  "loo": loo,
  "stratified_loo": stratified_loo,
  "shrunk": shrunk,
  "two_term": two_term,
  "dr_grpo": dr_grpo,
  "reinforce": reinforce,
  "san_rms": san_rms,
  "opo": opo,
}
