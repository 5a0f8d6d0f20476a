"""The group family's loss as the update weighs it, against a float64 NumPy loop of each choice."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from small_rollouts import collate, family, random_groups, trajectory

from stratified.algorithms.base import Outputs
from stratified.learner import update

Q, K, NUM_STRATA, MAX_TOKENS = 3, 4, 3, 20
ESTIMATORS = ("gn", "blend", "stratified_loo")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
KL = ((0.0, "k3"), (0.3, "k1"), (0.3, "k2"), (0.3, "k3"))
CLIPS = (
  dict(clip_ratio=0.2),
  dict(clip_ratio=0.1, clip_ratio_high=0.4),
  dict(clip_ratio=0.2, dual_clip=1.5),
)
IMPORTANCE = (
  dict(),
  dict(old_log_probs="sampler"),
  dict(importance_cap=1.2),
  dict(importance_cap=1.5, importance="sequence"),
)


@pytest.fixture(scope="module")
def made():
  """One micro-batch with random log-probs: of the policy now and before, reference, sampler."""
  rng = np.random.default_rng(0)
  groups = random_groups(Q, K, seed=4)
  groups[1][2] = trajectory(("prompt", [1]), ("policy", [2]), stop="fault", fault="lost")
  rewards = rng.choice([0.0, 0.5, 1.0], (Q, K)).astype(np.float32)
  strata = rng.integers(0, NUM_STRATA, (Q, K))
  batch = collate(groups, rewards=rewards, strata=strata, num_strata=NUM_STRATA, rows=12, length=24)
  shape = batch.token_art.shape
  near = lambda center: (center + rng.normal(0, 0.4, shape)).astype(np.float32)
  before = near(np.full(shape, -1.5, np.float32))
  batch = batch._replace(sampler_logp_art=near(before) * batch.policy_art)
  return batch, near(before)[0], before[0], near(before)[0]


def jax_loss(algorithm, batch, logp, before, reference_logp):
  """(loss, gradient in the log-probs, stats) as the update makes them of its only micro-batch."""
  one = lambda x: Outputs(x, jnp.zeros_like(x), jnp.asarray(reference_logp), {})
  of_step = Outputs(*(jnp.asarray(x)[None] for x in (before, before, reference_logp)), {})
  credit = algorithm.credit(batch, of_step, 0)
  micro, _, by_token = update._micro_batch(
    batch, None, {"advantage": update.flat(credit.token["advantage"])}, 0
  )
  counts = update._counts(batch, 0, 1, credit.valid)

  def loss(x):
    losses = algorithm.losses(one(x), one(jnp.asarray(before)), by_token, micro)
    return update._weighted(losses, micro, counts)

  (value, (sums, maxima)), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logp))
  mass = sums["policy"].pop("")
  return value, gradient, {key: total / mass for key, total in sums["policy"].items()} | maxima


def numpy_loss(
  batch, logp, before, reference_logp, estimator, aggregation, kl, clip, importance, *,
  kl_in="loss", filtered=False,
):  # fmt: skip
  """The same in float64, one token after the other."""
  reward, stratum, valid = (
    np.float64(x) for x in (batch.reward_qk, batch.stratum_qk, batch.valid_qk)
  )
  mask, index = batch.policy_art[0] > 0, batch.trajectory_art[0]
  logp, before, ref = (np.float64(x) for x in (logp, before, reference_logp))
  coefficient, kind = kl
  if kl_in == "reward":
    for r, t in zip(*np.nonzero(mask)):
      x = ref[r, t] - before[r, t]
      each = {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - 1 - x}[kind]
      reward[np.unravel_index(index[r, t], reward.shape)] -= coefficient * each
    coefficient = 0.0
  advantage_qk = np.stack(
    [reference.GROUP[estimator](r, s.astype(int), v) for r, s, v in zip(reward, stratum, valid)]
  )
  if filtered:  # what is without signal is no part of the batch
    signal_q = (advantage_qk != 0).any(axis=1)
    valid = valid * signal_q[:, None]
    mask = mask & signal_q[index // K]
  advantage = advantage_qk.reshape(-1)
  sampler = np.float64(batch.sampler_logp_art[0])
  lengths = {i: (mask & (index == i)).sum() for i in range(Q * K)}
  trajectories, tokens = valid.sum(), mask.sum()
  gradient, total, clipped_tokens = np.zeros_like(logp), 0.0, 0
  low, high = clip["clip_ratio"], clip.get("clip_ratio_high", clip["clip_ratio"])
  for r, t in zip(*np.nonzero(mask)):
    i = index[r, t]
    a = advantage[i]
    weight = (
      1
      / {
        "token_mean": tokens,
        "sequence_mean": trajectories * lengths[i],
        "constant": trajectories * MAX_TOKENS,
      }[aggregation]
    )
    old = sampler[r, t] if importance.get("old_log_probs") == "sampler" else before[r, t]
    ratio = np.exp(logp[r, t] - old)
    held = np.clip(ratio, 1 - low, 1 + high)
    objective, slope, is_clipped = ratio * a, ratio * a, False
    if held * a < ratio * a:
      objective, slope, is_clipped = held * a, 0.0, True
    if clip.get("dual_clip") and a < 0 and objective < clip["dual_clip"] * a:
      objective, slope, is_clipped = clip["dual_clip"] * a, 0.0, True
    correction = 1.0
    if importance.get("importance_cap"):
      gap = before - sampler
      own = mask[r] & (index[r] == i)
      whole = importance.get("importance") == "sequence"
      gap = gap[r][own].sum() if whole else gap[r, t]
      correction = min(np.exp(gap), importance["importance_cap"])
    x = ref[r, t] - logp[r, t]
    value, dx = {
      "k1": (-x, -1.0), "k2": (x**2 / 2, x), "k3": (np.exp(x) - 1 - x, np.exp(x) - 1)
    }[kind]  # fmt: skip
    total += weight * (-correction * objective + coefficient * value)
    gradient[r, t] += weight * (-correction * slope - coefficient * dx)
    clipped_tokens += is_clipped
  return total, gradient, clipped_tokens / tokens


@pytest.mark.parametrize("importance", IMPORTANCE, ids=str)
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_loss_and_gradient_are_those_of_a_loop_over_tokens(made, clip, importance):
  """Every aggregation with every KL, each with the estimator whose turn it is: over the cases, all
  choices of four of the five parts meet."""
  batch, logp, before, reference_logp = made
  turn = CLIPS.index(clip) + IMPORTANCE.index(importance)
  for (k, kl), (a, aggregation) in itertools.product(enumerate(KL), enumerate(AGGREGATIONS)):
    estimator = ESTIMATORS[(turn + k + a) % len(ESTIMATORS)]
    algorithm = family(
      estimator,
      max_tokens=MAX_TOKENS,
      aggregation=aggregation,
      kl_coefficient=kl[0],
      kl_estimator=kl[1],
      **clip,
      **importance,
    )
    value, gradient, stats = jax_loss(algorithm, batch, logp, before, reference_logp)
    total, slope, share = numpy_loss(
      batch, logp, before, reference_logp, estimator, aggregation, kl, clip, importance
    )
    label = f"{estimator} {aggregation} {kl}"
    # float32 against float64: log-probs of 1.5 carry 1e-7, sums of 40 tokens some 1e-6.
    np.testing.assert_allclose(value, total, rtol=2e-5, atol=2e-6, err_msg=label)
    np.testing.assert_allclose(gradient, slope, rtol=2e-4, atol=2e-6, err_msg=label)
    np.testing.assert_allclose(stats["policy/clip_share"], share, atol=1e-6, err_msg=label)
  assert share > 0.1


def test_the_reference_tells_choices_apart(made):
  """A wrong choice in any part gives another gradient: the comparison above can fail."""
  batch, logp, before, reference_logp = made
  base = dict(estimator="gn", aggregation="token_mean", kl=KL[3], clip=CLIPS[0], importance={})
  others = dict(
    estimator="blend", aggregation="constant", kl=KL[1], clip=CLIPS[1], importance=IMPORTANCE[2]
  )
  value = lambda choice: numpy_loss(batch, logp, before, reference_logp, **choice)[1]
  for name, other in others.items():
    assert np.abs(value(base) - value(base | {name: other})).max() > 1e-3, name


@pytest.mark.parametrize("kl", [KL[1], KL[3]], ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_kl_in_the_reward_and_filtered_groups_are_those_of_the_loop(made, aggregation, kl):
  """One question's rewards are all equal: without KL in the reward it is filtered, with it not."""
  batch, *logps = made
  rewards = batch.reward_qk.copy()
  rewards[0] = 0.5
  rewards[1, :2] = 0, 1
  batch, found = batch._replace(reward_qk=rewards), []
  for options in (
    dict(kl_in="reward"), dict(filter_groups=True), dict(kl_in="reward", filter_groups=True)
  ):  # fmt: skip
    algorithm = family(
      "gn", max_tokens=MAX_TOKENS, aggregation=aggregation, kl_coefficient=kl[0],
      kl_estimator=kl[1], **CLIPS[1], **options,
    )  # fmt: skip
    value, gradient, _ = jax_loss(algorithm, batch, *logps)
    total, slope, _ = numpy_loss(
      batch, *logps, "gn", aggregation, kl, CLIPS[1], {},
      kl_in=options.get("kl_in", "loss"), filtered=options.get("filter_groups", False),
    )  # fmt: skip
    np.testing.assert_allclose(value, total, rtol=2e-5, atol=2e-6, err_msg=str(options))
    np.testing.assert_allclose(gradient, slope, rtol=2e-4, atol=2e-6, err_msg=str(options))
    found.append(gradient)
  index = batch.trajectory_art[0]
  assert not found[1][index // K == 0].any() and found[0][(index // K == 0)].any()
  np.testing.assert_array_equal(found[0], found[2])  # nothing was left to filter
