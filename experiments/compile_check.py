"""Says before a machine is rented whether a run fits it, and the least time of an update there.

    python experiments/compile_check.py --config=configs/search_r1.py:base --topology=v5e:4x4
    python experiments/compile_check.py --config=configs/search_r1.py:base --topology=cpu:8 \\
        --config.lora.rank=64

Compiles the real update and the sampler's real prefill and decode for the chips of a topology (v5e,
v5p, v6e by their grid, or N forced CPU devices), without weights, data or any chip: where
policy.checkpoint is not here, the sizes of a known model are taken by its name. For a TPU the
compiler comes from the package libtpu, once:

    .venv/bin/python -m pip install --no-deps --target .cache/libtpu 'libtpu==0.0.42.*'

(the version that `pip install 'jax[tpu]'` names beside jax 0.10.2; not in the environment itself,
where it looks for a TPU at every start). Exit status 1 means that it does not fit.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time

from absl import flags

_LIBTPU = pathlib.Path(__file__).parents[1] / ".cache" / "libtpu"
_CPU = next(
  (
    int(part.rpartition(":")[2])
    for part in sys.argv
    if "cpu:" in part and part.rpartition(":")[2].isdigit()
  ),
  0,
)
if _CPU:  # before jax starts
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={_CPU}"
  )
os.environ["JAX_PLATFORMS"] = "cpu"
# no TPU is asked for here: its library need not look for one
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
sys.path.insert(0, str(_LIBTPU))

import jax
from ml_collections import config_flags

from stratified.config import read
from stratified.planning import compiled, costs, fitting
from stratified.policy import sizes
from stratified.policy.settings import PolicySettings, with_attention
from stratified.runs import build, command_line, stage_parts

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run.")
_TOPOLOGY = flags.DEFINE_string(
  "topology", "v5e:4x4", "KIND:GRID with KIND v5e, v5p or v6e, such as v5e:4x4; or cpu:N."
)
_TOKENS = flags.DEFINE_float(
  "tokens",
  1200,
  "Tokens of a rollout on average, prompt and observations included: sets the "
  "number of micro-batches of the time figures; memory does not depend on it.",
  lower_bound=1,
)
_MARGIN = flags.DEFINE_float(
  "margin", 0.1, "Share of a chip's memory that must stay free.", lower_bound=0, upper_bound=1
)
_LAYERS = flags.DEFINE_integer(
  "layers",
  None,
  "Only the update, with so many layers: how its compilation grows with depth.",
  lower_bound=1,
)
_JSON = flags.DEFINE_string("json", None, "Also write the figures there.")


def devices_of(topology: str):
  """(devices, platform, costs.Device or None) of `v5e:4x4` or `cpu:8`."""
  kind, _, grid = topology.partition(":")
  if kind == "cpu" and grid.isdigit() and int(grid) > 0:
    return jax.devices()[: int(grid)], "cpu", None
  if kind not in ("v5e", "v5p", "v6e") or not grid:
    raise ValueError(
      f"--topology={topology} is unknown; write v5e:4x4, v6e:2x4, v5p:2x2x2 or another grid of "
      "these, or cpu:8"
    )
  from jax.experimental import topologies

  try:
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
  except Exception as error:
    why = str(error).splitlines()[0]
    raise ValueError(
      f"--topology={topology} can't be described ({why}); is it a grid that exists, and is the "
      "compiler here? "
      "To get it: .venv/bin/python -m pip install --no-deps --target .cache/libtpu "
      "'libtpu==0.0.42.*'"
    ) from error
  return found.devices, "tpu", costs.DEVICES[kind]


def decoder_of(config, platform: str):
  p = config.policy
  if p.checkpoint and not (pathlib.Path(p.checkpoint) / "config.json").exists():
    model = sizes.decoder_of(p.checkpoint, dtype=p.dtype, remat=p.remat, unroll=p.unroll)
    settings, length = read(PolicySettings, config), config.packing.row_length
    return with_attention(settings, model, platform=platform, row_length=length)
  return build.model_config(config, platform=platform)


def main(_) -> None:
  config, start = _CONFIG.value, time.perf_counter()
  try:
    devices, platform, device = devices_of(_TOPOLOGY.value)
    build.check(config)
    model = decoder_of(config, platform)
    if _LAYERS.value:
      model = dataclasses.replace(model, num_layers=_LAYERS.value)
    run = build.assemble(config, build.mesh_of(config, devices), model)
    plans = [compiled.Plan(run, device, _TOKENS.value, parts) for parts in kinds(run)]
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  if _LAYERS.value:
    for plan in plans:
      compiled.compile_update(plan)
    print(
      f"{_TOPOLOGY.value}: the update of {_LAYERS.value} layers compiled in "
      f"{time.perf_counter() - start:.1f} s"
    )
    return
  found = []
  for plan in plans:
    found.append(compiled.figures(plan))
    print(fitting.text(_TOPOLOGY.value, plan, found[-1], _MARGIN.value) + "\n")
  print(f"compiled in {time.perf_counter() - start:.0f} s with jax {jax.__version__}")
  if _JSON.value:
    first, *others = [{"topology": _TOPOLOGY.value} | figures for figures in found]
    # A run of one kind of stage is one object; what others there are stand in it under their names.
    first |= {"stages": {each["stage"]: each for each in others}} if others else {}
    pathlib.Path(_JSON.value).write_text(json.dumps(first, indent=2) + "\n")
  if device and not all(
    fitting.fits(plan, figures, _MARGIN.value) for plan, figures in zip(plans, found)
  ):
    sys.exit(1)


def kinds(run: build.Run) -> list[stage_parts.StageParts]:
  """The first of each kind of stage, those of the first cycle; the warm start is in none's way."""
  found = {}
  for parts in run.stages:
    if not parts.supervised:
      found.setdefault(parts.stage.source, parts)
  return list(found.values())


if __name__ == "__main__":
  command_line.run(main, config="configs/search_r1.py:base")
