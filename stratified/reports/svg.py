"""Elements of SVG as markup."""

from typing import Any

from markupsafe import Markup

from stratified.reports import text as texts


def tag(name: str, *children: Markup, **attributes: Any) -> Markup:
  """An element; attribute values are escaped, children are markup already."""
  pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
  told = Markup("").join(Markup(' {}="{}"').format(key, _pixels(value)) for key, value in pairs)
  return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), told, Markup("").join(children))


def _pixels(value: Any) -> str:
  return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(said: str, x: float, y: float, kind: str = "") -> Markup:
  content = Markup.escape(texts.one_line(said))
  return tag("text", content, **({"class_": kind} if kind else {}), x=float(x), y=float(y))


def path(d: str, kind: str, **more: Any) -> Markup:
  return tag("path", class_=kind, d=d, **more)


def dash(dashed: bool) -> dict[str, str]:
  return {"stroke_dasharray": "6 4"} if dashed else {}
