"""One update on several meshes of eight forced CPU devices; run by test_sharding.py in a process of
its own.

python tests/sharded_steps.py OUT.npz
"""

import dataclasses
import json
import os
import sys

import cpu_devices

os.environ["XLA_FLAGS"] = cpu_devices.flags(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_rollouts import (
  collate,
  decoder_config,
  family,
  OneCharacterEach,
  parameters,
  random_groups,
)

from stratified import sharding
from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.learner.packing import Packing
from stratified.planning import compiled, hlo
from stratified.policy import lora
from stratified.sampling.in_process import JaxSampler, SamplerConfig
from stratified.sampling.interface import Request

SIZES = dict(
  vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, mlp_width=64
)
MODELS = {
  "tied": decoder_config(**SIZES),
  "untied": decoder_config(
    **SIZES, tied_embeddings=False, qkv_bias=True, qk_norm=True, remat="full"
  ),
}
MESHES = {
  "tied": [(1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)],
  "untied": [(1, 1, 1), (2, 2, 2)],
}
RATE = 0.1
ADAPTED = {"1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2)}
CHAINS = {name: optimizer.make(name=name, learning_rate=1e-3) for name in ("adamw", "muon")}


def _record():
  """Plain SGD whose state also holds the gradient and what the others would have done with it: one
  compilation shows all."""

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {
      "gradient": zeros,
      **{name: (chain.init(params), zeros) for name, chain in CHAINS.items()},
    }

  def step(gradient, state, params):
    others = {
      name: chain.update(gradient, state[name][0], params)[::-1] for name, chain in CHAINS.items()
    }
    return jax.tree.map(lambda g: -RATE * g, gradient), {"gradient": gradient, **others}

  return optax.GradientTransformation(init, step)


def take_step(name, sizes):
  """What one step on a mesh gives, as arrays by name, and what is true of where they lie."""
  config, mesh, chain = MODELS[name], sharding.make_mesh(*sizes), _record()
  step = update.make_update(
    mesh,
    config,
    chain,
    family("blend", clip_ratio=0.2, kl_coefficient=0.3, kl_estimator="k3"),
    num_strata=3,
    chunk=12 if name == "tied" else None,
  )
  state = states.init_state(mesh, config, parameters(config, scale=2.0), chain, with_reference=True)
  other = parameters(config, seed=1, scale=2.0)
  state = state._replace(
    reference={
      key: jax.device_put(other[key], old.sharding) for key, old in state.reference.items()
    }
  )
  batch = batching.place(
    mesh, collate(random_groups(8, 3, vocab=64, longest=21, seed=4), rows=8, length=24, micro=3)
  )
  state, stats = step(state, batch)
  abstract = states.abstract_state(mesh, config, chain, with_reference=True)
  same_place = jax.tree.map(
    lambda x, wanted: x.sharding.is_equivalent_to(wanted.sharding, x.ndim), state, abstract
  )
  sampler = JaxSampler(config, SamplerConfig(lanes=2, length=24), OneCharacterEach(64, eos_id=-1))
  sampler.load(state.params, 1)
  (sampled,) = sampler.generate([Request((0, 0, 0), (5, 6, 7), 12)])
  arrays = {
    f"{part}/{key}": value
    for part, tree in (
      ("params", state.params),
      ("gradient", state.opt_state["gradient"]),
      ("stats", stats),
      *((name, state.opt_state[name][1]) for name in CHAINS),
    )
    for key, value in tree.items()
  } | {"sampled": np.asarray(sampled.token_ids)}
  facts = {
    "largest_share": {
      key: x.addressable_shards[0].data.size / x.size for key, x in state.params.items()
    },
    "as_abstract": all(jax.tree.leaves(same_place)),
    "num_micro": int(batch.first_m[-1]),
  }
  arrays = {key: np.asarray(value) for key, value in arrays.items()}
  step(state, batch)
  return arrays, facts | {"compilations": step.jitted._cache_size()}


def adapter_shares(sizes):
  """Of each factor of adapters, the share that one device holds."""
  mesh, adapter = sharding.make_mesh(*sizes), lora.LoraConfig(rank=3, alpha=6.0)
  chain = optimizer.make(name="sgd", learning_rate=RATE)
  params = parameters(MODELS["tied"])
  state = states.init_state(
    mesh, MODELS["tied"], params, chain, with_reference=True, adapter=adapter
  )
  return {name: x.addressable_shards[0].data.size / x.size for name, x in state.params.items()}


def samplers():
  """What samplers on one device, and on four with fewer lanes each than rollouts, draw for 5
  questions of 4 samples.

  Two turns each; the second goes on from the first's own tokens.
  """
  config, drawn = MODELS["tied"], {}
  params = parameters(config, scale=2.0)
  prompts = [tuple(range(3 + q, 9 + 2 * q)) for q in range(5)]
  for count, lanes in ((1, 20), (4, 3)):
    sampler = JaxSampler(
      config,
      SamplerConfig(lanes=lanes, length=40, block=3, rows=2, seed=5),
      OneCharacterEach(64, eos_id=-1),
      jax.devices()[:count],
    )
    sampler.load(params_on_device(params), 1)
    keys = [(0, q, k) for q in range(5) for k in range(4)]
    first = sampler.generate([Request(key, prompts[key[1]], 4 + key[2]) for key in keys])
    second = sampler.generate(
      [
        Request(one.key, prompts[one.key[1]] + one.token_ids + (1, 2), 5, last=True)
        for one in first
      ]
    )
    drawn[count] = (
      [[list(one.token_ids), list(one.log_probs)] for one in (*first, *second)],
      sampler.stats,
    )
  return drawn


def params_on_device(params):
  return {name: jnp.asarray(value) for name, value in params.items()}


def programs():
  """What the compiled update of a mesh holds and sends, with its logits in chunks and without."""
  config, mesh, chain = (
    dataclasses.replace(MODELS["tied"], vocab_size=208),
    sharding.make_mesh(2, 2, 2),
    optimizer.make(learning_rate=1e-3),
  )
  state = states.abstract_state(mesh, config, chain, with_reference=True)
  batch = batching.place(
    mesh, collate(random_groups(8, 3, vocab=64, longest=21, seed=4), rows=8, length=24, micro=3)
  )
  found = {}
  for chunk in (6, 0):
    step = update.make_update(
      mesh,
      config,
      chain,
      family("blend", clip_ratio=0.2, kl_coefficient=0.3, kl_estimator="k3"),
      num_strata=3,
      chunk=chunk or None,
    )
    text = step.lower(state, batch).compile().as_text()
    packing = Packing(length=24, rows=8, micro=3)
    found[f"chunk {chunk}"] = {
      "unexpected": compiled.unexpected(config, mesh.shape, packing, 6, text),
      "sent": [
        [each.kind, str(each.array), each.group, each.count]
        for each in hlo.collectives(text, dynamic=3, num_devices=8)
      ],
    }
  return found


def main(path):
  arrays, facts = {}, {}
  for name, meshes in MESHES.items():
    for sizes in meshes:
      label = f"{name} {'x'.join(map(str, sizes))}"
      found, facts[label] = take_step(name, sizes)
      arrays |= {f"{label}/{key}": value for key, value in found.items()}
  np.savez(
    path,
    facts=json.dumps(facts),
    programs=json.dumps(programs()),
    samplers=json.dumps(samplers()),
    adapters=json.dumps({name: adapter_shares(sizes) for name, sizes in ADAPTED.items()}),
    **arrays,
  )


if __name__ == "__main__":
  main(sys.argv[1])
