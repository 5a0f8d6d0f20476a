"""The divergence and its gradients on meshes of eight forced CPU devices.

Run by test_divergence.py in a process of its own:

    python tests/sharded_divergence.py OUT.npz
"""

import json
import math
import os
import re
import sys

import cpu_devices

os.environ["XLA_FLAGS"] = cpu_devices.flags(8)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from small_rollouts import decoder_config

from stratified import sharding
from stratified.planning import hlo
from stratified.policy import decoder, divergence

ROWS, LENGTH, WIDTH, VOCAB = 8, 12, 16, 208
# LLVM at its fastest; the program itself stays the same.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MESHES = [(1, 1, 1), (1, 8, 1), (2, 2, 2)]
CASES = {  # settings, chunk, tied; of 8 parts, each of 26 entries: a top 30 takes more than one has
  "forward, tied, top 3": (dict(top_k=3), 4, True),
  "reverse, top 30": (
    dict(divergence="reverse", clip_form="position", top_k=30, clip=0.8),
    3,
    False,
  ),
  "whole": (
    dict(divergence="jensen_shannon", clip_form="scaled", jensen_shannon_beta=0.3, clip=0.1),
    None,
    False,
  ),
}


def problem():
  """Hidden states and output weights of student and teacher, weights of the tokens' losses."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  hidden, weight = normal(ROWS, LENGTH, WIDTH), 0.4 * normal(VOCAB, WIDTH)
  # The teacher's logits of two parts are equal, those of the first and last, and of the middle.
  weight[156:], weight[104:156] = weight[:52], weight[52:104]
  near = lambda x: x + 0.3 * normal(*x.shape)
  return near(hidden), near(weight), hidden, weight, normal(ROWS, LENGTH)


def make(mesh, fields, chunk, tied):
  """A jitted function of `problem`'s arrays, placed as a run has them, and those arrays."""
  config = decoder_config(vocab_size=VOCAB, width=WIDTH, tied_embeddings=tied)
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

  arrays = [sharding.put(x, sharding.named(mesh, at)) for x, at in zip(problem(), places)]
  return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)), arrays


def measure(mesh, case):
  """The Divergence and its gradients as arrays by name, and their compiled program's text."""
  with jax.set_mesh(mesh):
    function, arrays = make(mesh, *CASES[case])
    compiled = function.lower(*arrays).compile(FAST)
    gradients, parts = compiled(*arrays)
  found = {name: np.asarray(x) for name, x in parts._asdict().items()}
  for name, x, given in zip(("hidden", "weight", "teacher", "teacher's"), gradients, arrays):
    assert x.sharding.is_equivalent_to(given.sharding, x.ndim), (case, name, x.sharding)
    found[f"gradient of {name}"] = np.asarray(x)
  return found, compiled.as_text()


def summary(text):
  """Arrays of a program, and the kind and size of what its collectives yield."""
  return {
    "arrays": sorted([str(one), one.size, one.shape] for one in hlo.arrays(text)),
    "sent": [
      [kind, math.prod(map(int, shape.split(",")))]
      for results, kind in re.findall(rf" = (.*?) ({'|'.join(hlo.KINDS)})\(", text)
      for shape in re.findall(r"\w+\[([\d,]+)\]", results)
    ],
  }


def main(path):
  found, programs = {}, {}
  for sizes in MESHES:
    mesh, label = sharding.make_mesh(*sizes), "x".join(map(str, sizes))
    for case in CASES:
      arrays, text = measure(mesh, case)
      found |= {f"{label}/{case}/{name}": x for name, x in arrays.items()}
      programs[f"{label}/{case}"] = summary(text)
  np.savez(path, programs=json.dumps(programs), **found)


if __name__ == "__main__":
  main(sys.argv[1])
