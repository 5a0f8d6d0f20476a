"""Compiles a run's programs ahead of time: memory on a device, bytes over its links, least time."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from stratified.learner import batching
from stratified.learner import optimizer as optimizers
from stratified.learner import state as states
from stratified.planning import costs, hlo
from stratified.policy import decoder
from stratified.runs import build, samplers
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
  parts: build.StageParts | None = None

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
  def packing(self) -> batching.Packing:
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
    host=build.host_parts(plan.config),
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
  model: decoder.DecoderConfig, mesh_shape, packing: batching.Packing, chunk: int, text: str
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


def fits(plan: Plan, found: dict[str, Any], margin: float) -> bool:
  return most_of(found) <= (1 - margin) * plan.device.capacity


def most_of(found: dict[str, Any]) -> int:
  """The highest of the update's and the sampler's peaks."""
  return max(
    found["memory"]["update"],
    *(found["sampler"][name] for name in ("decode", "prefill_peak", "load")),
  )


# Settings that take less of a device where the update or the sampler is too large, those that cost
# least time first.
WAYS = {
  "update": (
    (
      "sampler.release",
      True,
      lambda c: not c.sampler.release and not c.rollout.max_staleness,  # or it samples meanwhile
    ),
    ("policy.remat", "full", lambda c: c.policy.remat != "full"),
    ("policy.logit_chunk", 256, lambda c: c.policy.logit_chunk == 0 or c.policy.logit_chunk > 256),
    ("memory.reference", "host", lambda c: c.memory.reference != "host" and not c.lora.rank),
    ("memory.optimizer", "host", lambda c: c.memory.optimizer != "host"),
    ("lora.rank", 64, lambda c: not c.lora.rank and c.optimizer.name != "muon"),
  ),
  "sampler": (
    ("sampler.prefill_tokens", 1024, lambda c: c.sampler.prefill_tokens > 1024),
    ("sampler.lanes", 16, lambda c: c.sampler.lanes > 16),
    ("sampler.lanes", 8, lambda c: c.sampler.lanes > 8),
    ("memory.reference", "host", lambda c: c.memory.reference != "host" and not c.lora.rank),
    ("memory.optimizer", "host", lambda c: c.memory.optimizer != "host"),
    ("sampler.lanes", 4, lambda c: c.sampler.lanes > 4),
  ),
}


def way_to_fit(plan: Plan, found: dict[str, Any], margin: float) -> tuple[str, int] | None:
  """Adds settings one to another until the run fits when compiled: (settings, peak), or None."""
  config, chosen = plan.config.copy_and_resolve_references(), {}
  while not fits(plan, found, margin):
    part = (
      "update" if found["memory"]["update"] > (1 - margin) * plan.device.capacity else "sampler"
    )
    way = next(((key, value) for key, value, helps in WAYS[part] if helps(config)), None)
    if way is None:
      return None
    group, name = way[0].split(".")
    config[group][name] = chosen[way[0]] = way[1]
    if way[0] == "lora.rank":  # the reference is then what every pass computes with
      config.memory.reference = "device"
      chosen.pop("memory.reference", None)
    model = dataclasses.replace(plan.model, remat=config.policy.remat)
    run = build.assemble(config, plan.mesh, model)
    parts = run.stages[plan.run.stages.index(plan.parts)]
    found = figures(dataclasses.replace(plan, run=run, parts=parts))
  return " ".join(f"--config.{key}={value}" for key, value in chosen.items()), most_of(found)


def text(topology: str, plan: Plan, found: dict[str, Any], margin: float) -> str:
  gb = lambda n: f"{n / 1e9:.2f} GB"
  m, s, t, device = found["memory"], found["sampler"], found["time"], plan.device
  lines = [
    f"{topology}, {found['stage']}, mesh {'x'.join(str(n) for n in found['mesh'].values())} "
    f"(data, fsdp, tensor): {found['parameters'] / 1e9:.3f} G parameters, "
    f"{plan.packing.rows} rows of "
    f"{plan.packing.length} tokens a micro-batch, "
    + (f"a teacher's of {plan.packing.teacher_length}, " if plan.packing.teacher_length else "")
    + f"attention {plan.model.attention}, remat {plan.model.remat}",
    "per device in the update: "
    + ", ".join(
      f"{name} {gb(m[name])}"
      for name in ("params", "reference", "optimizer", "critic", "batch", "activations", "code")
      if name != "critic" or m[name]
    )
    + f"; peak {gb(m['update'])}",
    f"per device in rollouts (training state beside it): weights {gb(s['params'])}, cache of "
    f"{s['lanes']} lanes {gb(s['cache'])}; "
    f"peak {gb(s['decode'])} decoding, {gb(s['prefill_peak'])} in a prefill of {s['prefill'][0]} x "
    f"{s['prefill'][1]}, {gb(s['load'])} when weights are loaded",
    f"an update of {plan.rollouts} rollouts of {plan.tokens:.0f} tokens: {t['micro_batches']} "
    "micro-batches, "
    f"{t['flops']:.3g} FLOPs a device ({t['model_flops']:.3g} of them the model's own), "
    f"{gb(t['bytes'])} to and from memory, "
    f"{gb(sum(c['sent'] for c in found['collectives']))} over links",
    "collectives of an update:",
  ]
  lines += [
    f"  {c['kind']:18} {c['array']:28} over {c['group']:3} x {c['count']:8.0f}  {gb(c['sent'])}"
    for c in found["collectives"][:12]
  ]
  lines += [f"  and {len(found['collectives']) - 12} kinds that send less"] * (
    len(found["collectives"]) > 12
  )
  lines += [f"UNEXPECTED: {fault}" for fault in found["unexpected"]]
  if device:
    lines += _against(device, plan, found, margin)
  return "\n".join(lines)


def _against(device: costs.Device, plan: Plan, found: dict[str, Any], margin: float) -> list[str]:
  t, most = found["time"], most_of(found)
  sent = sum(c["sent"] for c in found["collectives"])
  seconds, bound = costs.roofline(device, flops=t["flops"], moved=t["bytes"], sent=sent)
  utilisation = t["model_flops"] / device.flops / seconds
  decode, decode_bound = costs.roofline(
    device,
    flops=costs.forward_flops(plan.model, plan.config.sampler.lanes, plan.tokens),
    moved=t["decode_bytes"],
  )
  lines = [
    f"{device.name}: an update takes {seconds:.1f} s at the least, bound by {bound}; no more than "
    f"{100 * utilisation:.0f} % "
    f"of its peak can be the model's own FLOPs",
    f"a token of every lane takes {1e3 * decode:.2f} ms at the least, bound by {decode_bound}: at "
    "most "
    f"{plan.config.sampler.lanes / decode:,.0f} tokens a second a device",
  ]
  verdict = (
    f"{most / 1e9:.2f} of {device.capacity / 1e9:.0f} GB, "
    f"{100 * (1 - most / device.capacity):.0f} % free"
  )
  if fits(plan, found, margin):
    return lines + [f"FITS: {verdict}"]
  way = way_to_fit(plan, found, margin)
  advice = (
    f"with {way[0]} it does: {way[1] / 1e9:.2f} GB"
    if way
    else "no setting tried makes it fit; take more chips, or chips with more memory"
  )
  return lines + [f"DOES NOT FIT with {100 * margin:.0f} % to spare: {verdict}; {advice}"]
