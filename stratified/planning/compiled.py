"""Compiles a run's programs ahead of time: memory on a device, bytes over its links, least time."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from stratified.learner import batching
from stratified.learner import optimizer as optimizers
from stratified.learner import state as states
from stratified.learner.packing import Packing
from stratified.planning import costs, hlo
from stratified.policy import decoder
from stratified.runs import build, samplers, stage_parts
from stratified.sampling import in_process, lane_programs
from stratified.types import Batch

FULL = 0.95  # of a packed row's positions hold tokens, for the number of micro-batches


@dataclasses.dataclass(frozen=True)
class Plan:
  """A stage of a run on given devices.

  device: what a chip can do; None on CPU. tokens: those of an average rollout. parts: the stage;
  None is the run's last.
  """

  run: build.Run
  device: costs.Device | None
  tokens: float
  parts: stage_parts.StageParts | None = None

  def __post_init__(self):
    if self.tokens > self.config.rollout.max_tokens:
      raise ValueError(
        f"--tokens={self.tokens:g} is more than "
        f"rollout.max_tokens={self.config.rollout.max_tokens}, the most that a rollout can have"
      )

    if self.parts is None:
      object.__setattr__(self, "parts", self.run.last)

  @property
  def config(self):
    return self.run.config

  @property
  def model(self) -> decoder.DecoderConfig:
    return self.run.model

  @property
  def mesh(self):
    return self.run.mesh

  @property
  def packing(self) -> Packing:
    return self.parts.packing

  @property
  def groups(self) -> tuple[int, int]:
    """Questions of a step and rollouts of each."""
    trained = self.parts.stage.trained
    if trained:
      return trained.rollouts, 1
    return self.config.data.questions_per_step, self.config.rollout.samples_per_question

  @property
  def rollouts(self) -> int:
    return math.prod(self.groups)

  @property
  def micro(self) -> int:
    """Micro-batches of an average step; a teacher reads a reference as long as the rollout too."""
    p, tokens = self.packing, self.rollouts * self.tokens
    fullest = max(tokens / p.length, 2 * tokens / p.teacher_length if p.teacher_length else 0)
    return math.ceil(fullest / (FULL * p.rows))


def state_of(plan: Plan):
  """The training state as it lies between updates: shapes, dtypes, shardings."""
  parts = plan.parts
  state = states.abstract_state(
    plan.mesh,
    plan.model,
    parts.optimizer,
    with_reference=parts.with_reference,
    adapter=parts.adapter,
    critic=parts.stage.algorithm.critic,
    host=stage_parts.host_parts(plan.config),
  )
  if parts.adapter:  # a checkpoint holds only a fingerprint of the frozen weights
    frozen = states.abstract_state(
      plan.mesh, plan.model, optimizers.make(learning_rate=1.0, name="sgd"), with_reference=False
    ).params
    state = state._replace(
      reference={
        name: jax.ShapeDtypeStruct(
          x.shape, decoder.seen_dtype(plan.model, name), sharding=x.sharding
        )
        for name, x in frozen.items()
      }
    )
  return state


def batch_of(plan: Plan) -> Batch:
  return batching.abstract(plan.mesh, plan.packing, plan.parts.stage.algorithm, *plan.groups)


def local_bytes(tree) -> int:
  """Bytes of a tree of abstract arrays on one device, without what lies in the host's memory."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if x.sharding.memory_kind != "pinned_host"
  )


def compile_update(plan: Plan):
  return plan.parts.learn.lower(state_of(plan), batch_of(plan)).compile()


def peak_of(program) -> int:
  """Most bytes of a program on a device: arguments, results and temporaries at once, and code."""
  m = program.memory_analysis()
  return (
    m.argument_size_in_bytes
    + m.output_size_in_bytes
    - m.alias_size_in_bytes
    + m.temp_size_in_bytes
    + m.generated_code_size_in_bytes
  )


