"""The update step: its gradient against an independent reference, what must not change it, and what
stops it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_rollouts import (
  collate,
  decoder_config,
  family,
  parameters,
  random_groups,
  resampled,
  trajectory,
)

from stratified.algorithms.base import Loss
from stratified.algorithms.supervised import Supervised
from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.policy import decoder

CONFIG = decoder_config()
PARAMS = parameters(CONFIG, scale=2.0)
REFERENCE = parameters(CONFIG, seed=1, scale=2.0)
NUM_STRATA = 3
LOSS = dict(clip_ratio=0.2, kl_coefficient=0.3, kl_estimator="k3")
POLICY_ONLY = LOSS | {"kl_coefficient": 0.0}

SGD = optimizer.make(name="sgd", learning_rate=0.5, clip_norm=1e9)
ADAM = optimizer.make(learning_rate=1e-2)

# An optimizer that moves nothing and keeps the gradient it was given as its state.
RECORD = optax.GradientTransformation(
  lambda params: jax.tree.map(jnp.zeros_like, params),
  lambda gradient, state, params: (jax.tree.map(jnp.zeros_like, gradient), gradient),
)


@functools.cache
def _step_of(mesh, chain, loss, settings, options):
  return update.make_update(
    mesh,
    CONFIG,
    chain,
    family(**dict(loss)),
    num_strata=3,
    settings=update.UpdateSettings(**dict(settings)),
    **dict(options),
  )


def step_of(mesh, chain=RECORD, loss=LOSS, settings=(), **options):
  """The step of these settings, made and compiled once for the whole file.

  Options of the aggregation belong to the loss, the others to the update.
  """
  loss = dict(loss) | {
    key: options.pop(key) for key in ("aggregation", "max_tokens") if key in options
  }
  return _step_of(
    mesh, chain, *(tuple(sorted(dict(part).items())) for part in (loss, settings, options))
  )


def state_of(mesh, chain=RECORD, params=PARAMS, reference=REFERENCE):
  state = states.init_state(mesh, CONFIG, params, chain, with_reference=True)
  return state._replace(
    reference=jax.tree.map(
      lambda new, old: jax.device_put(new, old.sharding), reference, state.reference
    )
  )


def run(mesh, batch, **options):
  """(gradient, stats) of one step as NumPy."""
  state, stats = step_of(mesh, **options)(state_of(mesh), batching.place(mesh, batch))
  return jax.device_get(state.opt_state), jax.device_get(stats)


def distance(found, expected):
  """Norm of the difference of two trees over the norm of the second."""
  return float(
    optax.global_norm(jax.tree.map(jnp.subtract, found, expected)) / optax.global_norm(expected)
  )


# --- An independent reference: one rollout after the other, unpacked, plain log_softmax, NumPy
# advantages. ---


LONGEST = 20


@jax.jit
def alone_logp(params, token_t, temperature=1.0):
  """Log-probs [T] of one rollout's tokens, 0 for its first; what stands after its end changes
  nothing before it."""
  token = token_t[None]
  x = decoder.hidden(CONFIG, params, token, jnp.arange(LONGEST)[None], jnp.ones_like(token))
  logp = jax.nn.log_softmax(decoder.logits(CONFIG, params, x)[0, :-1] / temperature)
  return jnp.pad(jnp.take_along_axis(logp, token_t[1:, None], axis=1)[:, 0], (1, 0))


def padded(values):
  return np.pad(np.asarray(values), (0, LONGEST - len(values)))


def policy_mask(rollout, context=0.0):
  """[T], 1 on policy tokens and `context` on others, 0 on the first token and past the end."""
  mask = padded(
    [float(s.origin == "policy") or context for s in rollout.segments for _ in s.token_ids]
  )
  mask[0] = 0
  return mask


def trainer_logp(rollout):
  return np.asarray(alone_logp(PARAMS, padded(rollout.token_ids)))[: len(rollout.token_ids)]


@jax.jit
@functools.partial(jax.grad, argnums=0)
def rollout_gradient(params, token_t, weight_t, advantage, temperature):
  logp = alone_logp(params, token_t, temperature)
  x = alone_logp(REFERENCE, token_t, temperature) - logp
  return (weight_t * (-advantage * logp + 0.3 * (jnp.exp(x) - 1 - x))).sum()


def reference_gradient(groups, rewards, *, aggregation="token_mean", max_tokens=1, temperature=1.0):
  """Gradient of mean over policy tokens of -A logp + 0.3 (exp(r - logp) - 1 - (r - logp)), A = (R -
  mean) / (std + 1e-6)."""
  rewards = np.asarray(rewards, np.float64)
  scored = []
  for q, group in enumerate(groups):
    kept = [k for k, rollout in enumerate(group) if rollout.fault is None]
    scores = rewards[q, kept]
    scored += [
      (group[k], (score - scores.mean()) / (scores.std() + 1e-6)) for k, score in zip(kept, scores)
    ]
  tokens = sum(rollout.num_policy_tokens for rollout, _ in scored)
  total = jax.tree.map(np.zeros_like, PARAMS)
  for rollout, advantage in scored:
    divisor = {
      "token_mean": tokens,
      "sequence_mean": rollout.num_policy_tokens * len(scored),
      "constant": len(scored) * max_tokens,
    }[aggregation]
    gradient = rollout_gradient(
      PARAMS, padded(rollout.token_ids), policy_mask(rollout) / divisor, advantage, temperature
    )
    total = jax.tree.map(np.add, total, gradient)
  return total


REWARDS = np.float32([[1, 0, 0], [0, 0.5, 1], [1, 1, 0]])


@pytest.fixture(scope="module")
def groups():
  """Three questions with three rollouts each, whose log-probs are the trainer's; the last rollout
  is lost."""
  made = resampled(random_groups(3, 3, seed=3), trainer_logp)
  made[2][2] = trajectory(
    ("prompt", [5, 6]), ("policy", [7, 8]), sample=2, stop="fault", fault="lost"
  )
  return made


@pytest.mark.parametrize(
  "options",
  [
    dict(),
    dict(aggregation="sequence_mean", temperature=0.7),
    dict(aggregation="constant", max_tokens=50, chunk=8),
  ],
  ids=lambda options: "-".join(options) or "token_mean",
)
def test_the_gradient_is_that_of_each_rollout_alone(mesh, groups, options):
  found, stats = run(mesh, collate(groups, rewards=REWARDS), **options)
  options = {name: value for name, value in options.items() if name != "chunk"}
  expected = reference_gradient(groups, REWARDS, **options)
  assert distance(found, expected) < 2e-6
  np.testing.assert_allclose(stats["grad/norm"], optax.global_norm(expected), rtol=1e-5)


def test_a_plain_sgd_step_goes_down_that_gradient(mesh, groups):
  state, stats = step_of(mesh, SGD)(
    state_of(mesh, SGD), batching.place(mesh, collate(groups, rewards=REWARDS))
  )
  expected = reference_gradient(groups, REWARDS)
  moved = jax.tree.map(lambda old, new: old - new, PARAMS, jax.device_get(state.params))
  assert distance(moved, jax.tree.map(lambda g: 0.5 * g, expected)) < 1e-5
  assert int(state.step) == 1 and stats["update/skipped"] == 0
  np.testing.assert_array_equal(state.reference["embed"], REFERENCE["embed"])


@pytest.mark.parametrize("shape", [dict(rows=1), dict(rows=8, length=40)], ids=str)
def test_how_rows_are_packed_and_accumulated_changes_only_memory(mesh, groups, shape):
  baseline, baseline_stats = run(mesh, collate(groups, rewards=REWARDS))
  found, stats = run(mesh, collate(groups, rewards=REWARDS, **shape))
  assert distance(found, baseline) < 5e-6  # float32 sums in another order: 1e-6 was seen
  # The gap between sampler and trainer is itself rounding, some 1e-6 of a log-prob: its maximum is
  # no steadier.
  for name, value in baseline_stats.items():
    np.testing.assert_allclose(stats[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_rollouts_in_another_order_give_the_same_parameters(mesh, groups):
  def params_after(groups, rewards, **shape):
    batch = batching.place(mesh, collate(groups, rewards=rewards, **shape))
    return jax.device_get(step_of(mesh, SGD)(state_of(mesh, SGD), batch)[0].params)

  turned = [group[::-1] for group in groups[::-1]]
  assert distance(params_after(turned, REWARDS[::-1, ::-1]), params_after(groups, REWARDS)) < 1e-6


def test_a_lost_rollouts_reward_and_stratum_change_nothing(mesh, groups):
  rewards, strata = REWARDS.copy(), np.arange(9).reshape(3, 3) % NUM_STRATA
  found = []
  for reward, stratum in ((0, 0), (100, 1)):
    rewards[2, 2], strata[2, 2] = reward, stratum
    found.append(run(mesh, collate(groups, rewards=rewards, strata=strata.copy())))
  jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
  assert found[0][1]["advantage_qk"][2, 2] == 0


def test_a_step_of_which_every_rollout_was_lost_moves_nothing_and_stays_finite(mesh, groups):
  lost = [[trajectory(("prompt", [1]), stop="fault", fault="lost")] * 3] * 3
  gradient, stats = run(mesh, collate(lost))
  assert optax.global_norm(gradient) == 0 and stats["update/skipped"] == 0
  assert all(np.isfinite(value).all() for value in stats.values())


def test_equal_rewards_give_gn_no_policy_gradient(mesh, groups):
  gradient, stats = run(mesh, collate(groups, rewards=np.ones((3, 3))), loss=POLICY_ONLY)
  assert optax.global_norm(gradient) == 0
  assert stats["advantage/zero_share"] == 1 and stats["loss/policy"] == 0


def test_on_policy_nothing_is_clipped_and_the_sampler_agrees(mesh, groups):
  for loss in (POLICY_ONLY, POLICY_ONLY | {"old_log_probs": "sampler"}):
    _, stats = run(mesh, collate(groups, rewards=REWARDS), loss=loss)
    assert stats["policy/clip_share"] == 0
    assert stats["policy/logp_gap_max"] < 1e-5


def shifted(groups, by):
  """The groups as a sampler reports them whose log-probs lie `by` below the trainer's."""
  return resampled(groups, lambda rollout: trainer_logp(rollout) - by)


