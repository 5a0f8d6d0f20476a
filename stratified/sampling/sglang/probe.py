"""Computes the trainer's log-probs of a fixed prompt, which a server must reproduce to be used."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from stratified.policy import decoder, log_probs

LENGTH = 16


def prompt(vocab_size: int, avoid: int) -> tuple[int, ...]:
  """Ids spread over the vocabulary, the same in every run, without `avoid`, the end of text."""
  ids = np.random.default_rng(0).integers(0, vocab_size, LENGTH)
  return tuple(int(i) if i != avoid else (avoid + 1) % vocab_size for i in ids)


def trainer_log_probs(
  config: decoder.DecoderConfig, params, token_ids, mesh=None
) -> tuple[float, ...]:
  """log p(token_ids[i] | all before) for i = 1, 2, ..., at temperature 1, as the update has it.

  mesh: the one that `params` lie on, None for one device. With several processes every one must
  call.
  """
  rows = math.prod(mesh.shape[axis] for axis in ("data", "fsdp")) if mesh else 1
  token_rt = np.tile(np.asarray(token_ids, np.int32), (rows, 1))
  if mesh is None:
    return tuple(np.asarray(row_log_probs(config, params, token_rt), np.float64)[0, 1:].tolist())
  with jax.set_mesh(mesh):
    found = jax.device_put(
      token_rt, jax.sharding.NamedSharding(mesh, jax.P(("data", "fsdp"), None))
    )
    whole = jax.sharding.reshard(row_log_probs(config, params, found), jax.P(None, None))
    return tuple(np.asarray(whole.addressable_shards[0].data, np.float64)[0, 1:].tolist())


@functools.partial(jax.jit, static_argnums=0)
def row_log_probs(config, params, token_rt):
  """Log-probs [R, T] of each row's tokens but its first, at temperature 1; a row is one segment."""
  position_rt = jnp.broadcast_to(jnp.arange(token_rt.shape[1], dtype=jnp.int32), token_rt.shape)
  x = decoder.hidden(config, params, token_rt, position_rt, jnp.ones_like(token_rt))
  return log_probs.token_log_probs(config, params, x, token_rt)[0]
