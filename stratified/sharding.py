"""The device mesh, and the one table that says which mesh axis carries which logical axis.

The mesh has the axes `data` (replicas), `fsdp` (parameters and rows split alike) and `tensor`
(heads, MLP and vocabulary). All three are explicit: an array's sharding is part of its type, and
code says where it changes.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from stratified.config import setting, Settings

AXES = ("data", "fsdp", "tensor")

RULES = {
  "question": ("data", "fsdp"),
  "row": ("data", "fsdp"),
  "width": "fsdp",
  "vocabulary": "tensor",
  "vocabulary_part": ("tensor", "fsdp"),
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "head_dim": None,
  "layers": None,
  "position": None,
  None: None,
}


@dataclasses.dataclass(frozen=True)
class MeshSettings(Settings):
  """How many devices each axis of the mesh has."""

  SECTION = "mesh"
  data: int = setting(1, "replicas; -1 is what is left", low=-1, affects=["rounding"])
  fsdp: int = setting(
    -1, "devices that parameters and rows are split over", low=-1, affects=["rounding"]
  )
  tensor: int = setting(
    1, "devices that heads, MLP and vocabulary are split over", low=-1, affects=["rounding"]
  )


def make_mesh(
  data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
):
  """Makes a mesh of explicit axes `data`, `fsdp`, `tensor`; -1 in one takes the devices left."""
  devices = list(jax.devices() if devices is None else devices)
  sizes = [data, fsdp, tensor]
  if any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
    raise ValueError(
      f"mesh.data={data}, mesh.fsdp={fsdp} and mesh.tensor={tensor} must each be at least 1, but "
      "that one of them may be -1 (what is left)"
    )
  if -1 in sizes:
    known = math.prod(size for size in sizes if size != -1)
    sizes[sizes.index(-1)] = max(1, len(devices) // known)
  if math.prod(sizes) > len(devices):
    raise ValueError(
      f"mesh.data={sizes[0]} x mesh.fsdp={sizes[1]} x mesh.tensor={sizes[2]} needs "
      f"{math.prod(sizes)} devices, {len(devices)} are here; lower --config.mesh.*, or force CPU "
      "devices with XLA_FLAGS=--xla_force_host_platform_device_count=N"
    )
  return jax.make_mesh(
    tuple(sizes), AXES, axis_types=(AxisType.Explicit,) * 3, devices=devices[: math.prod(sizes)]
  )


def spec(*axes: str | None, without: str | None = None) -> P:
  """The PartitionSpec of an array with these logical axes; `without` leaves out a mesh axis.

  An empty mesh (no `jax.set_mesh`) gives an empty spec.
  """
  return P(*(_drop(RULES[axis], without) for axis in axes))


def _drop(rule, without):
  if without is None or rule is None:
    return rule
  if isinstance(rule, tuple):
    return tuple(axis for axis in rule if axis != without) or None
  return None if rule == without else rule


def meshed() -> bool:
  """Whether code runs under a mesh of these axes, and not inside a map over another mesh's."""
  return "fsdp" in jax.sharding.get_abstract_mesh().axis_names


def constrain(x, *axes: str | None, without: str | None = None):
  """Reshards `x` to its logical axes; the identity where no mesh is set."""
  if not meshed():
    return x
  return jax.sharding.reshard(x, spec(*axes, without=without))


def take(table, index, *axes: str | None):
  """table[index] of a table that each device holds whole; `axes` are the result's logical ones."""
  if not meshed():
    return table[index]
  return table.at[index].get(out_sharding=spec(*axes))


def replicate(x):
  """A small array whole on every device."""
  return x if not meshed() else jax.sharding.reshard(x, P(*[None] * x.ndim))


def over_rows(function, *arrays):
  """Maps a function of [T] arrays over all rows of [A, R, T]; each device takes its rows."""
  mapped = jax.vmap(jax.vmap(function))
  if not meshed():
    return mapped(*arrays)
  rows = spec(None, "row", None)
  # What a scan starts from is the same on every device, which the check would refuse.
  return jax.shard_map(mapped, in_specs=rows, out_specs=rows, check_vma=False)(*arrays)


def take_in_rows(x_rtd, index_rt):
  """Takes [R, T, D] of each row's own positions [R, T]; no row needs another's."""
  local = lambda x, index: jnp.take_along_axis(x, index[..., None], 1)
  if not meshed():
    return local(x_rtd, index_rt)
  rows, positions = spec("row", None, None), spec("row", None)
  return jax.shard_map(local, in_specs=(rows, positions), out_specs=rows)(
    constrain(x_rtd, "row", None, None), constrain(index_rt, "row", None)
  )


def gathered(weight, axes: Sequence[str | None]):
  """Gathers a weight along `fsdp` for the layer that uses it; backwards, scatters its gradient."""
  return constrain(weight, *axes, without="fsdp")


def put(value, place: NamedSharding) -> jax.Array:
  """Puts a value that every process holds whole on the mesh; each fills its own devices' parts."""
  if place.is_fully_addressable:
    return jax.device_put(value, place)
  if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(place, value.ndim):
    return value
  value = np.asarray(value)
  return jax.make_array_from_callback(value.shape, place, lambda index: value[index])


def replica(value, place: NamedSharding, dtype=None) -> jax.Array:
  """Casts an array of any mesh and copies it whole to each device of `place`, all of this process.

  Where the array is spread over processes, all of them must call this at the same point. One array
  at a time is then whole on every device, for as long as the call takes.
  """
  value = value if dtype is None else value.astype(dtype)
  if getattr(value, "is_fully_addressable", True):
    return jax.device_put(value, place)
  with jax.set_mesh(value.sharding.mesh):
    whole = jax.jit(lambda x: jax.sharding.reshard(x, P(*[None] * value.ndim)))(value)
  parts = {part.device: part.data for part in whole.addressable_shards}
  return jax.make_array_from_single_device_arrays(
    value.shape, place, [jax.block_until_ready(parts[device]) for device in place.mesh.devices.flat]
  )


def named(mesh, axes: Sequence[str | None]) -> NamedSharding:
  return NamedSharding(mesh, spec(*axes))


def check_divisible(mesh, sizes: dict[str, tuple[str, int]]) -> None:
  """Refuses sizes that the mesh can't split, before anything is compiled.

  `sizes` maps a readable name to (logical axis, size).
  """
  for name, (logical, size) in sizes.items():
    rule = RULES[logical]
    axes = (rule,) if isinstance(rule, str) else rule or ()
    shards = math.prod(mesh.shape[a] for a in axes)
    if size % shards:
      raise ValueError(
        f"{name}={size} can't be split over {shards} devices (mesh axes {rule}); "
        f"choose a multiple of {shards} or a smaller --config.mesh.*"
      )
