"""Trains three bandits of two strategies each, by policy gradient with the library's estimators.

A strategy is a stratum: the policy first chooses a strategy, then an act inside it; acts pay 0 or
1. With separate parameters the choice and the acts have logits of their own (a hierarchical
softmax); with shared ones there is one logit for each (strategy, act) pair and the choice is what
they add up to (a flat softmax). Both start from the same probabilities.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stratified import advantages

NUM_STRATA = 2
SAMPLES = 8  # rollouts of a question
QUESTIONS = 16  # groups of a step, all of the same bandit
LEARNING_RATE = 1.0


class Bandit(NamedTuple):
  """Starting probabilities of strategies [S] and of acts inside each [S, A]; success rates [S, A].

  drawn  the strategy is drawn for the policy, always from choice_s: nobody's choice
  """

  choice_s: Any
  act_sa: Any
  success_sa: Any
  drawn: Any = False


class Setting(NamedTuple):
  """One training run's fixed part; arrays throughout, so that settings are stacked and vmapped.

  shared   the flat softmax instead of the hierarchical one
  matched  advantages scaled to GN's root mean square over the step
  """

  bandit: Bandit
  shared: Any
  matched: Any


class Curves(NamedTuple):
  """By step, before its update: expected reward, probability of strategy 1, success inside it."""

  reward: Any
  share: Any
  success: Any


def better() -> Bandit:
  """A strategy that is simply better: every act pays 0.3 in the first, 0.6 in the second."""
  return Bandit(np.array([0.8, 0.2]), np.full((2, 4), 0.25), np.repeat([[0.3], [0.6]], 4, axis=1))


def learnt(share: float = 0.1) -> Bandit:
  """A strategy that must be learnt: 0.9 for one act in four, rare at first, and 0.1 for the rest.

  Its success rate at the start is 0.18, the other strategy's always 0.4.
  """
  acts = np.array([[0.25] * 4, [0.1, 0.3, 0.3, 0.3]])
  return Bandit(np.array([1 - share, share]), acts, np.array([[0.4] * 4, [0.9, 0.1, 0.1, 0.1]]))


def luck() -> Bandit:
  """Strategies that are drawn, far apart in reward; in each, one act in four is better by 0.2."""
  success = np.array([[0.25, 0.05, 0.05, 0.05], [0.95, 0.75, 0.75, 0.75]])
  return Bandit(np.array([0.5, 0.5]), np.full((2, 4), 0.25), success, True)


def log_policy(params, shared, drawn=False):
  """log p(strategy, act), [S, A], of params = (choice logits [S], act logits [S, A]).

  A bandit whose strategy is `drawn` can't be `shared`.
  """
  choice_s, act_sa = params
  choice_s = jnp.where(drawn, jax.lax.stop_gradient(choice_s), choice_s)
  # One logit for each pair is the case in which a strategy's logit is its acts' log-sum-exp.
  choice_s = jnp.where(shared, jax.nn.logsumexp(act_sa, axis=1), choice_s)
  return jax.nn.log_softmax(choice_s)[:, None] + jax.nn.log_softmax(act_sa, axis=1)


def start(setting: Setting):
  """Parameters with the bandit's starting probabilities."""
  choice_s, act_sa = jnp.log(setting.bandit.choice_s), jnp.log(setting.bandit.act_sa)
  return choice_s, act_sa + jnp.where(setting.shared, choice_s[:, None], 0)


def sample(key, p_sa, success_sa, groups: int):
  """(pair_qk, reward_qk) of `groups` questions; the pair is strategy * A + act."""
  pair_key, reward_key = jax.random.split(key)
  draw_qk = jax.random.uniform(pair_key, (groups, SAMPLES))
  pair_qk = sum((draw_qk > edge).astype(jnp.int32) for edge in jnp.cumsum(p_sa.ravel())[:-1])
  rate_qk = sum(jnp.where(pair_qk == i, rate, 0) for i, rate in enumerate(success_sa.ravel()))
  return pair_qk, (jax.random.uniform(reward_key, draw_qk.shape) < rate_qk).astype(jnp.float32)


def estimated(estimator, setting: Setting, pair_qk, reward_qk, key, step):
  """The advantages, [Q, K], of an entry of `estimators`."""
  estimate, shuffled = estimator
  stratum_qk, ones_qk = pair_qk // setting.bandit.success_sa.shape[1], jnp.ones_like(reward_qk)
  given_qk = (
    jax.random.permutation(key, stratum_qk, axis=1, independent=True) if shuffled else stratum_qk
  )
  advantage_qk = estimate(reward_qk, given_qk, ones_qk, step)
  gn_qk = advantages.make("gn", num_strata=NUM_STRATA)(reward_qk, stratum_qk, ones_qk, step)
  return jnp.where(
    setting.matched, advantages.match_rms(advantage_qk, gn_qk, ones_qk), advantage_qk
  )


