"""Asks a trained agent a question and shows its searches, what came back, and its answer.

    python experiments/ask.py --workdir=runs/tiny                      # a question a line
    python experiments/ask.py --workdir=runs/tiny --step=best "Who wrote ...?"
    python experiments/ask.py --workdir=runs/tiny --example=3          # a held-out question
    python experiments/ask.py --workdir=runs/tiny --page               # a page on 127.0.0.1

The run's newest checkpoint answers, greedily, or that of --step at --temperature. Fields of the
config that do not change what it answers can be given, such as --config.retriever.url=URL. Colours
are for terminals, and not where NO_COLOR is set.
"""

import os
import pathlib
import sys

from absl import flags
from ml_collections import config_flags

from stratified.reports import ask_page, terminal
from stratified.retrieval import server
from stratified.retrieval.client import RetrieverDown
from stratified.runs import asking, build, checkpoint, command_line, evaluations
from stratified.runs.weights import of_stage
from stratified.sampling.sglang.errors import SamplerError
from stratified.types import Question

_CONFIG = config_flags.DEFINE_config_file("config", None, "Fields that may change, see above.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder.", required=True)
_STEP = command_line.define_step(
  "step", "Which checkpoint of the run, or best, on held-out questions; the newest unless given."
)
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 0.0, "0 is greedy; above it answers are drawn.", 0, 1e9
)
_EXAMPLE = flags.DEFINE_integer("example", None, "Ask the held-out question of this number.", 0)
_PAGE = flags.DEFINE_bool("page", False, "Serve a page that asks and shows, on this machine alone.")
_PORT = flags.DEFINE_integer("port", 8765, "--page: its port; 0 is any free one.", 0, 65535)

_EXAMPLES = 8  # held-out questions that the page offers


def main(argv) -> None:
  workdir, words = pathlib.Path(_WORKDIR.value), " ".join(argv[1:]).strip()
  chosen = [bool(words), _EXAMPLE.value is not None, _PAGE.value]
  if sum(chosen) > 1:
    command_line.refuse("give one of a question, --example and --page")
  try:
    bound = server.bind("127.0.0.1", _PORT.value) if _PAGE.value else None
    made, step, params = trained(workdir)
  except (ValueError, OSError) as error:
    sys.exit(f"{error}")
  try:
    with asking.opened(made, params, _TEMPERATURE.value) as agent:
      title = f"{workdir}, step {step}"
      if bound is not None:
        serve(agent, title, bound)
      elif words:
        answer(agent, Question("asked", words, ()))
      elif _EXAMPLE.value is not None:
        answer(agent, agent.examples[_EXAMPLE.value % len(agent.examples)])
      else:
        converse(agent, title)
  except (ValueError, RetrieverDown, SamplerError) as error:
    sys.exit(f"{error}")


def trained(workdir: pathlib.Path):
  """Reads (what the run is made of, step, parameters) of the checkpoint that is asked for.

  Raises ValueError or OSError, one sentence, for what is missing.
  """
  if command_line.named():
    raise ValueError(f"--config is not used: {workdir} has a config of its own; leave it out")
  if not (workdir / "config.json").exists():
    raise ValueError(
      f"{workdir} holds no run (no config.json): train one there with experiments/train.py, or "
      "name the folder of another with --workdir"
    )
  given = {}
  if _CONFIG.value is not None:
    given = config_flags.get_override_values(flags.FLAGS["config"])
  made = build.build(asking.alone(evaluations.stored_config(workdir, given), _TEMPERATURE.value))
  build.enable_compilation_cache()
  weights = of_stage(made, made.last, workdir)
  found = weights.restore_policy(workdir, checkpoint.step_of(workdir, _STEP.value))
  if found is None:
    raise ValueError(
      f"{workdir} has no checkpoint yet: train it further with experiments/train.py and the same "
      "--workdir, which saves one after its first evaluation"
    )
  params, step = found
  return made, step, params


def answer(agent: asking.Agent, question: Question) -> None:
  """Asks one question and prints its rollout."""
  color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
  print(terminal.show(agent.ask(question), color), flush=True)


def converse(agent: asking.Agent, title: str) -> None:
  """Asks the lines of the terminal, or of whatever stands in its place, until they end."""
  shown, number = sys.stdin.isatty(), 0
  if shown:
    print(f"{title}. A line is a question, an empty one takes a held-out one, Ctrl-D ends.")
  while True:
    if shown:
      print("\n> ", end="", flush=True)
    line = sys.stdin.readline()
    if not line:
      return
    question = Question("asked", line.strip(), ())
    if not question.text:
      question = agent.examples[number % len(agent.examples)]
      number += 1
    try:
      answer(agent, question)
    except ValueError as error:  # this question's alone
      print(f"{error}", file=sys.stderr, flush=True)


def serve(agent: asking.Agent, title: str, bound) -> None:
  """Serves the page until Ctrl-C or SIGTERM."""
  known = {question.text: question for question in agent.examples}
  ask = lambda text: agent.ask(known.get(text, Question("asked", text, ())))
  app = ask_page.make_app(title, ask, list(known)[:_EXAMPLES])
  say = lambda: print(f"{title}: {server.address(bound)} (Ctrl-C ends)", flush=True)
  server.serve(app, bound, grace_s=5.0, on_start=say)


if __name__ == "__main__":
  command_line.run(main, fields_of="configs/search_r1.py:tiny", words=True)
