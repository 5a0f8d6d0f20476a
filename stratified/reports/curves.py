"""Draws one curve of a plot: its line, points, band, or area in a pile."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Literal

from markupsafe import Markup

from stratified.reports import svg
from stratified.reports.axes import Axes, every_nth, MOST_POINTS, MOST_WINDOW, smooth, thin

_SHAPES = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z", "M0-4.8L4.8 0 0 4.8-4.8 0Z")
_SHAPES += ("M-3.7-3.7h7.4v7.4h-7.4Z", "M0-4.8L4.6 3.4h-9.2Z")


@dataclasses.dataclass(frozen=True)
class Series:
  """One curve. `y` may hold None (a gap).

  style: "noisy" draws the values thinly under their moving average, "dots" marks each (rare ones).
  breaks: positions at which it begins anew: nothing is drawn from the point before.
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
  breaks: tuple[int, ...] = ()


def pieces(series: Series) -> list[Series]:
  """The unbroken parts of a curve."""
  ends = [0, *series.breaks, len(series.x)]
  return [
    dataclasses.replace(
      series,
      x=series.x[a:b],
      y=series.y[a:b],
      low=series.low[a:b],
      high=series.high[a:b],
      breaks=(),
    )
    for a, b in zip(ends, ends[1:])
    if b > a
  ]


def curve(axes: Axes, series: Series, index: int) -> list[Markup]:
  """Marks get smaller from series to series, so that none hides another at the same place."""
  x, y = series.x, series.y
  if series.style == "dots" or sum(v is not None for v in y) == 1:
    shape = _SHAPES[series.color % len(_SHAPES)]
    size = max(0.6, 1.4 - 0.3 * index)
    at = lambda a, b: f"translate({axes.x(a):.1f} {axes.y(b):.1f}) scale({size:.1f})"
    dots = [
      svg.path(shape, f"dot f{series.color}", transform=at(a, b))
      for a, b in zip(x, y)
      if b is not None
    ]
    return [svg.path(_line(axes, x, y), f"raw s{series.color}"), *dots]
  parts = []
  if series.style == "noisy" and len(x) >= 8:
    parts.append(svg.path(_line(axes, *thin(x, y)), f"raw s{series.color}"))
    y = smooth(y, min(2 * (len(y) // 24) + 3, MOST_WINDOW))
  line = _line(axes, *thin(x, y))
  return [*parts, svg.path(line, f"line s{series.color}", **svg.dash(series.dashed))]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float | None]) -> str:
  parts, pen = [], "M"
  for a, b in zip(x, y):
    if b is None:
      pen = "M"
      continue
    parts.append(f"{pen}{axes.x(a):.1f} {axes.y(b):.1f}")
    pen = "L"
  return "".join(parts)


def band(axes: Axes, series: Series) -> list[Markup]:
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
      parts.append(svg.tag("polygon", class_=f"band f{series.color}", points=points))
      for edge in (above, below):
        parts.append(svg.path("M" + "L".join(edge), f"edge s{series.color}"))
  return parts


def area(axes: Axes, series: Series, x, y, base) -> Markup:
  upper = [f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in zip(x, y)]
  lower = [f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in zip(reversed(x), reversed(base))]
  return svg.tag("polygon", class_=f"area f{series.color}", points=" ".join(upper + lower))


def stack(shown: Sequence[Series]) -> list[tuple[Series, list, list, list]]:
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
