"""The programs of a sampler's devices: each decodes its own lanes with a replica of the policy.

Arrays that lead with lanes (b) are split over the axis `lane` of a mesh of one process's devices;
parameters are whole on each; nothing travels between devices. A lane's number counts on its own
device.
"""

from collections.abc import Iterable, Sequence
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from stratified.policy import decoder

P = jax.P
LANES = P("lane")


def make_mesh(devices: Sequence[jax.Device]):
  return jax.make_mesh(
    (len(devices),), ("lane",), devices=list(devices), axis_types=(jax.sharding.AxisType.Auto,)
  )


def replicated(mesh) -> NamedSharding:
  """The sharding of parameters: whole on every device."""
  return NamedSharding(mesh, P())


def empty_cache(mesh, model: decoder.DecoderConfig, lanes: int, length: int) -> decoder.Cache:
  """A zeroed cache of `lanes` lanes on each device."""
  make = lambda: decoder.empty_cache(model, lanes * mesh.size, length)
  return jax.jit(make, out_shardings=NamedSharding(mesh, LANES))()


def _on_lanes(mesh, function, inputs: int, out_specs=LANES):
  """Runs a function of (parameters, `inputs` arrays led by lanes) on each device's part."""
  return jax.shard_map(
    function, mesh=mesh, in_specs=(P(), *[LANES] * inputs), out_specs=out_specs, check_vma=False
  )


def unstack(model, copies: Iterable[tuple[str, jax.Array]]) -> decoder.Params:
  """Makes `decoder.unstack` of (name, replica) pairs, one at a time, sharing no buffer with them.

  Beside the result a device holds one replica, not all of them.
  """
  layers, outer = [{} for _ in range(model.num_layers)], {}
  for name, value in copies:
    if decoder.weights(model)[name].stacked:
      for layer, part in zip(layers, jax.block_until_ready(_parts(value)), strict=True):
        layer[name] = part
    else:
      outer[name] = jax.block_until_ready(_copy(value))
    del value
  return outer | {"layers": tuple(layers)}


@jax.jit
def _parts(x):
  return tuple(x[i] for i in range(x.shape[0]))


_copy = jax.jit(jnp.copy)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def prefill(mesh, model, params, cache, lane_b, token_bt, position_bt):
  """Writes these tokens' keys and values into the cache; what lies past an end goes nowhere."""
  run = lambda params, cache, lane, token, position: decoder.extend(
    model, params, token, position, cache, lane
  )[1]
  return _on_lanes(mesh, run, 4)(params, cache, lane_b, token_bt, position_bt)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_lanes(mesh, cache, source_b, target_b):
  run = lambda _, cache, source, target: jax.tree.map(
    lambda x: x.at[target].set(x[source], mode="drop"), cache
  )
  return _on_lanes(mesh, run, 3)((), cache, source_b, target_b)


@functools.partial(
  jax.jit, static_argnums=(0, 1, 2, 3, 4, 5), static_argnames="gaps", donate_argnums=7
)
def decode(
  mesh, model, block, temperature, top_p, seed, params, cache, token_b, position_b, key_b3, gaps=()
):
  """Decodes `block` tokens for every lane: (cache, tokens [block, B], log-probs [block, B]).

  gaps: ranges of ids that are no token, and never drawn. Log-probs are of the whole softmax, as the
    trainer's are.
  """
  run = functools.partial(_decode, model, block, temperature, top_p, seed, gaps)
  by_lane = P(None, "lane")
  return _on_lanes(mesh, run, 4, (LANES, by_lane, by_lane))(
    params, cache, token_b, position_b, key_b3
  )


def _decode(
  model, block, temperature, top_p, seed, gaps, params, cache, token_b, position_b, key_b3
):
  fold = jax.vmap(lambda k, x: jax.random.fold_in(k, x))
  keys = jnp.broadcast_to(jax.random.key(seed), token_b.shape)
  for part in range(3):
    keys = fold(keys, key_b3[:, part])

  def step(carry, _):
    cache, token, position = carry
    x, cache = decoder.extend(model, params, token[:, None], position[:, None], cache)
    z = decoder.logits(model, params, x)[:, 0]
    if temperature > 0:
      z = z / temperature
      token = sample(fold(keys, position + 1), nucleus(_without(gaps, z), top_p))
    else:
      token = _argmax(_without(gaps, z))
    logp = jnp.take_along_axis(jax.nn.log_softmax(z), token[:, None], -1)[:, 0]
    return (cache, token, position + 1), (token, logp)

  (cache, _, _), (tokens, log_probs) = jax.lax.scan(
    step, (cache, token_b, position_b), length=block
  )
  return cache, tokens, log_probs


def _without(gaps, logits_bv):
  for first, end in gaps:
    logits_bv = logits_bv.at[:, first:end].set(-jnp.inf)
  return logits_bv


def sample(keys_b, logits_bv):
  """Draws once from each lane's softmax with its own key (Gumbel-max)."""
  gumbel = jax.vmap(lambda key: jax.random.gumbel(key, logits_bv.shape[1:]))(keys_b)
  return _argmax(logits_bv + gumbel)


def _argmax(x_bv):
  """jnp.argmax along v as two plain reductions: XLA's CPU backend is 4 times slower on pairs."""
  x_bv = jax.lax.optimization_barrier(x_bv)  # or each reduction would draw the noise again
  index = jnp.arange(x_bv.shape[1], dtype=jnp.int32)
  return jnp.min(jnp.where(x_bv >= x_bv.max(-1, keepdims=True), index, x_bv.shape[1] - 1), axis=-1)


def nucleus(logits_bv, top_p: float):
  """Logits with everything outside the smallest set of mass top_p at -inf; the identity at 1."""
  if top_p >= 1:
    return logits_bv
  high_bv = jnp.sort(logits_bv, axis=-1)[:, ::-1]
  before = jnp.cumsum(jax.nn.softmax(high_bv), -1) - jax.nn.softmax(high_bv)
  least = jnp.min(jnp.where(before < top_p, high_bv, jnp.inf), axis=-1, keepdims=True)
  return jnp.where(logits_bv >= least, logits_bv, -jnp.inf)
