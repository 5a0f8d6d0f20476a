"""From a config's `sampler` to what samples: in this process, or SGLang servers and the connection
with them."""

import contextlib
import pathlib

from stratified.policy import decoder
from stratified.runs import build
from stratified.sampling.sglang.members import FleetConfig
from stratified.sampling.sglang.publish import PublishConfig, Publisher
from stratified.sampling.sglang.sampler import Sampling, Servers, SglangSampler

THIRD_PARTY = pathlib.Path(__file__).parents[1] / "third_party" / "sglang"
# Largest difference of a log-prob between two right implementations: sums of thousands of products
# in another order.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def settings(config) -> tuple[FleetConfig, PublishConfig]:
  """Raises ValueError, one sentence, for what can't run."""
  s = config.sampler
  names = ("in_flight", "timeout_s", "retries", "start_s", "outage_s", "health_s", "update_s")
  fleet = FleetConfig(
    tuple(url.strip() for url in s.urls.split(",") if url.strip()),
    **{name: s[name] for name in names},
    probe_tolerance=s.probe_tolerance or TOLERANCE[config.policy.dtype],
  )
  helper = (s.helper_python, str(THIRD_PARTY / "broadcast.py"))
  if s.group_backend == "gloo":  # servers on CPU: see third_party/sglang/README.md
    helper = (
      "env",
      f"PYTHONPATH={THIRD_PARTY / 'standins'}",
      "SGLANG_USE_CPU_ENGINE=1",
      "OMP_NUM_THREADS=1",
      *helper,
    )
  publish = PublishConfig(
    sync=s.sync,
    dtype=config.policy.dtype,
    directory=s.directory,
    group_command=helper,
    group_backend=s.group_backend,
    group_address=s.group_address,
  )
  if s.sync == "group" and not pathlib.Path(s.helper_python).exists():
    raise ValueError(
      f"sampler.helper_python={s.helper_python!r} does not exist; make sglang builds the servers' "
      "environment, or set --config.sampler.sync=disk"
    )
  return fleet, publish


def connect(config, mesh, model: decoder.DecoderConfig, tokenizer) -> Servers:
  """Waits for the servers; raises SamplerError, one sentence, where one does not answer."""
  fleet, publish = settings(config)
  publisher = Publisher(model, publish, avoid=tokenizer.eos_id, mesh=mesh)
  return Servers(
    fleet,
    publisher,
    vocab_size=model.vocab_size,
    eos_id=tokenizer.eos_id,
    max_tokens=config.rollout.max_tokens,
    interrupt=config.rollout.max_staleness > 0,
  )


@contextlib.contextmanager
def samplers(config, mesh, model: decoder.DecoderConfig, tokenizer):
  """(training's sampler, a greedy one) of `sampler.name`; connections are closed at the end."""
  if config.sampler.name == "jax":
    yield tuple(build.sampler(config, model, tokenizer, greedy=greedy) for greedy in (False, True))
    return
  with connect(config, mesh, model, tokenizer) as found:
    yield tuple(sampler(config, found, greedy=greedy) for greedy in (False, True))


def sampler(config, servers: Servers, *, greedy: bool = False) -> SglangSampler:
  """A sampler on these servers; training's and a greedy one may share them."""
  r = config.rollout
  return SglangSampler(servers, Sampling(0.0) if greedy else Sampling(r.temperature, r.top_p))