def policy_only(mesh, groups, **changes):
  return run(mesh, collate(groups, rewards=REWARDS), loss=POLICY_ONLY | changes)


def test_the_gap_to_the_sampler_is_reported_and_matters_only_where_it_should(mesh, groups):
  apart = shifted(groups, 0.1)
  on_policy, _ = policy_only(mesh, groups)
  trainer, stats = policy_only(mesh, apart)
  np.testing.assert_allclose(
    [stats["policy/logp_gap_mean"], stats["policy/logp_gap_max"]], 0.1, rtol=1e-4
  )
  assert distance(trainer, on_policy) < 1e-6
  # A ratio of e^0.1 = 1.105 lies within the clip, so each token's gradient is that ratio times its
  # policy gradient.
  sampler, stats = policy_only(mesh, apart, old_log_probs="sampler")
  assert distance(sampler, jax.tree.map(lambda g: np.exp(0.1) * g, on_policy)) < 1e-5
  assert stats["policy/clip_share"] == 0


def test_a_ratio_beyond_the_clip_stops_only_what_is_already_more_likely_and_good(mesh, groups):
  _, stats = policy_only(mesh, shifted(groups, 0.5), old_log_probs="sampler")
  good = stats["advantage_qk"] > 0
  lengths = np.float32(
    [[t.num_policy_tokens * (t.fault is None) for t in group] for group in groups]
  )
  np.testing.assert_allclose(
    stats["policy/clip_share"], lengths[good].sum() / lengths.sum(), rtol=1e-6
  )