def figures(plan: Plan) -> dict[str, Any]:
  """Everything that `text` prints, in bytes, seconds and FLOPs of one device."""
  state, program = state_of(plan), compile_update(plan)
  memory, text_ = program.memory_analysis(), program.as_text()
  resident = local_bytes(state)
  result = {
    "devices": len(plan.mesh.devices.flat),
    "mesh": dict(plan.mesh.shape),
    "parameters": costs.num_parameters(plan.model),
    "memory": {
      "params": local_bytes(state.params),
      "reference": local_bytes(state.reference),
      "optimizer": local_bytes(state.opt_state),
      "critic": local_bytes(state.critic),
      "batch": local_bytes(batch_of(plan)),
      "activations": memory.temp_size_in_bytes,
      "code": memory.generated_code_size_in_bytes,
      "update": peak_of(program),
    },
    "time": time_of(plan),
    "collectives": collectives_of(plan, text_),
    "unexpected": unexpected(
      plan.model, plan.mesh.shape, plan.packing, plan.config.policy.logit_chunk, text_
    ),
  }
  result["sampler"] = sampler_figures(plan, resident)
  result["stage"] = plan.parts.stage.name
  result["memory"]["update"] += beside_update(plan, result["sampler"], resident)
  return result


def beside_update(plan: Plan, sampler: dict[str, int], resident: int) -> int:
  """What a device holds of the sampler during an update: all of its work where both run at once."""
  if plan.config.rollout.max_staleness:
    return max(sampler["decode"], sampler["prefill_peak"]) - resident
  return 0 if plan.config.sampler.release else sampler["params"] + sampler["cache"]


def sampler_arrays(plan: Plan, mesh):
  """What a sampler of one device holds while it works: (weights, cache).

  Training's and the greedy one of evaluations hold the same, never at once.
  """
  settings, here = samplers.sampler_config(plan.config), lane_programs.replicated(mesh)
  struct = lambda tree: jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree
  )
  whole = {
    name: jax.ShapeDtypeStruct(w.shape, jnp.float32)
    for name, w in decoder.weights(plan.model).items()
  }
  params = struct(jax.eval_shape(lambda p: decoder.unstack(plan.model, p), whole))
  cache = struct(
    jax.eval_shape(lambda: decoder.empty_cache(plan.model, settings.lanes, settings.length))
  )
  return params, cache


def load_bytes(plan: Plan) -> int:
  """What giving the sampler its weights takes besides: the largest one whole, merged adapters."""
  table = decoder.weights(plan.model)
  seen = lambda name: jnp.dtype(decoder.seen_dtype(plan.model, name)).itemsize
  largest = max(math.prod(w.shape) * seen(name) for name, w in table.items())
  return largest + (local_bytes(state_of(plan).reference) if plan.parts.adapter else 0)


def sampler_figures(plan: Plan, resident: int) -> dict[str, Any]:
  """The sampler's programs on one device, beside `resident` bytes of the training state."""
  settings = samplers.sampler_config(plan.config)
  mesh = lane_programs.make_mesh(plan.mesh.devices.flat[:1])
  here = lane_programs.replicated(mesh)
  params, cache = sampler_arrays(plan, mesh)
  of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=here)
  lanes = settings.lanes
  s = settings
  decode = lane_programs.decode.lower(
    mesh,
    plan.model,
    s.block,
    s.temperature,
    s.top_p,
    s.seed,
    params,
    cache,
    of(lanes),
    of(lanes),
    of(lanes, 3),
  ).compile()
  width = min(in_process.bucket(settings.length), in_process.CHUNK)
  rows = settings.rows_for(width)
  prefill = lane_programs.prefill.lower(
    mesh, plan.model, params, cache, of(rows), of(rows, width), of(rows, width)
  ).compile()
  held = {"params": local_bytes(params), "cache": local_bytes(cache)}
  return held | {
    "lanes": lanes,
    "prefill": [rows, width],
    "decode": resident + peak_of(decode),
    "prefill_peak": resident + peak_of(prefill),
    "load": resident + sum(held.values()) + load_bytes(plan),
  }


