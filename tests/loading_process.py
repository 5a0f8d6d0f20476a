"""One of two processes that load a checkpoint onto a mesh of eight devices; run by
test_hugging_face.py.

    python tests/loading_process.py DIRECTORY ADDRESS PROCESS

Prints, as JSON, the bytes of this process's shards, of its part of the largest stacked weight, and
the most anonymous memory that the process held above what it had before: pages of the mapped file
are the kernel's to take back.
"""

import json
import os
import sys
import threading
import time

import cpu_devices

os.environ["XLA_FLAGS"] = cpu_devices.flags(4)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from stratified import sharding
from stratified.policy import decoder
from stratified.policy.files import hugging_face


def anonymous() -> int:
  with open("/proc/self/statm", encoding="utf-8") as file:
    _, resident, shared, *_ = map(int, file.read().split())
  return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
  """The most anonymous memory seen until `done` is set."""

  def __init__(self):
    super().__init__(daemon=True)
    self.bytes, self.done = 0, threading.Event()

  def run(self):
    while not self.done.is_set():
      self.bytes = max(self.bytes, anonymous())
      time.sleep(1e-3)


def main(directory, address, process):
  jax.distributed.initialize(address, 2, int(process))
  config = hugging_face.load_config(directory)
  axes, mesh = decoder.logical_axes(config), sharding.make_mesh(fsdp=8)
  sharding_of = lambda name: sharding.named(mesh, axes[name])
  jax.block_until_ready(
    jax.device_put(np.zeros(4), jax.local_devices()[0])
  )  # start the backend before measuring
  before, peak = anonymous(), Peak()
  peak.start()
  params = hugging_face.load_params(directory, config, sharding_of=sharding_of)
  peak.done.set()
  peak.join()
  local = {
    name: sum(shard.data.nbytes for shard in value.addressable_shards)
    for name, value in params.items()
  }
  whole = hugging_face.load_params(directory, config)
  for name, value in params.items():
    assert value.sharding == sharding_of(name), name
    for shard in value.addressable_shards:
      np.testing.assert_array_equal(shard.data, whole[name][shard.index])
  print(
    json.dumps(
      {
        "local": sum(local.values()),
        "largest": max(local.values()),
        "peak": peak.bytes - before,
        "whole": sum(value.nbytes for value in whole.values()),
      }
    ),
    flush=True,
  )
  jax.distributed.shutdown()


if __name__ == "__main__":
  main(*sys.argv[1:])
