"""One check for each proposition and theorem of arXiv 2510.06214, run on a `kernels` with
.advantages and .theory.

The library's own kernels must pass them (test_theory.py) and deliberately broken ones must not
(test_mutations.py), so each takes the kernels as an argument. The other side of every equation
comes from tests/reference.py or from the exact enumeration of a small policy, in float64.
"""

import itertools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import reference

K, STRATA = 8, 4
TOLERANCE = 1e-10

# Rewards with ties and with arbitrary values; groups with masked rollouts, empty and singleton
# strata.
_reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-10, 10, width=16))
_rewards = st.lists(_reward, min_size=K, max_size=K)
_strata = st.lists(st.integers(0, STRATA - 1), min_size=K, max_size=K)
_masks = st.lists(st.booleans(), min_size=K, max_size=K).filter(any)


def for_groups(property_of_group, examples=60):
  """Calls property_of_group(reward, stratum, mask) for generated groups, each a float64 or int32
  array of length K."""
  # Reproducible, without the shrinking that the mutation tests would pay for every time.
  phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]

  @hypothesis.settings(
    max_examples=examples,
    deadline=None,
    derandomize=True,
    database=None,
    phases=phases,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(_rewards, _strata, _masks)
  def run(reward, stratum, mask):
    property_of_group(np.array(reward), np.array(stratum, np.int32), np.array(mask, np.float64))

  with jax.enable_x64(True):
    run()


def kernel(function, **options):
  jitted = jax.jit(lambda r, s, m: function(r, s, num_strata=STRATA, mask_k=m, **options))
  return lambda r, s, m: jax.tree.map(np.asarray, jitted(r, s, m))


def close(left, right, tolerance=TOLERANCE):
  np.testing.assert_allclose(np.asarray(left, np.float64), right, rtol=tolerance, atol=tolerance)


def variance(x, mask):
  return np.var(x[mask > 0])


def per_sample(formula, reward, stratum, mask):
  """formula(n_k, R_k, s_k, R_g, s_g) for each valid rollout, 0 elsewhere."""
  r_g, s_g, table = reference.statistics(reward, stratum, mask)
  return np.array([formula(*table[int(k)], r_g, s_g) if m else 0.0 for k, m in zip(stratum, mask)])


def proposition_1(kernels):
  global_, own = kernel(kernels.advantages.centered), kernel(kernels.advantages.stratified)
  parts = kernel(kernels.theory.centered_parts)

  def check(r, s, m):
    bias = per_sample(lambda n_k, r_k, s_k, r_g, s_g: r_k - r_g, r, s, m)
    close(global_(r, s, m), own(r, s, m) + bias)
    close(parts(r, s, m), (own(r, s, m), bias))

  for_groups(check)


def proposition_2(kernels):
  san = kernel(kernels.advantages.san, eps=0.0)

  def check(r, s, m):
    close(san(3.7 * r - 11.0, s, m), san(r, s, m), 1e-9)
    close(san(r, s, m), reference.san(r, s, m, eps=0.0), 1e-9)

  for_groups(check)


def proposition_3(kernels, eps=1e-3):
  gn, san = kernel(kernels.advantages.gn, eps=eps), kernel(kernels.advantages.san, eps=eps)
  parts = kernel(kernels.theory.gn_parts, eps=eps)

  def check(r, s, m):
    if reference.statistics(r, s, m)[1] == 0:
      return close(gn(r, s, m), 0.0)
    alpha = per_sample(lambda n_k, r_k, s_k, r_g, s_g: (s_k + eps) / (s_g + eps), r, s, m)
    offset = per_sample(lambda n_k, r_k, s_k, r_g, s_g: (r_k - r_g) / (s_g + eps), r, s, m)
    close(gn(r, s, m), alpha * san(r, s, m) + offset)
    close(parts(r, s, m), (alpha, san(r, s, m), offset))

  for_groups(check)


def _term_a(r, s, m):
  r_g, _, table = reference.statistics(r, s, m)
  return sum(n_k * (r_k - r_g) ** 2 for n_k, r_k, _ in table.values()) / np.sum(m)


def theorem_1(kernels):
  global_, own = kernel(kernels.advantages.centered), kernel(kernels.advantages.stratified)
  terms = kernel(kernels.theory.variance_terms)

  def check(r, s, m):
    difference = variance(global_(r, s, m), m) - variance(own(r, s, m), m)
    close(difference, _term_a(r, s, m))
    close(terms(r, s, m)[0], _term_a(r, s, m))
    assert terms(r, s, m)[0] >= 0

  for_groups(check)


def theorem_1_equality(kernels):
  """Equality iff all stratum means agree: strata moved to one mean have it, strata moved apart do
  not."""
  global_, own = kernel(kernels.advantages.centered), kernel(kernels.advantages.stratified)
  terms = kernel(kernels.theory.variance_terms)

  def check(r, s, m):
    level = 2.5 + r - per_sample(lambda n_k, r_k, s_k, r_g, s_g: r_k, r, s, m)
    close(variance(global_(level, s, m), m), variance(own(level, s, m), m))
    close(terms(level, s, m)[0], 0.0)
    apart = level + s
    if len(set(s[m > 0])) > 1:
      assert variance(global_(apart, s, m), m) - variance(own(apart, s, m), m) > 0.05
      assert terms(apart, s, m)[0] > 0.05

  for_groups(check)


def theorem_2(kernels, eps=1e-2):
  global_, san = kernel(kernels.advantages.centered), kernel(kernels.advantages.san, eps=eps)
  terms = kernel(kernels.theory.variance_terms, eps=eps)

  def check(r, s, m):
    _, _, table = reference.statistics(r, s, m)
    term_b = sum(
      n_k * s_k**2 * (1 - 1 / (s_k + eps) ** 2) for n_k, _, s_k in table.values()
    ) / np.sum(m)
    difference = variance(global_(r, s, m), m) - variance(san(r, s, m), m)
    close(difference, _term_a(r, s, m) + term_b, 1e-9)
    close(terms(r, s, m), (_term_a(r, s, m), term_b), 1e-9)

  for_groups(check)


class Population:
  """A softmax policy over few trajectories whose probabilities at theta = 0 are count / sum(count).

  A group that holds each trajectory `count` times therefore has the population's moments, and its
  sums are the population's expectations. The logits are log(count) + features theta: strata have no
  parameters of their own.
  """

  count = np.array([1, 3, 2, 4, 1, 2, 3])
  stratum = np.array([0, 0, 1, 1, 1, 2, 2])
  reward = np.array([0.3, 1.0, -0.5, 0.7, 2.0, 0.0, 1.5])

  def __init__(self):
    self.features = np.random.default_rng(0).normal(size=(7, 4))
    self.samples = np.repeat(np.arange(7), self.count)

  def probability(self, theta):
    return jax.nn.softmax(jnp.log(self.count) + self.features @ theta)

  def scores(self):
    """d log p / d theta of each sample of the group, [samples, parameters]."""
    return jax.jit(jax.jacobian(lambda theta: jnp.log(self.probability(theta))))(jnp.zeros(4))[
      self.samples
    ]

  def gradient(self, function):
    """d function(p_k, mu_k) / d theta, function of the strata's probabilities and mean rewards."""

    def of_theta(theta):
      p = self.probability(theta)
      p_k = jnp.stack([p[self.stratum == k].sum() for k in range(3)])
      mu_k = jnp.stack([(p * self.reward)[self.stratum == k].sum() for k in range(3)]) / p_k
      return function(p_k, mu_k)

    return jax.jit(jax.jacobian(of_theta))(jnp.zeros(4))

  def group(self):
    return self.reward[self.samples], self.stratum[self.samples]

  def moments(self):
    stats = reference.statistics(*self.group(), np.ones(len(self.samples)))
    n_k, mu_k, s_k = (np.array(x) for x in zip(*stats[2].values()))
    return n_k / n_k.sum(), mu_k, s_k, stats[0], stats[1]


def theorem_3(kernels, eps=1e-2):
  """E[A_SAN grad log p] = sum_k p_k / (s_k + eps) grad mu_k, and the strata's probabilities do
  depend on theta."""
  with jax.enable_x64(True):
    world = Population()
    p_k, _, s_k, _, _ = world.moments()
    san = kernels.advantages.san(*world.group(), num_strata=3, eps=eps)
    left = jnp.asarray(san) @ world.scores() / len(world.samples)
    right = (p_k / (s_k + eps)) @ world.gradient(lambda p_k, mu_k: mu_k)
    assert np.abs(world.gradient(lambda p_k, mu_k: p_k)).max() > 0.1
    close(left, right)
    return float(np.abs(left - right).max())


def equation_6(kernels, eps=1e-2):
  """The GN gradient is the sum of its two parts; they are sum_k p_k grad mu_k and sum_k (mu_k - mu)
  grad p_k, scaled.

  Together grad J / (s + eps): the first part is what Theorem 3's target reweights, the second what
  it leaves out.
  """
  with jax.enable_x64(True):
    world = Population()
    p_k, mu_k, _, mu, s = world.moments()
    gn = kernels.advantages.gn(*world.group(), num_strata=3, eps=eps)
    whole = jnp.asarray(gn) @ world.scores() / len(world.samples)
    within, between = kernels.theory.gradient_parts(
      *world.group(), world.scores(), num_strata=3, eps=eps
    )
    close(whole, within + between)
    close(within, p_k @ world.gradient(lambda p_k, mu_k: mu_k) / (s + eps))
    close(between, (mu_k - mu) @ world.gradient(lambda p_k, mu_k: p_k) / (s + eps))
    close(whole, world.gradient(lambda p_k, mu_k: p_k @ mu_k) / (s + eps))
    return float(np.abs(whole - world.gradient(lambda p_k, mu_k: p_k @ mu_k) / (s + eps)).max())


# Three normal strata: probability, mean and standard deviation of the reward.
_MIXTURE = (np.array([0.2, 0.5, 0.3]), np.array([0.0, 1.0, 3.0]), np.array([0.5, 1.0, 2.0]))


def _mixture(samples, seed):
  p_k, mu_k, s_k = _MIXTURE
  rng = np.random.default_rng(seed)
  stratum = rng.choice(3, size=samples, p=p_k).astype(np.int32)
  mean = p_k @ mu_k
  std = np.sqrt(p_k @ (s_k**2 + mu_k**2) - mean**2)
  return rng.normal(mu_k[stratum], s_k[stratum]), stratum, mean, std


def theorem_4(kernels, samples=20_000):
  """Within stratum k, eps = 0: SAN has mean 0 and variance 1, GN mean (mu_k - mu) / s and variance
  s_k^2 / s^2.

  The sample's moments may differ from these by 5 standard errors: of a mean s_k / sqrt(n_k), of a
  variance of normal rewards s_k^2 sqrt(2 / n_k); the errors of the group's own mean and deviation
  are added to them.
  """
  _, mu_k, s_k = _MIXTURE
  with jax.enable_x64(True):
    # Of s, relative: the mixture's fourth moment is below 6 s^4, so its variance's error below
    # sqrt(5 / n).
    of_std = 5 * np.sqrt(5 / samples) / 2
    for seed in range(3):
      reward, stratum, mean, std = _mixture(samples, seed)
      san = np.asarray(kernels.advantages.san(reward, stratum, num_strata=3, eps=0.0))
      gn = np.asarray(kernels.advantages.gn(reward, stratum, num_strata=3, eps=0.0))
      for k in range(3):
        inside = stratum == k
        n = inside.sum()
        close([san[inside].mean(), san[inside].var()], [0, 1], 1e-9)
        limit = (reward[inside] - mu_k[k]) / s_k[k]
        # SAN's own limit: the stratum's estimated mean and deviation are off by 5 standard errors
        # at most.
        assert np.abs(san[inside] - limit).max() < 5 / np.sqrt(n) * (1 + np.abs(limit).max())
        offset, ratio = (mu_k[k] - mean) / std, (s_k[k] / std) ** 2
        of_means = 5 * (s_k[k] / std / np.sqrt(n) + 1 / np.sqrt(samples))
        assert abs(gn[inside].mean() - offset) < of_means + of_std * abs(offset)
        assert abs(gn[inside].var() - ratio) < ratio * (5 * np.sqrt(2 / n) + 2 * of_std)


def theorem_5(kernels, samples=20_000):
  """Over all strata, eps = 0: both have mean 0 and variance 1, and both near their limits for each
  rollout."""
  _, mu_k, s_k = _MIXTURE
  with jax.enable_x64(True):
    for seed in range(3):
      reward, stratum, mean, std = _mixture(samples, seed)
      limits = dict(san=(reward - mu_k[stratum]) / s_k[stratum], gn=(reward - mean) / std)
      smallest = np.bincount(stratum).min()
      for name, limit in limits.items():
        advantage = np.asarray(
          getattr(kernels.advantages, name)(reward, stratum, num_strata=3, eps=0.0)
        )
        close([advantage.mean(), advantage.var()], [0, 1], 1e-9)
        assert np.abs(advantage - limit).max() < 6 / np.sqrt(smallest) * (1 + np.abs(limit).max())


def definition_2(kernels):
  """The blend is alpha SAN + (1 - alpha) GN; with rewards of 0 and 1 and alpha < 1 it is 0 exactly
  where GN is."""
  blend = kernel(kernels.advantages.blend, alpha=0.3)

  def check(r, s, m):
    close(blend(r, s, m), 0.3 * reference.san(r, s, m) + 0.7 * reference.gn(r, s, m))
    binary = (r > 0.5).astype(float)
    np.testing.assert_array_equal(
      np.abs(blend(binary, s, m)) < 1e-12, reference.gn(binary, s, m) == 0
    )

  for_groups(check)


class TwoStage:
  """A policy that first picks a stratum (parameters u) and then fails or succeeds inside it
  (parameters w).

  Its outcomes (stratum, success) are few enough to enumerate every group of `samples` rollouts.
  """

  def __init__(self, p_k, q_k, samples):
    self.p_k, self.q_k, self.samples = np.asarray(p_k), np.asarray(q_k), samples
    outcomes = [(k, y) for k in range(len(p_k)) for y in (0, 1)]
    tuples = np.array(list(itertools.product(range(len(outcomes)), repeat=samples)))
    self.stratum, self.success = (np.array(x, np.int32)[tuples] for x in zip(*outcomes))
    chance = np.array([p_k[k] * (q_k[k] if y else 1 - q_k[k]) for k, y in outcomes])
    self.weight = chance[tuples].prod(axis=1)

  def advantages(self, function, **options):
    one = lambda r, s: function(r, s, num_strata=len(self.p_k), **options)
    return np.asarray(
      jax.vmap(one)(jnp.asarray(self.success, jnp.float64), jnp.asarray(self.stratum))
    )

  def choice_push(self, advantage):
    """d / du of (1/K) sum_i A_i log p(k_i), for every group: [groups, strata]."""
    score = np.eye(len(self.p_k))[self.stratum] - self.p_k
    return np.einsum("nk,nks->ns", advantage, score) / self.samples

  def act_push(self, advantage):
    """The expectation over all groups of d / dw of (1/K) sum_i A_i log p(act_i | k_i), for each
    stratum."""
    score = np.eye(len(self.p_k))[self.stratum] * (self.success - self.q_k[self.stratum])[..., None]
    return np.einsum("n,nk,nks->s", self.weight, advantage, score) / self.samples


def attenuation(kernels):
  """Over all K-tuples the acts of a stratum get the infinite group's gradient times the closed-form
  factor."""
  worst = 0.0
  with jax.enable_x64(True):
    for world in (
      TwoStage([0.1, 0.6, 0.3], [0.3, 0.5, 0.05], 4),
      TwoStage([0.1, 0.9], [0.3, 0.7], 6),
    ):
      p, q, K_ = world.p_k, world.q_k, world.samples
      variance_q = q * (1 - q)
      infinite = {
        "stratified": p * variance_q,
        "stratified_loo": p * variance_q,
        "san": p * np.sqrt(variance_q),
      }
      for name, target in infinite.items():
        advantage = world.advantages(getattr(kernels.advantages, name), eps=0.0)
        expected = [
          t * kernels.theory.attenuation(name, p_k, K_, q_k) for t, p_k, q_k in zip(target, p, q)
        ]
        close(world.act_push(advantage), expected)
        worst = max(worst, np.abs(world.act_push(advantage) - expected).max())
  return worst


def choice_of_stratum(kernels):
  """With parameters of its own the choice of stratum gets nothing from SAN in any sample, (1 -
  alpha) of GN's from blend.

  With a flat softmax over trajectories the strata's probabilities drift all the same, through the
  acts inside them.
  """
  with jax.enable_x64(True):
    world = TwoStage([0.2, 0.5, 0.3], [0.3, 0.6, 0.1], 4)
    push = {
      name: world.choice_push(world.advantages(getattr(kernels.advantages, name), **options))
      for name, options in (("san", {}), ("gn", {}), ("blend", dict(alpha=0.7)))
    }
    close(push["san"], 0.0, 1e-12)
    assert np.abs(push["gn"]).max() > 0.1
    close(push["blend"], 0.3 * push["gn"], 1e-12)

    flat = Population()
    p = flat.count / flat.count.sum()
    san = np.asarray(kernels.advantages.san(*flat.group(), num_strata=3))
    gradient = (
      np.array([san[flat.samples == i].sum() for i in range(7)]) / len(san) - p * san.mean()
    )
    velocity = p * (gradient - p @ gradient)
    drift = np.array([velocity[flat.stratum == k].sum() for k in range(3)])
    assert np.abs(drift).max() > 1e-3


CHECKS = dict(
  proposition_1=proposition_1,
  proposition_2=proposition_2,
  proposition_3=proposition_3,
  theorem_1=theorem_1,
  theorem_1_equality=theorem_1_equality,
  theorem_2=theorem_2,
  theorem_3=theorem_3,
  equation_6=equation_6,
  theorem_4=theorem_4,
  theorem_5=theorem_5,
  definition_2=definition_2,
  attenuation=attenuation,
  choice_of_stratum=choice_of_stratum,
)
