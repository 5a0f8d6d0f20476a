"""Evaluates a run's newest checkpoint, or a preset before any training, greedily on held-out questions.

    python experiments/evaluate.py --workdir=runs/tiny [--questions=400] [--forced=2]
    python experiments/evaluate.py --config=configs/search_r1.py:smollm2 --workdir=runs/smollm2_untrained

Prints exact match by set, in the form of the papers' tables, and by hops; adds the scores to evaluation.json.
With --config and no run in the workdir the policy is the preset's checkpoint as it stands.
"""

import json
import pathlib
import sys

from absl import app, flags
import ml_collections
from ml_collections import config_flags

from experiments import build, check, phases, worlds
from stratified import update
from stratified.checkpoint import Checkpointer

_CONFIG = config_flags.DEFINE_config_file("config", None, "The preset, where the workdir holds no run.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.", required=True)
_QUESTIONS = flags.DEFINE_integer("questions", 0, "Held-out questions of each set; 0 is the config's eval.questions.",
                                lower_bound=0)
_FORCED = flags.DEFINE_integer("forced", None, "Make every rollout search exactly this often.")


def table(scores: dict, label: str) -> str:
  """Markdown: a row of exact match x 100 by set and their average, then one table by hops for each set."""
  percent = lambda x: "-" if x is None else f"{100 * x:.1f}"
  names = list(scores)
  average = [score["exact_match"] for score in scores.values() if score["exact_match"] is not None]
  lines = ["| exact match x 100 | " + " | ".join(names) + " | average |", "|---" * (len(names) + 2) + "|",
           f"| {label} | " + " | ".join(percent(scores[name]["exact_match"]) for name in names) +
           f" | {percent(sum(average) / len(average) if average else None)} |", "",
           "| set | hops | questions | exact match | F1 | searches | invalid actions | policy tokens |", "|---" * 8 + "|"]
  for name in names:
    for hops, part in [("all", scores[name])] + sorted(scores[name].get("by_hops", {}).items()):
      number = lambda key: "-" if part[key] is None else f"{part[key]:.2f}"
      lines.append(f"| {name} | {hops} | {part['count']} | {percent(part['exact_match'])} | {percent(part['f1'])} | "
                   f"{number('searches_mean')} | {number('invalid_actions')} | {number('tokens_mean')} |")
  return "\n".join(lines)


def main(_) -> None:
  workdir = pathlib.Path(_WORKDIR.value)
  stored = workdir / "config.json"
  if not stored.exists() and _CONFIG.value is None:
    sys.exit(f"{workdir} holds no run (no config.json): train one there, or name a preset with "
             "--config=configs/search_r1.py:PRESET")
  config = ml_collections.ConfigDict(json.loads(stored.read_text())) if stored.exists() else _CONFIG.value
  try:
    check.check(config)
    limits = worlds.limits(config, forced_searches=_FORCED.value)
    world, count = worlds.world(config), _QUESTIONS.value or config.eval.questions
    world.held_out(count)
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  phases.enable_compilation_cache()
  model, mesh = build.model_config(config), build.mesh_of(config)
  step, params = restore(config, workdir, mesh, model) if stored.exists() else (0, None)
  if params is None:
    params = build.initial_params(config, model, mesh)
  scores = phases.evaluate(config, params, world, build.sampler(config, model, world.tokenizer, greedy=True),
                           count=count, forced=limits.forced_searches)
  print(table(scores, f"{workdir.name}, step {step}"))
  key = {"step": step, "sets": scores} if _FORCED.value is None else {f"forced_{_FORCED.value}": {"step": step, "sets": scores}}
  workdir.mkdir(parents=True, exist_ok=True)
  phases.record(workdir, key)


def restore(config, workdir, mesh, model):
  """(step, parameters) of the newest checkpoint, (0, None) where nothing has been saved yet."""
  with Checkpointer(workdir, config.checkpoint.every) as checkpointer:
    found = checkpointer.restore_latest(
        update.abstract_state(mesh, model, build.optimizer(config), with_reference=True))
  return (found[1], found[0].params) if found else (0, None)


if __name__ == "__main__":
  app.run(main)
