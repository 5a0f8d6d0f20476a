"""SGLang's `POST /generate`: token ids in, token ids and log-probs out.

An answer is checked before it becomes a trajectory: that log-probs are as many as the ids, belong
to them and are finite, that ids lie in the vocabulary, and which weights each token came from.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

from stratified.sampling.interface import check_sampling, Request
from stratified.sampling.sglang.errors import Lost, Stale


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn: temperature 0 is greedy, with log-probs at temperature 1.

  A request carries no seed: one seed shared by the samples of a question would make them clones.
  """

  temperature: float = 1.0
  top_p: float = 1.0

  def __post_init__(self):
    check_sampling(self.temperature, self.top_p)


@dataclasses.dataclass(frozen=True)
class Generation:
  """A server's answer; `versions`: each token's weight version; `finish`: stop, length or abort."""

  token_ids: tuple[int, ...]
  log_probs: tuple[float, ...]
  versions: tuple[int, ...]
  finish: str
  message: str = ""


def check_request(request: Request, vocab_size: int, max_tokens: int) -> None:
  """Raises ValueError for what must not be sent: an id outside the vocabulary kills the server."""
  if not request.token_ids or request.max_new_tokens < 1:
    raise ValueError(f"request {request.key}: needs a context and max_new_tokens of at least 1")
  outside = next((i for i in request.token_ids if not 0 <= i < vocab_size), None)
  if outside is not None:
    raise ValueError(
      f"request {request.key}: token id {outside} is outside the vocabulary [0, {vocab_size}); the "
      "tokenizer and policy.checkpoint don't belong together"
    )
  if len(request.token_ids) + request.max_new_tokens > max_tokens:
    raise ValueError(
      f"request {request.key}: {len(request.token_ids)} tokens and {request.max_new_tokens} new "
      "ones "
      f"exceed the server's {max_tokens}; start it with a larger --context-length or lower "
      "rollout.max_tokens"
    )


def generate_body(request: Request, sampling: Sampling, eos_id: int, rid: str) -> dict[str, Any]:
  """Makes the body of POST /generate, without input log-probs, which defeat the prefix cache."""
  return {
    "rid": rid,
    "input_ids": list(request.token_ids),
    "return_logprob": True,
    "logprob_start_len": -1,
    "sampling_params": {
      "max_new_tokens": request.max_new_tokens,
      "temperature": sampling.temperature,
      "top_p": sampling.top_p,
      "top_k": -1,
      "stop": list(request.stop),
      "stop_token_ids": [eos_id],
      "skip_special_tokens": False,
      "spaces_between_special_tokens": False,
    },
  }


def read_generation(
  answer: Any, request: Request, vocab_size: int, number_of: Callable[[str], int | None]
) -> Generation:
  """Reads a Generation from the JSON of an answer.

  number_of: a weight version's name -> its number, None for weights that were never loaded here.
  Raises Lost where the answer is not what the contract says; Stale where a token came from unknown
  weights.
  """
  try:
    meta = answer["meta_info"]
    ids, pairs = answer["output_ids"], meta["output_token_logprobs"]
    finish, message = meta["finish_reason"]["type"], str(meta["finish_reason"].get("message") or "")
    spans = meta.get("weight_versions") or [
      {"version": meta["weight_version"], "start": 0, "end": len(ids)}
    ]
    log_probs = [entry[0] for entry in pairs]
    named = [entry[1] for entry in pairs]
  except (TypeError, KeyError, IndexError, AttributeError) as error:
    raise Lost(
      f"its answer to /generate lacks {error!s}, which the contract of SGLang 0.5 has"
    ) from error
  _check_tokens(ids, log_probs, named, request, vocab_size)
  if finish not in ("stop", "length", "abort"):
    raise Lost(f"its answer ends for the unknown reason {finish!r}")
  if finish != "abort" and not ids:
    raise Lost("its answer holds no token and was not aborted")
  return Generation(
    tuple(ids),
    tuple(float(x) for x in log_probs),
    _versions(spans, len(ids), number_of),
    finish,
    message,
  )


def _check_tokens(ids, log_probs, named, request, vocab_size) -> None:
  if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
    raise Lost("its answer holds something other than ids of the vocabulary")
  if len(ids) > request.max_new_tokens:
    raise Lost(
      f"its answer holds {len(ids)} tokens where at most {request.max_new_tokens} were asked for"
    )
  if named != ids:
    raise Lost(
      f"its answer holds log-probs of {len(named)} tokens for {len(ids)} tokens, or of other ones"
    )
  broken = next(
    (x for x in log_probs if type(x) not in (int, float) or not math.isfinite(x) or x > 1e-3), None
  )
  if broken is not None or None in log_probs:
    raise Lost(
      f"its answer holds the log-prob {broken}, which no token can have: its weights or its "
      "numerics are broken"
    )


def _versions(spans: Sequence[Any], count: int, number_of) -> tuple[int, ...]:
  """Reads one number a token from spans [{version, start, end}] that cover all tokens in order."""
  numbers = []
  for span in spans if count else ():
    try:
      name, start, end = str(span["version"]), span["start"], span["end"]
    except (TypeError, KeyError) as error:
      raise Lost(f"its weight versions lack {error!s}") from error
    if start != len(numbers) or not (type(end) is int and start <= end <= count):
      raise Lost(f"its weight versions {spans!r} don't cover its {count} tokens in order")
    number = number_of(name)
    if number is None and end > start:
      raise Stale(f"it sampled from weights of version {name!r}, which is not what was loaded")
    numbers += [number] * (end - start)
  if len(numbers) != count:
    raise Lost(f"its weight versions {spans!r} don't cover its {count} tokens")
  return tuple(numbers)


def probe_body(token_ids: Sequence[int], rid: str) -> dict[str, Any]:
  """Asks for the log-probs of a given prompt, past the prefix cache."""
  return {
    "rid": rid,
    "input_ids": list(token_ids),
    "return_logprob": True,
    "logprob_start_len": 0,
    "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0},
  }


def read_probe(answer: Any, token_ids: Sequence[int]) -> list[float]:
  """Reads log-probs of token_ids[1:] given all before; Lost where the answer has none."""
  try:
    pairs = answer["meta_info"]["input_token_logprobs"]
    found = [entry[1] for entry in pairs]
    values = [float(entry[0]) for entry in pairs[1:]]
  except (TypeError, KeyError, IndexError, ValueError) as error:
    raise Lost(f"its answer to the probe lacks {error!s}") from error
  if found != list(token_ids):
    raise Lost("its answer to the probe speaks of other tokens than were sent")
  return values
