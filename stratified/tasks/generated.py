"""Parts of tasks whose questions are made by a program: the split, distinct draws, other worlds.

Random streams and worlds are functions of seeds: the run's own for training and the first held-out
set, `seed + SECOND_SEED` for a world that training never sees, `seed + PRACTICE_SEED + n` for those
of the demonstrations, so that none of them is learnt by heart.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stratified import config as settings
from stratified.config import Settings
from stratified.retrieval.bm25 import BM25
from stratified.retrieval.corpus import Passage
from stratified.tasks import base
from stratified.tasks.draws import is_held_out, spread
from stratified.tasks.encyclopedia.demonstrations import DemonstrationConfig
from stratified.tools.base import Timed
from stratified.tools.search import Search
from stratified.types import Question

SECOND_SEED = 1_000_003
PRACTICE_SEED = 2_000_003
TRIES = 10_000  # draws of a question before it is taken for granted that there is no other


def distinct(
  shares: Sequence[float],
  count: int,
  rng: np.random.Generator,
  draw: Callable[[int], tuple[str, Any]],
  ask: Callable[[Any], Question],
  *,
  held_out: bool,
  more: str,
) -> list[Question]:
  """Draws `count` distinct questions on one side of the split.

  Args:
    shares: of questions that need 0, 1, ... calls.
    draw: the number of calls -> (id, what is asked).
    ask: puts what is asked into words.
    held_out: the side.
    more: the way to a world of more questions, for the error.

  Raises ValueError where there are not so many.
  """
  asked = {}
  for calls in spread(shares, count, rng):
    for _ in range(TRIES):
      id, made = draw(calls)
      if id not in asked and is_held_out(id) == held_out:
        break
    else:
      counts = (
        "eval.questions"
        if held_out
        else "data.questions_per_step and warm_start.demonstrations_per_step"
      )
      raise ValueError(
        f"{count} different {'held-out' if held_out else 'training'} questions are too many: those "
        f"of {calls} calls ran out; lower {counts}, or {more}"
      )
    asked[id] = ask(made)
  return list(asked.values())


def check(config, *classes: type[Settings]) -> None:
  """Refuses settings of these classes, and of the script where there is a warm start."""
  for cls in classes:
    settings.read(cls, config)
  if config.warm_start.num_steps:
    demonstration_config(config)


def demonstration_config(config) -> DemonstrationConfig:
  """The script's settings, checked."""
  return settings.read(DemonstrationConfig, config, max_turns=config.rollout.max_turns)


def searching(tools: base.Tools, passages: Sequence[Passage], topk: int) -> base.Tools:
  """Gives the tools a search of other passages in place of theirs."""
  other = Timed(Search(BM25(passages), topk))
  return tuple(other if tool.name == "search" else tool for tool in tools)
