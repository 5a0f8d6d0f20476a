"""The estimators once more, in float64 NumPy, written for clarity from their formulas and not from
the kernels.

Every function takes one group as plain sequences: rewards, stratum ids, mask. Loops over strata and
samples are meant.
"""

import numpy as np


def valid(mask):
  return [i for i, m in enumerate(mask) if m > 0]


def mean_std(values, ddof=0):
  """Mean and standard deviation by the textbook's two passes; the deviation is 0 with ddof or fewer
  values."""
  values = np.asarray(values, np.float64)
  # The mean, from the first value: keeps the digits behind a large common offset.
  mean = values[0] + np.mean(values - values[0])
  if len(values) <= ddof:
    return mean, 0.0
  return mean, float(np.sqrt(np.sum((values - mean) ** 2) / (len(values) - ddof)))


def statistics(reward, stratum, mask, ddof=0):
  """(R_g, s_g, {stratum: (n_k, R_k, s_k)}) of the valid rollouts, None for an empty group."""
  reward = np.asarray(reward, np.float64)
  members = valid(mask)
  if not members:
    return None
  table = {}
  for k in sorted({int(stratum[i]) for i in members}):
    inside = [reward[i] for i in members if stratum[i] == k]
    table[k] = (len(inside), *mean_std(inside, ddof))
  return (*mean_std([reward[i] for i in members], ddof), table)


def _each(reward, stratum, mask, formula, ddof=0):
  """formula(R_i, R_g, s_g, n, n_k, R_k, s_k) for each valid rollout, 0 for the others."""
  advantage = np.zeros(len(reward), np.float64)
  stats = statistics(reward, stratum, mask, ddof)
  for i in valid(mask):
    r_g, s_g, table = stats
    advantage[i] = formula(float(reward[i]), r_g, s_g, len(valid(mask)), *table[int(stratum[i])])
  return advantage


def _ratio(numerator, std, eps):
  return numerator / (std + eps) if std > 0 else 0.0


def gn(reward, stratum, mask, eps=1e-6, ddof=0):
  return _each(
    reward, stratum, mask, lambda r, rg, sg, n, nk, rk, sk: _ratio(r - rg, sg, eps), ddof
  )


def san(
  reward, stratum, mask, eps=1e-6, ddof=0, fallback="zero", fallback_on="singleton", kappa=1.0
):
  def formula(r, rg, sg, n, nk, rk, sk):
    lone = nk == 1 if fallback_on == "singleton" else all_equal
    if fallback != "zero" and lone:
      return _ratio(r - rg, sg, eps) * (1.0 if fallback == "gn" else kappa / (nk + kappa))
    return _ratio(r - rk, sk, eps)

  advantage = np.zeros(len(reward), np.float64)
  for i in valid(mask):
    rewards = [reward[j] for j in valid(mask) if stratum[j] == stratum[i]]
    all_equal = max(rewards) == min(rewards)
    advantage[i] = _each(reward, stratum, mask, formula, ddof)[i]
  return advantage


def blend(reward, stratum, mask, eps=1e-6, ddof=0, alpha=0.6, kappa=None):
  def formula(r, rg, sg, n, nk, rk, sk):
    a = alpha if kappa is None else nk / (nk + kappa)
    return a * _ratio(r - rk, sk, eps) + (1 - a) * _ratio(r - rg, sg, eps)

  return _each(reward, stratum, mask, formula, ddof)


def centered(reward, stratum, mask, eps=1e-6, ddof=0):
  return _each(reward, stratum, mask, lambda r, rg, sg, n, nk, rk, sk: r - rg)


def stratified(reward, stratum, mask, eps=1e-6, ddof=0):
  return _each(reward, stratum, mask, lambda r, rg, sg, n, nk, rk, sk: r - rk)


def loo(reward, stratum, mask, eps=1e-6, ddof=0):
  advantage = np.zeros(len(reward), np.float64)
  for i in valid(mask):
    others = [float(reward[j]) for j in valid(mask) if j != i]
    advantage[i] = float(reward[i]) - mean_std(others)[0] if others else 0.0
  return advantage


def stratified_loo(reward, stratum, mask, eps=1e-6, ddof=0):
  advantage = np.zeros(len(reward), np.float64)
  for i in valid(mask):
    others = [float(reward[j]) for j in valid(mask) if j != i and stratum[j] == stratum[i]]
    advantage[i] = float(reward[i]) - mean_std(others)[0] if others else 0.0
  return advantage


def shrunk(reward, stratum, mask, eps=1e-6, ddof=0, kappa=1.0):
  def formula(r, rg, sg, n, nk, rk, sk):
    w = nk / (nk + kappa)
    return r - rg - w * (rk - rg)

  return _each(reward, stratum, mask, formula)


