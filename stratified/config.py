"""Declares settings of a run, each once: as a field of the dataclass of the part that uses it.

    @dataclasses.dataclass(frozen=True)
    class Clip(Settings):
      SECTION = "loss"
      clip_ratio: float = setting(0.2, "how far the ratio may leave 1", above=0)

    config = to_config(Clip)          # ConfigDict: config.loss.clip_ratio == 0.2, as flags set it
    clip = read(Clip, config)         # a checked Clip; ValueError names field, value, rule

Several classes may share a section; each reads its own fields. `setting` also says, and nothing
else does, what a run needs to know of a field: its range, its choices, what it has an effect on,
whether it may change when a run resumes. `rules(*classes)` lists all of it by name, for sweeps,
reports and tests. stratified/runs/settings.py names the classes that make up a run.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import difflib
import functools
import math
import types
import typing
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

import ml_collections
from ml_collections import config_dict

from stratified import files

# What a field can have an effect on. One that affects nothing, or the rounding of sums alone, may
# change when a run resumes.
EFFECTS = {
  "training": "numbers of a reinforcement step",
  "warm_start": "parameters that the warm start reaches",
  "answers": "what a trained policy answers",
  "scores": "which questions measure it",
  "rows": "when it is evaluated on the way",
  "rounding": "the order of sums, so the last digits",
}
NUMBERS = ("training", "warm_start", "answers")  # of a field that says nothing else

# Sizes of numbers without a bound of their own: what int32 and float32 arithmetic bears.
LARGEST, SMALLEST = 10**9, 1e-30


@dataclasses.dataclass(frozen=True)
class Rule:
  """What a field's declaration says of it.

  kind: its type. grows: a resumed run may raise it. secret: its value may hold a password.
  """

  meaning: str
  low: float | None = None
  high: float | None = None
  above: float | None = None
  below: float | None = None
  choices: tuple | None = None
  affects: tuple[str, ...] = NUMBERS
  grows: bool = False
  secret: bool = False
  default: Any = None
  kind: Any = None


def setting(
  default: Any,
  meaning: str,
  *,
  low: float | None = None,
  high: float | None = None,
  above: float | None = None,
  below: float | None = None,
  choices: Iterable | None = None,
  affects: Sequence[str] = NUMBERS,
  grows: bool = False,
  secret: bool = False,
) -> Any:
  """A dataclass field that is a setting of a run.

  Args:
    default: its value where nobody gives one; None is "not given" for a type like `float | None`.
    meaning: one line, for the page of all fields.
    low, high: least and greatest value allowed; above, below: the same, the bound itself excluded.
      Of a tuple they bound each number. Without high or below a number is at most LARGEST in size.
    choices: the values allowed.
    affects: which of EFFECTS change with it; () and ("rounding",) may change when a run resumes.
    grows: a resumed run may raise it.
    secret: a URL whose password is kept out of files, pages and messages.
  """
  unknown = [effect for effect in affects if effect not in EFFECTS]
  if unknown:
    raise ValueError(f"affects={unknown} is unknown; choose from {', '.join(EFFECTS)}")
  choices = None if choices is None else tuple(choices)
  rule = Rule(
    meaning, low, high, above, below, choices, tuple(affects), grows, secret, default=default
  )
  return dataclasses.field(default=default, metadata={"rule": rule})


class Settings:
  """Base of a frozen dataclass of settings: construction checks every field's rule.

  SECTION is the config section that the fields stand in, "" for the top level. A subclass with
  rules across fields extends `__post_init__` and calls this one first.
  """

  SECTION: ClassVar[str] = ""

  def __post_init__(self):
    for name, rule in fields(type(self)).items():
      check(dotted(type(self), name), getattr(self, name), rule)


def dotted(cls: type, name: str) -> str:
  """The name of a field as a config has it: `section.field`."""
  return f"{cls.SECTION}.{name}" if cls.SECTION else name


@functools.cache
def fields(cls: type) -> dict[str, Rule]:
  """{name: rule} of the fields of a class that are settings."""
  kinds = typing.get_type_hints(cls)
  return {
    field.name: dataclasses.replace(field.metadata["rule"], kind=kinds[field.name])
    for field in dataclasses.fields(cls)
    if "rule" in field.metadata
  }


def rules(*classes: type) -> dict[str, Rule]:
  """{dotted name: rule} of every setting of the classes; ValueError where two declare one field."""
  found = {}
  for cls in classes:
    for name, rule in fields(cls).items():
      if dotted(cls, name) in found:
        raise ValueError(f"{dotted(cls, name)} is declared twice, the second time by {cls}")
      found[dotted(cls, name)] = rule
  return found


###  Values against rules  ###


def check(name: str, value: Any, rule: Rule) -> None:
  """Raises ValueError, one sentence naming field, value and rule, where the value breaks it."""
  if value is None and (rule.kind is None or _optional(rule.kind)):
    return
  if not _fits(value, rule.kind):
    raise ValueError(f"{name}={value!r} must be {allowed(rule)}")
  if rule.choices is not None and value not in rule.choices:
    choices = sorted(map(str, rule.choices))
    near = difflib.get_close_matches(str(value), choices, 1) if len(choices) > 4 else []
    raise ValueError(
      f"{name}={value!r} is unknown; choose one of {', '.join(choices)}"
      + (f"; did you mean {near[0]}?" if near else "")
    )
  values = value if isinstance(value, tuple | list) else (value,)
  numbers, bounds = _numbers(values), _bounds(rule)
  open_above = rule.high is None and rule.below is None
  if open_above and any(LARGEST < abs(x) < math.inf for x in numbers):
    bounds.append((f"{LARGEST} in size", "at most", lambda x: abs(x) <= LARGEST))
  if rule.above == 0 and any(0 < x < SMALLEST for x in numbers):  # which float32 takes for 0
    bounds.append((SMALLEST, "at least", lambda x: x >= SMALLEST))
  if not all(abs(x) < math.inf and all(holds(x) for *_, holds in bounds) for x in numbers):
    words = " and ".join(f"{word} {limit}" for limit, word, _ in bounds)
    raise ValueError(f"{name}={value} must be {words}{', and ' if words else ''}finite")


def _bounds(rule: Rule) -> list[tuple]:
  """(limit, words, test) of each bound that the rule has."""
  found = [
    (rule.low, "at least", lambda x: x >= rule.low),
    (rule.above, "above", lambda x: x > rule.above),
    (rule.high, "at most", lambda x: x <= rule.high),
    (rule.below, "below", lambda x: x < rule.below),
  ]
  return [(limit, word, holds) for limit, word, holds in found if limit is not None]


def _numbers(values: Iterable) -> list:
  return [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]


def _optional(kind: Any) -> bool:
  return kind is None or type(None) in typing.get_args(kind)


def _plain_kind(kind: Any) -> Any:
  """The type without its None: `float | None` -> float."""
  if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
    return next(one for one in typing.get_args(kind) if one is not type(None))
  return kind


def _fits(value: Any, kind: Any) -> bool:
  kind = _plain_kind(kind)
  if typing.get_origin(kind) is tuple:
    each = typing.get_args(kind)[0]
    return isinstance(value, tuple | list) and all(_fits(one, each) for one in value)
  types_ = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}.get(kind)
  if types_ is None:
    return True
  return isinstance(value, types_) and (kind is bool or not isinstance(value, bool))


def allowed(rule: Rule) -> str:
  """The rule in words: `a whole number, at least 1`."""
  if rule.choices is not None:
    return f"one of {', '.join(sorted(map(str, rule.choices)))}"
  kind = _plain_kind(rule.kind)
  many = typing.get_origin(kind) is tuple
  one = typing.get_args(kind)[0] if many else kind
  words = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false",) * 2,
    str: ("text", "texts"),
  }.get(one, ("a value", "values"))[many]
  parts = [words] + [f"{word} {limit}" for limit, word, _ in _bounds(rule)]
  return ", ".join(parts) + (", or nothing" if _optional(rule.kind) and rule.kind else "")


###  Configs  ###


class Config(ml_collections.ConfigDict):
  """A ConfigDict in which `config.update` is the section `update`, and can still be called.

  ConfigDict has a method of that name, which would hide the section from flags and attributes.
  """

  @property
  def update(self):
    method = functools.partial(ml_collections.ConfigDict.update, self)
    if "update" not in self:
      return method
    section = self["update"]
    object.__setattr__(section, "_method", method)
    return section


class UpdateSection(ml_collections.ConfigDict):
  """The section `update` of a Config, which called is the method `update` of that config."""

  def __call__(self, *args, **kwargs):
    return self._method(*args, **kwargs)


def to_config(*classes: type) -> ml_collections.ConfigDict:
  """Makes a ConfigDict of the classes' defaults; None becomes a placeholder of the field's type.

  It is locked: a field that nobody declared can't be set.
  """
  config = Config()
  rules(*classes)
  for cls in classes:
    if cls.SECTION and cls.SECTION not in config:
      kind = UpdateSection if cls.SECTION == "update" else ml_collections.ConfigDict
      config[cls.SECTION] = kind()
    section = config[cls.SECTION] if cls.SECTION else config
    for name, rule in fields(cls).items():
      section[name] = (
        config_dict.placeholder(_plain_kind(rule.kind)) if rule.default is None else rule.default
      )
  return config.lock()


def read(cls: type, config: Mapping[str, Any], **others: Any) -> Any:
  """Reads `cls` from the config and checks it; `others` are its fields that no config has.

  A field that the config does not have takes its default.
  """
  section = (config[cls.SECTION] if cls.SECTION in config else {}) if cls.SECTION else config
  values = {name: _plain(section[name]) for name in fields(cls) if name in section}
  return cls(**values, **others)


def value_at(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
  """The value of a dotted name; `default` where the config does not have it."""
  for part in name.split("."):
    if part not in config:
      return default
    config = config[part]
  return config


def check_all(config: Mapping[str, Any], wanted: Mapping[str, Rule]) -> None:
  """Raises ValueError for the first value that breaks its rule, and for a field without a rule."""
  for name in names(config):
    if name not in wanted:
      raise ValueError(f"{name} is no field of a config{suggestion(name, wanted)}")
  for name, rule in wanted.items():
    check(name, _plain(value_at(config, name, rule.default)), rule)


def names(config: Mapping[str, Any]) -> list[str]:
  """The dotted names of a config's fields."""
  values = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
  return [name for name, value in files.flatten(values).items() if value != {}]


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
  """`; did you mean x?` for a mistyped dotted name, or nothing where no field is like it.

  The nearest section counts first, then what is like the field in it, then fields of that very name
  in other sections, then any of the section. prefix: stands before each name in the answer.
  """
  section, _, last = name.rpartition(".")
  parts = [(one, *one.rpartition(".")[::2]) for one in known]
  near = difflib.get_close_matches(section, dict.fromkeys(where for _, where, _ in parts), 1, 0.6)
  inside = {field: one for one, where, field in parts if [where] == near}
  begun = [field for field in inside if last and (field.startswith(last) or last.startswith(field))]
  alike = [last] if last in inside else begun or difflib.get_close_matches(last, inside, 1, 0.5)
  same = [one for one, _, field in parts if field == last]
  found = [inside[field] for field in alike] or same or (list(inside.values()) if section else [])
  return f"; did you mean {' or '.join(prefix + one for one in found[:3])}?" if found else ""