def time_of(plan: Plan) -> dict[str, Any]:
  """FLOPs, bytes and seconds at the least, of one device and one update of average rollouts."""
  config, model, shards = plan.config, plan.model, len(plan.mesh.devices.flat)
  slots = plan.micro * plan.packing.rows * plan.packing.length / shards
  # A kernel that skips what lies above the diagonal computes half a row for each token; the others
  # all of it.
  seen = plan.packing.length / (2 if model.attention in ("splash", "cudnn") else 1)
  kl = plan.parts.with_reference and not plan.packing.teacher_length
  flops = costs.update_flops(
    model, slots, seen, reference=kl, chunked=bool(config.policy.logit_chunk)
  )
  useful = costs.model_flops(model, plan.rollouts * plan.tokens / shards, plan.tokens / 2)
  moved = costs.update_bytes(model, slots, plan.micro, shards, reference=kl)
  critic = plan.parts.stage.algorithm.critic
  if critic and critic.body == "own":  # its layers forward before the step, and in the update
    again = {"none": 0, "dots": 0, "full": 1}[model.remat]
    flops += (4 + again) * costs.forward_flops(model, slots, seen, logits=False)
    useful += 3 * costs.forward_flops(
      model, plan.rollouts * plan.tokens / shards, plan.tokens / 2, logits=False
    )
    moved += costs.update_bytes(model, slots, plan.micro, shards, reference=False)
  if plan.packing.teacher_length:  # its layers over its own rows, its logits at the policy's tokens
    longer = plan.packing.teacher_length / plan.packing.length
    layers = costs.forward_flops(model, slots * longer, seen * longer, logits=False)
    head = 2 * slots * model.vocab_size * model.width * (1 + bool(config.policy.logit_chunk))
    flops, moved = (
      flops + layers + head,
      moved + costs.forward_bytes(model, slots * longer, plan.micro),
    )
  return {
    "micro_batches": plan.micro,
    "flops": flops,
    "model_flops": useful,
    "bytes": moved,
    "decode_bytes": costs.decode_bytes(model, config.sampler.lanes, plan.tokens),
  }


def collectives_of(plan: Plan, text_: str) -> list[dict[str, Any]]:
  """Lists an update's collectives by kind and array, those that send most first."""
  found = {}
  for each in hlo.collectives(text_, dynamic=plan.micro, num_devices=len(plan.mesh.devices.flat)):
    entry = found.setdefault(
      (each.kind, str(each.array), each.group),
      {"kind": each.kind, "array": str(each.array), "group": each.group, "count": 0.0, "sent": 0.0},
    )
    entry["count"] += each.count
    entry["sent"] += each.wire_bytes
  return sorted(found.values(), key=lambda entry: -entry["sent"])


def unexpected(
  model: decoder.DecoderConfig, mesh_shape, packing: Packing, chunk: int, text: str
) -> list[str]:
  """Finds what must not be in an update: logits of all tokens, a whole stacked weight or state.

  mesh_shape: sizes by axis. chunk: positions whose logits may exist at once, 0 for all. text: the
  program's.
  """
  shards, tensor = mesh_shape["data"] * mesh_shape["fsdp"], mesh_shape["tensor"]
  parts = {model.vocab_size // n for n in (1, tensor, tensor * mesh_shape["fsdp"])}
  of_logits = lambda array: parts & set(array.shape) and model.width not in array.shape
  most = packing.rows // shards * packing.length * model.vocab_size // tensor
  faults = [
    f"an array of the logits of all local tokens, {array}"
    for array in sorted(hlo.arrays(text), key=str)
    if 0 < chunk < packing.length and of_logits(array) and array.size >= most
  ]
  stacked = {math.prod(w.shape) for w in decoder.weights(model).values() if w.kind == "matrix"}
  for each in hlo.collectives(text, num_devices=shards * tensor):
    whole = each.array.size in stacked and model.num_layers > 1
    if each.kind == "all-gather" and (whole or of_logits(each.array)):
      faults.append(f"an all-gather of {each.array} ({each.where})")
  return faults


def most_of(found: dict[str, Any]) -> int:
  """The highest of the update's and the sampler's peaks."""
  return max(
    found["memory"]["update"],
    *(found["sampler"][name] for name in ("decode", "prefill_peak", "load")),
  )
