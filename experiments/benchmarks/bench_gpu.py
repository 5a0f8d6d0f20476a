"""Measures how much of an accelerator update and decoding use, at several sizes, random weights.

    python experiments/benchmarks/bench_gpu.py    # 135M, 1.5B and 3B, under 8 minutes on a GPU
    python experiments/benchmarks/bench_gpu.py --sizes=SmolLM2-135M --layers=2 --rows=1 \\
        --length=256 --lanes=4                    # try it on a CPU

The update is the real one (clipped surrogate, KL to a reference, AdamW on float32 masters, bfloat16
products, layers rematerialised, logits in chunks) on packed rows of search-like lengths. Its
utilisation is model FLOPs (three forward passes; neither what is computed again nor the reference
counts) by time, against the product of two large bfloat16 matrices measured in the same run, and
against the chip's published peak where it is known. Decoding is a block of the in-process
sampler's, in tokens a second, against the time to read weights and caches once a token at the
memory bandwidth of a copy measured in the same run.
"""

import argparse
import dataclasses
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from stratified import advantages, sharding
from stratified.algorithms.grpo import Grpo, PolicyLossSettings
from stratified.learner import batching, optimizer, update
from stratified.learner import state as states
from stratified.learner.packing import Packing
from stratified.planning import costs
from stratified.policy import attention, decoder, sizes
from stratified.sampling import lane_programs
from stratified.types import Question, Segment, Trajectory

SAMPLES, STRATA = 8, 5


def best_seconds(run, repeats: int) -> float:
  """Least time of a call, after one that compiles."""
  jax.block_until_ready(run())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return min(times)


def matmul_peak(dtype: str, size: int) -> float:
  """FLOP/s of the product of two square matrices."""
  x = jnp.ones((size, size), dtype)
  product = jax.jit(lambda x: x @ x)
  return 2 * size**3 / best_seconds(lambda: product(x), 5)


def copy_bandwidth(size: int) -> float:
  """Bytes/s read and written by adding 1 to an array."""
  x = jnp.ones(size, jnp.float32)
  add = jax.jit(lambda x: x + 1)
  return 2 * 4 * size / best_seconds(lambda: add(x), 5)


def rollouts(a, vocabulary: int):
  """Makes [Q][K] random rollouts of a prompt, searches and an answer, as long as search agents'."""
  rng = np.random.default_rng(0)
  short = a.length / 4096
  groups = []
  for q in range(a.questions):
    groups.append([])
    for k in range(SAMPLES):
      parts = [("prompt", int(250 * short) + 1)]
      for _ in range(rng.choice(STRATA, p=[0.1, 0.35, 0.3, 0.15, 0.1])):
        parts += [("policy", int(120 * short) + 1), ("observation", int(480 * short) + 1)]
      parts.append(("policy", int(rng.integers(40, 160) * short) + 1))
      make = lambda origin, n: Segment(
        tuple(rng.integers(0, vocabulary, n).tolist()), origin, (-1.0,) * n * (origin == "policy")
      )
      groups[-1].append(
        Trajectory(Question(str(q), "", ()), k, tuple(make(*part) for part in parts))
      )
  return groups


