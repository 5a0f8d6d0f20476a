"""One update of adapters on several meshes of eight forced CPU devices; run by test_lora.py in a
process of its own.

python tests/sharded_adapters.py OUT.npz
"""

import json
import os
import sys

import cpu_devices

os.environ["XLA_FLAGS"] = cpu_devices.flags(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from small_rollouts import collate, decoder_config, family, parameters, random_groups

from stratified import sharding
from stratified.learner import batching, update
from stratified.learner import state as states
from stratified.policy import lora

CONFIG = decoder_config(
  vocab_size=64, width=32, num_heads=4, num_kv_heads=4, head_dim=8, mlp_width=64
)
LORA = lora.LoraConfig(rank=3, alpha=6.0)
MESHES = [(1, 1, 1), (1, 8, 1), (2, 2, 2)]

# Plain SGD that keeps the gradient as its state.
SGD = optax.GradientTransformation(
  lambda params: jax.tree.map(jax.numpy.zeros_like, params),
  lambda gradient, state, params: (jax.tree.map(lambda g: -0.1 * g, gradient), gradient),
)


def take_step(sizes):
  mesh = sharding.make_mesh(*sizes)
  step = update.make_update(
    mesh,
    CONFIG,
    SGD,
    family("blend", clip_ratio=0.2, kl_coefficient=0.3, kl_estimator="k3"),
    num_strata=3,
    chunk=12,
    adapter=LORA,
  )
  state = states.init_state(
    mesh, CONFIG, parameters(CONFIG, scale=2.0), SGD, with_reference=True, adapter=LORA
  )
  rng = np.random.default_rng(0)
  # Both factors away from zero: every gradient and the KL are.
  state = state._replace(
    params={
      name: jax.device_put(0.1 * rng.standard_normal(x.shape, np.float32), x.sharding)
      for name, x in state.params.items()
    }
  )
  batch = batching.place(
    mesh, collate(random_groups(8, 3, vocab=64, longest=21, seed=4), rows=8, length=24, micro=3)
  )
  state, stats = step(state, batch)
  rest = state._replace(reference=lora.fingerprint(state.reference))
  abstract = states.abstract_state(mesh, CONFIG, SGD, with_reference=True, adapter=LORA)
  alike = lambda a, b: all(
    jax.tree.leaves(
      jax.tree.map(lambda x, wanted: x.sharding.is_equivalent_to(wanted.sharding, x.ndim), a, b)
    )
  )
  with jax.set_mesh(mesh):
    policy = jax.jit(lambda frozen, adapters: lora.merge(CONFIG, LORA, frozen, adapters))(
      state.reference, state.params
    )
  arrays = {
    f"{part}/{key}": np.asarray(value)
    for part, tree in {
      "params": state.params,
      "gradient": state.opt_state,
      "policy": policy,
      "stats": stats,
    }.items()
    for key, value in tree.items()
  } | {"fingerprint": np.asarray(rest.reference)}
  facts = {"as_abstract": alike(rest, abstract), "merged_in_place": alike(policy, state.reference)}
  step(state, batch)
  return arrays, facts | {"compilations": step.jitted._cache_size()}


def main(path):
  arrays, facts = {}, {}
  for sizes in MESHES:
    label = "x".join(map(str, sizes))
    found, facts[label] = take_step(sizes)
    arrays |= {f"{label}/{key}": value for key, value in found.items()}
  np.savez(path, facts=json.dumps(facts), **arrays)


if __name__ == "__main__":
  main(sys.argv[1])
