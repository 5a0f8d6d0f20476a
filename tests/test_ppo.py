"""PPO's credit and losses by hand and against float64 loops; its critic in the update."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import collate, decoder_config, parameters, random_groups, trajectory

from stratified import advantages, losses
from stratified.algorithms import Facts, make
from stratified.algorithms.policy_loss import PolicyLossSettings
from stratified.algorithms.ppo import (
  calls_before,
  CriticSettings,
  explained_variance,
  Ppo,
  turn_starts,
)
from stratified.learner import batching, optimizer, outputs, trial, update
from stratified.learner import state as states
from stratified.policy import decoder
from stratified.types import Call, Turn

CONFIG = decoder_config(num_layers=1)
MAX_TOKENS, MAX_TURNS = 24, 3


def ppo(loss=PolicyLossSettings(), **settings):
  return Ppo(CriticSettings(**settings), loss, MAX_TOKENS, MAX_TURNS)


###  Estimation, by hand  ###

VALUE = np.float64([0.2, 0.3, 0.5, 0.4])


@pytest.mark.parametrize(
  "mask, lam, expected",
  [
    ([1, 1, 1, 1], 1.0, [0.8, 0.7, 0.5, 0.6]),
    ([1, 0, 0, 1], 1.0, [0.8, 0, 0, 0.6]),  # tokens 2 and 3 retrieved: stepped over
    ([1, 0, 0, 1], 0.9, [0.74, 0, 0, 0.6]),
    ([1, 1, 1, 1], 0.9, [0.6364, 0.596, 0.44, 0.6]),  # through them, as Search-R1's code
  ],
)
def test_gae_by_hand(mask, lam, expected):
  """V = .2 .3 .5 .4, reward 1 at the end, gamma 1."""
  found, target = advantages.gae(
    np.float32([0, 0, 0, 1]), np.float32(VALUE * mask), np.zeros(4, int), np.float32(mask), lam=lam
  )
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  if lam == 1:
    np.testing.assert_allclose(target, mask)


def numpy_turn_gae(reward, value, trajectory, mask, start, gamma, lam):
  """Turns collected into lists, then the recursion backwards over each rollout's turns."""
  turns = []  # (rollout, tokens)
  for t in np.flatnonzero(mask):
    turns.append((trajectory[t], [t])) if start[t] else turns[-1][1].append(t)
  advantage, target = np.zeros(len(reward)), np.zeros(len(reward))
  later = {}
  for who, tokens in reversed(turns):
    after_advantage, after_value = later.get(who, (0.0, 0.0))
    first = tokens[0]
    delta = reward[tokens].sum() + gamma * after_value - value[first]
    own = delta + gamma * lam * after_advantage
    advantage[tokens], target[first] = own, own + value[first]
    later[who] = own, value[first]
  return advantage, target


def test_turn_gae_is_that_of_a_loop_over_turns():
  rng = np.random.default_rng(0)
  #         a rollout of two turns, one of one, one whose two turns touch; then padding
  mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0])
  start = np.array([0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0])
  trajectory_t = np.array([4] * 8 + [2] * 3 + [0] * 6)
  reward, value = rng.normal(size=17), rng.normal(size=17)
  found = advantages.turn_gae(
    *map(np.float32, (reward, value)), trajectory_t, *map(np.float32, (mask, start)),
    gamma=0.9, lam=0.7,
  )  # fmt: skip
  expected = numpy_turn_gae(reward, value, trajectory_t, mask, start, 0.9, 0.7)
  for one, other in zip(found, expected):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_clipped_value_is_charged_where_it_moved_too_far():
  """Value clip 0.5: V_old .4, V 1.2, G 1 is held to .9, and .5 max(.04, .01) = .02."""
  loss = losses.clipped_value_loss(
    jnp.float32([1.2, 0.5]), jnp.float32([0.4, 0.4]), jnp.float32([1.0, 1.0]), clip=0.5
  )
  np.testing.assert_allclose(loss, [0.02, 0.125], rtol=1e-6)
  assert explained_variance(*(jnp.float32([1, 2]),) * 2, jnp.ones(2)) == 1.0


