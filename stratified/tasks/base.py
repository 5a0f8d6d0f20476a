"""Defines a task: what is asked, with which tools, and what the answer is worth.

A task of your own is a function `(config) -> Task`, named in the config as
`task.name=module:function`; `tools` and `make` below make its parts from the config.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

from stratified import config as settings
from stratified import outside
from stratified.agents import chat, protocols, tags, tool_calls
from stratified.agents.baselines import named as methods
from stratified.agents.limits import Limits
from stratified.config import setting, Settings
from stratified.data.tokenizer import Tokenizer
from stratified.retrieval.noise import NoiseSettings, Noisy
from stratified.tools import base as tools_base
from stratified.tools.base import Timed, Tool
from stratified.tools.calculator import Calculator
from stratified.tools.search import Search
from stratified.types import Question, Trajectory

Tools = tuple[Tool, ...]
Sets = dict[str, tuple[list[Question], Tools]]


@dataclasses.dataclass(frozen=True)
class Task:
  """What an agent is trained on.

  tokenizer: `encode`, `decode`, `eos_id`, `vocab_size`.
  protocol: what is fed and how text is read, see agents/tags.py.
  limits: see agents/limits.py.
  tools: see tools/base.py.
  questions_at: step -> the questions of that training step, a function of the step alone.
  held_out: count -> {set: (questions, tools)}; one set is "held_out", which metrics speak of.
  sets: the same of every question set by name, None where these are the held-out ones; count None
    is all there are.
  endless: whether held-out questions are made without end, so that a count is needed.
  demonstrations: step -> finished rollouts [n][1] to imitate in the warm start; None where there is
    no script.
  reward: what a rollout is worth (see rewards.Reward) where `reward.name` is left as it is; None is
    exact match.
  """

  tokenizer: Tokenizer
  protocol: tags.Tags
  limits: Limits
  tools: Tools
  questions_at: Callable[[int], list[Question]]
  held_out: Callable[[int], Sets]
  sets: Callable[[int | None], Sets] | None = None
  endless: bool = False
  demonstrations: Callable[[int], list[list[Trajectory]]] | None = None
  reward: Callable | None = None

  @property
  def tool_names(self) -> tuple[str, ...]:
    return tuple(tool.name for tool in self.tools)

  @property
  def seconds(self) -> float:
    """Seconds that the tools have run."""
    return sum(getattr(tool, "seconds", 0.0) for tool in self.tools)

  def row_at(self, step: int) -> dict[str, float]:
    """What the tools add to the row of a training step."""
    rows = [tool.row_at(step) for tool in self.tools if hasattr(tool, "row_at")]
    return {key: value for row in rows for key, value in row.items()}

  @property
  def manifest(self) -> dict[str, Any]:
    """Says what is searched; {} where nothing is."""
    return next((tool.manifest for tool in self.tools if tool.name == "search"), {})


TAGS = (
  {"short": tags.short, "search_r1": tags.search_r1, "few_shot": tags.few_shot}
  | protocols.PROTOCOLS
  | methods.PROTOCOLS
)
PROTOCOLS = (*TAGS, "tool_calls")


@dataclasses.dataclass(frozen=True)
class TaskSettings(Settings):
  """Which task."""

  SECTION = "task"
  name: str = setting(
    "",
    "encyclopedia, search_qa, arithmetic, ages, or module:function; empty is what data.name says",
  )


@dataclasses.dataclass(frozen=True)
class DataSettings(Settings):
  """What is asked."""

  SECTION = "data"
  name: str = setting(
    "files",
    "a generated encyclopedia, or files; task.name overrules it",
    choices=["encyclopedia", "files"],
  )
  questions_per_step: int = setting(
    256, "questions of a step", low=1, high=100_000, affects=["training"]
  )


@dataclasses.dataclass(frozen=True)
class ToolSettings(Settings):
  """Which tools."""

  tools: str = setting(
    "", "names with commas between them, each a tool or module:name; empty is the task's own"
  )


@dataclasses.dataclass(frozen=True)
class ProtocolSettings(Settings):
  """How text becomes calls and answers."""

  SECTION = "rollout"
  protocol: str = setting("search_r1", "the protocol's name", choices=PROTOCOLS)
  chat_template: bool = setting(False, "the prompt as a user message in the model's chat template")
  tool_schema: str = setting(
    "template",
    "tool_calls: the tools' schemas where the chat template shows them, or in a system message",
    choices=tool_calls.PLACES,
  )


TOOLS = {"calculator": Calculator}  # those that need nothing of a task's


def make(config, tools: Tools, tokenizer: Callable[[], Tokenizer], **parts: Any) -> Task:
  """Makes a task: tokenizer, protocol and limits from the config, and these parts.

  tokenizer: makes that of a policy that is built here; a model directory brings its own. parts: the
  other fields of Task.
  """
  return Task(
    tokenizer=from_checkpoint(config) if config.policy.checkpoint else tokenizer(),
    protocol=protocol(config, tools),
    limits=limits(config),
    tools=noisy(config, tools),
    **parts,
  )


def noisy(config, tools: Tools) -> Tools:
  """Gives training's search the noise of `retriever.noise_*`; held-out sets keep theirs without."""
  noise = settings.read(NoiseSettings, config)
  if not noise.active:
    return tools
  if not any(hasattr(tool, "retriever") for tool in tools):
    raise ValueError(
      f"retriever.noise_end={noise.noise_end} and noise_start={noise.noise_start} need a search "
      "tool, which this task has not; set both to 0"
    )
  return tuple(
    Timed(Search(Noisy(tool.retriever, noise, config.seed), tool.topk))
    if tool.name == "search"
    else tool
    for tool in tools
  )


