"""Broadcasts weights to servers in a torch.distributed group whose rank 0 is a helper process.

The helper (third_party/sglang/broadcast.py) runs in the servers' environment, which has PyTorch;
the trainer's need not. It reads safetensors from a file that the trainer wrote to memory (tmpfs)
and sends each tensor once, to all ranks of all servers. The trainer speaks to it in lines of JSON.
"""

import asyncio
from collections.abc import Sequence
import itertools
import json
import math
import os
import pathlib

from stratified.sampling.sglang.errors import Busy, Lost, Refused
from stratified.sampling.sglang.server import Server

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
START_S = 120.0  # the helper's imports, and the rendezvous of all ranks


class Group:
  """A group with one set of servers; another set, or an error, makes the next broadcast a new one.

  command: the helper's program and arguments. backend: gloo or nccl. address: where servers reach
  this host.
  """

  def __init__(self, command: Sequence[str], backend: str, address: str, bucket_bytes: int):
    self._command, self._backend, self._address, self._bucket_bytes = (
      tuple(command),
      backend,
      address,
      bucket_bytes,
    )
    self._numbers = itertools.count(1)
    self._helper: asyncio.subprocess.Process | None = None
    self._members: tuple[str, ...] = ()
    self._name = ""

  async def broadcast(
    self, servers: Sequence[tuple[Server, int]], file: pathlib.Path, version: str
  ) -> list[Lost | Refused | None]:
    """Sends every tensor of a safetensors file to all servers: each one's error, None without.

    One that drops out breaks the broadcast for all: each then gets the weights alone when it
    recovers.
    """
    try:
      if self._members != tuple(server.url for server, _ in servers) or self._dead():
        await self._build(servers)
      errors = await self._each(servers, lambda server: server.done("/begin_weight_update", {}))
      buckets = list(_buckets(_header(file), self._bucket_bytes))
      for i, bucket in enumerate(buckets):
        if any(errors):
          break
        body = {
          "names": [name for name, _, _ in bucket],
          "dtypes": [TORCH_NAMES[dtype] for _, dtype, _ in bucket],
          "shapes": [shape for _, _, shape in bucket],
          "group_name": self._name,
          "flush_cache": False,
        }
        if i == len(buckets) - 1:
          body |= {"weight_version": version, "flush_cache": True}
        sending = asyncio.create_task(
          self._say({"broadcast": str(file), "names": body["names"]}, 3600)
        )
        errors = await self._each(
          servers,
          lambda server, body=body: server.done(
            "/update_weights_from_distributed", body, timeout=3600
          ),
        )
        if any(errors):
          await self.close()  # or the helper would wait for a server that has left
        await asyncio.gather(sending, return_exceptions=any(errors))
      ended = await self._each(servers, lambda server: server.done("/end_weight_update", {}))
      errors = [error or late for error, late in zip(errors, ended)]
    except (Lost, Refused) as error:
      errors = [error] * len(servers)
    if any(errors):
      await self.close()
    return errors

  async def _each(self, servers, do) -> list[Lost | Refused | None]:
    async def quietly(server):
      try:
        await do(server)
      except Busy as error:
        return Lost(str(error))
      except (Lost, Refused) as error:
        return error
      return None

    return await asyncio.gather(*(quietly(server) for server, _ in servers))

  def _dead(self) -> bool:
    return self._helper is None or self._helper.returncode is not None

  async def _build(self, servers: Sequence[tuple[Server, int]]) -> None:
    """Starts the helper and lets all ranks meet."""
    await self.close()
    if not self._command:
      raise Refused(
        "sampler.sync='group' needs the helper's command: the Python of the servers' environment "
        "and "
        "third_party/sglang/broadcast.py"
      )
    try:
      self._helper = await asyncio.create_subprocess_exec(
        *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24
      )
    except OSError as error:
      raise Refused(
        f"the broadcast's helper {self._command[0]} can't be started ({error}); build the servers' "
        "environment (make sglang), or set --config.sampler.sync=disk"
      ) from error
    self._name = f"stratified-{os.getpid()}-{next(self._numbers)}"
    world = 1 + sum(ranks for _, ranks in servers)
    opened = await self._say(
      {"open": self._name, "backend": self._backend, "address": self._address}, START_S
    )
    joining = asyncio.create_task(self._say({"join": world}, START_S))
    offsets = itertools.accumulate((ranks for _, ranks in servers), initial=1)
    bodies = {
      server.url: {
        "master_address": self._address,
        "master_port": opened["port"],
        "rank_offset": offset,
        "world_size": world,
        "group_name": self._name,
        "backend": self._backend,
      }
      for (server, _), offset in zip(servers, offsets)
    }
    errors = await self._each(
      servers,
      lambda server: server.done("/init_weights_update_group", bodies[server.url], timeout=START_S),
    )
    if any(errors):
      await self.close()
    await asyncio.gather(joining, return_exceptions=any(errors))
    if any(errors):
      raise next(error for error in errors if error)
    self._members = tuple(server.url for server, _ in servers)

  async def _say(self, message: dict, timeout: float) -> dict:
    """Sends one line to the helper, reads one line back."""
    helper = self._helper
    try:
      async with asyncio.timeout(timeout):
        helper.stdin.write(json.dumps(message).encode() + b"\n")
        await helper.stdin.drain()
        line = await helper.stdout.readline()
      answer = json.loads(line) if line else {"error": "it ended"}
    except (TimeoutError, OSError, ValueError) as error:
      raise Lost(
        f"the broadcast's helper gave no answer to {next(iter(message))}: {error!r}"
      ) from error
    if "error" in answer:
      raise Lost(f"the broadcast's helper failed at {next(iter(message))}: {answer['error']}")
    return answer

  async def close(self) -> None:
    helper, self._helper, self._members = self._helper, None, ()
    if helper and helper.returncode is None:
      helper.kill()
      await helper.wait()


def _header(file: pathlib.Path) -> dict[str, dict]:
  """Reads what a safetensors file says of its tensors, in the order of their bytes."""
  with open(file, "rb") as source:
    header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
  header.pop("__metadata__", None)
  return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))


def _buckets(header: dict[str, dict], most: int):
  """Splits (name, dtype, shape) into lists of about `most` bytes together."""
  bucket, size = [], 0
  for name, entry in header.items():
    start, end = entry["data_offsets"]
    if bucket and size + end - start > most:
      yield bucket
      bucket, size = [], 0
    bucket.append((name, entry["dtype"], entry["shape"] or [math.prod(entry["shape"])]))
    size += end - start
  if bucket:
    yield bucket
