"""Measures the advantage kernels against two other ways to write them, in the same run.

    python experiments/benchmarks/bench_advantages.py [--estimators gn san blend] \\
        [--largest 20] [--json FILE]

For 2^10 to 2^20 trajectories in groups of 8 and of 64 it prints the time of the jitted kernel
(vmapped over questions), of SAN written with `jax.ops.segment_sum` alone, of NumPy (bincount over
all groups at once), and of the per-group dictionary loop that trainers commonly run on the host;
then the ratios, the growth with the number of trajectories, and how close a kernel comes to the
bandwidth of a copy of the same arrays.
"""

import argparse
import collections
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from stratified import advantages

EPS = 1e-6
NUM_STRATA = 6


def mean_and_std(values):
  mean = sum(values) / len(values)
  return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def dictionary_loop(name, reward, stratum):
  """Fills a dictionary of lists by question (gn) and stratum (san), then loops over rollouts."""
  if name == "blend":
    san, gn = dictionary_loop("san", reward, stratum), dictionary_loop("gn", reward, stratum)
    return [0.6 * a + 0.4 * b for a, b in zip(san, gn)]
  keys, rewards = [], []
  for question, (reward_k, stratum_k) in enumerate(zip(reward.tolist(), stratum.tolist())):
    keys += [(question, k) for k in stratum_k] if name == "san" else [question] * len(reward_k)
    rewards += reward_k
  scores = collections.defaultdict(list)
  for key, value in zip(keys, rewards):
    scores[key].append(value)
  moments = {key: mean_and_std(values) for key, values in scores.items()}
  return [(value - moments[key][0]) / (moments[key][1] + EPS) for key, value in zip(keys, rewards)]


def numpy_segments(name, reward, stratum):
  """Computes the same as segment sums over all groups at once, by bincount."""
  if name == "blend":
    return 0.6 * numpy_segments("san", reward, stratum) + 0.4 * numpy_segments(
      "gn", reward, stratum
    )
  questions, samples = reward.shape
  segment = np.repeat(np.arange(questions), samples)
  if name == "san":
    segment = segment * NUM_STRATA + stratum.ravel()
  count = np.maximum(np.bincount(segment), 1)
  centered = reward.ravel() - (np.bincount(segment, reward.ravel()) / count)[segment]
  std = np.sqrt(np.bincount(segment, centered * centered) / count)
  return centered / (std + EPS)[segment]


@jax.jit
def segment_sums(reward_qk, stratum_qk):
  """SAN by `jax.ops.segment_sum` alone: the plain formulation, without masks and exact zeros."""

  def of_group(reward_k, stratum_k):
    total = lambda x_k: jax.ops.segment_sum(x_k, stratum_k, NUM_STRATA)
    count_s = jnp.maximum(total(jnp.ones_like(reward_k)), 1)
    centered_k = reward_k - (total(reward_k) / count_s)[stratum_k]
    return centered_k / (jnp.sqrt(total(jnp.square(centered_k)) / count_s) + EPS)[stratum_k]

  return jax.vmap(of_group)(reward_qk, stratum_qk)


def best_of(function, *arguments, seconds=0.2):
  """Shortest of several runs in seconds: what the machine can do when nothing else runs."""
  jax.block_until_ready(function(*arguments))
  times, stop = [], time.perf_counter() + seconds
  while len(times) < 3 or time.perf_counter() < stop and len(times) < 200:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    times.append(time.perf_counter() - start)
  return min(times)


def measure(name, trajectories, samples):
  rng = np.random.default_rng(0)
  shape = (trajectories // samples, samples)
  reward = rng.integers(0, 2, shape).astype(np.float32)
  stratum = rng.integers(0, NUM_STRATA, shape).astype(np.int32)
  estimate = advantages.make(name, num_strata=NUM_STRATA)
  kernel = jax.jit(lambda r, s, valid: estimate(r, s, valid, 0))
  on_device = [jnp.asarray(x) for x in (reward, stratum, np.ones(shape, np.float32))]
  got = np.asarray(kernel(*on_device)).ravel()
  start = time.perf_counter()
  slow = np.array(dictionary_loop(name, reward, stratum))
  loop_s = time.perf_counter() - start
  for other in (slow, numpy_segments(name, reward, stratum)):
    np.testing.assert_allclose(got, other.ravel(), rtol=1e-4, atol=1e-4)
  kernel_s = best_of(kernel, *on_device)
  # A kernel reads rewards, strata and mask and writes advantages: two copies' worth of bytes.
  return dict(
    estimator=name,
    trajectories=trajectories,
    samples=samples,
    kernel_s=kernel_s,
    loop_s=loop_s,
    numpy_s=best_of(numpy_segments, name, reward, stratum),
    segment_sum_s=best_of(segment_sums, *on_device[:2]) if name == "san" else None,
    copy_share=2 * best_of(jax.jit(lambda r: r + 1), on_device[0]) / kernel_s,
  )


def report(name, trajectories, samples):
  row = measure(name, trajectories, samples)
  times = [
    row[f"{other}_s"] / row["kernel_s"] if row[f"{other}_s"] else None
    for other in ("loop", "numpy", "segment_sum")
  ]
  loop, numpy, segments = (f"{x:.3g}x" if x else "-" for x in times)
  print(
    f"{name:9} {samples:3}  {trajectories:12,}  {row['kernel_s'] * 1e3:9.3f}  {loop:>15}  "
    f"{numpy:>7}"
    f"  {segments:>11}  {row['copy_share']:6.1%}",
    flush=True,
  )
  return row


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  known = ["gn", "san", "blend"]
  parser.add_argument("--estimators", nargs="+", default=known, choices=known)
  parser.add_argument(
    "--largest", type=int, default=20, help="largest number of trajectories, a power of 2"
  )
  parser.add_argument("--json", help="write the measurements to this file")
  arguments = parser.parse_args()
  rows = []
  print(f"{jax.devices()[0].device_kind}, {len(jax.devices())} device(s), jax {jax.__version__}")
  print(
    "times are the kernel's advantage: the other's time over its own; copy: share of a copy's "
    "bandwidth"
  )
  print("estimator   K  trajectories  kernel ms  dictionary loop    NumPy  segment_sum    copy")
  for name in arguments.estimators:
    for samples in (8, 64):
      measured = [report(name, 2**power, samples) for power in range(10, arguments.largest + 1, 2)]
      rows += measured
      if len(measured) > 1:
        before, last = measured[-2:]
        times, sizes = (
          [row[key] for row in (last, before)] for key in ("kernel_s", "trajectories")
        )
        growth = math.log(times[0] / times[1], sizes[0] / sizes[1])
        print(
          f"{name}, K = {samples}: the kernel's time grows as trajectories to the power "
          f"{growth:.2f}"
        )
  if arguments.json:
    with open(arguments.json, "w", encoding="utf-8") as file:
      json.dump(rows, file, indent=1)


if __name__ == "__main__":
  main()
