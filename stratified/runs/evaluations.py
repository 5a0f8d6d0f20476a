"""Says what an evaluation of a config asks, and what its answers depend on."""

from collections.abc import Mapping, Sequence
import hashlib
import pathlib
from typing import Any

from stratified import files
from stratified.config import unaffected
from stratified.evaluation import tables
from stratified.runs import settings as run_settings
from stratified.tasks import base
from stratified.tasks.base import Sets, Task
from stratified.tasks.search_qa import path_of


def for_evaluation(config):
  """Puts the questions of data.evaluation, where there are any, in place of training's."""
  if config.data.name == "files" and config.data.evaluation:
    config.data.questions, config.data.split = config.data.evaluation, ""
  return config


def stored_config(workdir: pathlib.Path, given: Mapping[str, Any]):
  """Reads a run's config, with the fields that the command line gives.

  Raises ValueError for a field that changes what the policy answers: the answers would be those of
  another run.
  """
  config = run_settings.read_workdir(workdir)
  may = unaffected(run_settings.rules(), "answers")
  fixed = [name for name in given if name not in may]
  if fixed:
    raise ValueError(
      f"--config.{fixed[0]} can't be changed for the run in {workdir}: its answers would be "
      "those of another run; leave it out, or name another --workdir"
    )
  config.update_from_flattened_dict(dict(given))
  return config


def question_sets(task: Task, names: Sequence[str] | None, count: int | None) -> Sets:
  """Chooses what is asked: {name: (questions, tools)}.

  names: None takes the task's held-out sets; ["all"] every question set it has (the papers' order).
  count: questions of each, always the first of one fixed order, so that more is a continuation;
    None is all there are.

  Raises ValueError for a name that is not there.
  """
  if count is None and task.endless:
    raise ValueError(
      "--questions=-1 is all questions, but this task's are made without end; give a number"
    )
  if not names:
    return task.held_out(2**31 if count is None else count)
  available = task.sets(count) if task.sets else task.held_out(count)
  available = {name: available[name] for name in tables.ordered(list(available))}
  wanted = list(available) if list(names) == ["all"] else tables.ordered(names)
  missing = [name for name in wanted if name not in available]
  if missing:
    raise ValueError(
      f"--sets names {', '.join(missing)}, but there are questions of {', '.join(available)} only; "
      "prepare the others with experiments/prepare_data.py and name their folder with "
      "--config.data.evaluation=DIR"
    )
  return {name: available[name] for name in wanted}


def settings(
  config, *, step: int, samples: int, temperature: float, forced: int | None
) -> dict[str, Any]:
  """Collects what the answers depend on, beside the questions themselves."""
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
    kept["corpus"] = fingerprint([path_of(config.data.corpus)])
  return kept


def family_of(folder: str) -> str:
  """Reads the family of protocols of another evaluation: see tags.Tags.family; "" where unknown."""
  path = pathlib.Path(folder)
  found = [path / "settings.json", *path.glob("evaluation/*/settings.json")]
  stored = next((one for one in map(files.find_object, found) if one), {})
  return base.family(stored.get("rollout.protocol", ""))


def fingerprint(paths: Sequence[pathlib.Path]) -> str:
  """Hashes names, sizes, first and last MiB of files: cheap, and finds other weights."""
  digest = hashlib.sha256()
  for path in paths:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
      digest.update(file.read(2**20))
      file.seek(max(0, size - 2**20))
      digest.update(file.read(2**20))
  return digest.hexdigest()[:16]
