"""Two small runs on eight forced CPU devices: the bytes that lie on a device at the moments of a
run, beside those that the compile check counts; run by test_compile_check.py.

python tests/live_buffers.py WORKDIR
"""

import collections
import json
import os
import pathlib
import sys

import cpu_devices

os.environ["XLA_FLAGS"] = cpu_devices.flags(8)
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np
from small_rollouts import trajectory
from test_train import config

from stratified.learner import update
from stratified.planning import compiled
from stratified.runs import build, rollouts, stop, trainer
from stratified.sampling import lane_programs
from stratified.sampling.interface import Request

SMALL = {
  "num_steps": 2,
  "warm_start.num_steps": 0,
  "mesh.data": 4,
  "mesh.fsdp": 2,
  "data.questions_per_step": 8,
  "rollout.samples_per_question": 2,
  "packing.rows": 8,
  "eval.questions": 1,
  "eval.every": 0,
  "update.epochs": 1,
  "update.mini_batches": 1,
  "checkpoint.every": 9,
}
RUNS = {
  "kept": {},
  "released": {"lora.rank": 2, "optimizer.name": "adamw", "sampler.release": True},
}


def on_a_device() -> int:
  """Bytes of all live arrays on the device that holds most; what shares a buffer counts once."""
  sizes = {}
  for array in jax.live_arrays():
    for shard in array.addressable_shards:
      key = shard.device.id, shard.data.unsafe_buffer_pointer()
      sizes[key] = max(sizes.get(key, 0), shard.data.nbytes)
  found = collections.Counter()
  for (device, _), size in sizes.items():
    found[device] += size
  return max(found.values())


class Watch:
  """Notes what lies on a device where a run samples, loads weights and updates.

  Sampling, the update and checkpoints are left out: they take 25 s to compile.
  """

  def __init__(self):
    self.seen = {"update": [], "rollouts": [], "load": []}
    self._parts = lane_programs._parts
    lane_programs._parts = self.parts
    rollouts.loop.collect = self.collect
    update.OnMesh.__call__ = lambda _, state, batch: self.update(state, batch)
    trainer.Checkpointer.save = lambda *_, **how: False

  def collect(self, questions, *, sampler, samples_per_question=1, **how):
    sampler.submit(Request((0, 0, 0), (1, 2), 1))  # refused where it holds no weights
    sampler._queue.clear()
    self.seen["rollouts"].append(on_a_device())
    segments = ("prompt", [1, 2]), ("policy", [3])
    return [
      [trajectory(*segments, question=question, sample=k) for k in range(samples_per_question)]
      for question in questions
    ]

  def update(self, state, batch):
    self.seen["update"].append(on_a_device())
    return state, {"advantage_qk": np.zeros(batch.reward_qk.shape)}

  def parts(self, value):
    parts = self._parts(value)
    self.seen["load"].append(on_a_device())
    return parts


def measured(name: str, workdir: pathlib.Path) -> dict[str, list[int]]:
  """{moment: [most bytes that were found on a device, those that the compile check counts]}."""
  run, watch = build.build(config(**SMALL | RUNS[name])), Watch()
  trainer.train(run, workdir, stop.Stop())
  plan = compiled.Plan(run, None, 100.0)
  arrays = compiled.sampler_arrays(plan, lane_programs.make_mesh(jax.devices()[:1]))
  sampler = sum(map(compiled.local_bytes, arrays))
  resident = compiled.local_bytes(compiled.state_of(plan))
  kept = 0 if run.config.sampler.release else sampler
  counted = {
    "update": resident + compiled.local_bytes(compiled.batch_of(plan)) + kept,
    "rollouts": resident + sampler,
    "load": resident + sampler + compiled.load_bytes(plan),
  }
  return {moment: [max(watch.seen[moment]), counted[moment]] for moment in counted}


if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[1])
  print(json.dumps({name: measured(name, folder / name) for name in RUNS}))
