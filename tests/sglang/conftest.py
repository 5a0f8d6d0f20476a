"""Real SGLang servers on CPU for the tests of this folder, started once: `make test-sglang`."""

import contextlib
import pathlib
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "third_party" / "sglang"))  # small_checkpoint
import small_checkpoint  # noqa: E402

from experiments.benchmarks.soak_sglang import RealServer
from stratified.policy.files import hugging_face
from stratified.sampling.sglang.members import FleetConfig
from stratified.sampling.sglang.publish import PublishConfig, Publisher
from stratified.sampling.sglang.sampler import Servers
from stratified.tasks.encyclopedia import vocabulary

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
HELPER = (
  "env",
  f"PYTHONPATH={ROOT / 'third_party' / 'sglang' / 'standins'}",
  "SGLANG_USE_CPU_ENGINE=1",
  "OMP_NUM_THREADS=1",
  str(PYTHON),
  str(ROOT / "third_party" / "sglang" / "broadcast.py"),
)
LENGTH = 256


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
  directory = tmp_path_factory.mktemp("model")
  small_checkpoint.write(directory)
  return directory


@pytest.fixture(scope="session")
def real_servers(model_directory, tmp_path_factory):
  """Two servers of the small model."""
  if not PYTHON.exists():
    pytest.skip("needs the servers' environment: third_party/sglang/setup.sh cpu")
  logs = tmp_path_factory.mktemp("logs")
  servers = [RealServer(model_directory, logs) for _ in range(2)]
  try:
    yield [server.ready() for server in servers]
  finally:
    for server in servers:
      server.kill()


@pytest.fixture(scope="session")
def tokenizer():
  return vocabulary.build()


@pytest.fixture(scope="session")
def model(model_directory):
  return hugging_face.load_config(model_directory)


@pytest.fixture(scope="session")
def params_of(model, model_directory):
  """params_of(n): parameters that differ with n; 0 are the directory's own."""
  first = hugging_face.load_params(model_directory, model, dtype="float32")
  return lambda n: {
    name: value * (1 + 0.1 * n) if value.ndim > 2 else value for name, value in first.items()
  }


@pytest.fixture
def connect(model, tokenizer):
  """connect(servers, sync=..., interrupt=..., mesh=..., **settings of the fleet) as a context."""

  @contextlib.contextmanager
  def connected(servers, *, sync="disk", directory="", interrupt=False, mesh=None, **changes):
    settings = (
      dict(
        start_s=30.0, outage_s=240.0, timeout_s=120.0, health_s=20.0, update_s=120.0, in_flight=16
      )
      | changes
    )
    publisher = Publisher(
      model,
      PublishConfig(sync=sync, directory=str(directory), group_command=HELPER, bucket_bytes=2**17),
      avoid=tokenizer.eos_id,
      mesh=mesh,
    )
    with Servers(
      FleetConfig(tuple(server.url for server in servers), **settings),
      publisher,
      vocab_size=model.vocab_size,
      eos_id=tokenizer.eos_id,
      max_tokens=LENGTH,
      interrupt=interrupt,
    ) as found:
      yield found

  return connected


@pytest.fixture(scope="session", autouse=True)
def on_cpu():
  assert jax.default_backend() == "cpu", "these tests compare float32 on CPU; set JAX_PLATFORMS=cpu"
