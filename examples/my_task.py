"""A task of your own with a tool of your own: how many letters has this word?

    PYTHONPATH=examples python experiments/train.py --config=configs/search_r1.py:tiny \
        --config.task.name=my_task:make --config.strata.name=calls_letters --workdir=runs/my_task

A task is a function of the config that returns a Task. Its questions are functions of the step
alone, so that a run goes on where it stopped. `demonstrations` (a script for the warm start) may be
absent; then give --config.warm_start.num_steps=0.
"""

from my_tool import Letters
import numpy as np

from stratified.tasks import base, numbers, script
from stratified.types import Question

SYLLABLES = ("bar", "dim", "fon", "gul", "kes", "lor")
WORDING = "How many letters has {w}?"


def questions(count: int, *key: int) -> list[Question]:
  """Words of 1 to 4 syllables; another key gives other words."""
  rng = np.random.default_rng(key)
  made = []
  for i in range(count):
    word = "".join(rng.choice(SYLLABLES, size=1 + rng.integers(4)))
    text, answer = WORDING.format(w=word), str(len(word))
    made.append(Question(f"letters/{i}/{word}", text, (answer,), "letters", hops=1))
  return made


def demonstrate(question: Question, rng: np.random.Generator) -> script.Script:
  """Calls the tool in half of the rollouts, and says what it said; else guesses."""
  fed = None
  if rng.random() < 0.5:
    fed = yield f"<letters> {question.id.split('/')[-1]}</letters>"
  guess = str(3 * (1 + rng.integers(4)))
  yield f"<answer>{fed.split('>')[1].split('<')[0] if fed else guess}</answer>"


def make(config) -> base.Task:
  tools = base.tools(config, {"letters": Letters})
  w = config.warm_start
  task = base.make(
    config,
    tools,
    tokenizer=lambda: numbers.build([WORDING], ["letters"], SYLLABLES),
    questions_at=lambda step: questions(config.data.questions_per_step, config.seed, step),
    held_out=lambda count: {"held_out": (questions(count, config.seed, 2**30), tools)},
    demonstrations=lambda step: script.collect(
      task, questions(w.demonstrations_per_step, step, 7), demonstrate, seed=config.seed, step=step
    ),
  )
  return task
