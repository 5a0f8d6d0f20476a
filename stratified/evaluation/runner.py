"""The evaluation loop: every question of a set is answered, in memory or kept line by line.

The loop knows neither the config nor the processes of a run. Both stand in the `collect` that it is
given: `agents.loop.collect` with sampler, tools, tokenizer, protocol and limits filled in, and
with several processes each one's share exchanged:

    lambda questions, **how: processes.exchange(my_share(questions, **how), len(questions))
"""

from collections.abc import Callable, Mapping, Sequence
import hashlib
from typing import Any

from stratified.evaluation import answers, intervals
from stratified.evaluation import score as scoring
from stratified.progress import Progress
from stratified.types import Question, Trajectory

FIRST_STEP = 2**30  # names the random keys of evaluation; training never gets so far
CHUNK = 256  # questions in flight; more would only delay the progress line

Row = dict[str, Any]
# (questions, indices=, samples_per_question=, step=, on_end=) -> [n][K] trajectories; calls
# on_end(trajectory) for each that ends, on the process that made it.
Collect = Callable[..., Sequence[Sequence[Trajectory]]]


class Stopped(Exception):
  """Asked to stop; what has ended is kept."""


def run(
  name: str,
  questions: Sequence[Question],
  collect: Collect,
  *,
  tools: Sequence[str] = (),
  samples: int = 1,
  kept: answers.Answers | None = None,
  stop: Callable[[], bool] = lambda: False,
  what: str = "",
  active: bool = True,
) -> list[list[Row]]:
  """[Q][K] rows (`answers.record`) of a set, for `score.summarise`.

  Args:
    name: the set's; it also names the random keys, so that a set's rollouts are the same whichever
      sets are run beside it, and more questions continue fewer.
    collect: makes the rollouts of some questions, see above.
    tools: names of the tools whose calls are counted, called or not.
    samples: K, rollouts of each question.
    kept: the folder that holds answers of an earlier call, which are not made again, and takes
      each new one as it ends. None keeps nothing.
    stop: asked after each rollout that ends here.
    what: more words for the progress line.
    active: False shows no progress (every process but the first).

  Raises Stopped where `stop` says so, ValueError where a kept answer is to another question of the
  same id.
  """
  known = kept.read(name) if kept else {}
  if kept:
    kept.check_questions(name, questions, known)
  rows = [[known.get((question.id, k)) for k in range(samples)] for question in questions]
  todo, shown = answers.unfinished(rows), 0

  def ended(trajectory: Trajectory) -> None:
    nonlocal shown
    if kept:
      kept.append(name, trajectory, tools)
    if trajectory.sample == samples - 1:  # this process's alone; the rest is counted at the end
      shown += 1
      progress.update(1)
    if stop():
      raise Stopped

  with Progress(
    len(questions), f"questions of {name}{what}", done=len(questions) - len(todo), active=active
  ) as progress:
    for at in range(0, len(todo), CHUNK):
      part, shown = todo[at : at + CHUNK], 0
      groups = collect(
        [questions[i] for i in part],
        indices=part,
        samples_per_question=samples,
        step=step_of(name),
        on_end=ended,
      )
      for i, group in zip(part, groups, strict=True):
        rows[i] = [answers.record(trajectory, tools) for trajectory in group]
      progress.update(len(part) - shown)
  return rows


def step_of(name: str) -> int:
  """The step in the random keys of a set."""
  return FIRST_STEP + int.from_bytes(hashlib.sha256(name.encode()).digest()[:3])


def table_row(
  label: str, sets: Mapping[str, Sequence[Sequence[Row]]], family: str = ""
) -> dict[str, Any]:
  """A row of the tables: scores by set with intervals, and three means of them.

  average[key] is the mean over sets, as the papers give it; KEY_without_bamboogle leaves that set
  out, whose 125 questions weigh as much as another's thousands; KEY_micro is the mean over
  questions. family: which protocols compare, see tags.Tags.family.
  """
  scores = {name: scoring.summarise(groups, with_intervals=True) for name, groups in sets.items()}
  average = {}
  for key in ("exact_match", "f1"):
    by_set = {name: scoring.by_question(groups, key) for name, groups in sets.items()}
    if by_set and all(by_set.values()):
      means = {name: score[key] for name, score in scores.items()}
      average[key] = sum(means.values()) / len(means)
      average[f"{key}_interval"] = list(intervals.interval(by_set))
      pooled = [value for values in by_set.values() for value in values]
      average[f"{key}_micro"] = sum(pooled) / len(pooled)
      if others := [mean for name, mean in means.items() if name != "bamboogle"]:
        average[f"{key}_without_bamboogle"] = sum(others) / len(others)
  return {"label": label, "family": family, "sets": scores, "average": average}