def two_term(reward, stratum, mask, eps=1e-6, ddof=0, lam=1.0):
  return _each(reward, stratum, mask, lambda r, rg, sg, n, nk, rk, sk: (r - rk) + lam * (rk - rg))


def dr_grpo(reward, stratum, mask, eps=1e-6, ddof=0):
  return _each(reward, stratum, mask, lambda r, rg, sg, n, nk, rk, sk: r - rg)


def reinforce(reward, stratum, mask, eps=1e-6, ddof=0):
  return _each(reward, stratum, mask, lambda r, rg, sg, n, nk, rk, sk: r)


def opo(reward, stratum, mask, eps=1e-6, ddof=0, length=None):
  length = [1] * len(reward) if length is None else length
  total = sum(length[i] for i in valid(mask))
  baseline = sum(length[i] * float(reward[i]) for i in valid(mask)) / total if total else 0.0
  return _each(reward, stratum, mask, lambda r, rg, sg, n, nk, rk, sk: r - baseline)


def gdpo(reward_qkp, mask_qk, eps=1e-6):
  total = np.zeros(np.shape(mask_qk))
  for q, mask in enumerate(mask_qk):
    for part in np.moveaxis(np.asarray(reward_qkp, np.float64)[q], -1, 0):
      total[q] += gn(part, [0] * len(mask), mask, eps)
  return over_batch(gn, total, np.zeros(total.shape, int), mask_qk, eps=eps)


def san_rms(reward, stratum, mask, eps=1e-6, ddof=0):
  s, g = san(reward, stratum, mask, eps, ddof), gn(reward, stratum, mask, eps, ddof)
  return s * np.sqrt(np.sum(g**2) / np.sum(s**2)) if np.any(s) else s


GROUP = dict(
  gn=gn,
  san=san,
  blend=blend,
  centered=centered,
  stratified=stratified,
  loo=loo,
  san_rms=san_rms,
  opo=opo,
  stratified_loo=stratified_loo,
  shrunk=shrunk,
  two_term=two_term,
  dr_grpo=dr_grpo,
  reinforce=reinforce,
)


def over_batch(estimator, reward_qk, stratum_qk, mask_qk, **options):
  """The estimator with the whole batch as its one group."""
  flat = [np.asarray(x).reshape(-1) for x in (reward_qk, stratum_qk, mask_qk)]
  return estimator(*flat, **options).reshape(np.shape(reward_qk))


def gn_batch(reward_qk, stratum_qk, mask_qk, eps=1e-6, ddof=0):
  rows = [centered(r, s, m) for r, s, m in zip(reward_qk, stratum_qk, mask_qk)]
  everyone = [row[i] for row, m in zip(rows, mask_qk) for i in valid(m)]
  return np.array([[_ratio(x, mean_std(everyone, ddof)[1], eps) for x in row] for row in rows])


def gae(reward, value, trajectory, mask, gamma, lam):
  """The sum of discounted temporal differences, each policy token's written out over the later ones
  of its trajectory."""
  advantage = np.zeros(len(reward), np.float64)
  for t in valid(mask):
    later = [u for u in valid(mask) if u >= t and trajectory[u] == trajectory[t]]
    for distance, u in enumerate(later):
      following = value[later[distance + 1]] if distance + 1 < len(later) else 0.0
      advantage[t] += (gamma * lam) ** distance * (reward[u] + gamma * following - value[u])
  return advantage


def gigpo(reward_kt, state_kt, mask_kt, gamma, omega, eps=1e-6, normalize=True):
  turns = {(k, t): 0.0 for k, row in enumerate(mask_kt) for t in valid(row)}
  for k, t in turns:
    later = [u for u in valid(mask_kt[k]) if u >= t]
    turns[k, t] = sum(gamma**d * float(reward_kt[k][u]) for d, u in enumerate(later))
  totals = {
    k: sum(float(reward_kt[k][t]) for t in valid(row)) for k, row in enumerate(mask_kt) if any(row)
  }
  scale = lambda x, std: _ratio(x, std, eps) if normalize else x
  advantage = np.zeros(np.shape(reward_kt), np.float64)
  for k, t in turns:
    mean, std = mean_std(list(totals.values()))
    alike = [turns[other] for other in turns if state_kt[other[0]][other[1]] == state_kt[k][t]]
    step_mean, step_std = mean_std(alike)
    advantage[k, t] = scale(totals[k] - mean, std) + omega * scale(
      turns[k, t] - step_mean, step_std
    )
  return advantage