def measure_update(model: decoder.DecoderConfig, a) -> dict[str, float]:
  mesh, chain = sharding.make_mesh(1, 1, 1), optimizer.make(learning_rate=1e-6)
  groups = rollouts(a, model.vocab_size)
  algorithm = Grpo(
    advantages.AdvantageSettings(), PolicyLossSettings(), num_strata=STRATA, max_tokens=a.length
  )
  packing = Packing.for_rollouts(len(groups) * SAMPLES, length=a.length, rows=a.rows)
  rewards = np.random.default_rng(1).integers(0, 2, (len(groups), SAMPLES)).astype(np.float32)
  strata = [[min(len(t.segments) // 2 - 1, STRATA - 1) for t in group] for group in groups]
  batch = batching.place(
    mesh,
    batching.collate(
      groups,
      packing=packing,
      algorithm=algorithm,
      rewards=rewards,
      strata=strata,
      num_strata=STRATA,
    ),
  )
  learn = update.make_update(mesh, model, chain, algorithm, chunk=min(a.chunk, a.length))
  state = [
    states.init_state(
      mesh, model, decoder.init(model, jax.random.key(0)), chain, with_reference=True
    )
  ]

  def step():
    state[0], stats = learn(state[0], batch)
    return stats["loss/policy"]

  seconds, tokens = best_seconds(step, a.repeats), batching.num_tokens(batch)
  lengths = np.array([len(t.token_ids) for group in groups for t in group])
  flops = costs.model_flops(model, tokens, float((lengths**2).sum() / lengths.sum() / 2))
  return {
    "seconds": seconds,
    "tokens_per_second": tokens / seconds,
    "flops_per_second": flops / seconds,
    "padding": batching.padding_share(batch),
  }


def measure_decode(model: decoder.DecoderConfig, a) -> dict[str, float]:
  mesh = lane_programs.make_mesh(jax.local_devices()[:1])
  params = jax.jit(lambda: decoder.unstack(model, decoder.init(model, jax.random.key(0))))()
  params = jax.device_put(params, lane_programs.replicated(mesh))
  filled, block = a.length // 2, 16
  state = [lane_programs.empty_cache(mesh, model, a.lanes, a.length)]
  token, position, key = (
    np.zeros(a.lanes, np.int32),
    np.full(a.lanes, filled, np.int32),
    np.zeros((a.lanes, 3), np.int32),
  )

  def run():
    state[0], tokens, _ = lane_programs.decode(
      mesh, model, block, 1.0, 1.0, 0, params, state[0], token, position, key
    )
    return tokens

  seconds = best_seconds(run, a.repeats)
  # this program reads a lane's whole cache
  return {
    "tokens_per_second": block * a.lanes / seconds,
    "seconds_per_token": seconds / block,
    "bytes": costs.decode_bytes(model, a.lanes, a.length),
  }


def known_peak() -> costs.Device | None:
  kind = jax.devices()[0].device_kind.lower()
  return next((device for name, device in costs.DEVICES.items() if name in kind), None)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--sizes", nargs="+", default=["SmolLM2-135M", "Qwen2.5-1.5B", "Qwen2.5-3B"])
  parser.add_argument(
    "--layers", type=int, help="so many layers instead of the model's own, to try the script"
  )
  parser.add_argument(
    "--questions", type=int, default=8, help=f"of {SAMPLES} rollouts each in an update"
  )
  parser.add_argument("--rows", type=int, default=4, help="packed rows of a micro-batch")
  parser.add_argument("--length", type=int, default=4096, help="tokens of a row and of a lane")
  parser.add_argument(
    "--chunk", type=int, default=512, help="positions of a row whose logits exist at once"
  )
  parser.add_argument("--lanes", type=int, default=128, help="rollouts decoded side by side")
  parser.add_argument("--remat", default="full", choices=sorted(decoder.REMAT))
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--json", help="write the measurements to this file")
  a = parser.parse_args()
  platform = jax.default_backend()
  dtype = "float32" if platform == "cpu" else "bfloat16"
  size = 2048 if platform == "cpu" else 8192
  peak, bandwidth, device = matmul_peak(dtype, size), copy_bandwidth(size**2), known_peak()
  print(
    f"{jax.devices()[0].device_kind}: {peak / 1e12:.1f} TFLOP/s in a {dtype} product of {size} x "
    f"{size}, "
    f"{bandwidth / 1e9:.0f} GB/s in a copy"
    + (
      f"; published {device.flops / 1e12:.0f} TFLOP/s, {device.bandwidth / 1e9:.0f} GB/s"
      if device
      else ""
    ),
    flush=True,
  )
  found = {
    "device": jax.devices()[0].device_kind,
    "matmul_flops": peak,
    "copy_bandwidth": bandwidth,
    "sizes": {},
  }
  for name in a.sizes:
    model = sizes.decoder_of(name, dtype=dtype, remat=a.remat)
    model = dataclasses.replace(
      model,
      num_layers=a.layers or model.num_layers,
      attention=attention.best_for(platform, dtype, model.head_dim, a.length),
    )
    part = found["sizes"][name] = {"update": measure_update(model, a)}
    u = part["update"]
    shares = f"{100 * u['flops_per_second'] / peak:.0f} % of the product's FLOP/s" + (
      f", {100 * u['flops_per_second'] / device.flops:.0f} % of the published" if device else ""
    )
    print(
      f"{name} ({costs.num_parameters(model) / 1e6:,.0f}M, attention {model.attention}): update "
      f"{u['seconds']:.2f} s, "
      f"{u['tokens_per_second']:,.0f} tokens/s, model FLOPs {shares}, padding "
      f"{100 * u['padding']:.1f} %",
      flush=True,
    )
    part["decode"] = d = measure_decode(model, a)
    least = d["bytes"] / bandwidth
    print(
      f"{name}: decode {d['tokens_per_second']:,.0f} tokens/s on {a.lanes} lanes, "
      f"{1e3 * d['seconds_per_token']:.2f} ms a token of "
      f"each, {100 * least / d['seconds_per_token']:.0f} % of the bandwidth bound",
      flush=True,
    )
    jax.clear_caches()
  if a.json:
    pathlib.Path(a.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
  main()
