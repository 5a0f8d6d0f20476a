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
import functools
import math
import pathlib
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import bandits
from stratified import advantages, files
from stratified.advantages import theory
from stratified.evaluation import intervals
from stratified.reports import plots

HERE = pathlib.Path(__file__).parent
STEPS, LONG, GROUPS = 600, 3_000, 40_000
SAMPLES = bandits.SAMPLES
# Probabilities of the strata, success rates inside them.
SHARES = {
  "three equal strata, success 0.3": ([1 / 3] * 3, [0.3] * 3),
  "four equal strata, success 0.3": ([0.25] * 4, [0.3] * 4),
  "strata of .1 .5 .3 .1, success .1 .3 .4 .3": ([0.1, 0.5, 0.3, 0.1], [0.1, 0.3, 0.4, 0.3]),
  "collapsed: strata of .95 .03 .02, success 0.3": ([0.95, 0.03, 0.02], [0.3] * 3),
}
# Estimator, success rate inside the stratum (None: it does not matter).
ATTENUATED = (("stratified", None), ("stratified_loo", None), ("san", 0.3), ("san", 0.05))
PROBABILITIES = (0.05, 0.1, 0.2, 1 / 3, 0.5, 1.0)
START_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3)
FAMILIES = {
  "The paper's": ("gn", "san", "blend 0.6", "blend 1 to 0", "blend 1 to 0, sooner"),
  "Centring only": ("loo", "stratified", "stratified_loo"),
  "Mixed, and controls": ("shrunk", "two_term", "san_rms", "san, random strata"),
}

SHOWN = dict(zip(("paper", "centring", "controls"), FAMILIES))  # figure -> its family


def markdown(head, rows) -> str:
  """A table; the first column holds names, the others numbers."""
  lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
  return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def with_error(values, digits: int = 3, scale: float = 1.0) -> str:
  """Mean +- standard error of independent values."""
  values = np.asarray(values, np.float64) * scale
  return f"{values.mean():.{digits}f} ± {values.std(ddof=1) / math.sqrt(values.size):.{digits}f}"


def with_spread(values) -> str:
  """Mean +- standard deviation."""
  return f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"


def simulated_shares(p_s, q_s, groups: int = GROUPS):
  """By group: the shares of zero advantages of SAN and of GN, and of singletons, [groups] each."""
  rng = np.random.default_rng(0)
  stratum_qk = rng.choice(len(p_s), (groups, SAMPLES), p=p_s).astype(np.int32)
  reward_qk = (rng.random((groups, SAMPLES)) < np.array(q_s)[stratum_qk]).astype(np.float32)
  ones_qk = np.ones_like(reward_qk)
  estimate = lambda name: advantages.make(name, num_strata=len(p_s))(
    reward_qk, stratum_qk, ones_qk, 0
  )
  zero = [np.mean(np.asarray(estimate(name)) == 0, axis=1) for name in ("san", "gn")]
  alone_qk = (stratum_qk[:, :, None] == stratum_qk[:, None, :]).sum(axis=2) == 1
  return *zero, alone_qk.mean(axis=1)


def share_table(groups: int = GROUPS) -> str:
  rows = []
  for title, (p_s, q_s) in SHARES.items():
    exact = [
      *(theory.expected_zero_share(name, p_s, q_s, SAMPLES) for name in ("san", "gn")),
      theory.expected_singleton_share(p_s, SAMPLES),
    ]
    simulated = simulated_shares(p_s, q_s, groups)
    cells = [f"{one:.3f} ({with_error(seen, 4)})" for one, seen in zip(exact, simulated)]
    rows.append([title, *cells])
  return markdown(["setting", "zero advantage, SAN", "zero advantage, GN", "singletons"], rows)


