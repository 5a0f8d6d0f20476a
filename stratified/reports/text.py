"""Writes text and numbers for a page; every text is hostile until it went through here."""

from collections.abc import Mapping
import functools
import re
from typing import Any
import unicodedata

import jinja2
from markupsafe import escape, Markup

from stratified.progress import duration

LONGEST = 2_000  # characters shown of a text that nobody bounded
_MOST_CODES = 50  # characters of a text that are shown by their code
_KEPT = "\n\t\u200c\u200d"  # invisible, but part of how scripts are written
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp", "Co")
_SECRET = re.compile(r"(?<=://)[^/@\s]*@")


def cut(value: Any, longest: int = LONGEST) -> str:
  """A text of at most `longest` characters, and how many more there are."""
  text = value if isinstance(value, str) else _shown(value)
  more = len(text) - longest
  return text if more <= 0 else f"{text[:longest]} … {more:,} more characters"


def _shown(value: Any) -> str:
  try:
    return str(value)
  except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
    return f"({type(value).__name__} that can't be shown)"


def visible(value: Any, longest: int = LONGEST) -> Markup:
  """Escapes a text and shows characters that hide or reorder others by their code.

  Directional overrides can make a passage read as something else, and reach beyond it. A row of the
  same character is shown once, with its number; after the first 50 codes of a text each is �.
  """
  if isinstance(value, Markup):
    return value
  parts, codes = [], 0
  for c, run, count in _runs(cut(value, longest).replace("\r\n", "\n")):
    if c is None:
      parts.append(escape(run))
    elif (codes := codes + 1) > _MOST_CODES:
      parts.append("\ufffd")
    else:
      times = f" × {count:,}" if count > 1 else ""
      parts.append(Markup('<span class="code">U+{:04X}{}</span>').format(ord(c), times))
  return Markup("").join(parts)


def plain(value: Any, longest: int = LONGEST) -> str:
  """The same as plain text of several lines, for a terminal."""
  runs = _runs(cut(value, longest).replace("\r\n", "\n"))
  return "".join(run if c is None else f"[U+{ord(c):04X}]" for c, run, _ in runs)


def one_line(value: Any, longest: int = 200) -> str:
  """The same, for titles, attributes and SVG."""
  return plain(value, longest)


def _runs(text: str):
  """(None, text, 0) for what is seen, (character, "", how many) for what is not."""
  at = 0
  while at < len(text):
    end, c = at + 1, text[at]
    if _is_seen(c):
      while end < len(text) and _is_seen(text[end]):
        end += 1
      yield None, text[at:end], 0
    else:
      while end < len(text) and text[end] == c:
        end += 1
      yield c, "", end - at
    at = end


def _is_seen(c: str) -> bool:
  return c in _KEPT or unicodedata.category(c) not in _INVISIBLE


def without_secrets(text: str) -> str:
  """The text without user names and passwords of addresses."""
  return _SECRET.sub("…@", text)


def fixed(value: float | None, digits: int = 1, signed: bool = False) -> str:
  """A number with so many digits after the point, never -0.0; a dash for None."""
  if value is None:
    return "–"
  text = f"{value:{'+' * signed}.{digits}f}"
  return text.lstrip("+-") if float(text) == 0 else text


def percent(value: float | None, signed: bool = False) -> str:
  """A share x 100."""
  return fixed(None if value is None else 100 * value, 1, signed)


def number(value: float | None, percent: bool = False) -> str:
  """A short form: 0.031, 1.25, 12.3, 41k, 1.5M; percent turns fractions into 12.3%."""
  if value is None:
    return "–"
  if percent:
    return f"{fixed(100 * value)}%".replace(".0%", "%")
  size = abs(value)
  if 1e4 <= size < 1e6:
    return f"{value / 1000:.0f}k"
  if size >= 1e6:
    unit, letter = (1e6, "M") if size < 1e9 else (1e9, "B")
    return f"{value / unit:.3g}{letter}" if size < 1e12 else f"{value:.1e}"
  if size >= 100 or value == round(value):
    return fixed(value, 0)
  if size >= 0.001:
    return f"{value:.3g}"
  digits, power = f"{value:.1e}".split("e")
  return f"{digits.removesuffix('.0')}e{int(power)}"


def counted(count: Any, one: str, many: str) -> str:
  """`1 search`, `2 searches`, `– searches`."""
  return f"{'–' if count is None else cut(count, 40)} {one if count == 1 else many}"


@functools.cache
def environment() -> jinja2.Environment:
  """Opens the templates; what they print goes through `visible` unless it is markup already.

  So a forgotten filter lets nothing through.
  """
  made = jinja2.Environment(
    loader=jinja2.PackageLoader("stratified.reports"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=visible,
  )
  made.filters |= {
    "visible": visible,
    "one_line": one_line,
    "fixed": fixed,
    "percent": percent,
    "number": number,
    "duration": duration,
  }
  made.globals["counted"] = counted
  return made


def render(template: str, values: Mapping[str, Any] = {}) -> str:
  """A template of reports/templates with its values, as text."""
  return environment().get_template(template).render(values)
