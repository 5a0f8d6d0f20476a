"""Speaks to one SGLang server over HTTP: each route that is used, its answer's success checked.

Errors say what to do: Lost (use another server), Busy (later again), Refused (what was asked is
wrong); see errors.py.
"""

import asyncio
import json
from typing import Any

from stratified.config import without_password
from stratified.sampling.sglang.errors import Busy, Lost, Refused
from stratified.sampling.sglang.http import Client, HttpError

CONTROL_S = 30.0  # an answer to a control route that does no work with the model


class Server:
  """The routes of one server."""

  def __init__(self, url: str):
    self.url = without_password(url.rstrip("/"))  # as messages name it
    self._client = Client(url.rstrip("/"))

  def close(self) -> None:
    self._client.close()

  async def call(
    self,
    route: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float = CONTROL_S,
    method: str | None = None,
    content: bytes | None = None,
  ) -> Any:
    """Calls a route: the JSON of its answer, or its text; POST where there is a body.

    timeout: seconds for all of it; a server that sends its answer drop by drop is lost too.
    """
    if body is not None:
      content = json.dumps(body).encode()
    method = method or ("GET" if content is None else "POST")
    try:
      async with asyncio.timeout(timeout):
        code, answer = await self._client.request(method, route, content or b"")
    except TimeoutError as error:
      raise Lost(f"{self.url}{route} gave no answer within {timeout:g} s") from error
    except HttpError as error:
      raise Lost(f"{self.url}{route}: {error}") from error
    return self._read(route, code, answer)

  def _read(self, route: str, code: int, answer: bytes) -> Any:
    text = answer.decode(errors="replace")[:500] if code != 200 else ""
    if code in (429, 503):
      raise Busy(f"{self.url}{route} answered {code}: {text}")
    if code >= 500:
      raise Lost(f"{self.url}{route} answered {code}: {text}")
    if code >= 400:
      raise Refused(f"{self.url}{route} answered {code}: {text}")
    if code != 200:
      raise Lost(f"{self.url}{route} answered {code}, which is not from an SGLang server")
    try:
      return json.loads(answer)
    except (ValueError, RecursionError):
      return answer.decode(errors="replace")

  async def done(
    self,
    route: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float = CONTROL_S,
    content: bytes | None = None,
  ) -> dict[str, Any]:
    """Calls and wants {"success": true}; anything else is Refused, also a 200 with false."""
    answer = await self.call(route, body, timeout=timeout, content=content, method="POST")
    if not isinstance(answer, dict) or answer.get("success") is not True:
      raise Refused(f"{self.url}{route} did not succeed: {str(answer)[:500]}")
    return answer

  async def generate(self, body: dict[str, Any], timeout: float) -> Any:
    answer = await self.call("/generate", body, timeout=timeout)
    if not isinstance(answer, dict):
      raise Lost(
        f"{self.url}/generate answered 200 with what is no JSON object: {str(answer)[:100]!r}"
      )
    return answer

  async def weight_version(self, timeout: float = CONTROL_S) -> str:
    answer = await self.call("/model_info", timeout=timeout)
    if not isinstance(answer, dict) or not isinstance(answer.get("weight_version"), str):
      raise Lost(
        f"{self.url}/model_info has no weight_version: this is no SGLang server of version 0.5.21 "
        "or newer"
      )
    return answer["weight_version"]

  async def limits(self) -> dict[str, int]:
    """{context: most tokens of prompt and output of a request, tensor_parallel: its ranks}."""
    models, info = await self.call("/v1/models"), await self.call("/server_info")
    try:
      context = min(int(models["data"][0]["max_model_len"]), int(info["max_total_num_tokens"]))
      return {"context": context, "tensor_parallel": int(info["tp_size"])}
    except (TypeError, KeyError, IndexError, ValueError) as error:
      raise Lost(
        f"{self.url}/server_info lacks {error!s}: this is no SGLang server of version 0.5"
      ) from error

  async def pause(self, mode: str) -> None:
    await self.call("/pause_generation", {"mode": mode})

  async def resume(self) -> None:
    await self.call("/continue_generation", {})

  async def abort(self, rid: str | None = None) -> None:
    """Ends one request, or all: their answers come back with what they have so far."""
    await self.call("/abort_request", {"rid": rid} if rid else {"abort_all": True})

  async def flush(self, attempts: int = 40) -> None:
    """Empties the prefix cache, which a server does only while nothing runs.

    It goes on for a moment after an answer. The answer's text says whether it did; some versions
    send a 200 in any case.
    """
    told = ""
    for _ in range(attempts):
      try:
        told = str(await self.call("/flush_cache", method="POST"))
      except Refused as error:
        told = str(error)
      if told.strip().lower().startswith("cache flushed"):
        return
      await asyncio.sleep(0.25)
    raise Refused(f"{self.url}/flush_cache did not empty the cache: {told[:200]}")

  async def release(self, timeout: float) -> None:
    """Gives back the memory of weights and cache; flushes first, since a busy server would die."""
    await self.flush()
    await self.call(
      "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout=timeout
    )

  async def take_memory(self, timeout: float) -> None:
    """Takes the memory again; what is in it means nothing until the next update."""
    await self.call("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout=timeout)
