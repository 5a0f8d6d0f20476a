"""Makes the task that a config names: one of the project's, or a user's as `module:function`."""

from collections.abc import Callable, Sequence
import importlib

from stratified import config as settings
from stratified import outside, rewards
from stratified.agents.limits import Limits
from stratified.data.tokenizer import Tokenizer
from stratified.retrieval.corpus import Passage
from stratified.rewards import Score
from stratified.tasks import base
from stratified.tasks.arithmetic import ArithmeticSettings
from stratified.tasks.base import DataSettings, ProtocolSettings, Task, TaskSettings, ToolSettings
from stratified.tasks.encyclopedia.demonstrations import DemonstrationConfig
from stratified.tasks.encyclopedia.pages import EncyclopediaConfig
from stratified.tasks.encyclopedia.questions import QuestionSettings
from stratified.tasks.search_qa import FileSettings
from stratified.tools.search import SearchSettings
from stratified.types import Trajectory

# name -> its module, which has `make(config) -> Task`, `tokenizer(marks)` for a policy built here,
# and may have `check(config)` and `passages(config)`
MODULES = {
  "search_qa": "stratified.tasks.search_qa",
  "encyclopedia": "stratified.tasks.encyclopedia.task",
  "arithmetic": "stratified.tasks.arithmetic",
  "ages": "stratified.tasks.ages",
}
# the settings of all of them
SETTINGS = (
  TaskSettings,
  ToolSettings,
  DataSettings,
  ProtocolSettings,
  Limits,
  SearchSettings,
  FileSettings,
  EncyclopediaConfig,
  QuestionSettings,
  DemonstrationConfig,
  ArithmeticSettings,
)
BY_DATA = {"files": "search_qa", "encyclopedia": "encyclopedia"}  # data.name -> task


def name_of(config) -> str:
  """`task.name`, or the task that `data.name` stands for where that is empty.

  Raises ValueError, one sentence, for a name that is none.
  """
  name = config.task.name if "task" in config else ""
  if not name:
    if config.data.name not in BY_DATA:
      raise ValueError(
        f"data.name={config.data.name!r} is unknown; choose one of {', '.join(BY_DATA)}, or name a "
        "task with task.name"
      )
    return BY_DATA[config.data.name]
  if name not in MODULES and ":" not in name:
    raise ValueError(
      f"task.name={name!r} is unknown; choose one of {', '.join(MODULES)}, or your own as "
      "module:function"
    )
  return name


def make(config) -> Task:
  """Makes the task that the config names; ValueError or OSError, one sentence, where it can't."""
  name = name_of(config)
  if name in MODULES:
    return importlib.import_module(MODULES[name]).make(config)
  function = outside.function("task.name", name, "a config")
  try:
    task = function(config)
  except (ValueError, OSError):
    raise
  except (Exception, SystemExit) as error:
    said = " ".join(str(error).split())[:200]
    raise ValueError(f"task.name={name!r} failed with {type(error).__name__}: {said}") from error
  if not isinstance(task, Task):
    raise ValueError(
      f"task.name={name!r} returned {type(task).__name__}; it must return a Task, see "
      "stratified/tasks/base.py"
    )
  return task


def reward(config, task: Task) -> Callable[[Trajectory], Score]:
  """Makes the reward of `reward.name`; where that is left as it is, takes the task's own."""
  wanted = settings.read(rewards.RewardSettings, config)
  own = task.reward if wanted.name == rewards.RewardSettings.name else None
  return own or rewards.of(wanted)


def check(config) -> None:
  """Refuses, before any work, settings that the task can't be made with."""
  name = name_of(config)
  module = importlib.import_module(MODULES[name]) if name in MODULES else None
  if hasattr(module, "check"):
    module.check(config)


def tokenizer(config) -> Tokenizer:
  """Makes the task's tokenizer alone: the model directory's, or its own for a policy made here."""
  name = name_of(config)
  if config.policy.checkpoint:
    return base.from_checkpoint(config)
  if name in MODULES:
    return importlib.import_module(MODULES[name]).tokenizer(base.marks(config))
  return make(config).tokenizer


def passages(config) -> Sequence[Passage]:
  """Makes the passages that the task searches; ValueError where it searches nothing of its own."""
  module = importlib.import_module(MODULES[name]) if (name := name_of(config)) in MODULES else None
  if not hasattr(module, "passages"):
    raise ValueError(f"task.name={name!r} has no passages to search")
  return module.passages(config)
