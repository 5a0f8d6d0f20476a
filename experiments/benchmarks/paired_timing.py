"""Shared by benchmarks against PyTorch: equal weights and cores, measurements taken in turns."""

from collections.abc import Callable
import dataclasses
import os
import resource
import statistics
import tempfile
import time

import jax

from configs import search_r1
from stratified.policy.files import hugging_face
from stratified.runs import build


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of each run of one side: by the clock, and of processor time on all threads."""

  wall: tuple[float, ...]
  processor: tuple[float, ...]

  @property
  def median(self) -> float:
    return statistics.median(self.wall)

  @property
  def cores(self) -> float:
    """How many cores a run kept busy."""
    return sum(self.processor) / sum(self.wall)


def use_cores(count: int) -> None:
  """Confines this process to `count` cores, before either library starts its threads."""
  here = sorted(os.sched_getaffinity(0))
  if not 1 <= count <= len(here):
    raise ValueError(
      f"--cores={count} must lie between 1 and {len(here)}, the cores this process may use"
    )
  os.sched_setaffinity(0, here[:count])
  if (load := os.getloadavg()[0]) > 0.5 * count:
    print(
      f"note: the machine's load is {load:.1f} already; figures are right only where nothing else "
      "runs"
    )
  import torch  # not needed to train, hence no import of this module

  torch.set_num_threads(count)
  build.enable_compilation_cache()


def config_of(model: str):
  """The preset's config: `tiny`, or that of a model directory."""
  config = search_r1.get_config("tiny" if model == "tiny" else "smollm2")
  if model != "tiny":
    config.policy.checkpoint = model
  return config


def load(config):
  """(decoder's config, its parameters, transformers' model with the same float32 weights)."""
  import transformers

  model = build.model_config(config)
  params = build.initial_params(config, model, build.mesh_of(config))
  # A Device in place of the sharding would leave the mesh in the type of the arrays (jax 0.10).
  params = jax.device_put(params, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
  with tempfile.TemporaryDirectory() as directory:
    hugging_face.save(directory, model, params)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype="float32", attn_implementation="sdpa"
    )
  return model, params, reference


def count(params) -> int:
  return sum(value.size for value in params.values())


def in_turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
  """Warms up each side, then runs all `repeats` times in turn: a disturbance meets all alike."""
  taken = {name: ([], []) for name in sides}
  for repeat in range(repeats + 1):
    for name, run in sides.items():
      time.sleep(0.05)  # threads of the side before that still spin go to sleep
      before, start = _processor_seconds(), time.perf_counter()
      jax.block_until_ready(run())
      if repeat:
        taken[name][0].append(time.perf_counter() - start)
        taken[name][1].append(_processor_seconds() - before)
  return {name: Times(tuple(wall), tuple(processor)) for name, (wall, processor) in taken.items()}


def _processor_seconds() -> float:
  usage = resource.getrusage(resource.RUSAGE_SELF)
  return usage.ru_utime + usage.ru_stime
