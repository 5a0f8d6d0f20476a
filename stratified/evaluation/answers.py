"""The folder of one evaluation: a line for each rollout, written as it ends, and what it was made
with.

    settings.json    what the scores depend on; another evaluation never goes on in this folder
    SET.jsonl        a rollout a line: question, answer, scores, calls

A run that was killed leaves whole lines and at most one torn one, which is cut off; rollouts lost
to a fault are tried again.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any
import urllib.parse

from stratified import files
from stratified.evaluation import score
from stratified.types import Trajectory

Row = dict[str, Any]
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


def record(trajectory: Trajectory) -> Row:
  """One rollout as a line: `evaluate.score` with the question, the answer, the policy's turns and
  its calls."""
  question = trajectory.question
  return {
    "id": question.id,
    "sample": trajectory.sample,
    "question": question.text,
    "golden_answers": list(question.golden_answers),
    "answer": trajectory.answer,
    "stop": trajectory.stop,
    **score.score(trajectory),
    "turns": [
      {
        "action": turn.action,
        "text": turn.text,
        "calls": [dataclasses.asdict(call) for call in turn.calls],
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
    settings = json.loads(json.dumps(settings))  # as they will be read: tuples are lists
    if path.exists():
      known = files.read_object(path, "move its folder away")
      differ = sorted(key for key in known.keys() | settings if known.get(key) != settings.get(key))
      if differ:
        told = "; ".join(
          f"{key} was {known.get(key)!r} and is {settings.get(key)!r}" for key in differ[:4]
        )
        raise ValueError(
          f"{self.folder} holds an evaluation with other settings ({told}"
          f"{' ...' if len(differ) > 4 else ''}); name another folder with --name or --workdir"
        )
    else:
      self.folder.mkdir(parents=True, exist_ok=True)
      files.write_atomic(path, json.dumps(settings, indent=2) + "\n")

  def read(self, name: str) -> dict[tuple[str, int], Row]:
    """The rollouts of a set by (question id, sample), the newest line of each; a torn last line is
    cut off."""
    path = self.path(name)
    if path.exists():
      whole = path.read_bytes()
      if not whole.endswith(b"\n") and whole:
        with path.open("r+b") as file:
          file.truncate(whole.rfind(b"\n") + 1)
    return read(path)

  def append(self, name: str, trajectory: Trajectory) -> None:
    """Adds a rollout, handed to the system before this returns."""
    with self.path(name).open("ab") as file:
      file.write((json.dumps(record(trajectory)) + "\n").encode())

  def path(self, name: str) -> pathlib.Path:
    # a set's name comes from a data file: it must not lead out of the folder
    return self.folder / f"{urllib.parse.quote(name, safe='')}.jsonl"


def read(path: str | os.PathLike) -> dict[tuple[str, int], Row]:
  """A set's rollouts by (question id, sample). Raises ValueError for a line that is none."""
  rows, broken = files.read_rows(path)
  if broken or any(not row.keys() >= _NEEDED for row in rows):
    raise ValueError(
      f"{path} holds lines that are no rollouts: move it away, the same command makes it again"
    )
  return {(row["id"], row["sample"]): row for row in rows}


def unfinished(known: Mapping[tuple[str, int], Row], ids: Sequence[str], samples: int) -> list[int]:
  """Positions of the questions that lack a rollout or lost one."""
  lacks = lambda id: any(
    (id, k) not in known or known[id, k]["fault"] is not None for k in range(samples)
  )
  return [at for at, id in enumerate(ids) if lacks(id)]


def groups(
  known: Mapping[tuple[str, int], Row], ids: Sequence[str], samples: int
) -> list[list[Row]]:
  """[Q][K] rows of the questions, in their order, those that there are."""
  return [[known[id, k] for k in range(samples) if (id, k) in known] for id in ids]


def open_folder(path: str | os.PathLike) -> dict[str, dict[tuple[str, int], Row]]:
  """{set: rollouts} of a finished evaluation's folder, or of a workdir that holds exactly one.

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
