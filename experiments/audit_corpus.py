"""Says which questions a corpus can answer: whose golden answer stands in one of its passages.

    python experiments/audit_corpus.py --questions=data/benchmarks --corpus=data/wiki18.jsonl \\
        --out=data/coverage.jsonl
    python experiments/evaluate.py --workdir=runs/x --sets=all --coverage=data/coverage.jsonl

Prints the share of covered questions by set, and writes a question a line: whether it is covered,
and the first passage that holds an answer. evaluate.py then adds a row of scores on covered
questions. One pass over the corpus; 21 million passages take about an hour.
"""

import pathlib
import sys

from absl import flags

from stratified import files
from stratified.data import readers
from stratified.evaluation import coverage, tables
from stratified.progress import Progress
from stratified.retrieval import corpus
from stratified.runs import command_line

_QUESTIONS = flags.DEFINE_string(
  "questions", None, "A file or folder of questions, as data.evaluation names it.", required=True
)
_SPLIT = flags.DEFINE_string("split", "", "Of these, the records of one split; empty is all.")
_CORPUS = flags.DEFINE_string("corpus", None, "Passages, JSON Lines, plain or .gz.", required=True)
_OUT = flags.DEFINE_string("out", "coverage.jsonl", "The file that is written.")


def main(_) -> None:
  try:
    asked = readers.read_questions(_QUESTIONS.value, split=_SPLIT.value or None)
    audit = coverage.Audit(asked)
    with Progress(None, "passages read") as progress:
      for line, record in corpus.read_jsonl(_CORPUS.value):
        audit.read(corpus.passage_from_record(record, f"{_CORPUS.value}, line {line}"))
        progress.update()
    rows = audit.rows()
    pathlib.Path(_OUT.value).parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(_OUT.value, b"".join(map(files.json_line, rows)))
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  print(coverage.table(rows, tables.ordered([row["set"] for row in rows])))


if __name__ == "__main__":
  command_line.run(main)