def tools(config, own: Mapping[str, Callable[[], Tool]]) -> Tools:
  """Opens the tools of a run, each timed: the task's own, or those that `tools` names.

  own: name -> a function that opens the tool. Raises ValueError, one sentence, for a name that is
  none, for an object that is no tool, and for one from outside that fails its trial call.
  """
  given = settings.read(ToolSettings, config).tools
  field = f"tools={given!r}"
  names = [name.strip() for name in given.split(",") if name.strip()]
  opened = []
  for name in names or own:
    if name in own:
      opened.append(own[name]())
    elif name in TOOLS:
      opened.append(TOOLS[name]())
    elif ":" in name:
      opened.append(_from_outside(name, field))
    else:
      known = ", ".join({**own, **TOOLS})
      raise ValueError(
        f"{field} names {name!r}, which is no tool of this task; choose from {known}, or your own "
        "as module:name"
      )
  tools_base.check(opened, field)
  for tool in (tool for name, tool in zip(names, opened) if name not in own and ":" in name):
    tools_base.try_out(tool, field)
  return tuple(map(Timed, opened))


def _from_outside(name: str, field: str) -> Tool:
  """Loads the tool of `module:name`, an object or a class that is made without arguments."""
  found = outside.load("tools", name)
  if not isinstance(found, type):
    return found
  try:
    return found()
  except (Exception, SystemExit) as error:
    text = " ".join(str(error).split())[:200]
    raise ValueError(
      f"{field}: {name}() failed with {type(error).__name__}: {text}; a class is called without "
      "arguments, or name an object that is made already"
    ) from error


def protocol(config, tools: Sequence[Tool | type[Tool]]):
  """Makes the protocol of `rollout.protocol` for these tools.

  That is tags, in plain text or in the model's chat template, or its native tool calls.
  """
  name = config.rollout.protocol
  if name == "tool_calls":
    schema = settings.read(ProtocolSettings, config).tool_schema
    return tool_calls.tool_calls(
      chat.load(config.policy.checkpoint), from_checkpoint(config), tools, schema
    )
  render = chat.load(config.policy.checkpoint).user if config.rollout.chat_template else None
  if name in methods.PROTOCOLS:  # they search, and call no other tool
    return TAGS[name](render=render)
  return TAGS[name](render=render, tools=tools)


def family(name: str) -> str:
  """Which protocols compare with that of this name: see tags.Tags.family; "" for none."""
  if name in TAGS:
    return TAGS[name](render=None).family
  return tool_calls.ToolCalls.family if name == "tool_calls" else ""


def marks(config) -> tuple[str, ...]:
  """Lists the tags of a published method's protocol, for a tokenizer that is made here."""
  made = protocols.PROTOCOLS.get(config.rollout.protocol)
  return made().marks if made else ()


def from_checkpoint(config) -> Tokenizer:
  """Reads the tokenizer of the model's directory."""
  return Tokenizer.from_file(str(pathlib.Path(config.policy.checkpoint) / "tokenizer.json"))


def limits(config, **changes) -> Limits:
  return settings.read(Limits, config, **changes)
