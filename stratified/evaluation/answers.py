"""The folder of one evaluation: a line for each rollout, written as it ends, and the settings.

    settings.json    what the scores depend on; another evaluation never goes on in this folder
    SET.jsonl        a rollout a line: question, answer, scores, calls

A run that was killed leaves whole lines and at most one torn one, which is cut off; rollouts lost
to a fault are tried again.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os
import pathlib
from typing import Any
import urllib.parse

from stratified import files
from stratified.evaluation import score
from stratified.types import Question, Trajectory

Row = dict[str, Any]
Rows = dict[tuple[str, int], Row]  # (question id, sample) -> row
_NEEDED = {
  "id",
  "sample",
  "question",
  "golden_answers",
  "exact_match",
  "f1",
  "searches",
  "invalid",
  "tokens",
  "hops",
  "fault",
}


def record(trajectory: Trajectory, tools: Sequence[str] = ()) -> Row:
  """Makes a rollout's line: `score.score`, question, answer, the policy's turns and calls."""
  question = trajectory.question
  return {
    "id": question.id,
    "sample": trajectory.sample,
    "question": question.text,
    "golden_answers": list(question.golden_answers),
    "answer": trajectory.answer,
    "stop": trajectory.stop,
    **score.score(trajectory, tools),
    "turns": [
      {
        "action": turn.action,
        "text": turn.text,
        # Lists, not tuples: a row is the same whether it was made or read.
        "calls": files.plain([dataclasses.asdict(call) for call in turn.calls]),
      }
      for turn in trajectory.turns
    ],
  }


class Answers:
  """The lines of one folder.

  Raises ValueError where the folder holds an evaluation made with other settings, naming them.
  """

  def __init__(self, folder: str | os.PathLike, settings: Mapping[str, Any]):
    self.folder = pathlib.Path(folder)
    path = self.folder / "settings.json"
    settings = files.plain(settings)  # as they will be read: tuples are lists
    if path.exists():
      _refuse_other_settings(self.folder, files.read_object(path, "move its folder away"), settings)
    else:
      self.folder.mkdir(parents=True, exist_ok=True)
      files.write_json(path, settings)

  def read(self, name: str) -> Rows:
    """Reads the rollouts of a set, the newest line of each, and cuts off a torn last line."""
    files.cut_torn_line(self.path(name))
    return read(self.path(name))

  def append(self, name: str, trajectory: Trajectory, tools: Sequence[str] = ()) -> None:
    """Adds a rollout, handed to the system before this returns."""
    files.append_rows(self.path(name), [record(trajectory, tools)])

  def path(self, name: str) -> pathlib.Path:
    # a set's name comes from a data file: it must not lead out of the folder
    return self.folder / f"{urllib.parse.quote(name, safe='')}.jsonl"

  def check_questions(self, name: str, questions: Sequence[Question], known: Rows) -> None:
    """Raises ValueError where an id names two questions, or another one than the kept answer's."""
    texts = {}
    for question in questions:
      asked = (question.text, list(question.golden_answers))
      if texts.setdefault(question.id, asked) != asked:
        raise ValueError(
          f"the set {name} asks two questions of the id {question.id!r}, so their answers can't be "
          "kept apart; evaluate the sets one by one with --sets=all, or give them ids of their own"
        )
      row = known.get((question.id, 0))
      if row and (row["question"], row["golden_answers"]) != asked:
        raise ValueError(
          f"{self.path(name)} answers another question {question.id!r} than the data hold now; "
          "name another folder with --name or --workdir"
        )


def _refuse_other_settings(folder, known: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
  differ = sorted(key for key in known.keys() | settings if known.get(key) != settings.get(key))
  if differ:
    told = "; ".join(
      f"{key} was {known.get(key)!r} and is {settings.get(key)!r}" for key in differ[:4]
    )
    raise ValueError(
      f"{folder} holds an evaluation with other settings ({told}"
      f"{' ...' if len(differ) > 4 else ''}); name another folder with --name or --workdir"
    )


def read(path: str | os.PathLike) -> Rows:
  """Reads a set's rollouts by (question id, sample); ValueError for a line that is none."""
  rows, broken = files.read_rows(path)
  if broken or not all(map(_is_rollout, rows)):
    raise ValueError(
      f"{path} holds lines that are no rollouts: move it away, the same command makes it again"
    )
  return {(row["id"], row["sample"]): row for row in rows}


def _is_rollout(row: Row) -> bool:
  lost = row.get("fault") is not None
  scores = [row.get(key) for key in ("exact_match", "f1")]
  return row.keys() >= _NEEDED and (
    lost or all(isinstance(score, (int, float)) and 0 <= score <= 1 for score in scores)
  )


def unfinished(rows: Sequence[Sequence[Row | None]]) -> list[int]:
  """Positions of the groups that lack a rollout (None) or lost one."""
  lacks = lambda group: any(row is None or row["fault"] is not None for row in group)
  return [at for at, group in enumerate(rows) if lacks(group)]


def open_folder(path: str | os.PathLike) -> dict[str, Rows]:
  """Opens a finished evaluation's folder, or a workdir that holds exactly one: {set: rollouts}.

  Raises FileNotFoundError where there is none, ValueError where there are several to choose from.
  """
  path = pathlib.Path(path)
  if not (path / "settings.json").exists():
    found = sorted(settings.parent for settings in path.glob("evaluation/*/settings.json"))
    if not found:
      raise FileNotFoundError(
        f"{path} holds no evaluation (no settings.json, no evaluation/NAME/settings.json); "
        "make one with experiments/evaluate.py --workdir"
      )
    if len(found) > 1:
      raise ValueError(
        f"{path} holds {len(found)} evaluations; name one of them: {', '.join(map(str, found))}"
      )
    path = found[0]
  return {
    urllib.parse.unquote(file.name.removesuffix(".jsonl")): read(file)
    for file in sorted(path.glob("*.jsonl"))
  }


def by_question(rows: Rows) -> list[list[Row]]:
  """[Q][K] rows, questions in their order in the file, samples in order."""
  grouped = {}
  for (id, _), row in rows.items():
    grouped.setdefault(id, []).append(row)
  return [sorted(group, key=lambda row: row["sample"]) for group in grouped.values()]