def train(estimator, setting: Setting, key, steps: int) -> Curves:
  """Ascends (1 / (Q K)) sum_i A_i log p(strategy_i, act_i), with fresh rollouts at each step."""
  bandit = setting.bandit

  def step(params, t):
    p_sa = jnp.exp(log_policy(params, setting.shared))
    sample_key, shuffle_key = jax.random.split(jax.random.fold_in(key, t))
    pair_qk, reward_qk = sample(sample_key, p_sa, bandit.success_sa, QUESTIONS)
    advantage_qk = estimated(estimator, setting, pair_qk, reward_qk, shuffle_key, t)
    # The sum over rollouts, collected by pair: what the gradient of log p is weighted with.
    weight = jnp.stack(
      [jnp.mean(jnp.where(pair_qk == i, advantage_qk, 0)) for i in range(p_sa.size)]
    )
    objective = lambda x: jnp.vdot(
      weight.reshape(p_sa.shape), log_policy(x, setting.shared, bandit.drawn)
    )
    gradient = jax.grad(objective)(params)
    share = p_sa[1].sum()
    curves = Curves(
      jnp.vdot(p_sa, bandit.success_sa), share, jnp.vdot(p_sa[1], bandit.success_sa[1]) / share
    )
    return jax.tree.map(lambda x, d: x + LEARNING_RATE * d, params, gradient), curves

  return jax.lax.scan(step, start(setting), jnp.arange(steps))[1]


@functools.partial(jax.jit, static_argnames=("estimator", "steps"))
def train_all(estimator, settings: Setting, keys, steps: int) -> Curves:
  """Curves of stacked settings and keys, [settings, seeds, steps] each."""
  over_seeds = jax.vmap(lambda setting, key: train(estimator, setting, key, steps), (None, 0))
  return jax.vmap(over_seeds, (0, None))(settings, keys)


@functools.partial(jax.jit, static_argnames=("estimator", "groups"))
def first_push(estimator, setting: Setting, key, groups: int):
  """What groups push at the start on strategy 1's logit, and on its first act's, [groups] each.

  (1/K) sum_i A_i d log p_i / d logit, with separate parameters; a third array holds (1/K) sum_i
  A_i^2.
  """
  p_sa = jnp.exp(log_policy(start(setting), setting.shared))
  sample_key, shuffle_key = jax.random.split(key)
  pair_qk, reward_qk = sample(sample_key, p_sa, setting.bandit.success_sa, groups)
  advantage_qk = estimated(estimator, setting, pair_qk, reward_qk, shuffle_key, 0)
  acts = p_sa.shape[1]
  chosen_qk = (pair_qk // acts == 1).astype(jnp.float32)
  act_qk = (pair_qk == acts) - chosen_qk * p_sa[1, 0] / p_sa[1].sum()
  mean = lambda x_qk: jnp.mean(x_qk, axis=1)
  return (
    mean(advantage_qk * (chosen_qk - p_sa[1].sum())),
    mean(advantage_qk * act_qk),
    mean(jnp.square(advantage_qk)),
  )


def estimators(steps: int) -> dict:
  """Name -> (kernel over [Q, K], whether it gets strata shuffled within each group)."""
  make = functools.partial(advantages.make, num_strata=NUM_STRATA, samples_per_question=SAMPLES)
  annealed = lambda share: make(
    "blend", alpha=1.0, alpha_end=0.0, alpha_steps=max(1, round(share * steps))
  )
  return {
    "gn": (make("gn"), False),
    "san": (make("san"), False),
    "blend 0.6": (make("blend", alpha=0.6), False),
    "blend 1 to 0": (annealed(1 / 2), False),
    "blend 1 to 0, sooner": (annealed(1 / 8), False),
    "loo": (make("loo"), False),
    "stratified": (make("stratified"), False),
    "stratified_loo": (make("stratified_loo"), False),
    "shrunk": (make("shrunk", kappa=1.0), False),
    "two_term": (make("two_term", lam=0.5), False),
    "san_rms": (make("san_rms"), False),
    "san, random strata": (make("san"), True),
  }


def stack(settings) -> Setting:
  """Settings as one of arrays with a leading axis."""
  return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(one) for one in x]), *settings)
