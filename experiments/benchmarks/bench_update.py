"""Measures the update against PyTorch: same model, loss, gradients, clipping, AdamW and cores.

    python experiments/benchmarks/bench_update.py [--model=tiny] [--repeats=5] [--workdir=RUN] \\
        [--compile] [--json=FILE]
    python experiments/benchmarks/bench_update.py --model=.cache/models/smollm2-135m-instruct \\
        --rows=1 --length=512 --rollouts=8

Three comparisons, in tokens a second that are no padding:
  full     rows that are full on both sides, so nothing is lost to padding;
  real     the lengths of search rollouts, the encyclopedia's demonstrations or those of --workdir:
           PyTorch pads each mini-batch to its longest rollout, here they are packed;
  sorted   the same rollouts where PyTorch sorts them by length first, which few trainers do.
PyTorch gets transformers' model with its fused attention and no attention mask (causal attention
needs none where padding is on the right), the faster of its AdamW implementations, and of several
mini-batch sizes the fastest, gradients accumulating over them. Both sides must report the same loss
at the first and at the second step.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import time

import jax
import numpy as np

from experiments.benchmarks import paired_timing
from stratified import files
from stratified.algorithms.supervised import Supervised
from stratified.learner import batching, update
from stratified.learner import optimizer as optimizers
from stratified.learner import state as states
from stratified.learner.packing import Packing
from stratified.runs import build, surroundings
from stratified.types import Question, Segment, Trajectory

LEARNING_RATE = 1e-4
# rollouts that PyTorch runs at once, from which it gets the fastest
MINI_BATCHES = (4, 8, 16, 32, 64)


def full_rows(count, length, vocabulary):
  """(token ids, policy mask) of rollouts that fill a row each; their first token is the prompt."""
  rng = np.random.default_rng(0)
  return [(rng.integers(0, vocabulary, length), np.arange(length) > 0) for _ in range(count)]


def demonstrations(count):
  """(token ids, policy mask) of the encyclopedia's search rollouts, in the order of questions."""
  config = paired_timing.config_of("tiny")
  config.warm_start.demonstrations_per_step, config.warm_start.context_weight = count, 0.0
  config.warm_start.num_steps = 1
  run = build.build(config)
  batch = surroundings.unrewarded(run.task.demonstrations(0), run.stages[0])
  used = batch.segment_art > 0
  of = lambda i: used & (batch.trajectory_art == i)
  return [(batch.token_art[of(i)], batch.policy_art[of(i)] > 0) for i in range(count)]


def rollouts_of(workdir, count, vocabulary):
  """(token ids, policy mask) as long as a run's newest rollouts; the tokens are random."""
  rng, found = np.random.default_rng(0), []
  for path in sorted((pathlib.Path(workdir) / "trajectories").glob("step_*.jsonl"), reverse=True):
    for record in files.read_rows(path)[0]:
      mask = np.concatenate(
        [np.full(part["tokens"], part["origin"] == "policy") for part in record["segments"]]
      )
      found.append((rng.integers(0, vocabulary, len(mask)), mask))
    if len(found) >= count:
      return found[:count]
  raise ValueError(
    f"--workdir={workdir} holds {len(found)} rollouts in trajectories/, fewer than "
    f"--rollouts={count}"
  )


def trajectory(token, mask) -> Trajectory:
  segments = []
  for sampled, part in itertools.groupby(
    zip(token.tolist(), mask.tolist()), key=lambda pair: pair[1]
  ):
    ids = tuple(pair[0] for pair in part)
    segments.append(
      Segment(ids, "policy", (0.0,) * len(ids)) if sampled else Segment(ids, "prompt")
    )
  return Trajectory(Question("", "", ()), 0, tuple(segments))