def _plain(value: Any) -> Any:
  return tuple(value) if isinstance(value, list) else value


###  What does not matter where  ###


def unaffected(wanted: Mapping[str, Rule], *effects: str) -> tuple[str, ...]:
  """The fields that have none of these effects."""
  return tuple(name for name, rule in wanted.items() if not set(rule.affects) & set(effects))


def changed(
  before: Mapping[str, Any], after: Mapping[str, Any], ignore: Iterable[str] = ()
) -> list[str]:
  """The dotted names in which two flat configs differ; absent counts as a value."""
  absent = object()
  return [
    key
    for key in sorted({**before, **after})
    if key not in ignore and before.get(key, absent) != after.get(key, absent)
  ]


def free(wanted: Mapping[str, Rule]) -> tuple[str, ...]:
  """The fields that may change when a run resumes: they change no more than rounding."""
  return unaffected(wanted, *(effect for effect in EFFECTS if effect != "rounding"))


###  Passwords  ###


def without_password(url: str) -> str:
  """The URL with *** for a user and a password in it: what may be printed and stored."""
  if "@" not in url:
    return url
  try:
    parts = urlsplit(url)
  except ValueError:
    return "***"
  return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def public(config: Mapping[str, Any], wanted: Mapping[str, Rule], prefix: str = "") -> dict:
  """A plain dict of the config as a file may hold it: no password of a secret field."""
  shown = {}
  for key, value in config.items():
    name = f"{prefix}{key}"
    if isinstance(value, Mapping):
      value = public(value, wanted, f"{name}.")
    elif name in wanted and wanted[name].secret and isinstance(value, str):
      value = ",".join(without_password(part) for part in value.split(","))
    shown[key] = value
  return shown
