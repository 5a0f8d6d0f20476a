"""Settings of a run: each declared once, as a field of the dataclass of the part that uses it.

    @dataclasses.dataclass(frozen=True)
    class Clip(Settings):
      SECTION = "loss"
      clip_ratio: float = setting(0.2, "how far the ratio may leave 1", above=0)

    config = to_config(Clip)          # ConfigDict: config.loss.clip_ratio == 0.2, what flags override
    clip = read(Clip, config)         # a checked Clip; ValueError names field, rule and way out

Several classes may share a section, each reading the fields that are its own. What else a run needs
to know of a field (its range, its choices, whether it may change when a run resumes, what it has an
effect on) stands in `setting` too and nowhere else.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import typing
from typing import Any, ClassVar

import ml_collections
from ml_collections import config_dict

# What a field can have an effect on: the reinforcement stage's numbers, the warm start's, and what
# a trained policy answers. A field that affects nothing may change when a run resumes.
EFFECTS = ("training", "warm_start", "answers")


@dataclasses.dataclass(frozen=True)
class Rule:
  """What `setting` says of a field, its default and type aside."""

  meaning: str
  low: float | None = None
  high: float | None = None
  above: float | None = None
  below: float | None = None
  choices: tuple | None = None
  affects: tuple[str, ...] = EFFECTS


def setting(
  default: Any,
  meaning: str,
  *,
  low: float | None = None,
  high: float | None = None,
  above: float | None = None,
  below: float | None = None,
  choices: Sequence | None = None,
  affects: Sequence[str] = EFFECTS,
) -> Any:
  """A dataclass field that is a setting of a run.

  Args:
    default: its value where nobody gives one; None is "not given" for a type like `float | None`.
    meaning: one line, for the page of all fields.
    low, high: least and greatest value allowed; above, below: the same, the bound itself excluded.
    choices: the values allowed.
    affects: which of EFFECTS change with it; () may change when a run resumes.
  """
  choices = None if choices is None else tuple(choices)
  rule = Rule(meaning, low, high, above, below, choices, tuple(affects))
  return dataclasses.field(default=default, metadata={"rule": rule})


class Settings:
  """Base of a frozen dataclass of settings: construction checks every field's rule.

  SECTION is the config section that the fields stand in, "" for the top level. A subclass with
  rules across fields extends `__post_init__` and calls this one first.
  """

  SECTION: ClassVar[str] = ""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if "rule" in field.metadata:
        check(dotted(type(self), field.name), getattr(self, field.name), field.metadata["rule"])


def dotted(cls: type, name: str) -> str:
  """The name of a field as a config has it: `section.field`."""
  return f"{cls.SECTION}.{name}" if cls.SECTION else name


def check(name: str, value: Any, rule: Rule) -> None:
  """Raises ValueError, one sentence naming field, value and rule, where the value breaks it."""
  if value is None:
    return
  if rule.choices is not None and value not in rule.choices:
    raise ValueError(
      f"{name}={value!r} is unknown; choose one of {', '.join(map(str, rule.choices))}"
    )
  bounds = [
    (rule.low, "at least", lambda x: x >= rule.low),
    (rule.above, "above", lambda x: x > rule.above),
    (rule.high, "at most", lambda x: x <= rule.high),
    (rule.below, "below", lambda x: x < rule.below),
  ]
  bounds = [(limit, word, holds) for limit, word, holds in bounds if limit is not None]
  if bounds and not (math.isfinite(value) and all(holds(value) for *_, holds in bounds)):
    words = " and ".join(f"{word} {limit}" for limit, word, _ in bounds)
    raise ValueError(f"{name}={value} must be {words}, and finite")


def rules(*classes: type) -> dict[str, Rule]:
  """{dotted name: rule} of every setting of the classes."""
  return {
    dotted(cls, field.name): field.metadata["rule"]
    for cls in classes
    for field in dataclasses.fields(cls)
    if "rule" in field.metadata
  }


def to_config(*classes: type) -> ml_collections.ConfigDict:
  """A ConfigDict of the classes' defaults; None becomes a placeholder of the field's type."""
  config = ml_collections.ConfigDict()
  for cls in classes:
    if cls.SECTION and cls.SECTION not in config:
      config[cls.SECTION] = ml_collections.ConfigDict()
    section = config[cls.SECTION] if cls.SECTION else config
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
      if "rule" in field.metadata:
        default = field.default
        if default is None:
          kind = next(one for one in typing.get_args(types[field.name]) if one is not type(None))
          default = config_dict.placeholder(kind)
        section[field.name] = default
  return config


def read(cls: type, config: Mapping[str, Any], **others: Any) -> Any:
  """A checked instance of `cls` with its fields from the config; `others` are what no config has."""
  section = config[cls.SECTION] if cls.SECTION else config
  names = [field.name for field in dataclasses.fields(cls) if "rule" in field.metadata]
  return cls(**{name: _plain(section[name]) for name in names if name in section}, **others)


def _plain(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value