class Ours:
  """One update of packed rows a call."""

  def __init__(self, config, model, params, rollouts, a):
    mesh, optimizer = build.mesh_of(config), optimizers.make(learning_rate=LEARNING_RATE)
    packing = Packing.for_rollouts(len(rollouts), length=a.length, rows=a.rows)
    zeros = np.zeros((len(rollouts), 1), np.int32)
    batch = batching.collate(
      [[trajectory(*r)] for r in rollouts],
      packing=packing,
      algorithm=Supervised(),
      rewards=zeros,
      strata=zeros,
      num_strata=1,
    )
    self.padding, self._batch = batching.padding_share(batch), batching.place(mesh, batch)
    self._state = states.init_state(
      mesh, model, jax.tree.map(jax.numpy.copy, params), optimizer, with_reference=False
    )
    self._step = update.make_update(mesh, model, optimizer, Supervised(), chunk=a.chunk or None)

  def __call__(self) -> float:
    self._state, stats = self._step(self._state, self._batch)
    return float(stats["warm_start/loss"])


class Theirs:
  """One update of padded mini-batches of `size` rollouts a call; torch's AdamW gets `options`."""

  def __init__(self, reference, weights, rollouts, size, options, compiled=False):
    import torch

    with torch.no_grad():
      for name, value in reference.state_dict().items():
        value.copy_(weights[name])
    self._model = torch.compile(reference, dynamic=True) if compiled else reference
    self._parameters = list(reference.parameters())
    self._optimizer = torch.optim.AdamW(
      self._parameters, lr=LEARNING_RATE, weight_decay=0.0, **options
    )
    self._batches = [_padded(rollouts[at : at + size]) for at in range(0, len(rollouts), size)]
    self._count = sum(int(mask.sum()) for _, mask in rollouts)
    slots = sum(ids.numel() for ids, _ in self._batches)
    self.padding = 1 - sum(len(token) for token, _ in rollouts) / slots

  def __call__(self) -> float:
    import torch

    self._optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for ids, target in self._batches:
      logits = self._model(ids, use_cache=False).logits[:, :-1]
      loss = (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        / self._count
      )
      loss.backward()
      total += loss.item()
    torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
    self._optimizer.step()
    return total


def _padded(rollouts):
  """Pads on the right: (token ids [B, T], targets [B, T - 1], -100 where the loss doesn't look)."""
  import torch

  longest = max(len(token) for token, _ in rollouts)
  ids, target = (np.full((len(rollouts), longest), fill, np.int64) for fill in (0, -100))
  for row, (token, mask) in enumerate(rollouts):
    ids[row, : len(token)] = token
    target[row, : len(token)] = np.where(mask, token, -100)
  return torch.from_numpy(ids), torch.from_numpy(target[:, 1:].copy())


def fastest(reference, weights, rollouts, a):
  """Finds the PyTorch side whose mini-batch size and AdamW implementation take least time."""

  def seconds(size, options):
    run = Theirs(reference, weights, rollouts, size, options)
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

  sizes = [size for size in MINI_BATCHES if size <= len(rollouts)] or [len(rollouts)]
  sizes = sizes if a.mini_batch is None else [a.mini_batch]
  size = min(sizes, key=lambda size: seconds(size, {"foreach": True}))
  options = min(({"foreach": True}, {"fused": True}), key=lambda options: seconds(size, options))
  return size, options