@pytest.mark.parametrize("gap, weight", [(0.5, np.exp(0.5)), (2.0, 3.0), (-1.0, np.exp(-1.0))])
def test_importance_weights_scale_the_gradient_up_to_their_cap(mesh, groups, gap, weight):
  on_policy, _ = policy_only(mesh, groups)
  found, _ = policy_only(mesh, shifted(groups, gap), importance_cap=3.0)
  assert distance(found, jax.tree.map(lambda g: weight * g, on_policy)) < 1e-5


# --- What surrounds the gradient ---


@jax.jit
@jax.value_and_grad
def cross_entropy(params, token_nt, mask_nt):
  return (
    -(mask_nt * jax.vmap(lambda token: alone_logp(params, token))(token_nt)).sum() / mask_nt.sum()
  )


def test_supervision_is_the_mean_cross_entropy_and_its_context_counts_the_given_weight(
  mesh, groups
):
  rollouts = [rollout for group in groups for rollout in group if rollout.fault is None]
  step = update.make_update(mesh, CONFIG, RECORD, Supervised())  # the weight is in the batch
  for weight in (0.0, 0.25):
    batch = collate(groups, rewards=REWARDS, algorithm=Supervised(weight))
    state, stats = step(
      states.init_state(mesh, CONFIG, PARAMS, RECORD, with_reference=False),
      batching.place(mesh, batch),
    )
    token, mask = (
      np.stack(x) for x in zip(*((padded(t.token_ids), policy_mask(t, weight)) for t in rollouts))
    )
    value, gradient = cross_entropy(PARAMS, token, mask)
    assert distance(state.opt_state, gradient) < 2e-6
    np.testing.assert_allclose(stats["warm_start/loss"], value, rtol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted_until_a_finite_one(mesh, groups):
  step, batch = step_of(mesh, ADAM), batching.place(mesh, collate(groups, rewards=REWARDS))
  state, _ = step(state_of(mesh, ADAM), batch)
  before = jax.tree.map(np.array, (state.params, state.opt_state))
  put = lambda tree: jax.tree.map(
    lambda new, old: jax.device_put(new, old.sharding), tree, state.reference
  )
  state = state._replace(
    reference=put(REFERENCE | {"final_norm": REFERENCE["final_norm"] * np.nan})
  )
  for count in (1, 2):
    state, stats = step(state, batch)
    assert stats["update/skipped"] == 1 and int(state.skipped_in_a_row) == count
  jax.tree.map(
    np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before
  )
  assert int(state.step) == 3
  state, stats = step(state._replace(reference=put(REFERENCE)), batch)
  assert stats["update/skipped"] == 0 and int(state.skipped_in_a_row) == 0
  assert distance(state.params, before[0]) > 0


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too(mesh, groups):
  class Root(Supervised):
    """The square root of 0, whose derivative is infinite."""

    def losses(self, outputs, before, credit, micro):
      logp = outputs.logp
      loss = jnp.sqrt(jnp.abs(logp - jax.lax.stop_gradient(logp)))
      return {"imitation": Loss(loss, {"loss/policy": logp})}

  step = update.make_update(mesh, CONFIG, ADAM, Root())
  state = states.init_state(mesh, CONFIG, PARAMS, ADAM, with_reference=False)
  state, stats = step(state, batching.place(mesh, collate(groups, algorithm=Root())))
  assert np.isfinite(stats["loss/policy"]) and not np.isfinite(stats["grad/norm"])
  assert stats["update/skipped"] == 1
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), PARAMS)


