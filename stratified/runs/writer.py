"""Writes metrics.jsonl, TensorBoard events and trajectories/step_NNNNNN.jsonl while a run trains.

The three follow one rule, so that a run that was killed and resumed leaves what an uninterrupted
one leaves: a row belongs to the step it carries, a step's rows are written before its checkpoint,
and opening a workdir cuts everything back to the step that was restored.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
import os
import pathlib
import re
from typing import Any

import numpy as np

from stratified import files
from stratified.config import setting, Settings
from stratified.runs import events
from stratified.runs.workdir import MAIN
from stratified.types import Trajectory

Row = dict[str, Any]
# (workdir, name of the curve's run, first step) -> what takes its numbers, see events.Backend
OpenBackend = Callable[[pathlib.Path, str, int | None], events.Backend]


@dataclasses.dataclass(frozen=True)
class LoggingSettings(Settings):
  """What a run writes of its rollouts."""

  SECTION = "logging"
  trajectories_every: int = setting(
    1, "steps between two files of rollouts in trajectories/; 0 writes none", low=0, affects=[]
  )
  tracker: str = setting(
    "none",
    "where the numbers go beside TensorBoard",
    choices=["none", "wandb", "mlflow", "trackio"],
    affects=[],
  )
  project: str = setting(
    "stratified", "tracker: the project, or experiment, that the run belongs to", affects=[]
  )


STEPS = ("step", "warm_start/step")
TOKENS = ("run/sampled_tokens", "run/trained_tokens")
_TRAJECTORY_FILE = re.compile(r"step_(\d+)\.jsonl")


def trajectory_path(workdir: str | os.PathLike, step: int) -> pathlib.Path:
  return pathlib.Path(workdir) / "trajectories" / f"step_{step:06d}.jsonl"


def trajectory_record(
  trajectory: Trajectory,
  decode: Callable[[Sequence[int]], str],
  *,
  reward: float | None,
  stratum: int | None,
  advantage: float | None,
  tools: Sequence[str] = ("search",),
) -> Row:
  """Makes a rollout a JSON object: what was asked, every segment as text, what it was worth.

  Args:
    trajectory: the rollout.
    decode: token ids -> text, special tokens kept.
    reward, stratum, advantage: the rollout's numbers in the step; None for a lost one.
    tools: names of the tools that are counted under `calls`, called or not.

  Returns:
    question_id, question, golden_answers, source, hops, sample, segments (origin, text, number of
    tokens), turns (action, and of each call its tool, argument, outcome, results), searches (a
    count), calls (counts by tool), answer, stop, fault, weight_version, reward, stratum, advantage.
  """
  question = trajectory.question
  segments = [
    (segment.origin, decode(list(segment.token_ids)), len(segment.token_ids))
    for segment in trajectory.segments
  ]
  return {
    "question_id": question.id,
    "question": question.text,
    "golden_answers": list(question.golden_answers),
    "source": question.source,
    "hops": question.hops,
    "sample": trajectory.sample,
    "segments": [
      {"origin": origin, "text": text, "tokens": tokens} for origin, text, tokens in segments
    ],
    "turns": [
      {"action": turn.action, "calls": [dataclasses.asdict(call) for call in turn.calls]}
      for turn in trajectory.turns
    ],
    "searches": trajectory.num_searches,
    "calls": {tool: trajectory.num_calls(tool) for tool in tools},
    "answer": trajectory.answer,
    "stop": trajectory.stop,
    "fault": trajectory.fault,
    "weight_version": trajectory.weight_version,
    "reward": reward,
    "stratum": stratum,
    "advantage": advantage,
  }


def trajectory_records(
  groups, decode: Callable, reward, strata, advantage_qk, tools: Sequence[str] = ("search",)
) -> list[Row]:
  """Makes a `trajectory_record` of each rollout of a step; all arguments are [Q, K].

  A lost rollout has no reward, stratum or advantage.
  """
  rows = []
  for q, group in enumerate(groups):
    for k, trajectory in enumerate(group):
      lost = trajectory.fault is not None
      rows.append(
        trajectory_record(
          trajectory,
          decode,
          reward=None if lost else reward[q][k],
          stratum=None if lost else strata[q][k],
          advantage=None if lost else float(advantage_qk[q, k]),
          tools=tools,
        )
      )
  return rows


class Writer:
  """Appends rows and trajectories to a workdir, which it first cuts back to the restored step.

  Args:
    workdir: the run's folder, made if missing.
    resume_step: the step of the restored checkpoint, None when training starts from nothing. Rows
      and trajectory files of later steps are removed; None removes every row that carries a step.
    warm_start_step: how much of the warm start was kept when `resume_step` is None; later
      warm-start rows are removed. A restored checkpoint keeps them all.
    active: False on every process but the first; nothing is read or written then.
    backends: what takes the numbers of the rows beside metrics.jsonl, see events.Backend.

  Raises:
    ValueError: a line of metrics.jsonl other than the last is no JSON object.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    resume_step: int | None = None,
    *,
    warm_start_step: int = 0,
    active: bool = True,
    backends: Sequence[OpenBackend] = (events.TensorBoard,),
  ):
    self._workdir = pathlib.Path(workdir)
    self._active = active
    self._open_backends = backends
    self._backends: dict[str, list[events.Backend]] = {}
    self._purge = {
      "train": -1 if resume_step is None else resume_step,
      "warm_start": math.inf if resume_step is not None else warm_start_step,
    }
    self._last_step, self._tokens = -1, dict.fromkeys(TOKENS, 0)
    self._evaluated: set[int] = set()
    if not active:
      return
    self._workdir.mkdir(parents=True, exist_ok=True)
    (self._workdir / "trajectories").mkdir(exist_ok=True)
    kept = _cut_back(self._workdir / "metrics.jsonl", self._purge)
    _say_what_is_gone(self._workdir / "metrics.jsonl", kept, resume_step, warm_start_step)
    self._evaluated = {row["step"] for row in kept if "step" in row and MAIN in row}
    self._last_step = max((row["step"] for row in kept if "step" in row), default=-1)
    for row in kept:
      self._tokens |= {key: row[key] for key in TOKENS if isinstance(row.get(key), int)}
    _remove_trajectories(self._workdir / "trajectories", self._purge["train"])
    self._file = (self._workdir / "metrics.jsonl").open("ab")

  def write(self, row: Mapping[str, Any], *, sampled: int = 0, trained: int = 0) -> None:
    """Appends one row, flushed to the system before returning, and its numbers to the backends.

    sampled: tokens that the policy wrote for training since the last row; trained: tokens that
    updates ran over, each pass counted. A row with either carries both sums since the run's start.

    A row carries `step` (training and evaluation) or `warm_start/step`. Values are numbers,
    strings, None or 0-d arrays. JSON has no word for a number that is not finite: it is written as
    null, and named with its value under `not_finite`.

    Raises:
      ValueError: the row carries no step, or an earlier step than a row before it.
    """
    if not self._active:
      return
    row = _plain_row(row)
    run, step = (
      ("train", row["step"]) if "step" in row else ("warm_start", row.get("warm_start/step"))
    )
    if not isinstance(step, int):
      raise ValueError(
        f"a row of metrics.jsonl needs an integer step or warm_start/step, not {step!r}"
      )
    if run == "train":
      if step < self._last_step:
        raise ValueError(
          f"step {step} comes after step {self._last_step}, but metrics.jsonl never goes "
          "back: open a new Writer with the restored step to repeat steps"
        )
      self._last_step = step
    if sampled or trained:
      for key, count in zip(TOKENS, (sampled, trained)):
        self._tokens[key] += int(count)
      row |= self._tokens
    self._file.write(files.json_line(row))
    self._file.flush()
    self._write_curves(run, step, row)

  def write_trajectories(self, step: int, records: Iterable[Row]) -> None:
    """Writes trajectories/step_NNNNNN.jsonl, a `trajectory_record` a line, whole or not at all."""
    if self._active:
      with files.replacing(trajectory_path(self._workdir, step)) as part:
        part.write_bytes(b"".join(files.json_line(_finite(record)) for record in records))

  def evaluated(self, step: int) -> bool:
    """Whether the rows that were there at the start have held-out scores of that step."""
    return step in self._evaluated

  def close(self) -> None:
    if self._active:
      self._file.close()
      for backend in (one for opened in self._backends.values() for one in opened):
        backend.close()
      self._backends = {}

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _write_curves(self, run: str, step: int, row: Row) -> None:
    """Writes warm start and training as two runs for a viewer, each with steps of its own."""
    if run not in self._backends:
      last = self._purge[run]
      first = None if last == math.inf else int(last) + 1
      self._backends[run] = [opened(self._workdir, run, first) for opened in self._open_backends]
    numbers = {
      key: value
      for key, value in row.items()
      if isinstance(value, (int, float)) and key not in ("step", "warm_start/step")
    }
    for backend in self._backends[run]:
      backend.write(step, numbers)


