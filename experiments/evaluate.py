"""Evaluates a checkpoint of a run, or a preset's weights as they are, on held-out questions.

    python experiments/evaluate.py --workdir=runs/tiny [--questions=400] [--forced=2] [--step=best]
    python experiments/evaluate.py --config=configs/search_r1.py:instruct \\
        --config.policy.checkpoint=runs/x/export --sets=all --questions=-1 --workdir=runs/x_table
    python experiments/evaluate.py --config=configs/baselines.py:rag:smollm2 --sets=nq,hotpotqa \\
        --workdir=runs/rag --compare=runs/x_table

Rollouts are greedy, or --samples=n a question at --temperature; --temperature=0,1 makes both, a row
each. Prints exact match by set in the form of the papers' tables, everything by set and by hops
with 95 % intervals, and a paired test against each --compare; adds the scores to evaluation.json.
--coverage adds a row of the questions that the corpus can answer. WORKDIR/evaluation/NAME/ holds an
answer a line, written as it comes, and table.md, table.tex, table.json. The same command again goes
on where a stopped one was.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

from absl import flags
from ml_collections import config_flags

from stratified import files
from stratified.agents import loop
from stratified.evaluation import answers, coverage, paired, runner, tables
from stratified.retrieval.client import RetrieverDown
from stratified.runs import build, checkpoint, command_line, evaluations, held_out
from stratified.runs import samplers as servers
from stratified.runs import workdir as workdirs
from stratified.runs.stop import Early, Stop
from stratified.runs.weights import of_stage
from stratified.sampling.sglang.errors import SamplerError
from stratified.tasks import base

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "The preset, where the workdir holds no run."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.", required=True)
_STEP = command_line.define_step(
  "step", "Which checkpoint of the run, or best, on held-out questions; the newest unless given."
)
_QUESTIONS = flags.DEFINE_integer(
  "questions",
  0,
  "Questions of each set; 0 is the config's eval.questions, -1 is all.",
  lower_bound=-1,
)
_SETS = flags.DEFINE_list(
  "sets", None, "Question sets by name, or all; without it, the held-out questions of the config."
)
_FORCED = flags.DEFINE_integer("forced", None, "Make every rollout search exactly this often.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "Rollouts of each question.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_list(
  "temperature",
  [],
  "0 is greedy, as one rollout is; several rollouts take the config's. With commas, a row each.",
)
_COVERAGE = flags.DEFINE_string(
  "coverage", None, "A file of audit_corpus.py: adds a row of the questions that it calls covered."
)
_COMPARE = flags.DEFINE_list(
  "compare", [], "Workdirs or evaluation folders: rows of the table, each with a paired test."
)
_NAME = flags.DEFINE_string(
  "name", None, "The folder under WORKDIR/evaluation; by default it says what was evaluated."
)
_LABEL = flags.DEFINE_string("label", None, "The row's name in the tables.")


@dataclasses.dataclass(frozen=True)
class Asked:
  """What all evaluations of a command share."""

  made: build.Run
  sets: base.Sets
  limits: Any
  step: int | None  # None where the weights are the preset's
  known: dict[str, bool] | None  # what the corpus can answer, where --coverage says it
  others: dict[str, dict[str, answers.Rows]]


def main(_) -> None:
  stop = Stop()
  try:
    run(stop)
  except Early:
    print("stopped before the first answer; the same command begins again", file=sys.stderr)
    sys.exit(command_line.INTERRUPTED if stop.interrupted else 1)


def run(stop: Stop) -> None:
  workdir = pathlib.Path(_WORKDIR.value)
  try:
    config, stored = _config(workdir)
    if _STEP.value is not None and not stored:
      raise ValueError(f"--step={_STEP.value} is a checkpoint's, and {workdir} holds no run")
    temperatures = _temperatures(config)
    others = {folder: answers.open_folder(folder) for folder in _COMPARE.value}
    known = coverage.read(_COVERAGE.value) if _COVERAGE.value else None
    if _QUESTIONS.value > 0:
      config.eval.questions = _QUESTIONS.value
    with stop.at_once():
      made = build.build(config)
    limits = base.limits(config, forced_searches=_FORCED.value)
    count = _QUESTIONS.value if _QUESTIONS.value < 0 else config.eval.questions
    sets = evaluations.question_sets(made.task, _SETS.value, None if count < 0 else count)
    paired.check_shared({name: questions for name, (questions, _) in sets.items()}, others)
    if known is not None:
      coverage.check(known, {name: of for name, (of, _) in sets.items()}, _COVERAGE.value)
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  build.enable_compilation_cache()
  try:
    with stop.at_once():
      step, params = restore(made, workdir, _STEP.value) if stored else (None, None)
  except ValueError as error:
    sys.exit(f"{error}")
  asked = Asked(made, sets, limits, step, known, others)
  folder, rows = workdir, []
  try:
    for temperature in temperatures:
      folder = workdir / "evaluation" / _folder(step, temperature)
      kept = answers.Answers(folder, _settings(config, step, temperature))
      if params is None:
        with stop.at_once():
          params = build.initial_params(config, made.model, made.mesh)
      found = _evaluate(asked, params, temperature, kept, stop)
      rows += _write(workdir, folder, asked, found, temperature, several=len(temperatures) > 1)
    if len(temperatures) > 1:
      print("\n" + tables.markdown(rows))
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  except (RetrieverDown, SamplerError) as error:
    sys.exit(f"{error}; the answers so far are in {folder}")
  except runner.Stopped:
    said = f"stopped; the answers so far are in {folder}, the same command goes on"
    print(said, file=sys.stderr)
    sys.exit(command_line.INTERRUPTED if stop.interrupted else 1)


def _settings(config, step: int | None, temperature: float) -> dict[str, Any]:
  return evaluations.settings(
    config, step=step or 0, samples=_SAMPLES.value, temperature=temperature, forced=_FORCED.value
  )


def _evaluate(asked: Asked, params, temperature: float, kept: answers.Answers, stop: Stop) -> dict:
  """Evaluates every set at one temperature: {set: [Q][K] rows}."""
  made, task = asked.made, asked.made.task
  config = made.config.copy_and_resolve_references()
  config.rollout.temperature = temperature or config.rollout.temperature
  with servers.samplers(config, made.mesh, made.model, task.tokenizer) as samplers:
    sampler = samplers[temperature == 0]
    sampler.load(params, runner.FIRST_STEP)
    collect = functools.partial(
      loop.collect,
      sampler=sampler,
      tokenizer=task.tokenizer,
      protocol=task.protocol,
      limits=asked.limits,
    )
    return {
      name: runner.run(
        name,
        questions,
        functools.partial(collect, tools=tools),
        tools=task.tool_names,
        samples=_SAMPLES.value,
        kept=kept,
        stop=lambda: stop.asked,
      )
      for name, (questions, tools) in asked.sets.items()
    }


def _write(workdir, folder, asked: Asked, found: dict, temperature: float, several: bool) -> list:
  """Writes the tables of one evaluation; returns its rows."""
  label = _LABEL.value or workdir.name + ("" if asked.step is None else f", step {asked.step}")
  label += f", temperature {temperature:g}" if several else ""
  rows = [runner.table_row(label, found, getattr(asked.made.task.protocol, "family", ""))]
  if asked.known is not None:
    rows.append(
      runner.table_row(f"{label}, covered", coverage.covered(found, asked.known), rows[0]["family"])
    )
  others = [
    (other, _row_of(other, theirs), paired.differences(found, theirs))
    for other, theirs in asked.others.items()
  ]
  write(workdir, folder, asked.step or 0, rows, others, temperature)
  return rows


def write(workdir, folder, step: int, rows: list, others: list, temperature: float) -> None:
  """Prints the tables and writes them to files; the first row's scores go to evaluation.json too.

  rows: ours. others: (folder, its row, paired tests) of each evaluation to compare with.
  """
  row, rows = rows[0], [*rows, *(other for _, other, _ in others)]
  parts = [tables.markdown(rows), tables.markdown(rows, "f1"), tables.details(row)]
  parts += [tables.comparison(row["label"], name, tests) for name, _, tests in others]
  text = "\n\n".join(parts)
  print(text)
  files.write_atomic(folder / "table.md", text + "\n")
  files.write_atomic(folder / "table.tex", tables.latex(rows) + "\n")
  found = {name: tests for name, _, tests in others}
  files.write_json(folder / "table.json", {"rows": rows, "paired": found})
  scores = {"step": step, "sets": row["sets"], "average": row["average"]}
  plain = _SAMPLES.value == 1 and _STEP.value is None
  if _FORCED.value is not None or not plain or temperature:
    forced = _FORCED.value is not None and plain
    scores = {f"forced_{_FORCED.value}" if forced else folder.name: scores}
  elif _SETS.value:
    scores["sets"] = _sets_of_step(workdir, step) | scores["sets"]
  held_out.record(workdir, scores)


def restore(made: build.Run, workdir, step: int | str | None = None):
  """Restores (step, parameters) of the newest checkpoint, or of that step, or "best".

  (0, None) where nothing is saved yet.
  """
  weights = of_stage(made, made.last, workdir)
  found = weights.restore_policy(workdir, checkpoint.step_of(workdir, step))
  return (found[1], found[0]) if found else (0, None)


def _config(workdir: pathlib.Path):
  """Reads the config to evaluate with, and says whether it is that of a run in the workdir."""
  stored = workdir / "config.json"
  if stored.exists():
    if command_line.named():
      raise ValueError(
        f"--config is not used, since {workdir} holds a run with a config of its own; leave it out "
        "(fields that may change can be given, such as --config.retriever.url=URL), or name "
        "another --workdir"
      )
    given = {}
    if _CONFIG.value is not None:
      given = config_flags.get_override_values(flags.FLAGS["config"])
    return evaluations.for_evaluation(evaluations.stored_config(workdir, given)), True
  if not command_line.named():
    raise ValueError(
      f"{workdir} holds no run (no config.json): train one there, or name a preset with "
      "--config=configs/search_r1.py:PRESET"
    )
  return evaluations.for_evaluation(_CONFIG.value), False


def _temperatures(config) -> list[float]:
  """Chooses temperatures: one rollout is greedy unless told otherwise, several can't be."""
  if not _TEMPERATURE.value:
    return [0.0 if _SAMPLES.value == 1 else config.rollout.temperature]
  given = ",".join(_TEMPERATURE.value)
  try:
    found = [float(text) for text in _TEMPERATURE.value]
  except ValueError:
    found = [-1.0]
  if not all(0 <= value < 1e9 for value in found) or len(set(found)) < len(found):
    raise ValueError(
      f"--temperature={given} must be numbers of at least 0, each once, as in --temperature=0,1"
    )
  if 0 in found and _SAMPLES.value > 1:
    raise ValueError(
      f"--samples={_SAMPLES.value} at --temperature=0 would be the same rollout {_SAMPLES.value} "
      "times; "
      "give a temperature above 0 or leave --samples=1"
    )
  if _NAME.value and len(found) > 1:
    raise ValueError(
      f"--name={_NAME.value!r} is one folder, and --temperature={given} needs {len(found)}; leave "
      "it out"
    )
  return found


def _folder(step: int | None, temperature: float) -> str:
  parts = ["as_given" if step is None else f"step_{step:06d}"]
  parts += [] if _FORCED.value is None else [f"forced_{_FORCED.value}"]
  parts += [] if not temperature else [f"samples_{_SAMPLES.value}", f"temperature_{temperature:g}"]
  name = _NAME.value or "_".join(parts)
  if pathlib.Path(name).name != name or name in (".", ".."):
    raise ValueError(f"--name={name!r} must be the name of a folder, without a path")
  return name


def _sets_of_step(workdir: pathlib.Path, step: int) -> dict:
  """Reads the sets of the same step in evaluation.json: evaluating others must not forget them."""
  known = workdirs.evaluation_of(workdir)
  return known.get("sets", {}) if known.get("step") == step else {}


def _row_of(label: str, theirs: dict[str, answers.Rows]) -> dict:
  """Makes the row of another evaluation."""
  sets = {name: answers.by_question(rows) for name, rows in theirs.items() if rows}
  return runner.table_row(label, sets, evaluations.family_of(label))


if __name__ == "__main__":
  command_line.run(main, fields_of="configs/search_r1.py:tiny")
