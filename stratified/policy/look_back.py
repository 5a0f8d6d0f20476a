"""Starts the heads of the first layer looking a fixed number of tokens back.

To copy a name off a page, a decoder needs heads that look at the token before: the first half of an
induction head (Olsson et al., "In-context learning and induction heads", 2022). From random weights
they come late, after a plateau of the loss. Rotary positions can say "o tokens back" exactly, so
they can be there from the start; everything else stays random, and training may undo them.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from stratified.policy.config import DecoderConfig
from stratified.policy.weights import Params

# Size of the constant part of a query and a key. A pair of dimensions of frequency f adds
# SHARPNESS^2 cos((distance - o) f) / sqrt(head_dim) to a score: with 16 pairs down to 0.01, 4.8
# less at one token from o than at o, well above the random part of a score, which is about 1.
SHARPNESS = 5.0


def start(config: DecoderConfig, params: Params, offsets: Sequence[int]) -> Params:
  """Adds to random parameters what makes head h of layer 0 look offsets[h] tokens back.

  Heads beyond the offsets take them again from the first; offsets beyond the heads are not used.
  Every embedding gets the same vector u in addition, of their own length, which shifts all logits
  of a position alike. Layer 0 reads u as a constant: its keys get the vector (1, 1, ...; 0, 0, ...)
  over the pairs of dimensions, its queries the same turned back by o tokens, (cos o f; -sin o f).
  Rotated to their positions i and j, their product is sum_f cos((i - j - o) f), largest at
  i - j = o.
  """
  half = config.head_dim // 2
  frequency = config.rope_theta ** (-jnp.arange(half) / half)
  offset_h = jnp.resize(jnp.asarray(offsets, jnp.float32), config.num_heads)
  angle_hf = offset_h[:, None] * frequency
  query_hk = jnp.concatenate([jnp.cos(angle_hf), -jnp.sin(angle_hf)], axis=-1)
  key_k = jnp.concatenate([jnp.ones(half), jnp.zeros(half)])
  u_d = jnp.full(config.width, config.width**-0.5)
  # A normed embedding is sqrt(width / 2) long along u and as long across it.
  reader_d = u_d * SHARPNESS / (config.width / 2) ** 0.5
  return params | {
    "embed": params["embed"] + u_d,
    "q": params["q"].at[0].add(reader_d[:, None, None] * query_hk),
    "k": params["k"].at[0].add(reader_d[:, None, None] * key_k),
  }
