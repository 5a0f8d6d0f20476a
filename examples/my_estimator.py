"""An estimator of your own: SAN with each stratum's deviation shrunk to the group's.

    python experiments/train.py --config=configs/search_r1.py:tiny --workdir=runs/mine \\
        --config.advantage.name=examples.my_estimator:pooled_san

A stratum of two rollouts hardly knows its own deviation. Here s_k^2 is averaged with the group's
s_g^2, with weights n_k and 4: a large stratum keeps its own.
"""

import jax.numpy as jnp

PRIOR = 4.0  # how many rollouts of the group's deviation stand beside a stratum's own


def pooled_san(reward_k, stratum_k, *, num_strata, mask_k, eps, ddof):
  """(R_i - R_k) / (s + eps), s^2 = (n_k s_k^2 + PRIOR s_g^2) / (n_k + PRIOR).

  Written for one question's rollouts [K]: the trainer maps it over questions and compiles it. A
  rollout with mask 0 was lost; it enters no mean and gets 0.
  """
  del ddof
  mask_k = jnp.asarray(mask_k, jnp.float32)
  own_kk = (stratum_k[:, None] == stratum_k[None, :]) * mask_k[None, :]
  count_k = jnp.maximum(own_kk.sum(1), 1)

  def variance(weight_kk):
    total_k = jnp.maximum(weight_kk.sum(1), 1)
    mean_k = (weight_kk * reward_k).sum(1) / total_k
    return (weight_kk * jnp.square(reward_k - mean_k[:, None])).sum(1) / total_k

  everyone_kk = jnp.broadcast_to(mask_k, own_kk.shape)
  pooled_k = (count_k * variance(own_kk) + PRIOR * variance(everyone_kk)) / (count_k + PRIOR)
  centered_k = reward_k - (own_kk * reward_k).sum(1) / count_k
  return mask_k * centered_k / (jnp.sqrt(pooled_k) + eps)
