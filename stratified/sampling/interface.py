"""The interface between the agent loop and whatever samples tokens.

A sampler has three methods:

    submit(request)     takes one generation; returns at once
    poll() -> list      waits until a submitted generation has ended; returns all that have
    load(params, step)  samples from these parameters from now on; `step` is their version

Token ids go in and come out; nothing is re-tokenised on the way.
"""

import dataclasses
from typing import Any, Protocol

from stratified.config import check, fields, setting, Settings


@dataclasses.dataclass(frozen=True)
class SamplingSettings(Settings):
  """How a training rollout's tokens are drawn."""

  SECTION = "rollout"
  temperature: float = setting(
    1.0, "the logits are divided by it before a token is drawn", above=0, affects=["training"]
  )
  top_p: float = setting(
    1.0,
    "tokens are drawn from the fewest that hold this much probability",
    above=0,
    high=1,
    affects=["training"],
  )


def check_sampling(temperature: float, top_p: float) -> None:
  """Raises ValueError unless tokens can be drawn so; temperature 0 is greedy decoding."""
  rule = fields(SamplingSettings)
  check(
    "rollout.temperature", temperature, dataclasses.replace(rule["temperature"], above=None, low=0)
  )
  check("rollout.top_p", top_p, rule["top_p"])


@dataclasses.dataclass(frozen=True)
class Request:
  """One generation to run.

  key: (step, question index in the step, sample): names the rollout; a later request with the same
    key continues it, so its `token_ids` begin with everything that was fed and sampled before, and
    random keys derive from (seed, key, position of the token), never from a slot or the clock.
  token_ids: the whole context.
  max_new_tokens: at least 1.
  stop: strings; generation ends with the token that completes one of them. That token is kept
    whole, nothing after it is.
  last: the caller promises not to continue this rollout; what was cached for it may go.
  """

  key: tuple[int, int, int]
  token_ids: tuple[int, ...]
  max_new_tokens: int
  stop: tuple[str, ...] = ()
  last: bool = False


@dataclasses.dataclass(frozen=True)
class Completion:
  """What a sampler returns for a request.

  token_ids, log_probs: the sampled tokens and their log-probs after temperature, same length.
  finish: "stop" (a stop string or the end-of-text token), "length", or "fault".
  fault: what broke.
  weight_versions: the step of the parameters that sampled each token; empty for those of the last
    load().
  """

  key: tuple[int, int, int]
  token_ids: tuple[int, ...]
  log_probs: tuple[float, ...]
  finish: str
  fault: str | None = None
  weight_versions: tuple[int, ...] = ()


class Sampler(Protocol):
  """See the module's docstring."""

  def submit(self, request: Request) -> None: ...

  def poll(self) -> list[Completion]: ...

  def load(self, params: Any, step: int) -> None: ...
