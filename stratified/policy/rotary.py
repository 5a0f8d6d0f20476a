"""Rotary positions (arXiv 2104.09864) and the ways to stretch them beyond the trained length.

Pair i of a head of dimension K turns by position x frequency_i, frequency_i = theta^(-2 i / K). A
scaling changes the frequencies, and YaRN also multiplies queries and keys by a factor.

Letters: r rows, t tokens, h heads, k head dimension.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp


class Linear(NamedTuple):
  """Positions divided by `factor`."""

  factor: float

  def frequency(self, frequency, theta):
    del theta
    return frequency / self.factor

  @property
  def attention_factor(self) -> float:
    return 1.0


class Llama3(NamedTuple):
  """Llama 3's scaling, by wavelength.

  Those above original / low are stretched by `factor`, those below original / high are kept, those
  between are mixed.
  """

  factor: float
  low: float
  high: float
  original: float

  def frequency(self, frequency, theta):
    del theta
    wavelength = 2 * math.pi / frequency
    smooth = (self.original / wavelength - self.low) / (self.high - self.low)
    middle = (1 - smooth) * frequency / self.factor + smooth * frequency
    return jnp.where(
      wavelength < self.original / self.high,
      frequency,
      jnp.where(wavelength > self.original / self.low, frequency / self.factor, middle),
    )

  @property
  def attention_factor(self) -> float:
    return 1.0


class Yarn(NamedTuple):
  """YaRN (arXiv 2309.00071).

  Pairs that turn at least `beta_fast` times over the original length are kept; those that turn at
  most `beta_slow` times are stretched by `factor`; a linear ramp joins them. `attention_factor`
  multiplies sines and cosines, and so scores by its square; the paper's value is
  `yarn_attention_factor(factor)`. `truncate` widens the ramp to whole pairs.
  """

  factor: float
  original: float
  attention_factor: float
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True

  def frequency(self, frequency, theta):
    half = frequency.shape[0]
    # the pair that turns so often over the original length
    pair = lambda turns: half * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)
    low, high = pair(self.beta_fast), pair(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high + 0.001 if low == high else high
    stretched = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return frequency / self.factor * stretched + frequency * (1 - stretched)


Scaling = Linear | Llama3 | Yarn


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
  """0.1 scale ln(factor) + 1; 1 where nothing is stretched."""
  return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary(position_rt, head_dim: int, theta: float, scaling: Scaling | None = None):
  """Sines and cosines [R, T, K/2] of the rotary embedding, in float32."""
  half = head_dim // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if scaling:
    frequency = scaling.frequency(frequency, theta)
  angle = position_rt[..., None].astype(jnp.float32) * frequency
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  if scaling and scaling.attention_factor != 1:
    return sin * scaling.attention_factor, cos * scaling.attention_factor
  return sin, cos


def rotate(x_rthk, sin, cos):
  """Rotates the two halves of the head dimension (Hugging Face's layout of the weights)."""
  a, b = jnp.split(x_rthk.astype(jnp.float32), 2, axis=-1)
  sin, cos = sin[:, :, None], cos[:, :, None]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_rthk.dtype)
