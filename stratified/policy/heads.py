"""Extra outputs for each token: linear layers on a decoder's last hidden states.

    sizes = {"value": 1}                                  # what a method asks for
    table = weights(config, sizes)                        # value [width, 1], value_bias [1]
    value_rtn = outputs(params, "value", decoder.hidden(config, ...))

Both weights start at zero and stay float32. They lie beside the policy's parameters, never among
them (`learner/state.py`): a sampler, an adapter and an export see the policy alone.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from stratified.policy import layers
from stratified.policy.weights import DecoderConfig, ROWS, Weight


def check(sizes: Mapping[str, int]) -> None:
  """Raises ValueError for heads that can't be: {name: how many numbers of each token}."""
  fits = lambda name, size: (
    isinstance(name, str)
    and name.isidentifier()
    and not {name, f"{name}_bias"} & set(ROWS)
    and isinstance(size, int)
    and size >= 1
  )
  if not isinstance(sizes, Mapping) or not sizes or not all(map(fits, sizes, sizes.values())):
    raise ValueError(
      f"heads={sizes!r} must be {{name: how many numbers of each token, at least 1}}, with names "
      "that no weight of a decoder has"
    )


def weights(config: DecoderConfig, sizes: Mapping[str, int]) -> dict[str, Weight]:
  """Describes the heads' weights by name: NAME [width, size] and NAME_bias [size]."""
  table = {}
  for name, size in sizes.items():
    table[name] = Weight((config.width, size), ("width", None), 0.0, "head", inputs=1)
    table[f"{name}_bias"] = Weight((size,), (None,), 0.0, "bias")
  return table


def outputs(params, name: str, hidden_rtd) -> jax.Array:
  """float32 [R, T, size] of a head: hidden W + b."""
  x = hidden_rtd.astype(jnp.float32)
  return layers.linear(x, params[name], ("width", None)) + params[f"{name}_bias"]
