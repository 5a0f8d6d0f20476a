"""Low-rank adapters (LoRA, arXiv 2106.09685): a trained A B of rank r beside each linear layer W.

    x W' = x W + (alpha / r) (x A) B

W stays frozen; A starts at random, B at zero, so that training starts from the policy W exactly.
Adapters are a flat table like the decoder's own, `q_a`, `q_b`, .... A pass uses a table of both, in
one of two forms:

    params = join(lora, frozen, adapters)           # training: thin products beside frozen ones
    params = merge(config, lora, frozen, adapters)  # sampling, export: W + (alpha / r) A B

Frozen weights go into no checkpoint; `fingerprint` tells whether those read again are the ones
trained against.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from stratified.config import check, rules, setting, Settings
from stratified.policy import decoder
from stratified.policy.digest import digest
from stratified.policy.weights import adapter_weights, linear_layers


@dataclasses.dataclass(frozen=True)
class LoraSettings(Settings):
  """The section `lora`."""

  SECTION = "lora"

  rank: int = setting(
    0,
    "rank of the adapters that are trained beside frozen weights; 0 trains every weight",
    low=0,
    affects=("training", "answers"),
  )
  alpha: float = setting(
    128.0, "an adapter counts alpha / rank", above=0, affects=("training", "answers")
  )
  targets: str = setting(
    ",".join(linear_layers()),
    "linear layers that have an adapter, with commas between them",
    affects=("training", "answers"),
  )

  def __post_init__(self):
    super().__post_init__()
    LoraConfig(self.rank or 1, self.alpha, tuple(self.targets.split(",")))

  def adapter(self) -> "LoraConfig | None":
    """The adapters that are trained in place of the weights; None where every weight is."""
    return LoraConfig(self.rank, self.alpha, tuple(self.targets.split(","))) if self.rank else None


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Rank r, alpha (an adapter counts alpha / r), and the linear layers that have an adapter."""

  rank: int
  alpha: float
  targets: tuple[str, ...] = dataclasses.field(default_factory=lambda: tuple(linear_layers()))

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(
        f"lora.rank={self.rank} must be at least 1; 0 in a run's config trains all parameters "
        "instead"
      )
    check("lora.alpha", self.alpha, rules(LoraSettings)["lora.alpha"])
    unknown = [target for target in self.targets if target not in linear_layers()]
    if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
      raise ValueError(
        f"lora.targets={','.join(self.targets)!r} must name each layer once, one at least, out of "
        f"{','.join(linear_layers())}"
      )

  @property
  def scaling(self) -> float:
    return self.alpha / self.rank


def weights(config: decoder.DecoderConfig, lora: LoraConfig) -> dict[str, decoder.Weight]:
  """Lists the trained weights by name: adapters' factors in the order of layers.

  Raises ValueError where the rank is not below a layer's own: A B would hold more numbers than W.
  """
  table = decoder.weights(config)
  for target in lora.targets:
    shape, inputs = table[target].part_shape, table[target].inputs
    most = min(math.prod(shape[:inputs]), math.prod(shape[inputs:]))
    if lora.rank >= most:
      raise ValueError(
        f"lora.rank={lora.rank} must be below {most}, the rank of {target}; lower it, or leave "
        f"{target} "
        "out of lora.targets"
      )
  return {
    name: weight
    for target in table
    if target in lora.targets
    for name, weight in adapter_weights(config, target, lora.rank).items()
  }


def init(config: decoder.DecoderConfig, lora: LoraConfig, key: jax.Array) -> decoder.Params:
  """Makes float32 adapters that change nothing yet.

  A is truncated normal of variance 1 / inputs, B is zero. A layer's A depends on the key and the
  layer alone, not on which others have adapters.
  """
  order = {f"{target}_a": number for number, target in enumerate(linear_layers())}
  return {
    name: decoder.initial(weight, jax.random.fold_in(key, order.get(name, 0)))
    for name, weight in weights(config, lora).items()
  }


def join(lora: LoraConfig, frozen: decoder.Params, adapters: decoder.Params) -> decoder.Params:
  """Joins both in one table for `decoder.hidden`: alpha / r goes into A."""
  factors = {f"{target}_a" for target in lora.targets}
  return frozen | {
    name: value * lora.scaling if name in factors else value for name, value in adapters.items()
  }


def merge(
  config: decoder.DecoderConfig, lora: LoraConfig, frozen: decoder.Params, adapters: decoder.Params
) -> decoder.Params:
  """Adds (alpha / r) A B to the decoder's weights, in float32.

  The result has the frozen weight's dtype.
  """
  merged, table = dict(frozen), decoder.weights(config)
  for target in lora.targets:
    # Of each of the layers l: inputs i or h k, outputs o ...; the einsum names them by their place.
    inputs = "abc"[: table[target].inputs]
    outputs = "def"[: frozen[target].ndim - 1 - len(inputs)]
    delta = jnp.einsum(
      f"l{inputs}z,lz{outputs}->l{inputs}{outputs}",
      adapters[f"{target}_a"],
      adapters[f"{target}_b"],
      precision=jax.lax.Precision.HIGHEST,
    )
    merged[target] = (frozen[target].astype(jnp.float32) + lora.scaling * delta).astype(
      frozen[target].dtype
    )
  return merged


@jax.jit
def fingerprint(params: decoder.Params) -> jax.Array:
  """Fingerprints weights: the digests uint32 [weights, 2] by name, the same on any mesh."""
  return jnp.stack([digest(params[name]) for name in sorted(params)])


def check_fingerprint(params: decoder.Params, expected, source: str) -> None:
  """Refuses frozen weights other than those that adapters were trained against.

  expected: their fingerprint then. source: where `params` were read, for the message.
  """
  found = np.asarray(fingerprint(params))
  changed = [
    name for name, a, b in zip(sorted(params), found, np.asarray(expected)) if (a != b).any()
  ]
  if changed:
    raise ValueError(
      f"{source} has changed since these adapters were trained beside it ({', '.join(changed)}); "
      "bring the old weights back, or train in a new workdir"
    )
