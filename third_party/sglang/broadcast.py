"""Rank 0 of a group that takes weights to SGLang servers; run with the Python of the servers'
environment.

Reads one JSON object a line from its standard input and answers each with one line:

    {"open": NAME, "backend": "gloo" | "nccl", "address": HOST}
        -> {"port": where the other ranks meet}
    {"join": WORLD_SIZE}
        -> {"ok": true} once all ranks have
    {"broadcast": FILE, "names": [...]}
        -> {"ok": true} once every rank has the tensors

FILE is a safetensors file, whole or its shard. It ends with its standard input. Only
stratified/sampling/sglang/broadcast.py starts it.
"""

import json
import os
import socket
import sys


def main() -> None:
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # what libraries print must not be taken for an answer
  state = {}
  for line in sys.stdin:
    try:
      message = json.loads(line)
      answer = next(do for name, do in COMMANDS.items() if name in message)(state, message)
    except (
      Exception
    ) as error:  # the trainer decides what follows; it needs the reason, whatever it is
      answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def open_store(state, message):
  address = message["address"]
  if address == "127.0.0.1" and message["backend"] == "gloo":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
  import torch.distributed as dist  # slow, hence after the first line

  # Bound here, so that the meeting point listens on this address alone.
  listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
  listener.bind((address, 0))
  listener.listen()
  port = listener.getsockname()[1]
  store = dist.TCPStore(
    address,
    port,
    is_master=True,
    wait_for_workers=False,
    master_listen_fd=listener.detach(),
    use_libuv=True,
  )
  state |= {"name": message["open"], "backend": message["backend"], "store": store}
  return {"port": port}


def join(state, message):
  from sglang.srt.utils.common import init_custom_process_group
  import torch.distributed as dist

  state["group"] = init_custom_process_group(
    backend=state["backend"],
    store=dist.PrefixStore(state["name"], state["store"]),
    world_size=message["join"],
    rank=0,
    group_name=state["name"],
  )
  return {"ok": True}


def broadcast(state, message):
  import safetensors
  import torch.distributed as dist

  device = "cuda" if state["backend"] == "nccl" else "cpu"
  with safetensors.safe_open(message["broadcast"], framework="pt", device="cpu") as file:
    tensors = [file.get_tensor(name).to(device) for name in message["names"]]
    for handle in [
      dist.broadcast(tensor, src=0, group=state["group"], async_op=True) for tensor in tensors
    ]:
      handle.wait()
  return {"ok": True}


COMMANDS = {"open": open_store, "join": join, "broadcast": broadcast}

if __name__ == "__main__":
  main()
