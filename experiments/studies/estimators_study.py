"""Makes the tables and figures of ESTIMATORS.md, on what each estimator rewards.

    python experiments/studies/estimators_study.py [--out DIR] [--seeds N]

It uses the library's own kernels, and writes ESTIMATORS.md and figures/*.svg into --out, the folder
of this file by default. The page's words stand in ESTIMATORS.md itself; each table there, between
`<!-- made: NAME -->` and `<!-- end -->`, is replaced by the one that this command computes. Seeds
are fixed: the same command gives the same page.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import bandits
from experiments.studies import estimators_tables as tables_of
from stratified import files
from stratified.advantages import theory
from stratified.reports import plots

HERE = pathlib.Path(__file__).parent
FAMILIES = {
  "The paper's": ("gn", "san", "blend 0.6", "blend 1 to 0", "blend 1 to 0, sooner"),
  "Centring only": ("loo", "stratified", "stratified_loo"),
  "Mixed, and controls": ("shrunk", "two_term", "san_rms", "san, random strata"),
}

SHOWN = dict(zip(("paper", "centring", "controls"), FAMILIES))  # figure -> its family


def attenuation_figure() -> str:
  percent = range(1, 101)
  curves = []
  for column in tables_of.ATTENUATED:
    y = [theory.attenuation(column[0], x / 100, tables_of.SAMPLES, column[1]) for x in percent]
    curves.append(plots.Series(tables_of.attenuated_name(column), percent, y))
  title = "Share of the gradient inside a stratum that a group of 8 keeps"
  return figure(
    [plots.Panel(title, tuple(curves), y_label="share")],
    640,
    280,
    1,
    "probability of the stratum, %",
  )


def figure(
  panels, width: int, height: int, columns: int, x_label: str, names: Sequence[str] = ()
) -> str:
  """Draws panels under one legend, colours in the order of `names` (all curves' by default)."""
  names = names or list(dict.fromkeys(one.name for panel in panels for one in panel.series))
  looks = plots.colors(names)
  panels = [
    dataclasses.replace(
      panel, series=tuple(_colored(one, *looks[one.name]) for one in panel.series)
    )
    for panel in panels
  ]
  return plots.figure(
    panels,
    width=width,
    height=height,
    columns=columns,
    x_label=x_label,
    legend=[(name, *look) for name, look in looks.items()],
    standalone=True,
  )


def _colored(series: plots.Series, color: int, dashed: bool) -> plots.Series:
  return dataclasses.replace(series, color=color, dashed=dashed)


def settings() -> dict[tuple, bandits.Setting]:
  """(bandit, starting share, shared, matched) -> setting; B also with other starting shares."""
  makers = {"better": (bandits.better(), 0.2), "learnt": (bandits.learnt(), 0.1)}
  four = {
    (name, share, shared, matched): bandits.Setting(bandit, shared, matched)
    for name, (bandit, share) in makers.items()
    for shared in (False, True)
    for matched in (False, True)
  }
  drawn = {
    ("luck", 0.5, False, matched): bandits.Setting(bandits.luck(), False, matched)
    for matched in (False, True)
  }
  return (
    four
    | drawn
    | {
      ("learnt", share, False, True): bandits.Setting(bandits.learnt(share), False, True)
      for share in tables_of.START_SHARES
    }
  )


def train(made: dict[tuple, bandits.Setting], seeds: int, steps: int, names=None):
  """Estimator -> key of `made` -> curves [seeds, steps]; all see the same random numbers."""
  keys, stacked = jax.vmap(jax.random.key)(jnp.arange(seeds)), bandits.stack(made.values())
  chosen = {
    name: one for name, one in bandits.estimators(steps).items() if names is None or name in names
  }
  result, began = {}, time.perf_counter()
  for i, (name, estimator) in enumerate(chosen.items(), 1):
    curves = jax.tree.map(np.asarray, bandits.train_all(estimator, stacked, keys, steps))
    result[name] = {key: bandits.Curves(*(x[at] for x in curves)) for at, key in enumerate(made)}
    left = (time.perf_counter() - began) * (len(chosen) - i) / i
    print(
      f"trained {i} of {len(chosen)} estimators for {steps} steps: {name}; about {left:.0f} s left",
      flush=True,
    )
  return result


def band(name: str, values_nt) -> plots.Series:
  """Mean and middle 80 % of seeds, at some sixty steps: a standard deviation would leave [0, 1]."""
  steps = values_nt.shape[1]
  x = sorted({*range(0, steps, max(1, steps // 60)), steps - 1})
  low, high = np.quantile(values_nt[:, x], [0.1, 0.9], axis=0)
  mean = values_nt[:, x].mean(axis=0).tolist()
  return plots.Series(name, x, mean, low=low.tolist(), high=high.tolist())


def reward_figure(
  result, name: str, share: float, family: str, steps: int = tables_of.STEPS
) -> str:
  """Draws early reward at equal RMS of a family's estimators, for each kind of policy."""
  panels = []
  for shared, kind in ((False, "separate"), (True, "shared")):
    drawn = [
      band(one, result[one][name, share, shared, True].reward[:, :steps])
      for one in FAMILIES[family]
      if one in result
    ]
    panels.append(plots.Panel(f"{family} · {kind}", tuple(drawn), y_label="mean reward"))
  return figure(panels, 310, 220, 2, "step")


def mechanism_figure(result) -> str:
  """Bandit B, separate parameters: reward, choice of the strategy, success rate inside it."""
  members = [name for name in FAMILIES["The paper's"] if name in result]
  found = {name: result[name]["learnt", 0.1, False, True] for name in members}
  panels = [
    plots.Panel(
      title,
      tuple(band(name, getattr(curves, field)) for name, curves in found.items()),
      y_label=unit,
    )
    for title, field, unit in (
      ("Reward", "reward", "mean reward"),
      ("Probability of the strategy", "share", "probability"),
      ("Success rate inside it", "success", "success rate"),
    )
  ]
  return figure(panels, 310, 230, 3, "step", members)


def fill(page: str, tables: dict[str, str]) -> str:
  """Replaces each marked block of the page; ValueError unless blocks and tables are one set."""
  block = re.compile(r"(<!-- made: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
  marked = [match[2] for match in block.finditer(page)]
  if sorted(marked) != sorted(tables):
    raise ValueError(
      f"the page marks the tables {', '.join(marked)}, but {', '.join(tables)} were made; "
      "mark each once, `<!-- made: NAME -->` to `<!-- end -->`"
    )
  return block.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n\n{match[3]}", page)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "--out", type=pathlib.Path, default=HERE, help="folder of ESTIMATORS.md and figures/"
  )
  parser.add_argument(
    "--seeds", type=int, default=24, help="trainings of each estimator, 2 or more"
  )
  arguments = parser.parse_args()
  if arguments.seeds < 2:
    parser.error(f"--seeds is {arguments.seeds}; a spread needs 2 or more")
  tables = {
    "shares": tables_of.share_table(),
    "attenuation": tables_of.attenuation_table(),
    "push": tables_of.push_table(),
  }
  result = train(settings(), arguments.seeds, tables_of.STEPS)
  longer = train(
    {"learnt": bandits.Setting(bandits.learnt(), False, True)},
    arguments.seeds,
    tables_of.LONG,
    ("gn", "blend 0.6", "loo", "shrunk", "two_term"),
  )
  tables |= {
    "better": tables_of.reward_table(result, "better", 0.2),
    "speed": tables_of.speed_table(result),
    "learnt": tables_of.reward_table(result, "learnt", 0.1),
    "inside": tables_of.inside_table(result),
    "start": tables_of.start_table(result),
    "long": tables_of.long_table(longer),
    "luck": tables_of.luck_table(result),
  }
  figures = {
    "attenuation": attenuation_figure(),
    **{f"better_{key}": reward_figure(result, "better", 0.2, of, 240) for key, of in SHOWN.items()},
    **{f"learnt_{key}": reward_figure(result, "learnt", 0.1, of) for key, of in SHOWN.items()},
    "mechanism": mechanism_figure(result),
  }
  (arguments.out / "figures").mkdir(parents=True, exist_ok=True)
  for name, figure in figures.items():
    files.write_atomic(arguments.out / "figures" / f"{name}.svg", figure + "\n")
  page = arguments.out / "ESTIMATORS.md"
  files.write_atomic(page, fill((HERE / "ESTIMATORS.md").read_text(encoding="utf-8"), tables))
  for name, table in tables.items():
    print(f"\n{name}\n{table}")
  print(f"\npage: {page}")


if __name__ == "__main__":
  main()
