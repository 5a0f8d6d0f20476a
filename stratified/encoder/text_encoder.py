"""A BERT-type text encoder in JAX: E5, multilingual E5, MiniLM; one unit vector for each text.

    encoder = Encoder.load(".cache/models/all-minilm-l6-v2")
    vectors = encoder.encode(["Who wrote Hamlet?"], "query")      # float32 [1, width]

The encoder is a post-norm transformer with learned positions (Devlin et al., arXiv 1810.04805),
mean pooling over a text's tokens, and the L2 norm. E5's prefixes tell queries from passages (Wang
et al., arXiv 2212.03533). Texts are batched by length, and batches are split over devices by rows.
Shapes: r texts, t tokens, d width, h heads, k head dimension, n = r t.
"""

from collections import deque
from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from stratified import sharding
from stratified.encoder import weights

Params = dict[str, Any]

ROLES = ("query", "passage")
# Tokens of one batch on one device. On a CPU a batch should stay in its caches.
BATCH_TOKENS = {"cpu": 2048}
_ACCELERATOR_TOKENS = 65536
# batches dispatched and not yet fetched: enough to tokenise while the device computes
_IN_FLIGHT = 3
_MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """Sizes of the encoder; `max_positions` counts positions of tokens, from `position_offset` on."""

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  mlp_width: int
  max_positions: int
  position_offset: int = 0
  norm_eps: float = 1e-12
  dtype: str = "float32"
  attention: str = "folded"

  def __post_init__(self):
    if self.width % self.num_heads:
      raise ValueError(f"width={self.width} must be a multiple of num_heads={self.num_heads}.")
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(f"dtype={self.dtype!r} is unknown; choose float32 or bfloat16.")


def embed(
  config: EncoderConfig, params: Params, token_rt: jax.Array, length_r: jax.Array
) -> jax.Array:
  """Embeds texts padded on the right as unit vectors [R, D], float32.

  v = mean over a text's own tokens of the last hidden state;  result = v / |v|. length_r counts
  these tokens; a text of none gets a zero vector.
  """
  r, t = token_rt.shape
  real_rt = jnp.arange(t) < length_r[:, None]
  x = params["word"][token_rt] + params["position"][:t]
  x = norm(x, params["embedding_norm"], params["embedding_norm_bias"], config.norm_eps)
  # Rows and tokens in one axis: each weight is one large matrix product, which is what a CPU's
  # library does best.
  x = x.reshape(r * t, -1).astype(config.dtype)

  def layer(x_nd, w):
    mixed = attend(config, affine(x_nd, w, "qkv"), real_rt)
    x_nd = norm(
      x_nd + affine(mixed, w, "o"), w["attention_norm"], w["attention_norm_bias"], config.norm_eps
    )
    hidden = jax.nn.gelu(affine(x_nd, w, "up"), approximate=False)
    x_nd = norm(
      x_nd + affine(hidden, w, "down"), w["mlp_norm"], w["mlp_norm_bias"], config.norm_eps
    )
    return x_nd, None

  outer = ("word", "position", "embedding_norm", "embedding_norm_bias")
  x, _ = jax.lax.scan(
    layer, x, {name: value for name, value in params.items() if name not in outer}
  )
  x = jnp.where(real_rt[..., None], x.reshape(r, t, -1).astype(jnp.float32), 0)
  mean = x.sum(1) / jnp.maximum(length_r, 1)[:, None]
  return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def affine(x_nd, w, name):
  y = jnp.dot(x_nd, w[name], preferred_element_type=jnp.float32) + w[f"{name}_bias"]
  return y.astype(x_nd.dtype)


def norm(x, scale, bias, eps):
  """LayerNorm in float32: (x - mean) / sqrt(variance + eps) * scale + bias."""
  y = x.astype(jnp.float32)
  y = y - y.mean(-1, keepdims=True)
  y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
  return (y * scale + bias).astype(x.dtype)


def attend(config: EncoderConfig, qkv_nd, real_rt):
  """Softmax attention [N, D] of every token of a text over all of that text's."""
  r, t = real_rt.shape
  q, k, v = (x.reshape(r, t, config.num_heads, -1) for x in jnp.split(qkv_nd, 3, axis=-1))
  return {"folded": _folded, "library": _library}[config.attention](q, k, v, real_rt).reshape(
    r * t, -1
  )


def _library(q, k, v, real_rt):
  return jax.nn.dot_product_attention(q, k, v, mask=real_rt[:, None, None, :])


