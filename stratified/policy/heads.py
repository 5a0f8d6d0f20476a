"""Extra outputs of a decoder beside the vocabulary: linear layers on its last hidden states.

    config = dataclasses.replace(config, heads=("value",))
    value_rt = values(config, params, decoder.hidden(config, params, ...))

A head named NAME adds the weights NAME [width, outputs] and NAME_bias [outputs] to the decoder's
table; both start at zero and stay float32. To add one, add its entry to HEADS. No Hugging Face
model has them: export leaves them out, import starts them anew, and adapters train them whole.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from stratified.policy import layers

# Name of a head -> how many numbers it gives for each token.
HEADS = {"value": 1}


def check(names: Sequence[str]) -> None:
  """Raises ValueError for a head that does not exist, or is named twice."""
  unknown = [name for name in names if name not in HEADS]
  if unknown or len(set(names)) < len(names):
    raise ValueError(
      f"heads={tuple(names)} must name each head once, out of {', '.join(sorted(HEADS))}"
    )


def outputs(config, params, name: str, hidden_rtd) -> jax.Array:
  """float32 [R, T, outputs] of a head: hidden W + b."""
  if name not in config.heads:
    raise ValueError(f"the decoder has no head {name!r}; its config says heads={config.heads}")
  x = hidden_rtd.astype(jnp.float32)
  return layers.linear(x, params[name], ("width", None)) + params[f"{name}_bias"]


def values(config, params, hidden_rtd) -> jax.Array:
  """float32 [R, T]: the head "value" of each token's hidden state."""
  return outputs(config, params, "value", hidden_rtd)[..., 0]
