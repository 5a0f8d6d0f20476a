"""Draws line, band and area charts as SVG text: no script, legible on a phone, light and dark.

Colours come from CSS variables (templates/chart.css): a page with many charts states them once, and
a chart that is a file of its own (`standalone`) carries them along. Written here because the SVG of
matplotlib has neither tooltips nor the colours of the reader's scheme.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, Literal

from markupsafe import Markup

from stratified.reports import text as texts
from stratified.reports.axes import (
  Axes,
  every_nth,
  LEFT,
  MOST_POINTS,
  MOST_WINDOW,
  RIGHT,
  smooth,
  thin,
)

PALETTE = 8  # colours of kinds
ORDERED = 7  # shades of more and more of one thing: color PALETTE + i
_TITLE, _LEGEND_ROW, _MOST_HOVER = 26, 18, 48
_SHAPES = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z", "M0-4.8L4.8 0 0 4.8-4.8 0Z")
_SHAPES += ("M-3.7-3.7h7.4v7.4h-7.4Z", "M0-4.8L4.6 3.4h-9.2Z")


@dataclasses.dataclass(frozen=True)
class Series:
  """One curve. `y` may hold None (a gap).

  style: "noisy" draws the values thinly under their moving average, "dots" marks each (rare ones).
  low, high: the edges of a band around the curve, None where there is none; empty for no band.
  """

  name: str
  x: Sequence[float]
  y: Sequence[float | None]
  color: int = 0
  style: Literal["line", "noisy", "dots"] = "line"
  low: Sequence[float | None] = ()
  high: Sequence[float | None] = ()
  dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
  """One plot.

  stacked: piles the series, which then share their x, up as areas.
  percent: shows fractions as percentages.
  limits: y values that the axis must include.
  alarms: x values marked with a dashed line.
  stages: (name, x of its beginning) of the parts of a run, in order.
  meaning: what the plot tells, in a sentence, for a page to print below.
  """

  title: str
  series: tuple[Series, ...]
  stacked: bool = False
  percent: bool = False
  limits: tuple[float, ...] = (0.0,)
  alarms: tuple[float, ...] = ()
  stages: tuple[tuple[str, float], ...] = ()
  meaning: str = ""


def colors(names: Sequence[str], ordered: bool = False) -> dict[str, tuple[int, bool]]:
  """Name -> (color, dashed) of the curves of several groups.

  Shades from light to dark where the groups are an ordered few (a sweep over one number). More
  groups than colours: the next round of them is dashed.
  """
  if ordered and 2 < len(names) <= ORDERED:
    shade = lambda i: PALETTE + round(i * (ORDERED - 1) / (len(names) - 1))
    return {name: (shade(i), False) for i, name in enumerate(names)}
  return {name: (i % (PALETTE - 1), i >= PALETTE - 1) for i, name in enumerate(names)}


def figure(
  panels: Sequence[Panel],
  *,
  width: int = 400,
  height: int = 200,
  columns: int = 1,
  x_label: str = "step",
  legend: Sequence[tuple[str, int, bool]] = (),
  standalone: bool = False,
) -> Markup:
  """Draws panels in a grid and returns one <svg> element.

  Args:
    panels: what to draw; panels without a single point say so.
    width, height: of one panel, in CSS pixels at scale 1 (the element scales with its container).
    columns: panels side by side.
    x_label: what the x axis counts.
    legend: (name, color, dashed) of curves that all panels share, above them; without it each panel
      names its own, with their last values.
    standalone: a file of its own: style, background and XML namespace included.
  """
  columns = min(columns, len(panels)) or 1
  rows, total = math.ceil(len(panels) / columns), width * columns
  parts, tall = _shared_legend(legend, total) if legend else ([], 0)
  for i, panel in enumerate(panels):
    at = f"translate({width * (i % columns)} {tall + height * (i // columns)})"
    parts.append(_tag("g", *_panel(panel, width, height, not legend), transform=at))
  bottom = tall + height * rows + 18
  for column in range(columns):
    middle = width * column + (width + LEFT - RIGHT) / 2
    parts.append(_text(x_label, middle, bottom - 5, "m"))
  head, extra = [], {}
  if standalone:
    extra = {"xmlns": "http://www.w3.org/2000/svg", "width": total, "height": bottom}
    back = _tag("rect", class_="bg", width="100%", height="100%", rx=10)
    head = [_tag("style", Markup(texts.render("chart.css"))), back]
  label = texts.one_line("; ".join(panel.title for panel in panels))
  box = f"0 0 {total} {bottom}"
  return _tag(
    "svg", *head, *parts, class_="chart", viewBox=box, role="img", aria_label=label, **extra
  )


def _tag(name: str, *children: Markup, **attributes: Any) -> Markup:
  """An element; attribute values are escaped, children are markup already."""
  pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
  told = Markup("").join(Markup(' {}="{}"').format(key, _pixels(value)) for key, value in pairs)
  return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), told, Markup("").join(children))


def _pixels(value: Any) -> str:
  return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def _text(said: str, x: float, y: float, kind: str = "") -> Markup:
  content = Markup.escape(texts.one_line(said))
  return _tag("text", content, **({"class_": kind} if kind else {}), x=float(x), y=float(y))


def _path(d: str, kind: str, **more: Any) -> Markup:
  return _tag("path", class_=kind, d=d, **more)


def _shared_legend(names: Sequence[tuple[str, int, bool]], width: int) -> tuple[list[Markup], int]:
  parts, x, row = [], 10.0, 0
  longest = int((width - 60) / 6.6)
  for name, color, dashed in names:
    shown = name if len(name) <= longest else name[: longest - 1] + "…"
    needed = 26 + 6.6 * len(shown) + 14
    if x > 10 and x + needed > width:
      x, row = 10.0, row + 1
    y = 18 + _LEGEND_ROW * row
    parts.append(_path(f"M{x:.0f} {y - 4}h18", f"line s{color}", **_dash(dashed)))
    parts.append(_text(shown, x + 24, y, "k"))
    x += needed
  return parts, 8 + _LEGEND_ROW * (row + 1)


def _dash(dashed: bool) -> dict[str, str]:
  return {"stroke_dasharray": "6 4"} if dashed else {}


def _panel(panel: Panel, width: int, height: int, own_legend: bool) -> list[Markup]:
  shown = [series for series in panel.series if any(v is not None for v in series.y)]
  legend, legend_rows = _legend(panel, shown, width) if own_legend else ([], 0)
  top = _TITLE + _LEGEND_ROW * legend_rows + 10 + 14 * bool(panel.stages)
  parts = [_text(panel.title, 10, 18, "t"), *legend]
  if not shown:
    return [*parts, _text("nothing recorded", width / 2, height / 2, "m")]
  curves = _stack(shown) if panel.stacked else [(one, one.x, one.y, None) for one in shown]
  y = [v for _, _, values, _ in curves for v in values if v is not None] + list(panel.limits)
  y += [v for one in shown for edge in (one.low, one.high) for v in edge if v is not None]
  axes = Axes([x for one in shown for x in one.x], y, width, height, top)
  parts += _grid(axes, panel.percent)
  parts += _stage_marks(axes, panel.stages)
  if panel.stacked:
    parts += [_area(axes, *curve) for curve in curves]
  else:
    parts += [piece for one in shown for piece in _band(axes, one)]
    parts += [piece for i, one in enumerate(shown) for piece in _curve(axes, one, i)]
  parts += [
    _path(f"M{axes.x(at):.1f} {top}V{axes.bottom}", "alarm")
    for at in panel.alarms
    if axes.x_low <= at <= axes.x_high
  ]
  return parts + _hover(axes, shown, panel.percent)


def _legend(panel: Panel, shown: Sequence[Series], width: int) -> tuple[list[Markup], int]:
  """Names with their last values. One series needs only the value, beside the title."""
  last = [next((v for v in reversed(series.y) if v is not None), None) for series in shown]
  if len(shown) == 1:
    said = texts.number(last[0], panel.percent)
    return [_text(said, width - RIGHT, 18, f"e f{shown[0].color}")], 0
  parts, x, row = [], 10.0, 0
  for series, value in zip(shown, last):
    said = f"{value:.0%}" if panel.stacked and panel.percent else texts.number(value, panel.percent)
    label = f"{series.name} {said}"
    needed = 16 + 6.4 * len(label) + 10
    if x > 10 and x + needed > width:
      x, row = 10.0, row + 1
    y = _TITLE + _LEGEND_ROW * row + 9
    parts.append(_tag("rect", class_=f"f{series.color}", x=x, y=y - 9, width=10, height=10, rx=2))
    parts.append(_text(label, x + 14, y))
    x += needed
  return parts, row + 1 if shown else 0


def _grid(axes: Axes, percent: bool) -> list[Markup]:
  parts = []
  for tick in axes.y_ticks:
    y = axes.y(tick)
    parts.append(_path(f"M{axes.left} {y:.1f}H{axes.right}", "g"))
    parts.append(_text(texts.number(tick, percent), axes.left - 6, y + 4, "e"))
  return parts + [
    _text(texts.number(tick), axes.x(tick), axes.bottom + 16, "m") for tick in axes.x_ticks
  ]


def _stage_marks(axes: Axes, stages: Sequence[tuple[str, float]]) -> list[Markup]:
  """A line where each stage begins and its name above; names that would overlap are left out."""
  parts, free = [], -math.inf
  for name, at in stages:
    x = axes.x(at)
    if not axes.x_low <= at <= axes.x_high:
      continue
    parts.append(_path(f"M{x:.1f} {axes.top - 4}V{axes.bottom}", "stage"))
    if x >= free and x + 6.4 * len(name) <= axes.right + RIGHT:
      parts.append(_text(name, x + 2, axes.top - 8))
      free = x + 6.4 * len(name) + 8
  return parts


def _curve(axes: Axes, series: Series, index: int) -> list[Markup]:
  """Marks get smaller from series to series, so that none hides another at the same place."""
  x, y = series.x, series.y
  if series.style == "dots" or sum(v is not None for v in y) == 1:
    shape = _SHAPES[series.color % len(_SHAPES)]
    size = max(0.6, 1.4 - 0.3 * index)
    at = lambda a, b: f"translate({axes.x(a):.1f} {axes.y(b):.1f}) scale({size:.1f})"
    dots = [
      _path(shape, f"dot f{series.color}", transform=at(a, b))
      for a, b in zip(x, y)
      if b is not None
    ]
    return [_path(_line(axes, x, y), f"raw s{series.color}"), *dots]
  parts = []
  if series.style == "noisy" and len(x) >= 8:
    parts.append(_path(_line(axes, *thin(x, y)), f"raw s{series.color}"))
    y = smooth(y, min(2 * (len(y) // 24) + 3, MOST_WINDOW))
  line = _line(axes, *thin(x, y))
  return [*parts, _path(line, f"line s{series.color}", **_dash(series.dashed))]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float | None]) -> str:
  parts, pen = [], "M"
  for a, b in zip(x, y):
    if b is None:
      pen = "M"
      continue
    parts.append(f"{pen}{axes.x(a):.1f} {axes.y(b):.1f}")
    pen = "L"
  return "".join(parts)


def _band(axes: Axes, series: Series) -> list[Markup]:
  """One polygon for each unbroken stretch of the band, with thin edges."""
  stretches, current = [], []
  for i in every_nth(len(series.low)):
    if series.low[i] is None:
      stretches, current = stretches + [current], []
    else:
      current.append((axes.x(series.x[i]), axes.y(series.low[i]), axes.y(series.high[i])))
  parts = []
  for stretch in stretches + [current]:
    if len(stretch) > 1:
      above = [f"{x:.1f},{high:.1f}" for x, _, high in stretch]
      below = [f"{x:.1f},{low:.1f}" for x, low, _ in stretch]
      points = " ".join([*above, *reversed(below)])
      parts.append(_tag("polygon", class_=f"band f{series.color}", points=points))
      for edge in (above, below):
        parts.append(_path("M" + "L".join(edge), f"edge s{series.color}"))
  return parts


def _area(axes: Axes, series: Series, x, y, base) -> Markup:
  upper = [f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in zip(x, y)]
  lower = [f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in zip(reversed(x), reversed(base))]
  return _tag("polygon", class_=f"area f{series.color}", points=" ".join(upper + lower))


def _stack(shown: Sequence[Series]) -> list[tuple[Series, list, list, list]]:
  """(series, x, upper edge, lower edge) of moving averages piled up.

  A missing value counts as nothing; a single point becomes a bar.
  """
  size = math.ceil(len(shown[0].x) / MOST_POINTS)
  below, stacked = None, []
  for series in shown:
    chunks = range(0, len(series.x), size)
    x = [series.x[start] for start in chunks]
    parts = [series.y[start : start + size] for start in chunks]
    y = [sum(value or 0.0 for value in part) / len(part) for part in parts]
    y = smooth(y, len(y) // 24)
    if len(x) == 1:
      x, y = [x[0], x[0] + 1], y * 2
    below = below or [0.0] * len(x)
    upper = [a + b for a, b in zip(below, y)]
    stacked.append((series, x, upper, below))
    below = upper
  return stacked


def _hover(axes: Axes, shown: Sequence[Series], percent: bool) -> list[Markup]:
  """Invisible columns whose tooltip reads the values; a browser shows it without any script."""
  x = sorted({value for series in shown for value in series.x})
  count = min(_MOST_HOVER, len(x))
  step = (axes.right - axes.left) / count
  columns: list[dict[str, tuple[float, float]]] = [{} for _ in range(count)]
  for series in shown:
    for at, value in zip(series.x, series.y):
      if value is not None:
        column = columns[min(count - 1, int((axes.x(at) - axes.left) / step))]
        column[series.name] = (at, value)
  parts = []
  for i, column in enumerate(columns):
    if column:
      at = max(at for at, _ in column.values())
      said = [f"{name} {texts.number(value, percent)}" for name, (_, value) in column.items()]
      title = texts.one_line(f"{texts.number(at)}: {', '.join(said)}")
      parts.append(
        _tag(
          "rect",
          _tag("title", Markup.escape(title)),
          class_="hover",
          x=axes.left + i * step,
          y=axes.top,
          width=step,
          height=axes.bottom - axes.top,
        )
      )
  return parts