@functools.partial(jax.jit, static_argnames=("name", "groups"))
def simulated_attenuation(name: str, p, q, key, groups: int = GROUPS):
  """By group: the gradient inside a stratum of probability p over an infinite group's, [groups].

  Its acts succeed or fail, with one logit between them: the score of a rollout inside is R_i - q.
  """
  stratum_key, reward_key = jax.random.split(key)
  stratum_qk = (jax.random.uniform(stratum_key, (groups, SAMPLES)) < p).astype(jnp.int32)
  reward_qk = (jax.random.uniform(reward_key, (groups, SAMPLES)) < q).astype(jnp.float32)
  advantage_qk = advantages.make(name, num_strata=2)(
    reward_qk, stratum_qk, jnp.ones_like(reward_qk), 0
  )
  whole = p * jnp.where(name == "san", jnp.sqrt(q * (1 - q)), q * (1 - q))
  return jnp.mean(advantage_qk * stratum_qk * (reward_qk - q), axis=1) / whole


def attenuation_table(groups: int = GROUPS) -> str:
  columns = [*ATTENUATED, ("loo", None)]
  rows = []
  for p in PROBABILITIES:
    cells = []
    for name, q in columns:
      exact = 1.0 if name == "loo" else theory.attenuation(name, p, SAMPLES, q)
      seen = simulated_attenuation(name, p, q or 0.3, jax.random.key(0), groups)
      cells.append(f"{exact:.3f} ({with_error(seen)})")
    rows.append([f"{p:.2f}", *cells])
  return markdown(["probability of the stratum", *map(_attenuated, columns)], rows)


def _attenuated(column) -> str:
  name, q = column
  return name if q is None else f"{name}, success {q:g}"


def attenuation_figure() -> str:
  percent = range(1, 101)
  curves = []
  for column in ATTENUATED:
    y = [theory.attenuation(column[0], x / 100, SAMPLES, column[1]) for x in percent]
    curves.append(plots.Series(_attenuated(column), percent, y))
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
      for share in START_SHARES
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


def end(curve) -> str:
  """Mean +- standard deviation over seeds at the last step, and the mean's 95 % interval."""
  last = np.asarray(curve[:, -1], np.float64)
  low, high = intervals.mean_interval(last)
  return f"{last.mean():.3f} ± {last.std(ddof=1):.3f} [{low:.3f}, {high:.3f}]"


def reward_table(result, name: str, share: float) -> str:
  keys = [(name, share, shared, matched) for shared in (False, True) for matched in (False, True)]
  head = ["estimator", "separate", "separate, equal RMS", "shared", "shared, equal RMS"]
  return markdown(
    head,
    [
      [estimator, *(end(curves[key].reward) for key in keys)]
      for estimator, curves in result.items()
    ],
  )


def steps_until(reached_nt) -> str:
  """Median over seeds of the first step at which it holds, and the middle 80 %; or "never"."""
  first = np.where(reached_nt.any(axis=1), reached_nt.argmax(axis=1), np.inf)
  low, middle, high = (
    f"{x:.0f}" if x < np.inf else "never"
    for x in np.quantile(first, [0.1, 0.5, 0.9], method="inverted_cdf")
  )
  return middle if low == high else f"{middle} ({low} to {high})"


def speed_table(result) -> str:
  """Bandit A, separate parameters: steps until half of the rollouts take the better strategy."""
  rows = []
  for estimator, curves in result.items():
    cells = [
      steps_until(curves["better", 0.2, False, matched].share >= 0.5) for matched in (False, True)
    ]
    moved = np.abs(curves["better", 0.2, False, False].share - 0.2).max()
    rows.append([estimator, *cells, f"{moved:.0e}" if moved < 1e-3 else f"{moved:.2f}"])
  return markdown(
    ["estimator", "steps", "steps, equal RMS", "largest move of the probability"], rows
  )


def long_table(result) -> str:
  """Bandit B, separate parameters, equal RMS, trained for longer."""
  rows = [
    [estimator, steps_until(curves["learnt"].share >= 0.5), end(curves["learnt"].reward)]
    for estimator, curves in result.items()
  ]
  return markdown(["estimator", "steps until half take it", f"reward after {LONG}"], rows)


