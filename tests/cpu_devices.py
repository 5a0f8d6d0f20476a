"""Flags for JAX on CPU devices, to be set before it starts; the tests' own process has them too."""

import importlib.util
import mmap
import pathlib

# Most of the suite's time is spent compiling programs that then run for milliseconds. Emitters of
# fusions and code split over threads make them faster to run and take three times as long.
_QUICK = {
  "xla_backend_optimization_level": "0",
  "xla_cpu_use_fusion_emitters": "false",
  "xla_cpu_parallel_codegen_split_count": "1",
}


def _known(names) -> list[str]:
  """Which flags this jaxlib has: one that it does not know would end the process."""
  folder = pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent
  library = max(folder.glob("*.so*"), key=lambda path: path.stat().st_size)
  with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
    return [name for name in names if text.find(b"\0" + name.encode() + b"\0") >= 0]


COMPILE_QUICKLY = " ".join(f"--{name}={_QUICK[name]}" for name in _known(_QUICK))


def flags(count: int) -> str:
  """XLA_FLAGS for a process with that many CPU devices."""
  return f"--xla_force_host_platform_device_count={count} {COMPILE_QUICKLY}"