def test_batches_of_any_size_share_one_compilation_and_the_old_state_is_reused(mesh, caplog):
  chain = optimizer.make(learning_rate=1e-3, warmup_steps=3)
  step = update.make_update(mesh, CONFIG, chain, family("blend", **LOSS))
  state, seen = state_of(mesh, chain), set()
  with jax.log_compiles():
    for seed, longest in enumerate((6, 24, 12, 24)):
      batch = collate(random_groups(3, 3, longest=longest, seed=seed), rows=1, length=30)
      seen.add(int(batch.first_m[-1]))
      old = state
      state, _ = step(state, batching.place(mesh, batch))
      assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state)))
  assert len(seen) > 2
  compiled = [record.message for record in caplog.records if "Finished XLA" in record.message]
  assert sum("jit(step)" in message for message in compiled) == 1


def test_an_abstract_state_is_the_state_without_its_values(mesh):
  chain = optimizer.make(learning_rate=1e-3)
  state, abstract = (
    state_of(mesh, chain),
    states.abstract_state(mesh, CONFIG, chain, with_reference=True),
  )
  describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
  assert jax.tree.structure(state) == jax.tree.structure(abstract)
  assert describe(state.params) == describe(abstract.params) and describe(
    state.reference
  ) == describe(abstract.reference)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
    lambda x: (x.shape, x.dtype), abstract
  )


