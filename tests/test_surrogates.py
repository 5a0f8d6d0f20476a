"""Surrogates and what stands beside them, against float64 loops; alive in an update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_rollouts import collate, decoder_config, family, parameters, random_groups, trajectory

from configs import search_r1
from stratified import losses
from stratified.algorithms.base import Algorithm, Outputs
from stratified.algorithms.grpo import Grpo
from stratified.algorithms.likelihood import LikelihoodSettings
from stratified.algorithms.policy_loss import outside_bounds, PolicyLossSettings
from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.runs import refusals

# Two packed rows: rollouts of 7 and 4 tokens, then one of 9; padding. 1 is the policy's.
ROWS = [[[0, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1]], [[0, 1, 1, 0, 0, 1, 1, 1, 0]]]
LENGTH = 12
CLIP = dict(clip_ratio=0.1, clip_ratio_high=0.2)
TAU = dict(temperature=1.0, temperature_negative=2.0)


@pytest.fixture(scope="module")
def packed():
  """(logp, old_logp, advantage, mask, position) [2, 12], and each rollout's policy tokens."""
  rng = np.random.default_rng(1)
  mask, position = np.zeros((2, LENGTH), np.float32), np.zeros((2, LENGTH), np.int32)
  advantage, rollouts = np.zeros((2, LENGTH), np.float32), []
  for r, row in enumerate(ROWS):
    start = 0
    for one, value in zip(row, (1.5, -0.8) if r == 0 else (-0.5,)):
      at = slice(start, start + len(one))
      mask[r, at], position[r, at], advantage[r, at] = one, np.arange(len(one)), value
      rollouts.append([(r, start + t) for t, policy in enumerate(one) if policy])
      start += len(one)
  old = rng.normal(-1.5, 0.5, mask.shape).astype(np.float32)
  logp = (old + rng.normal(0, 0.4, mask.shape)).astype(np.float32)
  return (logp, old, advantage, mask, position), rollouts


def sequence_objective(kind, logp, old, advantage, rollouts):
  """-sum over rollouts of (policy tokens) x the paper's sequence objective, in float64."""
  low, high, total = 1 - CLIP["clip_ratio"], 1 + CLIP["clip_ratio_high"], 0.0
  for tokens in rollouts:
    a = np.float64(advantage[tokens[0]])
    x = [np.float64(logp[at]) - np.float64(old[at]) for at in tokens]
    if kind == "gspo":
      s = np.exp(np.mean(x))
      value = min(s * a, np.clip(s, low, high) * a)
    else:
      # The paper's: the geometric mean of |min(rho A, clip(rho) A)|, with A's sign.
      each = [min(np.exp(v) * a, np.clip(np.exp(v), low, high) * a) for v in x]
      value = np.sign(a) * np.prod(np.abs(each)) ** (1 / len(each))
    total -= len(tokens) * value
  return total


def token_objective(kind, logp, old, advantage, rollouts, held):
  """-sum over policy tokens; `held` are the log-probs that no gradient flows through."""
  total = 0.0
  for at in (at for tokens in rollouts for at in tokens):
    a, x = np.float64(advantage[at]), np.float64(logp[at])
    if kind == "cispo":
      rho = np.exp(np.float64(held[at]) - np.float64(old[at]))
      total -= min(max(rho, 0.9), 1.2) * a * x
    else:
      tau = TAU["temperature"] if a >= 0 else TAU["temperature_negative"]
      rho = np.exp(x - np.float64(old[at]))
      total -= 4 / tau / (1 + np.exp(-tau * (rho - 1))) * a
  return total


def slopes(objective, logp):
  """Central differences of a float64 function of the log-probs."""
  found, step = np.zeros(logp.shape), 1e-6
  for at in np.ndindex(logp.shape):
    moved = [np.float64(logp) for _ in range(2)]
    moved[0][at] += step
    moved[1][at] -= step
    found[at] = (objective(moved[0]) - objective(moved[1])) / (2 * step)
  return found


