"""Flags for JAX on CPU devices, to be set before it starts; the tests' own process has them too."""

# Most of the suite's time is spent compiling programs that then run for milliseconds.
COMPILE_QUICKLY = "--xla_backend_optimization_level=0"


def flags(count: int) -> str:
  """XLA_FLAGS for a process with that many CPU devices."""
  return f"--xla_force_host_platform_device_count={count} {COMPILE_QUICKLY}"
