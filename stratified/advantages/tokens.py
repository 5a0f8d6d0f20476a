"""Token and turn estimators: generalised advantage estimation, and GiGPO's step-level groups."""

import functools

import chex
import jax
import jax.numpy as jnp

from stratified.advantages import group, segments


@jax.jit
def gae(reward_t, value_t, trajectory_t, mask_t, *, gamma=1.0, lam=1.0):
  """Generalised advantage estimation over the policy tokens of one packed row; vmap it over rows.

      delta_t = r_t + gamma V_{t'} - V_t,   A_t = delta_t + gamma lam A_{t'}

  t' is the next policy token of the same trajectory (observations between turns are stepped over
  and cost no discount); past the last one V and A are 0. With turns in place of tokens it is GAE
  over turns.

  reward_t      [T] reward given at each policy token, read only where the mask is set: a final
                reward belongs on the trajectory's last policy token
  value_t       [T] the critic's value before the token, V_t
  trajectory_t  [T] integer id; a change of id ends the recursion
  mask_t        [T] 1 where the policy sampled the token

  Returns (advantage_t, return_t); return_t = A_t + V_t is the critic's target; both are 0 off the
  mask. Source: arXiv 1506.02438, as in PPO. Search-R1 (arXiv 2503.09516) masks observations too.
  """
  chex.assert_rank([reward_t, value_t, trajectory_t, mask_t], 1)
  chex.assert_equal_shape([reward_t, value_t, trajectory_t, mask_t])
  dtype = jnp.promote_types(jnp.result_type(reward_t, value_t), jnp.float32)
  reward_t, value_t, keep_t = reward_t.astype(dtype), value_t.astype(dtype), mask_t > 0

  def backwards(carry, token):
    next_advantage, next_value, next_trajectory = carry
    reward, value, trajectory, keep = token
    same = trajectory == next_trajectory
    next_advantage, next_value = (jnp.where(same, x, 0) for x in (next_advantage, next_value))
    advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
    advantage = advantage.astype(dtype)
    carry = (
      jnp.where(keep, advantage, next_advantage),
      jnp.where(keep, value, next_value),
      trajectory,
    )
    return carry, jnp.where(keep, advantage, 0)

  start = (jnp.zeros((), dtype), jnp.zeros((), dtype), trajectory_t[-1])
  _, advantage_t = jax.lax.scan(
    backwards, start, (reward_t, value_t, trajectory_t, keep_t), reverse=True
  )
  return advantage_t, jnp.where(keep_t, advantage_t + value_t, 0)


@jax.jit
def turn_gae(reward_t, value_t, trajectory_t, mask_t, start_t, *, gamma=1.0, lam=1.0):
  """`gae` over the turns of one packed row: a turn is one action, its state what stands before it.

      delta_u = R_u + gamma V_{u+1} - V_u,   A_u = delta_u + gamma lam A_{u+1}

  R_u sums the rewards of turn u's policy tokens and V_u is the value before its first one. Each of
  its policy tokens gets A_u.

  start_t  [T] 1 on the first policy token of each turn; the other arguments are those of `gae`

  Returns (advantage_t, return_t); return_t = A_u + V_u at the first token of a turn, 0 elsewhere.
  Source: Turn-PPO, arXiv 2512.17008 (gamma 0.99, lam 0.9).
  """
  chex.assert_equal_shape([reward_t, value_t, trajectory_t, mask_t, start_t])
  keep_t, turn_t = mask_t > 0, jnp.cumsum(start_t > 0)
  by_turn = lambda x_t: jax.ops.segment_sum(x_t, turn_t, start_t.shape[0] + 1)[turn_t]
  reward_t = by_turn(jnp.where(keep_t, reward_t, 0))
  advantage_t, return_t = gae(reward_t, value_t, trajectory_t, start_t, gamma=gamma, lam=lam)
  return jnp.where(keep_t, by_turn(advantage_t), 0), return_t


@jax.jit
def whiten(advantage, mask, *, eps=1e-6):
  """(A - mean) / (std + eps) over the entries with mask 1; the others get 0. Usual after GAE."""
  mask = mask > 0
  everyone = segments.whole(mask, advantage.dtype)
  centered = everyone.center(advantage)
  return segments.over_deviation(centered, segments.deviation(everyone, centered, 0), eps)


@functools.partial(jax.jit, static_argnames=("normalize", "num_states"))
def gigpo(
  reward_kt,
  state_kt,
  mask_kt,
  *,
  num_states=None,
  gamma=0.95,
  omega=1.0,
  eps=1e-6,
  ddof=0,
  normalize=True,
):
  """GiGPO over the turns (or tokens) of one question's K rollouts: A_episode + omega A_step.

      A_episode(i)  = (R_i - R_g) / (s_g + eps),            R_i = sum_t r_it
      A_step(i, t)  = (G_it - mean) / (std + eps),          G_it = sum_{u >= t} gamma^(u - t) r_iu

  where mean and std run over all turns of all rollouts that stood in the same state. A state met
  once, or with equal returns, adds 0. normalize=False divides by no deviation (F_norm = 1 in the
  paper).

  reward_kt   [K, T] reward of each turn; mask_kt [K, T] 1 where the turn took place
  state_kt    [K, T] integer id of the state (the anchor) before the turn, in [0, num_states);
              num_states defaults to K T, which fits ids counted from 0
  gamma, omega  the paper's 0.95 and 1

  Returns [K, T], 0 off the mask. Source: arXiv 2505.10978, episode and step relative advantages.
  """
  reward_kt, state_kt = jnp.asarray(reward_kt), jnp.asarray(state_kt)
  chex.assert_rank([reward_kt, state_kt, mask_kt], 2)
  chex.assert_equal_shape([reward_kt, state_kt, mask_kt])
  keep_kt = jnp.asarray(mask_kt) > 0
  reward_kt = jnp.where(
    keep_kt, reward_kt.astype(jnp.promote_types(reward_kt.dtype, jnp.float32)), 0
  )
  seen_k = keep_kt.any(axis=1)
  estimator = group.gn if normalize else group.centered
  episode_k = estimator(
    reward_kt.sum(axis=1),
    jnp.zeros_like(seen_k, dtype=jnp.int32),
    num_strata=1,
    mask_k=seen_k,
    eps=eps,
    ddof=ddof,
  )

  # Turns that did not take place carry the return through undiscounted: a gap costs nothing.
  step = lambda following_k, turn: (
    (jnp.where(turn[1], turn[0] + gamma * following_k, following_k),) * 2
  )
  _, return_tk = jax.lax.scan(
    step, jnp.zeros_like(reward_kt[:, 0]), (reward_kt.T, keep_kt.T), reverse=True
  )
  estimator = group.san if normalize else group.stratified
  step_n = estimator(
    return_tk.T.reshape(-1),
    state_kt.reshape(-1),
    num_strata=num_states or state_kt.size,
    mask_k=keep_kt.reshape(-1),
    eps=eps,
    ddof=ddof,
  )
  return jnp.where(keep_kt, episode_k[:, None] + omega * step_n.reshape(keep_kt.shape), 0)
