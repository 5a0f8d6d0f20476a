"""Sends the trainer's parameters to the servers: by files, by the socket, or broadcast in a group.

    disk     safetensors in a directory that the servers see (tmpfs where there is none), renamed
             when they are whole
    tensor   over HTTP, in PyTorch's serialisation written without PyTorch
    group    broadcast in a torch.distributed group (gloo, nccl) by a helper process in the servers'
             environment

Each ends with the weights' version on every server, which the fleet then checks and proves.
"""

import asyncio
from collections.abc import Iterator, Sequence
import contextvars
import dataclasses
import os
import pathlib
import secrets
import shutil
import socket
import tempfile

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from stratified.config import setting, Settings
from stratified.policy import decoder
from stratified.policy.files import hugging_face
from stratified.sampling.sglang import probe, torch_wire
from stratified.sampling.sglang.broadcast import Group
from stratified.sampling.sglang.errors import Lost, Refused
from stratified.sampling.sglang.server import Server


@dataclasses.dataclass(frozen=True)
class PublishConfig(Settings):
  """How weights travel.

  dtype: what they are stored as. bucket_bytes: size of a message.
  group_command: the helper process that broadcasts, see broadcast.py.
  """

  SECTION = "sampler"
  sync: str = setting(
    "disk", "how weights reach the servers", choices=["disk", "tensor", "group"], affects=[]
  )
  directory: str = setting(
    "", "sync=disk: a folder that every server sees; empty is tmpfs", affects=[]
  )
  group_backend: str = setting(
    "gloo", "sync=group: what broadcasts", choices=["gloo", "nccl"], affects=[]
  )
  group_address: str = setting(
    "127.0.0.1", "sync=group: address at which the servers meet this process", affects=[]
  )
  dtype: str = "float32"
  bucket_bytes: int = 2**28
  group_command: tuple[str, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    if self.dtype not in torch_wire.STORAGES:
      raise ValueError(
        f"sampler.dtype={self.dtype!r} is unknown; choose one of {', '.join(torch_wire.STORAGES)}"
      )


@dataclasses.dataclass(eq=False)
class Weights:
  """A `fleet.Publication`: one state of the parameters, by whichever way the publisher goes."""

  publisher: "Publisher"
  params: decoder.Params
  version: str
  number: int
  probe_ids: tuple[int, ...]
  probe_log_probs: tuple[float, ...]
  directory: pathlib.Path | None = None

  @property
  def together(self) -> bool:
    return self.publisher.config.sync == "group"

  @property
  def leads(self) -> bool:
    """Whether this process gives the weights to the servers; the others wait for their version."""
    return jax.process_index() == 0

  async def apply(self, server: Server, ranks: int) -> None:
    if self.publisher.config.sync == "disk":
      await server.done(
        "/update_weights_from_disk",
        timeout=3600,
        body={
          "model_path": str(self.directory),
          "weight_version": self.version,
          "flush_cache": True,
        },
      )
      return
    await server.done("/begin_weight_update", {})
    try:
      async for body in self._bodies(ranks):
        await server.done("/update_weights_from_tensor", content=body, timeout=3600)
    finally:
      await server.done("/end_weight_update", {})

  async def _bodies(self, ranks: int):
    """Makes messages for /update_weights_from_tensor, each in a thread while the last is sent."""

    def body(buckets):
      bucket, last = next(buckets, (None, True))
      return bucket and torch_wire.update_body(
        bucket, ranks=ranks, weight_version=self.version if last else None
      )

    # One context for all calls: the generator behind it may hold a context variable (NumPy's error
    # state) meanwhile.
    loop, context, buckets = (
      asyncio.get_running_loop(),
      contextvars.copy_context(),
      self.publisher.buckets(self.params),
    )
    while True:
      try:
        message = await loop.run_in_executor(None, context.run, body, buckets)
      except RuntimeError as error:
        raise Refused(
          f"these parameters can't be read any more, the next ones will be sent ({error})"
        ) from error
      if message is None:
        return
      yield message

  async def apply_together(
    self, servers: Sequence[tuple[Server, int]]
  ) -> list[Lost | Refused | None]:
    return await self.publisher.group.broadcast(
      servers, self.directory / "model.safetensors", self.version
    )


class Publisher:
  """Makes a `Weights` of each state of the parameters.

  mesh: the mesh that params lie on, None for one device.
  avoid: a token id that the probe leaves out (end of text).
  """

  def __init__(self, model: decoder.DecoderConfig, config: PublishConfig, *, avoid: int, mesh=None):
    self.config, self._model, self._mesh = config, model, mesh
    self.run = _nonce()
    self._number = 0
    self._probe_ids = probe.prompt(model.vocab_size, avoid)
    self._generations: list[pathlib.Path] = []
    self._root: pathlib.Path | None = None
    self.group = None
    if config.sync != "tensor":
      self._root = _own_directory(config.directory if config.sync == "disk" else "", self.run)
    if config.sync == "group":
      self.group = Group(
        config.group_command, config.group_backend, config.group_address, config.bucket_bytes
      )

  def publish(self, params: decoder.Params) -> Weights:
    """Publishes; every process must call. OSError, one sentence, for too small a directory."""
    self._number += 1
    known = probe.trainer_log_probs(self._model, params, self._probe_ids, self._mesh)
    if not np.all(np.isfinite(known)):
      raise ValueError(
        "the trainer's own log-probs of the probe are not finite: the parameters have diverged, "
        "and no "
        "server gets them; go on from an earlier checkpoint with a lower optimizer.learning_rate"
      )
    directory = self._write(params) if self._root else None
    return Weights(
      self, params, f"{self.run}-{self._number}", self._number, self._probe_ids, known, directory
    )

  def _write(self, params) -> pathlib.Path:
    """Writes a model directory that appears whole; keeps the one before it, removes older ones."""
    while len(self._generations) > 1:
      shutil.rmtree(self._generations.pop(0), ignore_errors=True)
    target = self._root / f"weights-{self._number:06d}"
    partial = self._root / f".partial-{self._number:06d}"
    if jax.process_index() == 0:
      self._check_room()
    try:
      hugging_face.save(partial, self._model, params, dtype=self.config.dtype)
      if jax.process_index() == 0:
        os.rename(partial, target)
    finally:
      shutil.rmtree(partial, ignore_errors=True)
    self._generations.append(target)
    return target

  def _check_room(self) -> None:
    needed, free = self.num_bytes(), shutil.disk_usage(self._root).free
    if needed > free:
      raise OSError(
        f"{self._root} has {free / 2**30:.1f} GiB free and the weights take {needed / 2**30:.1f} "
        "GiB (two "
        "generations are kept); name a larger directory that the servers see with "
        "--config.sampler.directory, "
        "or set --config.sampler.sync=tensor"
      )

  def num_bytes(self) -> int:
    sizes = (np.prod(weight.shape) for weight in decoder.weights(self._model).values())
    return int(sum(sizes)) * jnp.dtype(self.config.dtype).itemsize

  def buckets(self, params) -> Iterator[tuple[list[tuple[str, np.ndarray]], bool]]:
    """Yields (tensors of about bucket_bytes, whether they are the last) as a model directory's."""
    bucket, size = [], 0
    for name, value in hugging_face.stored_tensors(self._model, params, self.config.dtype):
      if bucket and size + value.nbytes > self.config.bucket_bytes:
        yield bucket, False
        bucket, size = [], 0
      bucket.append((name, value))
      size += value.nbytes
    yield bucket, True

  def close(self) -> None:
    if self._root and jax.process_index() == 0:
      shutil.rmtree(self._root, ignore_errors=True)


def _nonce() -> str:
  """Names this run's weights on the servers, so that an earlier run's are never taken for them."""
  number = np.uint32(secrets.randbits(32))
  if jax.process_count() > 1:
    number = multihost_utils.broadcast_one_to_all(number)
  return f"{int(number):08x}"


def _own_directory(parent: str, run: str) -> pathlib.Path:
  """Makes a directory for this run, and removes those of runs on this host that have ended."""
  if parent:
    root = pathlib.Path(parent).expanduser().absolute()
  else:
    shared = pathlib.Path("/dev/shm")
    root = (
      shared if shared.is_dir() else pathlib.Path(tempfile.gettempdir())
    ) / f"stratified-{os.getuid()}"
  root.mkdir(parents=True, exist_ok=True)
  if not parent and (root.is_symlink() or root.stat().st_uid != os.getuid()):
    raise OSError(
      f"{root} belongs to another user; name a directory with --config.sampler.directory"
    )
  host = socket.gethostname()
  for old in root.glob(f"run-{host}-*"):
    pid = old.name.removeprefix(f"run-{host}-").split("-")[0]
    if pid.isdigit() and not _alive(int(pid)):
      shutil.rmtree(old, ignore_errors=True)
  own = root / (
    f"run-{host}-{os.getpid()}-{run}" if jax.process_count() == 1 else f"run-shared-{run}"
  )
  own.mkdir(exist_ok=True)
  return own


def _alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True