JAX = {
  "gspo": lambda x, old, a, m, p: losses.gspo(x, old, a, m, p, **CLIP),
  "gmpo": lambda x, old, a, m, p: losses.gmpo(x, old, a, m, p, **CLIP),
  "cispo": lambda x, old, a, m, p: losses.cispo(x, old, a, **CLIP),
  "sapo": lambda x, old, a, m, p: losses.sapo(x, old, a, **TAU),
}


@pytest.mark.parametrize("kind", JAX)
def test_a_surrogate_and_its_gradient_are_those_of_a_loop(packed, kind):
  (logp, old, advantage, mask, position), rollouts = packed

  def total(x):
    value, held = JAX[kind](x, old, advantage, mask, position)
    return jnp.where(mask > 0, value, 0).sum(), (held * mask).sum()

  (value, held), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(logp)
  if kind in ("gspo", "gmpo"):
    objective = lambda x: sequence_objective(kind, x, old, advantage, rollouts)
  else:
    objective = lambda x: token_objective(kind, x, old, advantage, rollouts, logp)
  np.testing.assert_allclose(value, objective(np.float64(logp)), rtol=1e-5)
  np.testing.assert_allclose(gradient, slopes(objective, logp), rtol=1e-4, atol=1e-5)
  assert held > 0.1  # something is held back
  _, none = jax.jit(JAX[kind])(old, old, advantage, mask, position)
  np.testing.assert_allclose(none * mask, 0, atol=1e-6)  # and nothing where nothing moved


def test_gspos_ratio_is_the_geometric_mean_over_all_turns():
  """By hand: old -1 -2 -.5, new -.9 -2.1 -.4 give s = exp(.1 / 3); an observation in between."""
  old, new = jnp.float32([[-1, -2, 9, -0.5]]), jnp.float32([[-0.9, -2.1, 7, -0.4]])
  mask, position = jnp.float32([[1, 1, 0, 1]]), jnp.int32([[0, 1, 2, 3]])
  loss, _ = losses.gspo(new, old, jnp.ones((1, 4)), mask, position, clip_ratio=0.2)
  np.testing.assert_allclose(loss[0, [0, 1, 3]], -1.033895, rtol=1e-6)


def numpy_lost(logp, old, spans):
  """Sum over spans of max(0, Delta) where the span's Delta sums above 0, in float64."""
  total = 0.0
  for span in spans:
    delta = [np.float64(old[at]) - np.float64(logp[at]) for at in span]
    total += sum(max(0.0, d) for d in delta) if sum(delta) > 0 else 0.0
  return total


@pytest.mark.parametrize("gate", losses.GATES)
def test_lost_likelihood_is_that_of_a_loop_over_the_gates_spans(packed, gate):
  (logp, old, _, mask, position), rollouts = packed
  turns = []
  for tokens in rollouts:
    turns.append([tokens[0]])
    for before, at in zip(tokens, tokens[1:]):
      turns[-1].append(at) if at[1] == before[1] + 1 else turns.append([at])
  spans = {"token": [[at] for tokens in rollouts for at in tokens], "response": rollouts}
  spans["action"] = turns
  lost = lambda x: losses.lost_likelihood(x, old, mask, position, gate=gate).sum()
  value, gradient = jax.jit(jax.value_and_grad(lost))(logp)
  expected = lambda x: numpy_lost(x, old, spans[gate])
  np.testing.assert_allclose(value, expected(logp), rtol=1e-5)
  np.testing.assert_allclose(gradient, slopes(expected, logp), atol=1e-6)
  assert len({round(numpy_lost(logp, old, s), 6) for s in spans.values()}) == 3  # gates differ


def lone_update(algorithm, batch, logp, before):
  """{stream: (sum of weight x loss, means)} of the batch's only micro-batch."""
  outputs = lambda x: Outputs(x, jnp.zeros_like(x), None, {})
  credit = algorithm.credit(batch, outputs(before), 0)
  by_token = {name: update.flat(x) for name, x in credit.token.items()}
  micro, _, by_token = update._micro_batch(batch, None, by_token, 0)
  counts = update._counts(batch, 0, 1, credit.valid)
  found = algorithm.losses(outputs(logp), outputs(before[0]), by_token, micro)
  return {name: update._weighted({name: one}, micro, counts)[0] for name, one in found.items()}