# --- Several updates a rollout batch ---


def reference_step(groups, rewards, epochs, mini_batches, rate=0.5, clip=0.2):
  """SGD on -min(rho A, clip(rho) A), one update a mini-batch of questions, rho against PARAMS."""
  rewards, params, q = np.asarray(rewards, np.float64), PARAMS, len(groups)
  advantage = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
  clipped = []

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def surrogate(params, token_t, old_t, weight_t, advantage):
    rho = jnp.exp(alone_logp(params, token_t) - old_t)
    free, held = rho * advantage, jnp.clip(rho, 1 - clip, 1 + clip) * advantage
    return -(weight_t * jnp.minimum(free, held)).sum(), (weight_t * (held < free)).sum()

  for m in list(range(mini_batches)) * epochs:
    own = [(i, k) for i in range(q) if i * mini_batches // q == m for k in range(len(groups[i]))]
    tokens = sum(groups[i][k].num_policy_tokens for i, k in own)
    total, share = jax.tree.map(np.zeros_like, PARAMS), 0.0
    for i, k in own:
      token = padded(groups[i][k].token_ids)
      old = alone_logp(PARAMS, token)
      (_, aux), gradient = surrogate(
        params, token, old, policy_mask(groups[i][k]) / tokens, advantage[i, k]
      )
      total, share = jax.tree.map(np.add, total, gradient), share + float(aux)
    params = jax.tree.map(lambda p, g: p - rate * g, params, total)
    clipped.append(share)
  return params, float(np.mean(clipped))


@pytest.fixture(scope="module")
def four_groups():
  return resampled(random_groups(4, 3, seed=5), trainer_logp)


FOUR = np.float32([[1, 0, 0], [0, 0.5, 1], [1, 1, 0], [0, 1, 0]])


@pytest.mark.parametrize("settings, packed", [((2, 1), (2,)), ((1, 2), (2,)), ((2, 2), (1, 2, 4))])
def test_several_updates_are_those_updates_one_after_the_other(mesh, four_groups, settings, packed):
  """Packed in so many rows: of both kinds at once in several ways, which changes nothing."""
  epochs, mini_batches = settings
  step = step_of(mesh, SGD, POLICY_ONLY, settings=dict(epochs=epochs, mini_batches=mini_batches))
  found = []
  for rows in packed:
    batch = collate(four_groups, rewards=FOUR, rows=rows, mini_batches=mini_batches)
    state, stats = step(state_of(mesh, SGD), batching.place(mesh, batch))
    found.append((jax.device_get(state.params), jax.device_get(stats)))
    assert int(state.step) == 1
  params, clip_share = reference_step(four_groups, FOUR, epochs, mini_batches)
  moved = lambda after: jax.tree.map(lambda new, old: new - old, after, PARAMS)
  for after, stats in found:
    # One update agrees to 2e-6; each further one starts from rounded parameters.
    assert distance(moved(after), moved(params)) < 2e-4
    np.testing.assert_allclose(stats["policy/clip_share"], clip_share, atol=1e-6)
    # Against the sampler, which is what the trainer said before the first update.
    assert stats["policy/logp_gap_max"] < 1e-5
  assert clip_share > 0.05


def test_one_update_has_nothing_to_clip_and_four_do(mesh, four_groups):
  shares = []
  for settings in ((1, 1), (2, 2)):
    step = step_of(
      mesh, SGD, POLICY_ONLY, settings=dict(epochs=settings[0], mini_batches=settings[1])
    )
    batch = collate(four_groups, rewards=FOUR, mini_batches=settings[1])
    _, stats = step(state_of(mesh, SGD), batching.place(mesh, batch))
    shares.append(float(stats["policy/clip_share"]))
  assert shares[0] == 0 and shares[1] > 0


def test_a_mini_batch_of_lost_rollouts_alone_moves_nothing(mesh, four_groups):
  lost = [[trajectory(("prompt", [1]), stop="fault", fault="lost")] * 3] * 2
  step = step_of(mesh, SGD, POLICY_ONLY, settings=dict(epochs=1, mini_batches=2))
  whole = step_of(mesh, SGD, POLICY_ONLY)
  args = dict(rewards=FOUR, mini_batches=2)
  state, stats = step(
    state_of(mesh, SGD), batching.place(mesh, collate(four_groups[:2] + lost, **args))
  )
  alone, _ = whole(
    state_of(mesh, SGD), batching.place(mesh, collate(four_groups[:2] + lost, rewards=FOUR))
  )
  moved = lambda state: jax.tree.map(
    lambda new, old: new - old, jax.device_get(state.params), PARAMS
  )
  assert distance(moved(state), moved(alone)) < 1e-5 and stats["update/skipped"] == 0


def test_the_sequence_weight_sends_no_gradient_through_what_the_policy_did_not_write(mesh):
  """The weight of a whole rollout counts its policy tokens' gap, not prompt and observation."""
  groups = [
    [
      trajectory(
        ("prompt", [3, 4]),
        ("policy", [5 + k, 6], [-3.0, -3.0]),
        ("observation", [7, 8, 9 + k]),
        ("policy", [10], [-3.0]),
        sample=k,
      )
      for k in range(3)
    ]
  ]
  reward = np.float32([[1, 0, 0]])
  args = dict(POLICY_ONLY, importance="sequence", importance_cap=1e6)
  others = [[trajectory(("prompt", [1]), stop="fault", fault="lost")] * 3] * 2
  found, _ = run(mesh, collate(groups + others, rewards=np.repeat(reward, 3, axis=0)), loss=args)

  @jax.jit
  @functools.partial(jax.grad, argnums=0)
  def weighted(params, token_t, weight_t, advantage):
    logp = alone_logp(params, token_t)
    gap = (policy_mask(groups[0][0]) * (alone_logp(PARAMS, token_t) + 3.0)).sum()
    return -(weight_t * jnp.exp(gap) * advantage * logp).sum()

  total = jax.tree.map(np.zeros_like, PARAMS)
  advantage = (reward[0] - reward.mean()) / (reward.std() + 1e-6)
  for k, rollout in enumerate(groups[0]):
    g = weighted(PARAMS, padded(rollout.token_ids), policy_mask(rollout) / 9, advantage[k])
    total = jax.tree.map(np.add, total, g)
  assert distance(found, total) < 1e-4


def test_gaps_that_overflow_are_held_and_the_update_stays_finite(mesh, groups):
  apart = resampled(
    groups, lambda rollout: np.where(np.arange(len(rollout.token_ids)) % 2, -95, -0.01)
  )
  for loss in (dict(old_log_probs="sampler"), dict(importance_cap=3.0),
               dict(importance_cap=1e6, importance="sequence")):  # fmt: skip
    gradient, stats = run(mesh, collate(apart, rewards=REWARDS), loss=POLICY_ONLY | loss)
    assert (
      all(np.isfinite(value).all() for value in stats.values()) and stats["update/skipped"] == 0
    )
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
  "loss, words",
  [
    (dict(aggregation="mean"), "loss.aggregation='mean' is unknown; choose one of .*token_mean"),
    (dict(old_log_probs="sampler", importance_cap=2.0), "corrects for the sampler twice"),
    (dict(importance="sequence"), "does nothing without a cap"),
    (dict(dual_clip=0.5), "loss.dual_clip=0.5 must be above 1"),
    (dict(clip_ratio=-0.1), "loss.clip_ratio=-0.1 must be at least 0"),
  ],
)
def test_losses_that_can_not_be_meant_are_refused_in_words(loss, words):
  with pytest.raises(ValueError, match=words):
    family(**loss)
