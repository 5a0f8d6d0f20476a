"""What an evaluation of a config asks, and what its answers depend on."""

from collections.abc import Sequence
import hashlib
import pathlib
from typing import Any

from stratified import files
from stratified.config import unaffected
from stratified.data import readers
from stratified.evaluation import tables
from stratified.runs import settings as run_settings
from stratified.tasks import worlds
from stratified.types import Question

Sets = dict[str, tuple[list[Question], Any]]  # name -> (questions, retriever)


def for_evaluation(config):
  """The config with the questions of data.evaluation, where it has any, in place of those of
  training."""
  if config.data.name == "files" and config.data.evaluation:
    config.data.questions, config.data.split = config.data.evaluation, ""
  return config


def question_sets(
  config, world: worlds.World, names: Sequence[str] | None, count: int | None
) -> Sets:
  """What is asked: {name: (questions, retriever)}.

  names: None takes the world's held-out sets; ["all"] every question set of the files (the papers'
    order). count: questions of each, always the first of one fixed order, so that more is a
    continuation; None is all there are.

  Raises ValueError for a name that is not there.
  """
  if count is None and config.data.name == "encyclopedia":
    raise ValueError(
      "--questions=-1 is all questions, but the encyclopedia's are made without end; give a number"
    )
  if not names:
    return world.held_out(2**31 if count is None else count)
  if config.data.name == "files":
    by_source = {}
    for question in worlds.evaluation_questions(config):
      by_source.setdefault(question.source, []).append(question)
    available = {
      name: (_first(by_source[name], count), world.retriever)
      for name in tables.ordered(list(by_source))
    }
  else:
    available = world.held_out(count)
  wanted = list(available) if list(names) == ["all"] else tables.ordered(names)
  missing = [name for name in wanted if name not in available]
  if missing:
    raise ValueError(
      f"--sets names {', '.join(missing)}, but there are questions of {', '.join(available)} only; "
      "prepare the others with experiments/prepare_data.py and name their folder with "
      "--config.data.evaluation=DIR"
    )
  return {name: available[name] for name in wanted}


def _first(questions: list[Question], count: int | None) -> list[Question]:
  """The first `count` of an order that does not change with the count."""
  size = len(questions) if count is None else min(count, len(questions))
  return readers.questions_at(questions, seed=0, step=0, count=size)


def settings(
  config, *, step: int, samples: int, temperature: float, forced: int | None
) -> dict[str, Any]:
  """What the answers depend on, beside the questions themselves."""
  kept = files.flatten(config.to_dict())
  for name in unaffected(run_settings.rules(), "answers"):
    kept.pop(name, None)
  kept |= {"step": step, "samples": samples, "temperature": temperature, "forced": forced}
  if temperature:
    kept["rollout.top_p"] = config.rollout.top_p
  if config.policy.checkpoint:
    kept["weights"] = fingerprint(
      sorted(pathlib.Path(config.policy.checkpoint).glob("*.safetensors"))
    )
  if config.data.name == "files" and config.retriever.name != "http":
    kept["corpus"] = fingerprint([worlds.path_of(config.data.corpus)])
  return kept


def fingerprint(paths: Sequence[pathlib.Path]) -> str:
  """Names, sizes, first and last MiB of files: tells other weights under the same name, at no
  cost."""
  digest = hashlib.sha256()
  for path in paths:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
      digest.update(file.read(2**20))
      file.seek(max(0, size - 2**20))
      digest.update(file.read(2**20))
  return digest.hexdigest()[:16]
