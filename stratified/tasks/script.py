"""Runs a scripted policy behind the sampler's interface: demonstrations from the same agent loop.

A script is a generator `play(question, rng)`: it yields the text of its next turn and is sent what
was fed since. A text that closes no tag is ended by the end-of-text token. Log-probs are 0: the
script has only one next turn.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from stratified.agents import loop
from stratified.data.tokenizer import Tokenizer
from stratified.sampling.interface import Completion, Request
from stratified.tasks.base import Task, Tools
from stratified.tasks.draws import DEMONSTRATION, generator
from stratified.types import Question, Trajectory

Script = Generator[str, str, None]
Key = tuple[int, int, int]


class Scripted:
  """A sampler (submit, poll, load) that plays `play` for the questions of one step.

  The random choices of a rollout are functions of (seed, its key) alone.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    play: Callable[[Question, np.random.Generator], Script],
    questions: Sequence[Question],
    seed: int,
  ):
    self._tokenizer, self._play, self._seed = tokenizer, play, seed
    self._questions = questions
    self._running: dict[Key, tuple[Script, int]] = {}  # the script, and the tokens it has seen
    self._done: list[Completion] = []

  def submit(self, request: Request) -> None:
    if request.key in self._running:
      script, seen = self._running[request.key]
      text = script.send(self._tokenizer.decode(request.token_ids[seen:]))
    else:
      rng = generator(self._seed, *request.key, DEMONSTRATION)
      script = self._play(self._questions[request.key[1]], rng)
      text = next(script)
    token_ids = tuple(self._tokenizer.encode(text))
    if not text.endswith(">"):
      token_ids += (self._tokenizer.eos_id,)
    finish = "stop" if len(token_ids) <= request.max_new_tokens else "length"
    token_ids = token_ids[: request.max_new_tokens]
    self._running[request.key] = script, len(request.token_ids) + len(token_ids)
    self._done.append(Completion(request.key, token_ids, (0.0,) * len(token_ids), finish))

  def poll(self) -> list[Completion]:
    done, self._done = self._done, []
    return done

  def load(self, params: Any, step: int) -> None:
    """A script has no parameters."""


def collect(
  task: Task,
  questions: Sequence[Question],
  play: Callable[[Question, np.random.Generator], Script],
  *,
  seed: int,
  step: int,
  tools: Tools | None = None,
) -> list[list[Trajectory]]:
  """Collects one demonstration of each question, [Q][1]; `tools`, if given, replace the task's."""
  return loop.collect(
    questions,
    sampler=Scripted(task.tokenizer, play, questions, seed),
    tools=task.tools if tools is None else tools,
    tokenizer=task.tokenizer,
    protocol=task.protocol,
    limits=task.limits,
    samples_per_question=1,
    step=step,
  )
