"""The optimizer: clipping by global norm; AdamW, Muon or SGD; linear warm-up to a constant rate."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from stratified import sharding
from stratified.config import check, rules, setting, Settings
from stratified.policy import weights

LARGEST_DECAY = 1 - 1e-6  # above it float32 takes it for 1, and Adam divides by 1 - 1
NAMES = ("adamw", "muon", "sgd")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Settings):
  """The section `optimizer`."""

  SECTION = "optimizer"

  name: str = setting("adamw", "the rule of an update", choices=NAMES, affects=("training",))
  learning_rate: float = setting(1e-6, "rate after the warm-up", above=0, affects=("training",))
  warmup_steps: int = setting(
    20,
    "steps (rollout batches) over which the rate rises linearly",
    low=0,
    high=100_000,
    affects=("training",),
  )
  decay_steps: int = setting(
    0,
    "steps after them over which the rate falls to a tenth along a cosine; 0 keeps it",
    low=0,
    high=10**6,
    affects=("training",),
  )
  weight_decay: float = setting(
    0.0,
    "share of a weight that rate x this takes off; none of norms and biases",
    low=0,
    affects=("training",),
  )
  clip_norm: float = setting(
    1.0,
    "most that the gradient's norm over all weights may be; 1e9 clips nothing",
    above=0,
    affects=("training", "warm_start"),
  )
  b1: float = setting(
    0.9, "decay of Adam's mean of gradients", low=0, high=LARGEST_DECAY, affects=("training",)
  )
  b2: float = setting(
    0.999, "decay of Adam's mean of their squares", low=0, high=LARGEST_DECAY, affects=("training",)
  )
  embedding_rate: float = setting(
    1.0,
    "muon: rate of all but matrices, which Adam updates, as a share of learning_rate",
    above=0,
    affects=("training", "warm_start"),
  )


def make(
  *,
  learning_rate: float,
  warmup_steps: int = 0,
  weight_decay: float = 0.0,
  clip_norm: float = 1.0,
  b1: float = 0.9,
  b2: float = 0.999,
  decay_steps: int = 0,
  name: str = "adamw",
  embedding_rate: float = 1.0,
) -> optax.GradientTransformation:
  """Makes an optax chain.

  The rate rises linearly over `warmup_steps`, here updates; then it stays, or falls along a cosine
  to a tenth over `decay_steps` where that is positive. Weight decay spares norms and biases. Raises
  ValueError for what breaks a rule of OptimizerSettings.
  """
  given = locals()
  for field, rule in rules(OptimizerSettings).items():
    field = field.removeprefix("optimizer.")
    check("optimizer" if field == "name" else field, given[field], rule)
  after = (
    optax.cosine_decay_schedule(learning_rate, decay_steps, 0.1)
    if decay_steps
    else optax.constant_schedule(learning_rate)
  )
  # The first update already moves: step i of the warm-up uses (i + 1) / warmup_steps of the rate.
  warmup = optax.linear_schedule(
    learning_rate / max(warmup_steps, 1), learning_rate, max(warmup_steps - 1, 1)
  )
  schedule = optax.join_schedules([warmup, after], [warmup_steps]) if warmup_steps else after
  # As in AdamW, what decays is the weight and not its gradient's statistics.
  decay = [optax.add_decayed_weights(weight_decay, mask=decayed)] if weight_decay else []
  chains = {
    "adamw": lambda: optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=decayed),
    "muon": lambda: optax.partition(
      {
        "matrix": optax.chain(muon(), *decay, optax.scale_by_learning_rate(schedule)),
        "other": optax.adamw(
          lambda count: embedding_rate * schedule(count),
          b1=b1,
          b2=b2,
          weight_decay=weight_decay,
          mask=decayed,
        ),
      },
      lambda params: {
        name: "matrix" if name in weights.linear_layers() else "other" for name in params
      },
    ),
    "sgd": lambda: optax.chain(*decay, optax.sgd(schedule)),
  }
  return optax.chain(optax.clip_by_global_norm(clip_norm), chains[name]())


def beside(policy, critic) -> optax.GradientTransformation:
  """Two optimizers in one, over {"policy": ..., "critic": ...}: each clips and counts by itself."""
  both = {"policy": policy, "critic": critic}

  def init(trained):
    return {name: chain.init(trained[name]) for name, chain in both.items()}

  def update(gradient, state, trained):
    found = {
      name: chain.update(gradient[name], state[name], trained[name]) for name, chain in both.items()
    }
    return tuple({name: one[part] for name, one in found.items()} for part in (0, 1))

  return optax.GradientTransformation(init, update)


def decayed(params):
  """Which weights decay (`weights.decays`): matrices do; norms and biases don't."""
  return jax.tree.map_with_path(lambda path, _: weights.decays(path[-1].key), params)


def muon(momentum: float = 0.95, iterations: int = 5) -> optax.GradientTransformation:
  """Momentum with orthogonalised matrices (Jordan, "Muon", 2024), as large as an Adam update.

  For each layer's matrix G = U S V^T of the Nesterov momentum the update is about U V^T, by
  `iterations` of the quintic Newton-Schulz iteration X <- a X + (b A + c A^2) X, A = X X^T, times
  0.2 sqrt(max(rows, columns)) (Liu et al., arXiv 2502.16982), so that Adam's learning rates fit.
  The matrices are small enough to be whole on every device while that runs. optax.contrib.muon says
  the same, but can't see through explicitly sharded weights.
  """

  def init(params):
    return MuonState(jax.tree.map(jnp.zeros_like, params))

  def update(gradient, state, params=None):
    del params
    memory = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, gradient)
    ahead = jax.tree.map(lambda m, g: momentum * m + g, memory, gradient)
    inputs = weights.linear_layers()
    step = jax.tree.map_with_path(
      lambda path, x: _orthogonal(x, inputs[path[-1].key], iterations), ahead
    )
    return step, MuonState(memory)

  return optax.GradientTransformation(init, update)


class MuonState(NamedTuple):
  momentum: dict


def _orthogonal(x, inputs: int, iterations: int):
  """Brings each layer's matrix [L, in..., out...] to singular values near 1, then scales it."""
  meshed = sharding.meshed()
  spec = jax.typeof(x).sharding.spec if meshed else None
  whole = jax.sharding.reshard(x, jax.P(*[None] * x.ndim)) if meshed else x
  rows = math.prod(x.shape[1 : 1 + inputs])
  y = whole.reshape(x.shape[0], rows, -1).astype(jnp.float32)
  y = y / (jnp.linalg.norm(y, axis=(1, 2), keepdims=True) + 1e-7)
  tall = y.shape[1] > y.shape[2]
  y = y.swapaxes(1, 2) if tall else y
  a, b, c = NEWTON_SCHULZ
  for _ in range(iterations):
    square = y @ y.swapaxes(1, 2)
    y = a * y + (b * square + c * square @ square) @ y
  y = (y.swapaxes(1, 2) if tall else y) * (0.2 * math.sqrt(max(y.shape[1:])))
  y = y.reshape(x.shape).astype(x.dtype)
  return jax.sharding.reshard(y, spec) if meshed else y
