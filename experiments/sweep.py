"""Runs experiments/train.py over many settings, all in turn or one by index; makes one table.

    python experiments/sweep.py --config=configs/search_r1.py:tiny --sweep=alpha --seeds=3 \\
        --workdir=runs/alpha
    python experiments/sweep.py --config=configs/baselines.py:grpo --sweep=table \\
        --workdir=runs/table --list

A sweep is a function `sweep_NAME(add)` beside `get_config` in the config's file; it calls
`add(**{"dotted.key": value})` once a setting (`preset=NAME` sets the word after the file's first
colon). `--sweep=alpha,strata` crosses two, `--seeds=N` repeats all with N seeds from the config's
own on. Further `--config.FIELD=value` flags hold for every run. Each run has a folder of its name
in the workdir. The same command again skips the runs that are finished and goes on with the others.
A run that fails is named at the end and stops no other. `--index=N` runs only run N of `--list`, as
a job scheduler wants it. The end results are in sweep.md and sweep.json;
`experiments/compare.py WORKDIR` draws the curves. Ctrl-C and SIGTERM let the run at work save and
end.

`--share_warm_start` copies a finished warm start to the runs that would repeat it bit for bit on
this machine: same seed, same policy, data and warm-start settings. On `tiny` that saves most of the
time.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import config_flags

from stratified import files
from stratified.config import allowed, suggestion
from stratified.reports import comparison
from stratified.runs import build, command_line, sweeps
from stratified.runs import settings as run_settings
from stratified.runs import workdir as workdirs
from stratified.runs.sweeps import Job

_CONFIG = config_flags.DEFINE_config_file("config", None, "What the runs have in common.")
_SWEEP = flags.DEFINE_list(
  "sweep", None, "Which sweeps of the config's file to cross, e.g. alpha or alpha,strata."
)
_SEEDS = flags.DEFINE_integer(
  "seeds", None, "Seeds a setting, from the config's own on.", lower_bound=1
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where the runs' folders and the table go.", required=True
)
_INDEX = flags.DEFINE_integer("index", None, "Run only this one of --list.")
_LIST = flags.DEFINE_bool("list", False, "Print the runs and where each stands, and do nothing.")
_SHARE = flags.DEFINE_bool(
  "share_warm_start", False, "Runs that would repeat a finished warm start copy it."
)
_CHECK = flags.DEFINE_bool(
  "check_only", False, "Name the runs whose config can't run here, and do nothing."
)

Changes = Mapping[str, Any]


###  What to run  ###


def load(path: str) -> ModuleType:
  """Loads the config's file as a module."""
  spec = importlib.util.spec_from_file_location(f"sweeps_of_{pathlib.Path(path).stem}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def settings(
  module: ModuleType, names: Sequence[str], seeds: Sequence[int] = ()
) -> list[dict[str, Any]]:
  """Crosses the named sweeps: {dotted key: value} each, all of them for a seed before the next.

  Raises ValueError for an unknown name (with those that exist), and for two sweeps that set one
  key.
  """
  known = {
    name.removeprefix("sweep_"): one
    for name, one in vars(module).items()
    if name.startswith("sweep_")
  }
  for name in names:
    if name not in known:
      raise ValueError(
        f"--sweep={name} is unknown; {module.__file__} has {', '.join(sorted(known)) or 'none'}"
      )
  parts = [_collect(known[name]) for name in names]
  parts = [[{"seed": seed} for seed in seeds]] * bool(seeds) + parts
  if not parts:
    raise ValueError(
      "there is nothing to sweep over: name --sweep (one or more of "
      f"{', '.join(sorted(known))}) or --seeds"
    )
  keys = [key for part in parts for key in {key for changes in part for key in changes}]
  given = lambda key: {str(changes[key]) for part in parts for changes in part if key in changes}
  twice = sorted({key for key in keys if keys.count(key) > 1 and len(given(key)) > 1})
  if twice:
    raise ValueError(
      f"{', '.join(twice)} is set twice, by "
      f"--sweep={','.join(names)}{' and --seeds' * bool(seeds)}; "
      "leave one of them out"
    )
  return [
    dict(itertools.chain.from_iterable(changes.items() for changes in chosen))
    for chosen in itertools.product(*parts)
  ]


def _collect(sweep: Callable) -> list[dict[str, Any]]:
  found = []
  sweep(lambda **changes: found.append(changes))
  return found


def named(points: Sequence[Changes]) -> list[tuple[str, str]]:
  """(name of the run, name of its setting) of each point, fit for folders.

  A setting is named after the keys that vary, a run after its setting and its seed. Settings whose
  names would be the same get a number.
  """
  keys = list(dict.fromkeys(key for point in points for key in point if key != "seed"))
  text = lambda value: json.dumps(value, default=str, sort_keys=True)
  keys = [key for key in keys if len({text(point.get(key)) for point in points}) > 1] or keys
  short = workdirs.short_keys(keys) | {"preset": "", "seed": "seed"}

  def word(key, value):
    return re.sub(
      r"[^\w.+-]+", "-", f"{short[key]}-{workdirs.show(value)}".replace("*", "-x-")
    ).strip("-")

  names: dict[str, str] = {}
  result = []
  for point in points:
    rest = {key: value for key, value in point.items() if key != "seed"}
    name = "_".join(word(key, rest[key]) for key in keys if key in rest)
    if text(rest) not in names:
      again = sum(known == name or known.startswith(f"{name}_again-") for known in names.values())
      names[text(rest)] = f"{name}_again-{again}" if again else name
    setting = names[text(rest)]
    seed = [word("seed", point["seed"])] if "seed" in point else []
    result.append(("_".join([setting] * bool(setting) + seed), setting or "all"))
  return result