###  Credit  ###


def calling(*calls, sample=0):
  """Prompt, then a turn of two tokens with so many calls and what it reads of three, ..., an answer
  of one."""
  parts = [("prompt", [1])]
  for n, _ in enumerate(calls):
    parts += [("policy", [2 + n, 3]), ("observation", [7, 8, 9])]
  made = trajectory(*parts, ("policy", [5]), sample=sample)
  turns = tuple(Turn("call", "", (Call("search", "who", "hit"),) * count) for count in calls)
  return dataclasses.replace(made, turns=(*turns, Turn("answer", "")))


def test_calls_and_turns_are_told_by_token():
  one = calling(1, 2)
  assert calls_before(one) == [0, 0, 0, 1, 1, 1, 1, 1, 3, 3, 3, 3]
  assert turn_starts(one) == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def credit_of(algorithm, groups, rewards, *, seed=0):
  """(credit, batch, values by token) with random values and log-probs."""
  batch = collate(groups, rewards=np.float32(rewards), algorithm=algorithm, rows=4)
  shape, rng = batch.token_art.shape, np.random.default_rng(seed)
  draw = lambda *more: rng.standard_normal((*shape, *more)).astype(np.float32)
  size = algorithm.critic.heads["value"]
  value = draw() if size == 1 else draw(size)
  before = trial._outputs(algorithm, shape)._replace(
    logp=draw(), reference_logp=draw(), heads={"value": value}
  )
  return algorithm.credit(batch, before, 0), batch, before


def test_each_policy_token_gets_its_gae_and_the_critic_its_target():
  """lambda = gamma = 1: A = R - V on every policy token, and the target is R."""
  groups, rewards = random_groups(2, 3, seed=2), np.float32([[1, 0, 0.5], [0, 1, 0]])
  credit, batch, before = credit_of(ppo(whiten=False), groups, rewards)
  mask, value = batch.policy_art > 0, before.heads["value"]
  reward = rewards.reshape(-1)[batch.trajectory_art]
  np.testing.assert_allclose(credit.token["target"][mask], reward[mask], atol=1e-5)
  np.testing.assert_allclose(credit.token["advantage"][mask], (reward - value)[mask], atol=1e-5)
  assert (np.asarray(credit.token["advantage"])[~mask] == 0).all()
  for q in range(2):
    for k in range(3):
      own = mask & (batch.trajectory_art == q * 3 + k)
      np.testing.assert_allclose(credit.advantage_qk[q, k], (reward - value)[own].mean(), atol=1e-5)


def test_kl_in_the_reward_is_taken_at_each_policy_token():
  """Float64 loop: A_t = R - sum over u >= t of 0.1 (logp - reference) - V_t, over policy tokens."""
  loss = PolicyLossSettings(kl_in="reward", kl_estimator="k1", kl_coefficient=0.1)
  rewards = [[1, 0], [0.5, 0]]
  credit, batch, before = credit_of(ppo(loss, whiten=False), random_groups(2, 2, seed=3), rewards)
  kl = 0.1 * (np.float64(before.logp) - np.float64(before.reference_logp))
  penalties = 0.0
  for i in range(4):
    tokens = [at for at in zip(*np.nonzero((batch.trajectory_art == i) & (batch.policy_art > 0)))]
    for n, at in enumerate(tokens):
      left = np.ravel(rewards)[i] - sum(kl[u] for u in tokens[n:])
      value = np.float64(before.heads["value"][at])
      np.testing.assert_allclose(credit.token["advantage"][at], left - value, atol=1e-5)
    penalties += sum(kl[at] for at in tokens)
  np.testing.assert_allclose(credit.stats["reward/kl_penalty"], penalties / 4, rtol=1e-5)


