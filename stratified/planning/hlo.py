"""Reads what a compiler made of a step: collectives, how often each runs, and arrays.

Input is the text of optimised HLO (`compiled.as_text()`) for CPU, GPU or TPU. Loops are followed:
an instruction in the body of a scan over 36 layers counts 36 times. A loop whose length is no
constant (the micro-batches) is given one.
"""

from collections.abc import Iterator
import dataclasses
import math
import re

BYTES = {
  "pred": 1,
  "s4": 0.5,
  "u4": 0.5,
  "s8": 1,
  "u8": 1,
  "f8e4m3fn": 1,
  "f8e5m2": 1,
  "bf16": 2,
  "f16": 2,
  "s16": 2,
  "u16": 2,
  "f32": 4,
  "s32": 4,
  "u32": 4,
  "f64": 8,
  "s64": 8,
  "u64": 8,
  "c64": 8,
  "c128": 16,
}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_OPERATION = re.compile(r" = (.*?)\s([a-z][\w\-]*)\(")
_CALLED = re.compile(
  r"(?:calls|to_apply|body|called_computations=\{|branch_computations=\{)[=]?%?([\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of the program."""

  dtype: str
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> float:
    return self.size * BYTES[self.dtype]

  def __str__(self):
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective: what it yields on a device, over how many devices, how often it runs."""

  kind: str
  array: Array
  group: int
  count: float
  where: str

  @property
  def wire_bytes(self) -> float:
    """Bytes that leave a device in all `count` runs, by the algorithm that sends least (a ring)."""
    rest = (self.group - 1) / self.group
    share = {
      "all-gather": rest,
      "all-reduce": 2 * rest,
      "reduce-scatter": self.group - 1,
      "all-to-all": rest,
      "collective-permute": 1.0,
    }[self.kind]
    return self.count * share * self.array.num_bytes


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """The program's computations by name, as lines, and the name of the first to run."""
  found, entry, lines = {}, "", None
  for line in text.splitlines():
    head = _HEAD.match(line)
    if head and not line.startswith(" "):
      lines = found.setdefault(head.group(1), [])
      entry = head.group(1) if line.startswith("ENTRY") else entry
    elif line.rstrip() == "}":  # a kernel's own metadata may hold lines that begin with one
      lines = None
    elif lines is not None and " = " in line:
      lines.append(line)
  if not entry:
    raise ValueError(
      "this is no text of an HLO program: no ENTRY computation in it; give what compiled.as_text() "
      "returns"
    )
  return found, entry


def counts(program: dict[str, list[str]], entry: str, dynamic: float) -> dict[str, float]:
  """How often each computation runs; `dynamic` is the length of loops that have no fixed one."""
  total = dict.fromkeys(program, 0.0)

  def visit(name, times):
    total[name] += times
    for line in program[name]:
      body = re.search(r"\bbody=%?([\w.\-]+)", line)
      if body:
        visit(body.group(1), times * _trips(program, line, dynamic))
      else:
        for called in _CALLED.findall(line):
          if called in program:
            visit(called, times)

  visit(entry, 1.0)
  return total


def _trips(program, line, dynamic) -> float:
  known = re.search(r'known_trip_count"?:\s*\{"?n"?:"?(\d+)', line)
  if known:
    return float(known.group(1))
  condition = re.search(r"\bcondition=%?([\w.\-]+)", line).group(1)
  text = list(program[condition])
  for called in _CALLED.findall("\n".join(text)):
    text += program.get(called, [])
  limits = [int(n) for n in re.findall(r"[su]32\[\]\S* constant\((\d+)\)", "\n".join(text))]
  return math.ceil(max(limits) / _step(program, line, condition)) if limits else dynamic


def _step(program, line, condition) -> int:
  """What a loop adds to its counter: a compiler that unrolls a loop by two counts by two."""
  index = re.search(r"get-tuple-element\([^)]*\), index=(\d+)", "\n".join(program[condition]))
  body = program[re.search(r"\bbody=%?([\w.\-]+)", line).group(1)]
  root = re.search(r"ROOT .* tuple\((.*?)\)", body[-1])
  if not index or not root:
    return 1
  defined = {
    name: rest
    for name, rest in (
      re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)", each).groups() for each in body
    )
  }
  counter = root.group(1).split(", ")[int(index.group(1))].lstrip("%")
  added = re.search(r" add\(([^)]*)\)", defined.get(counter, ""))
  values = (
    [
      re.search(r" constant\((\d+)\)", defined.get(name.strip().lstrip("%"), ""))
      for name in added.group(1).split(",")
    ]
    if added
    else []
  )
  return next((int(value.group(1)) for value in values if value), 1)


def collectives(text: str, *, dynamic: float = 1.0, num_devices: int = 1) -> list[Collective]:
  """Every collective over more than one device, those that run most bytes first.

  A channel does not name a collective: on CPU all of shard_map's have channel 1, and layers of an
  unrolled loop share one on any platform. So each instruction counts, but for those in fusions:
  TPU's compiler writes one collective into each of the fusions that it starts, feeds and ends in,
  with the same channel and result.
  """
  program, entry = computations(text)
  times = counts(program, entry, dynamic)
  fused, found, seen = _fused(program), [], set()
  for name, lines in program.items():
    for line in lines:
      match = _OPERATION.search(line)
      kind = match and match.group(2).removesuffix("-start")
      channel = re.search(r"\bchannel_id=(\d+)", line)
      if not times[name] or kind not in KINDS:
        continue
      group = _group(line, kind, num_devices)
      where = re.search(r'op_name="([^"]*)"', line)
      results = list(_arrays(match.group(1)))
      same = (channel and channel.group(1), kind, *results, group, times[name])
      if name in fused and channel and same in seen:
        continue
      seen.add(same)
      if match.group(2).endswith("-start") and len(results) > 1:
        # (operands, results), then perhaps two scalars
        results = [array for array in results if array.shape]
        results = results[len(results) // 2 :]
      found += [
        Collective(kind, array, group, times[name], where.group(1) if where else "")
        for array in results
        if group > 1 and (array.shape or kind == "all-reduce")
      ]
  return sorted(found, key=lambda c: -c.wire_bytes)


def _fused(program: dict[str, list[str]]) -> set[str]:
  """The computations that fusions call."""
  calls = (
    re.search(r" fusion\(.*\bcalls=%?([\w.\-]+)", line)
    for lines in program.values()
    for line in lines
  )
  return {call.group(1) for call in calls if call}


def _group(line, kind, num_devices) -> int:
  if kind == "collective-permute":
    return num_devices
  named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line)
  if named:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named.group(2)))
  iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
  if iota:
    return int(iota.group(2))
  listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
  return len(listed.group(1).split(",")) if listed and listed.group(1) else num_devices


def _arrays(text: str) -> Iterator[Array]:
  for dtype, shape in _ARRAY.findall(text):
    if dtype in BYTES:
      yield Array(dtype, tuple(int(n) for n in shape.split(",") if n))


def arrays(text: str) -> set[Array]:
  """Every distinct array that an instruction of the program yields."""
  found = set()
  for lines in computations(text)[0].values():
    for line in lines:
      match = _OPERATION.search(line)
      if match:
        found.update(_arrays(match.group(1)))
  return found