def configure(module: ModuleType, argument: str | None, changes: Changes):
  """Makes the run's config; ValueError, one sentence, for an unknown key or another type."""
  changes = dict(changes)
  preset = changes.pop("preset", None)
  if preset is not None:
    argument = ":".join([preset, *(argument or "").split(":")[1:]])
  config = module.get_config(argument) if argument else module.get_config()
  config.lock()
  for key, value in changes.items():
    try:
      config.update_from_flattened_dict({key: value})
    except (KeyError, AttributeError) as error:
      near = suggestion(key, run_settings.rules())
      raise ValueError(f"{key} is no field of a config{near}") from error
    except (TypeError, ValueError) as error:
      raise ValueError(_misfit(key, value)) from error
  return config, argument


def _misfit(key: str, value: Any) -> str:
  rule = run_settings.rules().get(key)
  words = f"must be {allowed(rule)}" if rule else "does not fit the config"
  return f"{key}={value!r} {words}"


def plan(
  file: str,
  argument: str | None,
  given: Changes,
  names: Sequence[str],
  seeds: int | None,
  folder: pathlib.Path,
) -> list[tuple[Job, Any]]:
  """Plans a sweep's runs with their configs; `given`, the command line's, hold for all."""
  module = load(file)
  first = configure(module, argument, given)[0].seed
  points = settings(module, names, range(first, first + seeds) if seeds else ())
  twice = sorted(
    {key for point in points for key in point if key in given} - ({"seed"} if seeds else set())
  )
  if twice:
    raise ValueError(f"--config.{twice[0]} is what the sweep sets itself; leave the flag out")
  jobs = []
  for point, (name, setting) in zip(points, named(points)):
    config, preset = configure(module, argument, {**given, **point})
    fields = {key: value for key, value in {**given, **point}.items() if key != "preset"}
    flags_ = [f"--config={file}" + f":{preset}" * bool(preset)]
    flags_ += [f"--config.{key}={_text(value)}" for key, value in fields.items()]
    stored = files.flatten(files.parse(config.to_json()))
    jobs.append((Job(name, setting, folder / name, tuple(flags_), stored), config))
  return jobs


def _text(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


###  What comes of it  ###


def write_table(jobs: Sequence[Job], folder: pathlib.Path) -> str:
  """Writes sweep.md and sweep.json from what the runs' folders hold now, and returns the table."""
  groups: dict[str, list[workdirs.Run]] = {}
  for job in jobs:
    groups.setdefault(job.setting, []).append(workdirs.read(job.workdir))
  notes = [
    said for runs in groups.values() for run in runs if (said := workdirs.problem(run, None))
  ]
  made = comparison.Comparison(groups, next(iter(groups)), None, notes)
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in (
    ("sweep.md", comparison.as_markdown(made)),
    ("sweep.json", json.dumps(comparison.as_json(made), indent=2) + "\n"),
  ):
    own = folder / f"{name}.{os.getpid()}"  # several indices may end at the same moment
    files.write_atomic(own, text)
    files.settle(own, folder / name)
  return comparison.as_markdown(made)


def listing(jobs: Sequence[Job]) -> str:
  return comparison.markdown(
    [["index", "run", "where it stands"]]
    + [[str(i), job.name, sweeps.where(job)] for i, job in enumerate(jobs)]
  )


def refused(jobs: Sequence[tuple[Job, Any]], look: Callable[[Any], Any]) -> str:
  """A line for each run that experiments/train.py would refuse; `look` raises for its config."""
  lines = []
  for job, config in jobs:
    try:
      look(config)
    except (ValueError, OSError) as error:
      lines.append(f"{job.name}: {error}")
  return "\n".join(lines)


def main(_) -> None:
  file, _, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
  folder, index = pathlib.Path(_WORKDIR.value), _INDEX.value
  given = config_flags.get_override_values(flags.FLAGS["config"])
  try:
    jobs = plan(file, argument or None, given, _SWEEP.value or (), _SEEDS.value, folder)
  except ValueError as error:
    sys.exit(str(error))
  if index is not None and not 0 <= index < len(jobs):
    sys.exit(
      f"--index={index} must lie between 0 and {len(jobs) - 1}: the sweep has {len(jobs)} runs, "
      "see --list"
    )
  every = [job for job, _ in jobs]
  if _LIST.value:
    build.leave_devices()
    if said := refused(jobs, build.check):
      sys.exit(said)
    print(listing(every))
    return
  if _CHECK.value:
    sys.exit(refused(jobs, functools.partial(build.build, task=False)) or 0)
  relay = sweeps.Relay()
  chosen = every if index is None else [every[index]]
  if index is None and not all(map(sweeps.finished, every)):
    checked = subprocess.run(
      [sys.executable, *sys.argv, "--check_only"], capture_output=True, text=True
    )
    if checked.returncode:
      sys.exit(f"nothing was started, since not every run can be:\n{checked.stderr.strip()}")
  failed = sweeps.run_all(chosen, relay, share=_SHARE.value)
  print(f"\n{write_table(every, folder)}\ntable: {folder / 'sweep.md'}", flush=True)
  if relay.asked:
    print("stopped; the same command goes on", flush=True)
  if relay.interrupted:
    sys.exit(command_line.INTERRUPTED)
  if failed:
    sys.exit("\n".join(f"{name} {why}" for name, why in failed.items()))


if __name__ == "__main__":
  command_line.run(main, config="configs/search_r1.py:tiny")