def test_whitening_is_over_policy_tokens_unless_observations_take_part():
  for through in (False, True):
    algorithm = ppo(through_observations=through)
    rewards = [[1, 0, 0], [0, 1, 0]]
    credit, batch, _ = credit_of(algorithm, random_groups(2, 3, seed=2), rewards)
    advantage = np.asarray(credit.token["advantage"])
    over = batch.stream_art["value"] > 0
    assert (over.sum() > batch.policy_art.sum()) == through
    np.testing.assert_allclose([advantage[over].mean(), advantage[over].std()], [0, 1], atol=1e-5)
    assert abs(advantage[batch.policy_art > 0].mean()) < 1e-5 or through


def test_turns_share_one_advantage_and_the_value_is_that_of_their_start():
  algorithm = ppo(level="turn", gamma=0.9, lam=0.7, whiten=False)
  groups = [[calling(1, 1), calling(sample=1)]]
  credit, batch, before = credit_of(algorithm, groups, [[1, 0.5]])
  for i in range(2):
    (row,) = {
      at[:2] for at in zip(*np.nonzero((batch.trajectory_art == i) & (batch.policy_art > 0)))
    }
    own = lambda x: np.float64(x)[row] * (batch.trajectory_art[row] == i)
    expected = numpy_turn_gae(
      own(batch.stream_art["reward"]), own(before.heads["value"]), batch.trajectory_art[row],
      own(batch.policy_art), own(batch.stream_art["value"]), 0.9, 0.7,
    )  # fmt: skip
    mine = batch.trajectory_art[row] == i
    np.testing.assert_allclose(own(credit.token["advantage"])[mine], expected[0][mine], atol=1e-5)
    np.testing.assert_allclose(own(credit.token["target"])[mine], expected[1][mine], atol=1e-5)


def test_the_structure_aware_critic_reads_the_head_of_the_calls_made():
  algorithm = ppo(by_calls=True, whiten=False)
  assert algorithm.critic.heads == {"value": MAX_TURNS}
  groups = [[calling(1, 4), calling(sample=1)]]  # after five calls the last head serves
  credit, batch, before = credit_of(algorithm, groups, [[1, 0]])
  calls = np.minimum(batch.stream_art["calls"], MAX_TURNS - 1).astype(int)
  for at in zip(*np.nonzero(batch.policy_art)):
    value = before.heads["value"][(*at, calls[at])]
    reward = [1, 0][batch.trajectory_art[at]]
    np.testing.assert_allclose(credit.token["advantage"][at], reward - value, atol=1e-5)
  assert {0, 1, 2} == set(calls[batch.policy_art > 0])


def test_the_value_losss_gradient_is_that_of_a_float64_loop():
  """value_coefficient x mean over counted tokens of max((V - G)^2, (V_clip - G)^2) / 2."""
  algorithm = ppo(value_coefficient=0.3, value_clip=0.4, by_calls=True)
  groups, rng = random_groups(2, 3, seed=5), np.random.default_rng(1)
  credit, batch, before = credit_of(algorithm, groups, [[1, 0, 0], [0, 1, 1]])
  by_token = {name: x if x.ndim == 3 else update.flat(x) for name, x in credit.token.items()}
  micro, micro_before, by_token = update._micro_batch(batch, before, by_token, 0)
  counts = update._counts(batch, 0, 1)
  value = (
    micro_before.heads["value"] + rng.normal(0, 1, micro_before.heads["value"].shape)
  ).astype(np.float32)

  def loss(value):
    outputs = micro_before._replace(heads={"value": value})
    components = algorithm.losses(outputs, micro_before, by_token, micro)
    return update._weighted({"value": components["value"]}, micro, counts)[0]

  found, gradient = jax.value_and_grad(loss)(value)
  total, slope, held = 0.0, np.zeros(value.shape), 0
  tokens = batch.mass_qk["value"].sum()
  for r, t in zip(*np.nonzero(micro.stream_art["value"])):
    n = min(int(micro.stream_art["calls"][r, t]), MAX_TURNS - 1)
    v, old = np.float64(value[r, t, n]), np.float64(micro_before.heads["value"][r, t, n])
    target, clipped = np.float64(by_token["target"][r, t]), np.clip(v, old - 0.4, old + 0.4)
    free, bound = (v - target) ** 2, (clipped - target) ** 2
    total += 0.3 * max(free, bound) / 2 / tokens
    moves = free >= bound or clipped == v
    slope[r, t, n] = 0.3 * (v - target) / tokens if moves else 0.0
    held += not moves
  assert held > 0
  np.testing.assert_allclose(found, total, rtol=1e-5)
  np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-7)


