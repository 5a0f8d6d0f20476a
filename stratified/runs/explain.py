"""Writes the page of all fields of a config, for a terminal or as Markdown."""

import json
from typing import Any

from stratified import config as configs
from stratified.runs import settings

HEADER = ("field", "value", "allowed", "changes", "meaning")


def rows(config) -> list[tuple[str, str, str, str, str]]:
  """(field, value, what is allowed, what it has an effect on, meaning) of every field."""
  shown = configs.public(config.to_dict(), settings.rules())
  return [
    (
      name,
      _value(configs.value_at(shown, name), rule.default),
      configs.allowed(rule),
      effects(rule),
      rule.meaning,
    )
    for name, rule in sorted(settings.rules().items(), key=lambda pair: _section(pair[0]))
  ]


def effects(rule: configs.Rule) -> str:
  """Says what a field has an effect on, and what that allows on resuming."""
  free = not set(rule.affects) - {"rounding"}
  words = [effect.replace("_", " ") for effect in rule.affects] or ["nothing"]
  note = " (free to change)" if free else " (may grow)" if rule.grows else ""
  return ", ".join(words) + note


def text(config) -> str:
  """The page for a terminal."""
  found = rows(config)
  widths = [max(len(row[column]) for row in found) for column in (0, 1)]
  lines = []
  for name, value, allowed, changes, meaning in found:
    head = f"{name:{widths[0]}}  {value:{min(widths[1], 40)}}  {meaning}"
    lines += [head, f"{'':{widths[0]}}  {allowed}; changes {changes}"]
  return "\n".join(lines)


def markdown(config) -> str:
  """The page as Markdown, a table a section."""
  lines, current = [INTRODUCTION], None
  for name, *cells in rows(config):
    section = name.rpartition(".")[0]
    if section != current:
      current = section
      lines += ["", f"## {section or 'The run'}", ""]
      lines += [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    value, *rest = (cell.replace("|", "\\|") for cell in cells)
    lines.append(f"| `{name}` | {value} | {' | '.join(rest)} |")
  return "\n".join(lines) + "\n"


INTRODUCTION = f"""# Configuration

A run is described by the fields below. A preset in `configs/` changes some of their defaults, and
every field can be given on the command line: `--config.advantage.alpha=0.4`. This page is printed
by

    python experiments/train.py --config=configs/search_r1.py:tiny --explain=markdown

for the preset `tiny`: the value is the preset's, with the default beside it where it differs.
Without `=markdown` the same is printed for a terminal, for any preset and with any overrides. A
value that training would refuse is refused here too, before anything is printed.

A number without an upper bound of its own is at most {configs.LARGEST} in size.

A field *changes*:

{chr(10).join(f"- {name.replace('_', ' ')}: {words}" for name, words in configs.EFFECTS.items())}

A run that resumes may change the fields that change nothing, or rounding alone; everything else
must be as the run began, except that `num_steps` may grow. Runs of a sweep may share a warm start
where they differ in nothing that changes it."""


def _section(name: str) -> tuple[int, str]:
  order = list(dict.fromkeys(one.rpartition(".")[0] for one in settings.rules()))
  section = name.rpartition(".")[0]
  return order.index(section), section


def _value(value: Any, default: Any) -> str:
  value, default = _plain(value), _plain(default)
  return _show(value) if value == default else f"{_show(value)} (default {_show(default)})"


def _plain(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value


def _show(value: Any) -> str:
  if value is None:
    return "none"
  if isinstance(value, str) and (value != value.strip() or "\n" in value or not value):
    return json.dumps(value)  # what can't be seen on a line
  return f"{value:g}" if isinstance(value, float) else str(value)
