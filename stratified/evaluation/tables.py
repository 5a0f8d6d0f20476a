"""Writes an evaluation as the papers' tables, a row a method and a column a set: markdown, LaTeX.

A row is {"label", "family": which protocols compare, "sets": {set: scores as `score.summarise`
gives them}, "average": the same keys for the mean over sets, and two more means}, as
`runner.table_row` makes it; rows are JSON as they stand.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# The papers' order and spelling; other sets come after them as they are named.
TITLES = {
  "nq": "NQ",
  "triviaqa": "TriviaQA",
  "popqa": "PopQA",
  "hotpotqa": "HotpotQA",
  "2wikimultihopqa": "2Wiki",
  "musique": "MuSiQue",
  "bamboogle": "Bamboogle",
}
_LATEX = {character: "\\" + character for character in "&%$#_{}"} | {
  "\\": r"\textbackslash{}",
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
}

# Means beside that over sets: the end of their key -> title, and the set that they are about.
MEANS = {"_without_bamboogle": ("without Bamboogle", "bamboogle"), "_micro": ("micro", None)}

Row = Mapping[str, Any]


def ordered(names: Sequence[str]) -> list[str]:
  """Set names without repetitions, the papers' seven first and in their order."""
  rank = {name: at for at, name in enumerate(TITLES)}
  return sorted(dict.fromkeys(names), key=lambda name: rank.get(name, len(rank)))


def markdown(rows: Sequence[Row], key: str = "exact_match") -> str:
  """The paper's table, x 100; what a row was not evaluated on is a dash.

  Of several sets there are two more means: without Bamboogle, and over questions (micro). The last
  column says which rows' protocols compare, where that is known.
  """
  names = _names(rows)
  titles = [*(TITLES.get(name, name) for name in names), "average", *_means(rows).values()]
  family = any(row.get("family") for row in rows)
  lines = [
    f"| {_title(key)} x 100 | " + " | ".join(titles + ["family"] * family) + " |",
    "|---" * (len(titles) + 1 + family) + "|",
  ]
  lines += [
    f"| {_cell(row['label'])} | "
    + " | ".join(cells + [_cell(row.get("family") or "-")] * family)
    + " |"
    for row, cells in _cells(rows, names, key)
  ]
  return "\n".join(lines)


def latex(rows: Sequence[Row], key: str = "exact_match") -> str:
  """The same as a LaTeX tabular for the package booktabs, the best of each column in bold."""
  names, table = _names(rows), _cells(rows, _names(rows), key)
  means, family = list(_means(rows).values()), any(row.get("family") for row in rows)
  columns = range(len(names) + 1 + len(means))
  best = [
    max((float(cells[i]) for _, cells in table if cells[i] != "-"), default=None) for i in columns
  ]
  bold = lambda i, cell: (
    rf"\textbf{{{cell}}}" if len(rows) > 1 and cell != "-" and float(cell) == best[i] else cell
  )
  lines = [
    rf"\begin{{tabular}}{{l{'c' * len(columns)}{'l' * family}}}",
    r"\toprule",
    " & ".join(
      ["Method", *(_tex(TITLES.get(name, name)) for name in names), "Avg.", *means]
      + ["Family"] * family
    )
    + r" \\",
    r"\midrule",
  ]
  lines += [
    " & ".join(
      [_tex(row["label"]), *(bold(i, cells[i]) for i in columns)]
      + [_tex(row.get("family") or "-")] * family
    )
    + r" \\"
    for row, cells in table
  ]
  return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def details(row: Row) -> str:
  """Writes every number of one row, by set and by hops, with intervals where there are any."""
  lines = [
    "| set | hops | rollouts | lost | exact match | 95 % | F1 | 95 % | searches | invalid actions "
    "| tokens |",
    "|---" * 11 + "|",
  ]
  for name in _names([row]):
    score = row["sets"][name]
    for hops, part in [("all", score), *sorted(score.get("by_hops", {}).items())]:
      number = lambda key: "-" if part.get(key) is None else f"{part[key]:.2f}"
      lines.append(
        f"| {TITLES.get(name, _cell(name))} | {hops} | {part['count']} | {part['failed']} | "
        f"{percent(part['exact_match'])} | {interval(part.get('exact_match_interval'))} | "
        f"{percent(part['f1'])} | "
        f"{interval(part.get('f1_interval'))} | {number('searches_mean')} | "
        f"{number('invalid_actions')} | "
        f"{number('tokens_mean')} |"
      )
  return "\n".join(lines)


def comparison(label: str, other: str, results: Mapping[str, Mapping[str, float]]) -> str:
  """Writes paired tests, {set or "average": what `intervals.paired_difference` returned}."""
  lines = [
    f"| {_cell(label)} - {_cell(other)} | questions | difference x 100 | 95 % | only the first "
    "| only the second | McNemar p | permutation p |",
    "|---" * 8 + "|",
  ]
  for name, found in results.items():
    p = lambda key: (
      "-"
      if key not in found
      else f"{found[key]:.4f}"
      if found[key] >= 1e-4
      else f"{found[key]:.1e}"
    )
    lines.append(
      f"| {TITLES.get(name, _cell(name))} | {found['count']} | {100 * found['difference']:+.1f} | "
      f"{interval((found['low'], found['high']))} | {found.get('only_a', '-')} | "
      f"{found.get('only_b', '-')} | "
      f"{p('p_mcnemar')} | {p('p_permutation')} |"
    )
  return "\n".join(lines)


def percent(value: float | None) -> str:
  return "-" if value is None else f"{100 * value:.1f}"


def interval(ends: Sequence[float] | None) -> str:
  return "-" if ends is None else f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}"


def _names(rows: Sequence[Row]) -> list[str]:
  return ordered([name for row in rows for name in row["sets"]])


def _means(rows: Sequence[Row]) -> dict[str, str]:
  """{end of its key: title} of the means beside the average, where they say something else."""
  names = _names(rows)
  if len(names) < 2:
    return {}
  return {end: title for end, (title, about) in MEANS.items() if about in (None, *names)}


def _cells(rows: Sequence[Row], names: Sequence[str], key: str) -> list[tuple[Row, list[str]]]:
  """Each row's numbers, and means where the row has every set: unlike ones don't compare."""
  value = lambda row, name: percent(row["sets"].get(name, {}).get(key))
  mean = lambda row, end: (
    percent(row["average"].get(key + end)) if all(name in row["sets"] for name in names) else "-"
  )
  ends = ("", *_means(rows))
  return [
    (row, [value(row, name) for name in names] + [mean(row, end) for end in ends]) for row in rows
  ]


def _title(key: str) -> str:
  return {"exact_match": "exact match", "f1": "F1"}.get(key, key)


def _cell(text: str) -> str:
  return text.replace("|", "\\|").replace("\n", " ")


def _tex(text: str) -> str:
  return "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))
