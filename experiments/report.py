"""Writes a run's report.html, or the picture of a run as an SVG file.

    python experiments/report.py --workdir=runs/tiny
    python experiments/report.py --workdir=runs/tiny --steps=40,41     # more of their rollouts
    python experiments/report.py --workdir=runs/tiny --picture=tiny.svg

It also reads a run that has not ended yet.
"""

import re
import sys

from absl import flags

from stratified import files
from stratified.reports import run_page
from stratified.runs import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.", required=True)
_PICTURE = flags.DEFINE_string("picture", None, "Write this SVG file instead of report.html.")

_STEPS = flags.DEFINE_list("steps", [], "Steps whose rollouts the page shows, up to 20 of them.")


def main(_) -> None:
  if not all(re.fullmatch(r"\d{1,9}", step) for step in _STEPS.value):
    command_line.refuse(f"--steps={','.join(_STEPS.value)} must be numbers, such as --steps=1,40")
  try:
    if _PICTURE.value:
      files.write_atomic(_PICTURE.value, run_page.picture(_WORKDIR.value))
      print(_PICTURE.value)
    else:
      print(run_page.write(_WORKDIR.value, [int(step) for step in _STEPS.value]))
  except (FileNotFoundError, ValueError) as error:
    sys.exit(f"{error}")


if __name__ == "__main__":
  command_line.run(main)