def _cut_back(path: pathlib.Path, last: Mapping[str, float]) -> list[Row]:
  """Drops the first row beyond the restored step and all after it; returns the rest.

  Rows are in the order of time. A half-written last line, left by a killed process, goes too.
  """
  if not path.exists():
    return []
  lines = path.read_bytes().split(b"\n")
  torn = lines.pop()  # after the last newline: nothing, unless the process died while writing
  kept = []
  for number, line in enumerate(lines, 1):
    row = files.parse_object(line)
    if row is not None and not all(isinstance(row.get(key, 0), int) for key in STEPS):
      row = None
    if row is None and number < len(lines):
      raise ValueError(
        f"{path}:{number} is no JSON object with a step, and only the last line can be "
        "half-written by a killed run: repair or remove that line, or start in a new workdir"
      )
    if row is None or row.get("step", -1) > last["train"]:
      break
    if row.get("warm_start/step", 0) > last["warm_start"]:
      break
    kept.append(row)
  if torn or len(kept) < len(lines):
    with files.replacing(path) as part:
      part.write_bytes(b"".join(line + b"\n" for line in lines[: len(kept)]))
  return kept


def _say_what_is_gone(
  path: pathlib.Path, kept: Sequence[Row], resume_step, warm_start_step
) -> None:
  """Prints a sentence where a resumed run's rows do not reach the step that it goes on from."""
  key, wanted = ("step", resume_step) if resume_step else ("warm_start/step", warm_start_step)
  last = max((row[key] for row in kept if isinstance(row.get(key), int)), default=0)
  if last < wanted:
    what = f"ends at {key} {last}" if path.exists() else "is gone"
    print(
      f"{path} {what}, but the checkpoint is of {key} {wanted}: the rows between are lost, and "
      "curves and alarms begin after them; bring the file back from a copy and start again, or go "
      "on without",
      flush=True,
    )


def _remove_trajectories(folder: pathlib.Path, last_step: int) -> None:
  for path in folder.iterdir():
    name = _TRAJECTORY_FILE.fullmatch(path.name)
    if path.name.endswith(".part") or (name and int(name.group(1)) > last_step):
      path.unlink()


def _plain_row(row: Mapping[str, Any]) -> Row:
  """Makes a row of plain Python values; what is not finite is None and named in `not_finite`."""
  plain = {
    key: value if value is None or isinstance(value, str) else np.asarray(value).item()
    for key, value in row.items()
  }
  lost = {
    key: str(value)
    for key, value in plain.items()
    if isinstance(value, float) and not math.isfinite(value)
  }
  return _finite(plain) | ({"not_finite": lost} if lost else {})


def _finite(value: Any) -> Any:
  """Replaces every number that is not finite, however deep, by None; makes arrays plain."""
  if isinstance(value, Mapping):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(item) for item in value]
  if value is not None and not isinstance(value, (str, bool, int, float)):
    value = np.asarray(value).item()
  return None if isinstance(value, float) and not math.isfinite(value) else value
