"""Hidden states, values and their gradients of every switch of the decoder on meshes of eight
forced CPU devices; run by test_sharded_families.py in a process of its own.

python tests/sharded_families.py
"""

import json
import os

import cpu_devices

os.environ["XLA_FLAGS"] = cpu_devices.flags(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from small_rollouts import decoder_config, parameters

from stratified import sharding
from stratified.policy import decoder, heads, log_probs

SIZES = dict(
  vocab_size=64, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64
)
MODELS = {
  "gemma": dict(
    post_norms=True,
    zero_centered_norms=True,
    qk_norm=True,
    attention_scale=0.5,
    embedding_scale=32**0.5,
    activation="gelu_tanh",
    window=4,
    local=(True, False, True),
    rope_theta_local=20.0,
  ),
  "olmo": dict(
    pre_norms=False,
    post_norms=True,
    qk_norm=True,
    qk_norm_over_heads=True,
    tied_embeddings=False,
    remat="full",
  ),
  "mistral": dict(window=4, attention="folded"),
}


def run(config, params, sizes):
  mesh = sharding.make_mesh(*sizes)
  table = decoder.weights(config) | heads.weights(config, {"value": 1})
  axes = {name: weight.axes for name, weight in table.items()}
  rows = np.random.default_rng(0).integers(0, 64, (4, 12))
  position, segment = np.tile(np.r_[:7, :5], (4, 1)), np.tile(np.r_[[1] * 7, [2] * 5], (4, 1))

  @jax.jit
  def loss(params, token, position, segment):
    x = decoder.hidden(config, params, token, position, segment)
    logp = log_probs.token_log_probs(config, params, x, token)[0]
    return (logp * (1 + heads.outputs(params, "value", x)[..., 0])).sum()

  with jax.set_mesh(mesh):
    place = lambda value, *of: sharding.put(value, sharding.named(mesh, of))
    params = {name: place(value, *axes[name]) for name, value in params.items()}
    batch = [place(np.int32(x), "row", None) for x in (rows, position, segment)]
    value, gradient = jax.jit(jax.value_and_grad(loss))(params, *batch)
    return float(value), jax.device_get(gradient)


def main():
  found = {}
  for name, switches in MODELS.items():
    config = decoder_config(**SIZES, **switches)
    params = parameters(config)
    params["value"] = np.random.default_rng(1).standard_normal((32, 1)).astype(np.float32)
    params["value_bias"] = np.zeros(1, np.float32)
    alone, one = run(config, params, (1, 1, 1))
    spread, many = run(config, params, (2, 2, 2))
    size = {key: float(np.linalg.norm(value)) for key, value in one.items()}
    error = {key: float(np.linalg.norm(many[key] - value)) for key, value in one.items()}
    found[name] = {"loss": [alone, spread], "size": size, "error": error}
  print(json.dumps(found))


if __name__ == "__main__":
  main()