def compare(case, config, model, params, reference, rollouts, a) -> dict:
  weights = {name: value.clone() for name, value in reference.state_dict().items()}
  theirs_in = sorted(rollouts, key=lambda r: len(r[0])) if case == "sorted" else rollouts
  size, options = fastest(reference, weights, theirs_in, a)
  sides = {
    "stratified": Ours(config, model, params, rollouts, a),
    "PyTorch": Theirs(reference, weights, theirs_in, size, options, a.compile),
  }
  for step, tolerance in enumerate((1e-4, 1e-3), 1):
    loss, other = (side() for side in sides.values())
    if not abs(loss - other) <= tolerance * max(1.0, abs(other)):
      raise RuntimeError(
        f"{case}: losses {loss} and {other} of step {step} differ by more than {tolerance}: "
        "not the same update"
      )
  times = paired_timing.in_turns(sides, a.repeats)
  tokens = sum(len(token) for token, _ in rollouts)
  measured = {
    name: dict(
      tokens_per_second=tokens / times[name].median,
      padding=side.padding,
      cores_busy=times[name].cores,
      wall_s=times[name].wall,
      processor_s=times[name].processor,
    )
    for name, side in sides.items()
  }
  for name, value in weights.items():
    reference.state_dict()[name].copy_(value)
  return dict(
    case=case,
    tokens=tokens,
    rollouts=len(rollouts),
    loss=loss,
    mini_batch=size,
    adamw=next(iter(options)),
    sides=measured,
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", default="tiny", help="tiny, or a Hugging Face directory")
  parser.add_argument(
    "--cases", nargs="+", default=["full", "real", "sorted"], choices=["full", "real", "sorted"]
  )
  parser.add_argument(
    "--rollouts", type=int, default=128, help="rollouts of an update on real lengths"
  )
  parser.add_argument("--workdir", help="take the real lengths from this run's trajectories")
  parser.add_argument(
    "--rows", type=int, help="packed rows of a micro-batch; the preset's if not given"
  )
  parser.add_argument("--length", type=int, help="tokens of a row; the preset's if not given")
  parser.add_argument(
    "--full-rows", type=int, help="full rows of an update; 6 micro-batches of them if not given"
  )
  parser.add_argument(
    "--chunk", type=int, default=0, help="positions of a row whose logits exist at once; 0 is all"
  )
  parser.add_argument(
    "--remat",
    default="none",
    help="what the backward pass computes again; PyTorch keeps everything",
  )
  parser.add_argument(
    "--mini-batch", type=int, help="PyTorch's rollouts at once; the fastest of several if not given"
  )
  parser.add_argument(
    "--compile", action="store_true", help="PyTorch's model through torch.compile"
  )
  parser.add_argument("--cores", type=int, default=2)
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--json", help="write the measurements to this file")
  a = parser.parse_args()
  paired_timing.use_cores(a.cores)
  config = paired_timing.config_of(a.model)
  a.rows, a.length = a.rows or config.packing.rows, a.length or config.packing.row_length
  model, params, reference = paired_timing.load(config)
  model = dataclasses.replace(model, remat=a.remat)
  real = (
    rollouts_of(a.workdir, a.rollouts, model.vocab_size)
    if a.workdir
    else demonstrations(a.rollouts)
  )
  full = full_rows(a.full_rows or 6 * a.rows, a.length, model.vocab_size)
  print(
    f"{a.model}: {paired_timing.count(params) / 1e6:.2f}M parameters, {a.cores} cores; real "
    "lengths: mean "
    f"{np.mean([len(t) for t, _ in real]):.0f}, longest {max(len(t) for t, _ in real)}"
  )
  print(
    "case     tokens     stratified        PyTorch    ratio   padding        cores busy    "
    "PyTorch's mini-batch, AdamW"
  )
  rows = []
  for case in a.cases:
    rows.append(
      row := compare(case, config, model, params, reference, full if case == "full" else real, a)
    )
    mine, other = row["sides"].values()
    ratio = mine["tokens_per_second"] / other["tokens_per_second"]
    print(
      f"{case:7} {row['tokens']:7,} {mine['tokens_per_second']:10,.0f} tok/s "
      f"{other['tokens_per_second']:8,.0f} tok/s {ratio:6.2f}x  {mine['padding']:5.1%} "
      f"{other['padding']:5.1%}"
      f"    {mine['cores_busy']:.2f}  {other['cores_busy']:.2f}    {row['mini_batch']}, "
      f"{row['adamw']}",
      flush=True,
    )
  if a.json:
    with open(a.json, "w", encoding="utf-8") as file:
      json.dump(rows, file, indent=1)


if __name__ == "__main__":
  main()
