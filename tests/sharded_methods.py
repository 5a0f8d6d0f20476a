"""One step of each method, several updates in it, on meshes of eight forced CPU devices.

Run by test_sharding.py in a process of its own:

    python tests/sharded_methods.py OUT.npz
"""

import os
import sys

import cpu_devices

os.environ["XLA_FLAGS"] = cpu_devices.flags(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from small_rollouts import collate, decoder_config, parameters, random_groups

from stratified import sharding
from stratified.algorithms import Facts, make
from stratified.learner import batching, optimizer, update
from stratified.learner import state as states

CONFIG = decoder_config(
  vocab_size=64, width=32, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8, mlp_width=64
)
FACTS = Facts(num_strata=3, samples_per_question=3, max_tokens=24, max_turns=3)
TWICE = update.UpdateSettings(mini_batches=2)
# Name -> (method, settings of a class of its own by name of the class).
METHODS = {
  "ppo": ("ppo", {}),
  "ppo_own": ("ppo", {"CriticSettings": {"body": "own", "by_calls": True, "level": "turn"}}),
  "gigpo": ("gigpo", {}),
}
MESHES = [(1, 1, 1), (2, 2, 2)]


def take_step(name, sizes):
  method, settings = METHODS[name]
  algorithm = make(method, lambda cls: cls(**settings.get(cls.__name__, {})), FACTS)
  mesh, chain = sharding.make_mesh(*sizes), optimizer.make(name="sgd", learning_rate=0.1)
  chain = optimizer.beside(chain, chain) if algorithm.critic else chain
  learn = update.make_update(mesh, CONFIG, chain, algorithm, settings=TWICE, num_strata=3)
  params = parameters(CONFIG, scale=2.0)
  state = states.init_state(
    mesh, CONFIG, params, chain, with_reference=True, critic=algorithm.critic
  )
  batch = collate(
    random_groups(8, 3, vocab=64, longest=21, seed=4),
    rows=8,
    length=24,
    algorithm=algorithm,
    mini_batches=TWICE.mini_batches,
  )
  state, stats = learn(state, batching.place(mesh, batch))
  found = {f"params/{key}": np.asarray(x) - params[key] for key, x in state.params.items()}
  for key, value in (state.critic or {}).items():
    found[f"critic/{key}"] = np.asarray(value) - params.get(key, 0)
  return found | {f"stats/{key}": np.asarray(value) for key, value in stats.items()}


def main(path):
  arrays = {}
  for name in METHODS:
    for sizes in MESHES:
      label = f"{name} {'x'.join(map(str, sizes))}"
      arrays |= {f"{label}|{key}": value for key, value in take_step(name, sizes).items()}
  np.savez(path, **arrays)


if __name__ == "__main__":
  main(sys.argv[1])