def luck_table(result) -> str:
  """Bandit C: steps until nine tenths of what can be gained is gained, at either size of step."""
  success_sa = bandits.luck().success_sa
  wanted = success_sa.mean() + 0.9 * (success_sa.max(axis=1).mean() - success_sa.mean())
  rows = [
    [estimator]
    + [
      steps_until(curves["luck", 0.5, False, matched].reward >= wanted) for matched in (False, True)
    ]
    for estimator, curves in result.items()
  ]
  return markdown(["estimator", "steps", "steps, equal RMS"], rows)


def inside_table(result) -> str:
  """Where bandit B ends at equal RMS: seeds that moved to the strategy, its share, its success."""
  rows = []
  for estimator, curves in result.items():
    row = [estimator]
    for shared in (False, True):
      found = curves["learnt", 0.1, shared, True]
      share, success = found.share[:, -1], found.success[:, -1]
      row += [f"{np.mean(share > 0.5):.0%}", with_spread(share), with_spread(success)]
    rows.append(row)
  head = ["seeds on it", "its probability", "success inside"]
  head = [f"{what}, {kind}" for kind in ("separate", "shared") for what in head]
  return markdown(["estimator", *head], rows)


def start_table(result) -> str:
  rows = [
    [
      estimator,
      *(with_spread(curves["learnt", share, False, True].reward[:, -1]) for share in START_SHARES),
    ]
    for estimator, curves in result.items()
  ]
  return markdown(["estimator", *(f"start {share:g}" for share in START_SHARES)], rows)


def push_table(groups: int = GROUPS) -> str:
  """What each estimator pushes at the very start, in hundredths, and the size of its advantages."""
  a, b = (bandits.Setting(bandit, False, False) for bandit in (bandits.better(), bandits.learnt()))
  rows = []
  for name, estimator in bandits.estimators(STEPS).items():
    if name.startswith("blend 1"):
      continue  # begins as SAN
    choice_a, *_ = bandits.first_push(estimator, a, jax.random.key(0), groups)
    choice_b, act_b, square_b = bandits.first_push(estimator, b, jax.random.key(0), groups)
    cells = [_zero(with_error(x, 2, 100)) for x in (choice_a, choice_b, act_b)]
    rows.append([name, *cells, f"{np.sqrt(np.mean(square_b)):.2f}"])
  return markdown(
    [
      "estimator",
      "A: better strategy",
      "B: strategy to learn",
      "B: its good act",
      "B: advantage RMS",
    ],
    rows,
  )


def _zero(text: str) -> str:
  return "0" if text in ("0.00 ± 0.00", "-0.00 ± 0.00") else text


def band(name: str, values_nt) -> plots.Series:
  """Mean and middle 80 % of seeds, at some sixty steps: a standard deviation would leave [0, 1]."""
  steps = values_nt.shape[1]
  x = sorted({*range(0, steps, max(1, steps // 60)), steps - 1})
  low, high = np.quantile(values_nt[:, x], [0.1, 0.9], axis=0)
  mean = values_nt[:, x].mean(axis=0).tolist()
  return plots.Series(name, x, mean, low=low.tolist(), high=high.tolist())


def reward_figure(result, name: str, share: float, family: str, steps: int = STEPS) -> str:
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
  tables = {"shares": share_table(), "attenuation": attenuation_table(), "push": push_table()}
  result = train(settings(), arguments.seeds, STEPS)
  longer = train(
    {"learnt": bandits.Setting(bandits.learnt(), False, True)},
    arguments.seeds,
    LONG,
    ("gn", "blend 0.6", "loo", "shrunk", "two_term"),
  )
  tables |= {
    "better": reward_table(result, "better", 0.2),
    "speed": speed_table(result),
    "learnt": reward_table(result, "learnt", 0.1),
    "inside": inside_table(result),
    "start": start_table(result),
    "long": long_table(longer),
    "luck": luck_table(result),
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