###  The update  ###


@functools.cache
def groups_of():
  return random_groups(2, 4, seed=1)


def run(mesh, algorithm, *, steps=1, epochs=1, rate=1e-2):
  """(state at the start, states and statistics after each step) on one batch."""
  critic = algorithm.critic
  chain = optimizer.beside(
    optimizer.make(learning_rate=rate), optimizer.make(**critic.optimizer | {"learning_rate": 0.02})
  )
  learn = update.make_update(
    mesh, CONFIG, chain, algorithm, settings=update.UpdateSettings(epochs=epochs), num_strata=3
  )
  params = parameters(CONFIG, scale=2.0)
  state = states.init_state(mesh, CONFIG, params, chain, with_reference=True, critic=critic)
  rewards = np.float32([[1, 0, 0, 1], [0, 1, 0, 0]])
  batch = batching.place(mesh, collate(groups_of(), rewards=rewards, algorithm=algorithm))
  found = [(jax.device_get(state), {})]
  for _ in range(steps):
    state, stats = learn(state, batch)
    found.append(jax.device_get((state, stats)))
  return found


def moved(before, after):
  return max(np.abs(after[name] - before[name]).max() for name in before)


QUIET = PolicyLossSettings(kl_coefficient=0.0)


@pytest.mark.parametrize("body", ["policy", "own"])
def test_the_critic_learns_what_rewards_are_first_alone_then_beside_the_policy(mesh, body):
  critic = dict(body=body, value_clip=0.0, by_calls=True, alone_steps=2)
  found = run(mesh, ppo(QUIET, **critic), steps=3, epochs=12)
  (start, _), (_, first), (alone, second), (end, last) = found
  jax.tree.map(np.testing.assert_array_equal, alone.params, start.params)
  jax.tree.map(np.testing.assert_array_equal, alone.opt_state["policy"], start.opt_state["policy"])
  assert moved(start.params, end.params) > 0
  for name, value in start.critic.items():
    assert (alone.critic[name] != value).any(), name
  assert abs(first["value/explained_variance"]) < 1e-6  # a head of zeros says 0 of everything
  assert last["value/explained_variance"] > 0.2 and last["value/loss"] < first["value/loss"]
  assert first["value/grad_norm"] > 0 and first["grad/norm"] > 0 and last["update/skipped"] == 0


@pytest.mark.parametrize("body, reaches", [("own", False), ("policy", True)])
def test_the_values_gradient_reaches_the_body_that_its_head_reads(body, reaches):
  critic = ppo(body=body).critic
  params = parameters(CONFIG)
  head = {"value": np.ones((16, 1), np.float32), "value_bias": np.zeros(1, np.float32)}
  weights = head | (params if body == "own" else {})
  micro = collate(groups_of())
  micro = micro._replace(
    **{name: getattr(micro, name)[0] for name in ("token_art", "position_art", "segment_art")}
  )

  def total(policy):
    x = decoder.hidden(CONFIG, policy, micro.token_art, micro.position_art, micro.segment_art)
    return outputs._heads(CONFIG, critic, weights, x, micro)["value"].sum()

  gradient = jax.jit(jax.grad(total))(params)
  assert (max(np.abs(x).max() for x in gradient.values()) > 0) == reaches


def test_what_ppo_can_not_do_is_refused():
  with pytest.raises(ValueError, match="through_observations=True has no meaning.*level='turn'"):
    CriticSettings(level="turn", through_observations=True)
  facts = Facts(num_strata=3, samples_per_question=1, max_tokens=24, max_turns=3)
  read = lambda cls: cls(filter_groups=True) if cls is PolicyLossSettings else cls()
  with pytest.raises(ValueError, match="loss.filter_groups=True.*'ppo'"):
    make("ppo", read, facts)
