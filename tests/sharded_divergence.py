"""The divergence and its gradients on meshes of eight forced CPU devices.

Run by test_divergence.py in a process of its own:

    python tests/sharded_divergence.py OUT.npz
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from small_rollouts import decoder_config

from stratified import sharding
from stratified.planning import hlo
from stratified.policy import decoder, divergence

ROWS, LENGTH, WIDTH, VOCAB = 8, 12, 16, 64
MESHES = [(1, 1, 1), (1, 8, 1), (2, 2, 2)]
CASES = {  # of 8 parts, each of 8 entries: a top 11 takes more than a part has
  "forward entry": (dict(), 4, False),
  "forward entry, tied, top 3": (dict(top_k=3), 4, True),
  "reverse position, top 11": (
    dict(divergence="reverse", clip_form="position", top_k=11, clip=0.8),
    3,
    False,
  ),
  "jensen_shannon scaled": (
    dict(divergence="jensen_shannon", clip_form="scaled", jensen_shannon_beta=0.3, clip=0.1),
    None,
    False,
  ),
}


def problem(vocab):
  """Hidden states and output weights of student and teacher, weights of the tokens' losses."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  hidden, weight = normal(ROWS, LENGTH, WIDTH), 0.4 * normal(vocab, WIDTH)
  near = lambda x: x + 0.3 * normal(*x.shape)
  return near(hidden), near(weight), hidden, weight, normal(ROWS, LENGTH)


def make(mesh, fields, chunk, tied, vocab):
  """A jitted function of `problem`'s arrays, placed as a run has them, and those arrays."""
  config = decoder_config(vocab_size=vocab, width=WIDTH, tied_embeddings=tied)
  name = "embed" if tied else "head"
  axes = decoder.logical_axes(config)[name]
  places = (("row", None, None), axes, ("row", None, None), axes, ("row", None))

  def loss(student_rtd, student_vd, teacher_rtd, teacher_vd, weight_rt):
    found = divergence.token_divergence(
      config,
      {name: student_vd},
      {name: teacher_vd},
      student_rtd,
      teacher_rtd,
      settings=divergence.DivergenceSettings(**fields),
      chunk=chunk,
    )
    return (found.loss * weight_rt).sum(), found

  arrays = [
    sharding.put(x, sharding.named(mesh, where)) for x, where in zip(problem(vocab), places)
  ]
  return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)), arrays


def measure(mesh):
  """Everything that is computed on a mesh, by name."""
  found = {}
  with jax.set_mesh(mesh):
    for case, (fields, chunk, tied) in CASES.items():
      gradients, arrays = make(mesh, fields, chunk, tied, VOCAB)
      gradient, parts = gradients(*arrays)
      found |= {f"{case}/{name}": np.asarray(x) for name, x in parts._asdict().items()}
      for name, x, given in zip(("hidden", "weight", "teacher", "teacher's"), gradient, arrays):
        assert x.sharding.is_equivalent_to(given.sharding, x.ndim), (case, name, x.sharding)
        found[f"{case}/gradient of {name}"] = np.asarray(x)
  return found


def program(mesh, chunk):
  """Arrays and collectives of the compiled gradient, of a vocabulary that nothing else is as
  large as."""
  with jax.set_mesh(mesh):
    gradients, arrays = make(mesh, dict(top_k=3), chunk, False, 208)
    text = gradients.lower(*arrays).compile().as_text()
  return {
    "arrays": sorted([str(one), one.size, one.shape] for one in hlo.arrays(text)),
    "sent": [[one.kind, str(one.array), one.array.size] for one in hlo.collectives(text)],
  }


def main(path):
  found = {}
  for sizes in MESHES:
    label = "x".join(map(str, sizes))
    made = measure(sharding.make_mesh(*sizes))
    found |= {f"{label}/{key}": value for key, value in made.items()}
  mesh = sharding.make_mesh(2, 2, 2)
  programs = {str(chunk): program(mesh, chunk) for chunk in (3, None)}
  np.savez(path, programs=json.dumps(programs), **found)


if __name__ == "__main__":
  main(sys.argv[1])
