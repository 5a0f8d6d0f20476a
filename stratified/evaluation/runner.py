"""The parts of experiments/evaluate.py: which questions, what the scores depend on, the rollouts,
and their numbers."""

from collections.abc import Mapping, Sequence
import hashlib
import pathlib
from typing import Any

from stratified import files
from stratified.agents import loop
from stratified.config import Rule, unaffected
from stratified.evaluation import answers, intervals, tables
from stratified.evaluation import score as scoring
from stratified.progress import Progress
from stratified.tasks.base import Sets, Task
from stratified.tasks.search_qa import path_of
from stratified.types import Question

FIRST_STEP = 2**30  # names the random keys of evaluation; training never gets so far
CHUNK = 256  # questions in flight; more would only delay the progress line


class Stopped(Exception):
  """Asked to stop; what has ended is kept."""


def for_evaluation(config):
  """The config with the questions of data.evaluation, where it has any, in place of those of
  training."""
  if config.data.name == "files" and config.data.evaluation:
    config.data.questions, config.data.split = config.data.evaluation, ""
  return config


def question_sets(config, world: Task, names: Sequence[str] | None, count: int | None) -> Sets:
  """What is asked: {name: (questions, tools)}.

  names: None takes the world's held-out sets; ["all"] every question set of the files (the papers'
    order). count: questions of each, always the first of one fixed order, so that more is a
    continuation; None is all there are.

  Raises ValueError for a name that is not there.
  """
  if count is None and world.endless:
    raise ValueError(
      "--questions=-1 is all questions, but this task's are made without end; give a number"
    )
  if not names:
    return world.held_out(2**31 if count is None else count)
  available = world.sets(count) if world.sets else world.held_out(count)
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
  config,
  rules: Mapping[str, Rule],
  *,
  step: int,
  samples: int,
  temperature: float,
  forced: int | None,
) -> dict[str, Any]:
  """What the answers depend on, beside the questions themselves. rules: of the config's fields."""
  kept = files.flatten(config.to_dict())
  for name in unaffected(rules, "answers"):
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


def run(
  kept: answers.Answers,
  name: str,
  questions: list[Question],
  *,
  world: Task,
  tools,
  sampler,
  limits,
  samples: int,
  stop,
) -> list[list[dict]]:
  """[Q][K] rows of a set: those that are kept already, and the rest run now, each written as it
  ends.

  Raises Stopped where `stop` was asked, ValueError where a kept answer is to another question of
  the same id.
  """
  known, ids = kept.read(name), [question.id for question in questions]
  for question in questions:
    row = known.get((question.id, 0))
    if row and (row["question"], row["golden_answers"]) != (
      question.text,
      list(question.golden_answers),
    ):
      raise ValueError(
        f"{kept.path(name)} answers another question {question.id!r} than the data hold now; name "
        "another "
        "folder with --name or --workdir"
      )
  todo = answers.unfinished(known, ids, samples)

  def ended(trajectory):
    kept.append(name, trajectory)
    if trajectory.sample == samples - 1:
      progress.update(1)
    if stop.asked:
      raise Stopped

  with Progress(
    len(questions), f"questions of {name}", done=len(questions) - len(todo)
  ) as progress:
    for at in range(0, len(todo), CHUNK):
      part = todo[at : at + CHUNK]
      loop.collect(
        [questions[i] for i in part],
        indices=part,
        sampler=sampler,
        tools=tools,
        tokenizer=world.tokenizer,
        protocol=world.protocol,
        limits=limits,
        samples_per_question=samples,
        step=_step(name),
        on_end=ended,
      )
  return answers.groups(kept.read(name), ids, samples)


def _step(name: str) -> int:
  """The step in a set's random keys: each set has its own, whichever others are run beside it."""
  return FIRST_STEP + int.from_bytes(hashlib.sha256(name.encode()).digest()[:3])


def row(label: str, sets: Mapping[str, list[list[dict]]]) -> dict[str, Any]:
  """A row of the tables: scores by set with intervals, and their mean over sets."""
  scores = {name: scoring.summarise(groups, intervals=True) for name, groups in sets.items()}
  average = {}
  for key in ("exact_match", "f1"):
    by_set = {name: scoring.by_question(groups, key) for name, groups in sets.items()}
    if all(by_set.values()):
      average[key] = sum(score[key] for score in scores.values()) / len(scores)
      average[f"{key}_interval"] = list(intervals.bootstrap_interval(by_set))
  return {"label": label, "sets": scores, "average": average}


def check_shared(
  sets: Sets, others: Mapping[str, Mapping[str, Mapping[tuple[str, int], dict]]]
) -> None:
  """Refuses, before any work, to compare with an evaluation of other questions."""
  asked = {(name, question.id) for name, (questions, _) in sets.items() for question in questions}
  for folder, theirs in others.items():
    if not asked & {(name, id) for name, rows in theirs.items() for id, _ in rows}:
      raise ValueError(
        f"--compare={folder} holds no answer to any of these questions; evaluate the same --sets "
        "there"
      )


def paired(
  ours: Mapping[str, list[list[dict]]], theirs: Mapping[str, Mapping[tuple[str, int], dict]]
) -> dict[str, dict]:
  """{set: paired test of exact match on the questions that both answered}, and "average" over these
  sets.

  Raises ValueError where the two share no question, or one id names two questions.
  """
  first, second = {}, {}
  for name in ours.keys() & theirs.keys():
    other = _by_id(theirs[name].values())
    mine = _by_id([row for group in ours[name] for row in group])
    shared = [id for id in mine if id in other]
    for id in shared:
      if mine[id][0]["question"] != other[id][0]["question"]:
        raise ValueError(
          f"question {id!r} of {name} is not the same in both evaluations: they can't be compared"
        )
    if shared:
      first[name] = scoring.by_question([mine[id] for id in shared], "exact_match")
      second[name] = scoring.by_question([other[id] for id in shared], "exact_match")
  if not first:
    raise ValueError(
      "the two evaluations have no answered question in common: there is nothing to compare"
    )
  found = {
    name: intervals.paired_difference({name: first[name]}, {name: second[name]})
    | {"count": len(first[name])}
    for name in tables.ordered(list(first))
  }
  if len(found) > 1:
    found["average"] = intervals.paired_difference(first, second) | {
      "count": sum(map(len, first.values()))
    }
  return found


def _by_id(rows) -> dict[str, list[dict]]:
  """The rollouts that were not lost, by question."""
  grouped = {}
  for one in rows:
    if one["fault"] is None:
      grouped.setdefault(one["id"], []).append(one)
  return grouped