@pytest.mark.parametrize("normalizer, value", [("preserved", 0.25), ("all", 0.125)])
def test_llds_on_two_turns_by_hand(normalizer, value):
  """Spans (old -1 -2, new -1.5 -1.8) of a good rollout, (-.5 -.7; -.4 -.5) of a bad one: Delta sums
  0.3, so max(0, Delta) gives 0.5; over 2 preserved tokens, or 4 of the policy."""
  spans = [[-1.0, -2.0], [-0.5, -0.7]], [[-1.5, -1.8], [-0.4, -0.5]]
  groups = [[trajectory(("prompt", [1]), ("policy", [2, 3]), sample=k) for k in range(2)]]
  algorithm = family(max_tokens=8)
  algorithm = type(algorithm)(
    algorithm.advantage, algorithm.loss, 3, 8,
    LikelihoodSettings(coefficient=1.0, normalizer=normalizer),
  )  # fmt: skip
  batch = collate(
    groups, rewards=np.float32([[1, 0]]), strata=np.zeros((1, 2), int), rows=1, length=8,
    algorithm=algorithm, micro=1,
  )  # fmt: skip
  old, new = (np.zeros((1, 1, 8), np.float32) for _ in range(2))
  for k in range(2):
    at = (batch.trajectory_art == k) & (batch.policy_art > 0)
    old[at], new[at] = spans[0][k], spans[1][k]
  found = lone_update(algorithm, batch, jnp.asarray(new[0]), jnp.asarray(old))
  np.testing.assert_allclose(found["likelihood"], value, rtol=1e-6)


def test_the_overlong_penalty_falls_over_the_last_tokens():
  """By hand, 100 tokens of which the last 20 cost: DAPO's Eq. 13."""
  of = functools.partial(losses.overlong_penalty, max_length=100, buffer=20)
  assert [of(n) for n in (10, 80, 85, 90, 100, 120)] == [0, 0, -0.25, -0.5, -1, -1]


def test_a_rollout_whose_mean_ratio_leaves_the_bounds_is_rejected(packed):
  (logp, old, _, mask, position), rollouts = packed
  micro = type("Micro", (), dict(policy_art=jnp.asarray(mask), position_art=jnp.asarray(position)))
  for bounds in ({"reject_below": 0.97}, {"reject_above": 1.02}, {"reject_below": 0.9}):
    loss = PolicyLossSettings(**bounds)
    found = outside_bounds(loss, jnp.asarray(logp), jnp.asarray(old), micro)
    low, high = bounds.get("reject_below", 0), bounds.get("reject_above", np.inf)
    for tokens in rollouts:
      ratio = np.exp(np.mean([np.float64(logp[at]) - np.float64(old[at]) for at in tokens]))
      assert all(bool(found[at]) == (not low <= ratio <= high) for at in tokens)


# --- In an update ---

MODEL = decoder_config()
EVERYTHING = dict(
  surrogate="gspo", clip_ratio=3e-4, clip_ratio_high=4e-4, aggregation="sequence_mean",
  entropy_coefficient=0.1, kl_in="reward", kl_coefficient=0.1, kl_estimator="k1",
  overlong_tokens=14, filter_groups=True, reject_below=0.03,
)  # fmt: skip


def stats_of(mesh, several, coefficient=0.0, **loss):
  return three_steps(mesh, several, coefficient, **loss)[2]