def _folded(q, k, v, real_rt):
  """Computes the same with texts and heads as one axis; divides by the softmax's sum at the end."""
  r, t, h, _ = q.shape
  q, k, v = (x.transpose(0, 2, 1, 3).reshape(r * h, t, -1) for x in (q, k, v))
  score = jnp.einsum("bxk,bsk->bxs", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.float32)
  score = jnp.where(real_rt[:, None, None, :], score.reshape(r, h, t, t), _MASKED)
  weight = jnp.exp(score - score.max(-1, keepdims=True))
  mixed = jnp.einsum(
    "bxs,bsk->bxk",
    weight.reshape(r * h, t, t).astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  )
  mixed = (mixed.reshape(r, h, t, -1) / weight.sum(-1, keepdims=True)).astype(v.dtype)
  return mixed.transpose(0, 2, 1, 3)


class Encoder:
  """Turns texts into unit vectors. One object may be used by several threads.

  `manifest` says what its vectors depend on: name and path, SHA-256 of weights, configuration and
  tokenizer, pooling, prefixes, longest text, dtype. Indexes keep it, and refuse queries of another
  encoder.
  """

  def __init__(
    self,
    config: EncoderConfig,
    params: Params,
    tokenizer: tokenizers.Tokenizer,
    *,
    prefixes: dict[str, str],
    max_length: int,
    name: str = "",
    path: str = "",
    sha256: str = "",
    devices: Sequence[jax.Device] | None = None,
    batch_tokens: int | None = None,
  ):
    if sorted(prefixes) != sorted(ROLES):
      raise ValueError(
        f"prefixes are given for {sorted(prefixes)}; they must be given for {', '.join(ROLES)}."
      )
    if not 3 <= max_length <= config.max_positions:
      raise ValueError(
        f"max_length={max_length} must lie in [3, {config.max_positions}]: the encoder has that "
        "many "
        "positions, and two go to the marks around a text."
      )
    if tokenizer.get_vocab_size() > config.vocab_size:
      raise ValueError(
        f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the encoder embeds "
        f"{config.vocab_size}; "
        "they don't belong together."
      )
    devices = list(devices or jax.local_devices())
    tokenizer.no_padding()  # the files of some models pad every text to 128
    tokenizer.enable_truncation(max_length)
    self.config, self.tokenizer, self.prefixes = config, tokenizer, dict(prefixes)
    self.max_length = max_length
    self.manifest = {
      "name": name,
      "path": path,
      "sha256": sha256,
      "pooling": "mean",
      "normalized": True,
      "prefixes": self.prefixes,
      "max_length": max_length,
      "dtype": config.dtype,
    }
    self._num_devices = len(devices)
    self._tokens = batch_tokens or BATCH_TOKENS.get(devices[0].platform, _ACCELERATOR_TOKENS)
    mesh = sharding.make_mesh(data=len(devices), devices=devices)
    cast = {
      name: x if "norm" in name or name.endswith("_bias") else np.asarray(x, config.dtype)
      for name, x in params.items()
    }
    self._params = jax.device_put(cast, jax.NamedSharding(mesh, jax.P()))
    self._placement = jax.NamedSharding(mesh, sharding.spec("row"))
    self._embed = jax.jit(
      jax.shard_map(
        functools.partial(embed, config),
        mesh=mesh,
        in_specs=(jax.P(), sharding.spec("row"), sharding.spec("row")),
        out_specs=sharding.spec("row"),
      )
    )

  @classmethod
  def load(
    cls,
    directory: str | os.PathLike,
    *,
    max_length: int = 256,
    prefixes: dict[str, str] | None = None,
    dtype: str = "float32",
    devices: Sequence[jax.Device] | None = None,
    batch_tokens: int | None = None,
  ) -> "Encoder":
    """Loads a Hugging Face directory of a BERT or XLM-RoBERTa type encoder.

    Args:
      directory: config.json, model.safetensors (or shards with their index), tokenizer.json.
      max_length: tokens of a text that are read, marks at both ends included; the encoder's
        positions are the limit.
      prefixes: what stands in front of a "query" and a "passage"; None is E5's where the name says
        so, else nothing.
      dtype: of the products, "float32" or "bfloat16"; norms, softmax and pooling are float32.
      devices: to split batches over; None is all of this process.
      batch_tokens: tokens of a batch on one device; None is 2,048 on CPU, 65,536 elsewhere.
    """
    directory = pathlib.Path(directory)
    fields = weights.load_config(directory)
    platform = (list(devices or ()) or jax.local_devices())[0].platform
    config = EncoderConfig(
      **fields, dtype=dtype, attention="folded" if platform == "cpu" else "library"
    )
    path = directory / "tokenizer.json"
    if not path.is_file():
      raise FileNotFoundError(
        f"{path} does not exist; save the encoder's fast tokenizer there (transformers' "
        "AutoTokenizer.from_pretrained(...).save_pretrained)."
      )
    try:
      tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # what the library raises has no narrower type
      raise ValueError(f"{path} is no tokenizer ({error}); copy or download it again.") from error
    return cls(
      config,
      weights.load_params(directory, config),
      tokenizer,
      prefixes=weights.prefixes_of(directory) if prefixes is None else prefixes,
      max_length=min(max_length, config.max_positions),
      name=directory.resolve().name,
      path=str(directory.resolve()),
      sha256=weights.fingerprint(directory),
      devices=devices,
      batch_tokens=batch_tokens,
    )

  @classmethod
  def matching(
    cls, manifest: dict[str, Any], directory: str | os.PathLike | None = None, **options
  ) -> "Encoder":
    """Loads the encoder of an index, for its queries, with the index's prefixes and longest text.

    `manifest` is the index's "encoder"; `directory` is where the encoder lies now; `options` are
    those of `load`.
    """
    try:
      prefixes, max_length, path = manifest["prefixes"], manifest["max_length"], manifest["path"]
    except KeyError as error:
      raise ValueError(
        f"the manifest of the index says no {error} of its encoder; build the index again."
      ) from error
    return cls.load(directory or path, prefixes=prefixes, max_length=max_length, **options)

  @property
  def width(self) -> int:
    return self.config.width

  def encode(self, texts: Sequence[str], role: str) -> np.ndarray:
    """Encodes texts as unit vectors [len(texts), width], float32; `role` is "query" or "passage".

    A vector does not depend on what else is in the call beyond rounding. Raises FloatingPointError
    where a vector is not finite.
    """
    ids = self.token_ids(texts, role)
    result = np.empty((len(ids), self.width), np.float32)
    pending = deque()

    def fetch():
      rows, value = pending.popleft()
      result[rows] = np.asarray(value)[: len(rows)]

    for rows, token_rt, length_r in self._batches(ids):
      pending.append(
        (rows, self._embed(self._params, *jax.device_put((token_rt, length_r), self._placement)))
      )
      if len(pending) > _IN_FLIGHT:
        fetch()
    while pending:
      fetch()
    if not np.isfinite(result).all():
      raise FloatingPointError(
        f"the encoder {self.manifest['name']!r} gave a vector that is not finite for "
        f"{(~np.isfinite(result).all(1)).sum()} of {len(ids)} texts; its weights are damaged, "
        "or too large for its dtype (try float32)."
      )
    return result

  def warm_up(self, rows: int = 64, length: int = 64) -> None:
    """Compiles all batches up to `rows` texts of `length` tokens, so that no first query waits."""
    lengths = {
      bucket(n, self.config.max_positions) for n in range(1, min(length, self.max_length) + 1)
    }
    for r, t in sorted(
      {
        (batch_rows(t, left, self._tokens, self._num_devices), t)
        for t in lengths
        for left in range(1, rows + 1)
      }
    ):
      batch = np.zeros((r, t), np.int32), np.ones(r, np.int32)
      jax.block_until_ready(self._embed(self._params, *jax.device_put(batch, self._placement)))

  def token_ids(self, texts: Sequence[str], role: str) -> list[list[int]]:
    """The token ids of each text behind its role's prefix, cut at `max_length`."""
    if isinstance(texts, str):
      raise TypeError(f"texts is the string {texts!r}; encode takes a sequence of texts, [text].")
    if role not in ROLES:
      raise ValueError(f"role={role!r} is unknown; choose one of {', '.join(ROLES)}.")
    prefix = self.prefixes[role]
    # Half of a surrogate pair has no UTF-8 form; the tokenizer would refuse the whole batch for it.
    clean = [(prefix + text).encode("utf-8", "replace").decode("utf-8") for text in texts]
    return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(clean)]

  def _batches(self, ids):
    """Yields (rows of the call, token_rt, length_r), longest first: too large a one fails early."""
    order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    start = 0
    while start < len(order):
      t = bucket(len(ids[order[start]]), self.config.max_positions)
      r = batch_rows(t, len(order) - start, self._tokens, self._num_devices)
      rows = order[start : start + r]
      token_rt, length_r = np.zeros((r, t), np.int32), np.zeros(r, np.int32)
      for at, row in enumerate(rows):
        token_rt[at, : len(ids[row])] = ids[row]
        length_r[at] = len(ids[row])
      yield rows, token_rt, length_r
      start += r


def bucket(length: int, most: int) -> int:
  """The length that a text is padded to: the next multiple of 16 (from 128 on 32, from 256 on 64).

  Few lengths make few compilations; padding stays near 5 % of passages of a hundred words.
  """
  step = 16 if length <= 128 else 32 if length <= 256 else 64
  return min(most, max(step, -(-length // step) * step))


def batch_rows(t: int, left: int, tokens: int, num_devices: int) -> int:
  """Rows of a batch of texts of t tokens: a power of two a device, within its `tokens`."""
  full = 1 << max(0, (tokens // t).bit_length() - 1)
  needed = 1 << max(0, -(-left // num_devices) - 1).bit_length()
  return min(full, needed) * num_devices
