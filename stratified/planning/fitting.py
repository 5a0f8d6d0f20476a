"""Says whether a run fits a device, which settings would make it fit, and writes the report.

`figures` of compiled.py are what it judges.
"""

import dataclasses
from typing import Any

from stratified.planning import costs
from stratified.planning.compiled import figures, most_of, Plan
from stratified.runs import build


def fits(plan: Plan, found: dict[str, Any], margin: float) -> bool:
  return most_of(found) <= (1 - margin) * plan.device.capacity


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
