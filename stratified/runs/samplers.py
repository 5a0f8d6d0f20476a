"""Opens the sampler of a config: in this process, or on SGLang servers."""

import contextlib
import dataclasses
import pathlib

import jax

from stratified.config import read, setting, Settings
from stratified.policy import decoder
from stratified.sampling.in_process import JaxSampler, SamplerConfig
from stratified.sampling.interface import SamplingSettings
from stratified.sampling.sglang.members import FleetConfig
from stratified.sampling.sglang.publish import PublishConfig, Publisher
from stratified.sampling.sglang.sampler import Sampling, Servers, SglangSampler

THIRD_PARTY = pathlib.Path(__file__).parents[2] / "third_party" / "sglang"
# Largest difference of a log-prob between two right implementations: sums of thousands of products
# in another order.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclasses.dataclass(frozen=True)
class SamplerSettings(Settings):
  """Which sampler, and where it is."""

  SECTION = "sampler"
  name: str = setting(
    "jax",
    "in this process, or SGLang servers (third_party/sglang/README.md)",
    choices=["jax", "sglang"],
    affects=["training", "answers"],
  )
  devices: int = setting(
    1, "jax: devices of each process that sample; 0 is all of them", low=0, affects=[]
  )
  release: bool = setting(
    False, "free the device of the sampler's weights and caches during updates", affects=[]
  )
  urls: str = setting(
    "", "sglang: http://HOST:PORT of each server, with commas between them", affects=[], secret=True
  )
  probe_tolerance: float = setting(
    0.0,
    "sglang: largest difference of a log-prob; 0 is 1e-3 in float32, 0.1 in bfloat16",
    low=0,
    affects=[],
  )
  helper_python: str = setting(
    ".venv-sglang/bin/python", "sync=group: the interpreter of the helper process", affects=[]
  )


def sampler_config(config, *, greedy: bool = False) -> SamplerConfig:
  """Settings of the in-process sampler; a greedy one draws nothing."""
  drawn = read(SamplingSettings, config)
  return read(
    SamplerConfig,
    config,
    length=config.rollout.max_tokens,
    temperature=0.0 if greedy else drawn.temperature,
    top_p=1.0 if greedy else drawn.top_p,
    seed=config.seed,
  )


def settings(config) -> tuple[FleetConfig, PublishConfig]:
  """Settings of SGLang servers; ValueError, one sentence, for what can't run."""
  s = read(SamplerSettings, config)
  fleet = read(
    FleetConfig,
    config,
    urls=tuple(url.strip() for url in s.urls.split(",") if url.strip()),
    probe_tolerance=s.probe_tolerance or TOLERANCE[config.policy.dtype],
  )
  helper = (s.helper_python, str(THIRD_PARTY / "broadcast.py"))
  if config.sampler.group_backend == "gloo":  # servers on CPU: see third_party/sglang/README.md
    helper = (
      "env",
      f"PYTHONPATH={THIRD_PARTY / 'standins'}",
      "SGLANG_USE_CPU_ENGINE=1",
      "OMP_NUM_THREADS=1",
      *helper,
    )
  publish = read(PublishConfig, config, dtype=config.policy.dtype, group_command=helper)
  if publish.sync == "group" and not pathlib.Path(s.helper_python).exists():
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
  """Opens (training's sampler, a greedy one) of `sampler.name`; closes connections at the end."""
  if config.sampler.name == "jax":
    devices = jax.local_devices()
    devices = devices[: config.sampler.devices or len(devices)]
    yield tuple(
      JaxSampler(model, sampler_config(config, greedy=greedy), tokenizer, devices)
      for greedy in (False, True)
    )
    return
  with connect(config, mesh, model, tokenizer) as found:
    yield tuple(sampler(config, found, greedy=greedy) for greedy in (False, True))


def sampler(config, servers: Servers, *, greedy: bool = False) -> SglangSampler:
  """Makes a sampler on these servers, which training's and a greedy one may share."""
  drawn = read(SamplingSettings, config)
  sampling = Sampling(0.0) if greedy else Sampling(drawn.temperature, drawn.top_p)
  return SglangSampler(servers, sampling)