def three_steps(mesh, several, coefficient=0.0, **loss):
  """(batch, state, statistics) of the third step on four questions, one without signal."""
  method = family("gn", max_tokens=16, **loss)
  preserve = LikelihoodSettings(coefficient=coefficient)
  method = type(method)(method.advantage, method.loss, 3, 16, preserve)
  parts = 2 if several else 1
  chain = optimizer.make(learning_rate=2e-2)
  step = update.make_update(
    mesh, MODEL, chain, method, num_strata=3,
    settings=update.UpdateSettings(epochs=parts, mini_batches=parts),
  )  # fmt: skip
  groups = random_groups(4, 3, seed=2)
  # Every rollout of the first question is as long as the next and as good: nothing to learn.
  rewards = np.float32([[1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
  groups[0] = [trajectory(("prompt", [1]), ("policy", [2, 3]), sample=k) for k in range(3)]
  batch = collate(
    groups, rewards=rewards, strata=np.zeros((4, 3), int), algorithm=method, mini_batches=parts
  )
  state = states.init_state(mesh, MODEL, parameters(MODEL, scale=2.0), chain, with_reference=True)
  for _ in range(3):
    state, stats = step(state, batching.place(mesh, batch))
  return batch, state, jax.device_get(stats)


def test_every_option_is_alive_in_several_updates_and_inert_in_one(mesh):
  several, one = (stats_of(mesh, several, 0.2, **EVERYTHING) for several in (True, False))
  for key in ("policy/clip_share", "loss/likelihood"):
    assert several[key] > 0 and one[key] == 0, key
  for stats in (several, one):
    np.testing.assert_allclose(stats["advantage/filtered_share"], 0.25)
    assert stats["reward/overlong"] < 0 and stats["reward/kl_penalty"] != 0
    assert 0 < stats["policy/rejected_share"] < 1 and stats["update/skipped"] == 0


@pytest.mark.parametrize("surrogate", ["cispo", "sapo", "gmpo"])
def test_a_surrogate_holds_back_in_several_updates(mesh, surrogate):
  stats = stats_of(mesh, True, surrogate=surrogate, clip_ratio=0.02)
  assert stats["policy/clip_share"] > 0 and stats["update/skipped"] == 0


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(surrogate="cispo", dual_clip=3.0), "loss.dual_clip=3.0 does nothing.*'cispo'"),
    (dict(surrogate="sapo", clip_ratio_high=0.3), "clip_ratio_high=0.3 does nothing.*leave it out"),
  ],
)
def test_options_that_do_nothing_together_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    PolicyLossSettings(**changes)


def test_a_method_refuses_what_it_does_not_have():
  with pytest.raises(ValueError, match="loss.filter_groups=True.*'ppo'.*algorithm.name=grpo"):
    PolicyLossSettings(filter_groups=True).refuse("ppo", "filter_groups")
  with pytest.raises(ValueError, match="overlong_tokens=9 is more than rollout.max_tokens=8"):
    PolicyLossSettings(overlong_tokens=9).check_overlong(8)


def test_llds_with_one_update_a_batch_is_refused():
  config = search_r1.get_config("tiny")
  config.likelihood.coefficient = 0.2
  with pytest.raises(ValueError, match="likelihood.coefficient=0.2 does nothing.*mini_batches=2"):
    refusals.check_settings(config)
  config.update.epochs = 2
  refusals.check_settings(config)


@pytest.mark.parametrize("several", [False, True])
def test_questions_of_equal_rewards_take_no_rows_and_the_update_is_the_same(
  mesh, several, monkeypatch
):
  """Against the step that drops them itself, all in the rows: equal weights after three updates."""
  found = {}
  for left_out in (True, False):
    if not left_out:
      monkeypatch.setattr(Grpo, "idle", Algorithm.idle)
    batch, state, _ = three_steps(mesh, several, filter_groups=True, kl_coefficient=0.1)
    found[left_out] = batching.num_tokens(batch), jax.device_get(state.params)
  assert found[True][0] < found[False][0]
  for name, weight in found[True][1].items():
    # Sums over rows of other rollouts, in another order.
    np.testing.assert_allclose(weight, found[False][1][name], rtol=2e-4, atol=2e-6)


def test_every_rollout_counts_where_equal_rewards_are_not_equal_losses():
  reward, valid = np.float32([[1, 1, 1], [0, 1, 0], [0, 0, 1]]), np.ones((3, 3), np.float32)
  valid[2, 2] = 0  # lost: those that are left are equal
  assert family("gn", filter_groups=True).idle(reward, valid)[:, 0].tolist() == [True, False, True]
  for name, options in [
    ("reinforce", {}),
    ("gn_batch", {}),
    ("gn", {"filter_groups": False}),
    ("gn", {"kl_in": "reward"}),
    ("gn", {"overlong_tokens": 3}),
  ]:
    assert not family(name, **{"filter_groups": True} | options).idle(reward, valid).any(), name
