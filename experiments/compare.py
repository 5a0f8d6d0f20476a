"""Draws several runs together: curves as in arXiv 2510.06214's Figure 1, results as in its Table 2.

    python experiments/compare.py --out=runs/table/comparison runs/table
    python experiments/compare.py --out=/tmp/c 'GRPO=runs/gn-seed-*' 'SAN=runs/san-seed-*' \\
        --reference=GRPO

Each argument is a workdir, a glob (in quotes where it follows a label), or a folder of workdirs, as
a sweep leaves it. `label=` names a group; without it runs are grouped by the config keys in which
they differ, the seed apart. Writes comparison.html, comparison.md and comparison.json into --out,
and comparison.svg, the first figure alone.
"""

import pathlib
import sys

from absl import flags

from stratified.reports import comparison, comparison_page
from stratified.runs import command_line

_OUT = flags.DEFINE_string("out", "comparison", "The folder that the comparison is written to.")
_REFERENCE = flags.DEFINE_string(
  "reference", None, "The group that others are measured against; the first if none."
)
_STEP = flags.DEFINE_integer(
  "step", None, "Take end results at this step, not at each run's last.", lower_bound=1
)


def main(argv) -> None:
  try:
    made = comparison.of(argv[1:], _REFERENCE.value, _STEP.value)
  except ValueError as error:
    sys.exit(str(error))
  path = comparison_page.write(made, pathlib.Path(_OUT.value))
  print(comparison.as_markdown(made))
  print(f"comparison: {path}", flush=True)


if __name__ == "__main__":
  command_line.run(main, words=True)
