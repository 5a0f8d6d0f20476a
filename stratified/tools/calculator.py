"""Calculates as a tool: + - * / and parentheses over integers and decimals, by a small parser.

Numbers are fractions inside: what has a finite decimal form is exact (0.1 + 0.2 is 0.3), the rest
is rounded to DECIMALS places. Nothing that the policy writes is ever run as code. What is no
expression, or is too long, too deep or too large, gives a result that says so.
"""

from collections.abc import Sequence
from fractions import Fraction
import re

from stratified.tools.base import Result

LONGEST = 200  # characters of an expression
DEEPEST = 20  # parentheses and signs within each other
DIGITS = 40  # of a number, before or after the point
DECIMALS = 10  # of a result that has no finite decimal form

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([-+*/()]))", re.ASCII)


class Wrong(ValueError):
  """What is wrong with an expression, in words for the policy."""


def evaluate(expression: str) -> str:
  """Evaluates an expression, as text: `evaluate("12 * (3 + 4.5)")` is "90".

  Raises Wrong, saying what is wrong, for everything that has no value.
  """
  if len(expression) > LONGEST:
    raise Wrong(f"longer than {LONGEST} characters")
  tokens = _tokens(expression)
  value, at = _sum(tokens, 0, 0)
  if at < len(tokens):
    raise Wrong(f"unexpected {tokens[at]}")
  return written(value)


def _tokens(expression: str) -> list[str]:
  tokens, at, text = [], 0, expression.rstrip()
  while at < len(text):
    match = _TOKEN.match(text, at)
    if not match:
      raise Wrong(f"unexpected {text[at:].lstrip()[0]}")
    tokens.append(match[1] or match[2])
    if len(tokens[-1]) > DIGITS:
      raise Wrong(f"a number of more than {DIGITS} digits")
    at = match.end()
  return tokens


def _sum(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
  """sum = product {(+ | -) product}; (its value, where it ends)."""
  value, at = _product(tokens, at, depth)
  while at < len(tokens) and tokens[at] in "+-":
    right, end = _product(tokens, at + 1, depth)
    value, at = (value + right if tokens[at] == "+" else value - right), end
  return value, at


def _product(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
  """product = factor {(* | /) factor}."""
  value, at = _factor(tokens, at, depth)
  while at < len(tokens) and tokens[at] in "*/":
    right, end = _factor(tokens, at + 1, depth)
    if tokens[at] == "/" and not right:
      raise Wrong("division by zero")
    value, at = (value * right if tokens[at] == "*" else value / right), end
  return value, at


def _factor(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
  """factor = number | ( sum ) | - factor | + factor."""
  if depth > DEEPEST:
    raise Wrong(f"more than {DEEPEST} parentheses within each other")
  if at == len(tokens):
    raise Wrong("ends too early")
  token = tokens[at]
  if token in "+-":
    value, end = _factor(tokens, at + 1, depth + 1)
    return (value if token == "+" else -value), end
  if token == "(":
    value, end = _sum(tokens, at + 1, depth + 1)
    if end == len(tokens) or tokens[end] != ")":
      raise Wrong("a parenthesis is not closed")
    return value, end + 1
  if token in "*/)":
    raise Wrong(f"unexpected {token}")
  return Fraction(token if token[0] != "." else "0" + token), at + 1


def written(value: Fraction) -> str:
  """Writes a number in decimal form, exact where it can be.

  Raises Wrong for more than DIGITS digits before the point.
  """
  if abs(value) >= 10**DIGITS:
    raise Wrong(f"the result has more than {DIGITS} digits")
  rest, places = value.denominator, 0
  for prime in (2, 5):
    power = 0
    while rest % prime == 0:
      rest, power = rest // prime, power + 1
    places = max(places, power)
  places = places if rest == 1 and places <= DIGITS else DECIMALS
  digits = f"{abs(round(value * 10**places)):0{places + 1}d}"
  whole, part = digits[: len(digits) - places], digits[len(digits) - places :].rstrip("0")
  sign = "-" if value < 0 and set(digits) != {"0"} else ""
  return sign + whole + ("." + part if part else "")


class Calculator:
  """Evaluates expressions; see `evaluate`."""

  name = "calculator"
  description = "Evaluates an arithmetic expression of numbers, + - * / and parentheses."
  schema = {
    "type": "object",
    "properties": {
      "expression": {"type": "string", "description": "The expression, such as 12 * (3 + 4.5)."}
    },
    "required": ["expression"],
  }

  def run(self, calls: Sequence[str]) -> list[Result]:
    return [_answered(expression) for expression in calls]


def _answered(expression: str) -> Result:
  try:
    return Result((evaluate(expression),))
  except Wrong as error:
    return Result((f"error: {error}",), failed=True)
