"""Curves of several groups of runs with a band of spread around each, as SVG text in the style of
`charts`."""

from collections.abc import Sequence
import dataclasses
import html
import math

from stratified.reports import charts

_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND_ROW = 46, 16, 34, 24, 19
_MOST_POINTS, _MOST_HOVER = 240, 48
STYLE = (
  charts.STYLE
  + """
.chart .band{opacity:.16;stroke:none}.chart .k{fill:var(--ink)}
"""
)


@dataclasses.dataclass(frozen=True)
class Band:
  """One group's curve: its mean, and the edges of its band (None where there is none)."""

  name: str
  x: Sequence[float]
  mean: Sequence[float]
  low: Sequence[float | None]
  high: Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class Plot:
  """One plot of several bands; `percent` shows fractions as percentages, `dots` marks the points
  (rare ones)."""

  title: str
  bands: tuple[Band, ...]
  percent: bool = False
  dots: bool = False


def colors(names: Sequence[str], ordered: bool = False) -> dict[str, int]:
  """Group -> colour; shades from light to dark where the groups are an ordered few (a sweep over
  one number)."""
  if ordered and 2 < len(names) <= charts.ORDERED:
    shades = [
      charts.PALETTE + round(i * (charts.ORDERED - 1) / (len(names) - 1)) for i in range(len(names))
    ]
    return dict(zip(names, shades))
  return {name: i % (charts.PALETTE - 1) for i, name in enumerate(names)}


def figure_svg(
  plots: Sequence[Plot],
  colors_: dict[str, int],
  *,
  width: int = 400,
  height: int = 220,
  columns: int = 1,
  x_label: str = "step",
  standalone: bool = False,
) -> str:
  """Draws plots in a grid under one legend and returns an <svg> element.

  Args:
    plots: what to draw; one without a point says so.
    colors_: group -> colour (see `colors`); the legend names the groups in this order.
    width, height: of one plot, in CSS pixels at scale 1.
    columns: plots side by side.
    x_label: what the x axis counts.
    standalone: a file of its own: style, background and XML namespace included.
  """
  names = list(colors_)
  total = width * columns
  legend, tall = _legend(names, colors_, total)
  rows = math.ceil(len(plots) / columns)
  body = [legend] + [
    f'<g transform="translate({width * (i % columns)} {tall + height * (i // columns)})">'
    f"{_plot(plot, names, colors_, width, height)}</g>"
    for i, plot in enumerate(plots)
  ]
  body += [
    f'<text class="m" x="{width * column + (width + _LEFT - _RIGHT) / 2:.0f}" '
    f'y="{tall + height * rows + 12}">'
    f"{html.escape(x_label)}</text>"
    for column in range(min(columns, len(plots)))
  ]
  full = tall + height * rows + 18
  extra = (
    f' xmlns="http://www.w3.org/2000/svg" width="{total}" height="{full}"' if standalone else ""
  )
  head = (
    f'<style>{STYLE}</style><rect class="bg" width="100%" height="100%" rx="10"/>'
    if standalone
    else ""
  )
  label = html.escape("; ".join(plot.title for plot in plots))
  return (
    f'<svg class="chart" viewBox="0 0 {total} {full}" role="img" aria-label="{label}"{extra}>'
    f"{head}{''.join(body)}</svg>"
  )


def _legend(names: Sequence[str], colors_: dict[str, int], width: int) -> tuple[str, int]:
  parts, x, row = [], 10.0, 0
  longest = int((width - 60) / 6.6)
  for i, name in enumerate(names):
    shown = name if len(name) <= longest else name[: longest - 1] + "…"
    needed = 26 + 6.6 * len(shown) + 14
    if x > 10 and x + needed > width:
      x, row = 10.0, row + 1
    y = 18 + _LEGEND_ROW * row
    parts.append(
      f'<path class="line s{colors_[name]}"{_dash(i)} d="M{x:.0f} {y - 4}h18"/>'
      f'<text class="k" x="{x + 24:.0f}" y="{y}">{html.escape(shown)}</text>'
    )
    x += needed
  return "".join(parts), 8 + _LEGEND_ROW * (row + 1)


def _dash(index: int) -> str:
  """More groups than colours: the next round of them is dashed."""
  return "" if index < charts.PALETTE - 1 else ' stroke-dasharray="6 4"'


def _plot(
  plot: Plot, names: Sequence[str], colors_: dict[str, int], width: int, height: int
) -> str:
  title = f'<text class="t" x="10" y="18">{html.escape(plot.title)}</text>'
  shown = [_few(band) for band in plot.bands if band.x]
  if not shown:
    return (
      title + f'<text class="m" x="{width / 2:.0f}" y="{height / 2:.0f}">nothing recorded</text>'
    )
  xs = [x for band in shown for x in band.x]
  ys = [
    y
    for band in shown
    for values in (band.mean, band.low, band.high)
    for y in values
    if y is not None
  ]
  x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
  y_ticks = charts.ticks(min(0.0, *ys), max(*ys, min(0.0, *ys) + 1e-9))
  step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else 1.0
  y_low, y_high = (
    math.floor(min(0.0, *ys) / step + 1e-9) * step,
    math.ceil(max(ys) / step - 1e-9) * step,
  )
  y_high = y_high if y_high > y_low else y_low + step
  right, bottom = width - _RIGHT, height - _BOTTOM
  at_x = lambda x: _LEFT + (x - x_low) / (x_high - x_low) * (right - _LEFT)
  at_y = lambda y: bottom - (y - y_low) / (y_high - y_low) * (bottom - _TOP)
  parts = [title]
  for tick in charts.ticks(y_low, y_high, round((y_high - y_low) / step)):
    parts.append(
      f'<path class="g" d="M{_LEFT} {at_y(tick):.1f}H{right}"/><text class="e" x="{_LEFT - 6}" '
      f'y="{at_y(tick) + 4:.1f}">{charts.number(tick, plot.percent)}</text>'
    )
  for tick in charts.ticks(x_low, x_high, 5):
    if tick == round(tick):
      parts.append(
        f'<text class="m" x="{at_x(tick):.1f}" y="{bottom + 16}">{charts.number(tick)}</text>'
      )
  parts += [_area(band, colors_[band.name], at_x, at_y) for band in shown]
  for band in shown:
    parts.append(
      _line(band, colors_[band.name], _dash(names.index(band.name)), at_x, at_y, plot.dots)
    )
  return "".join(parts) + _hover(shown, plot.percent, at_x, _TOP, bottom, right)


def _few(band: Band) -> Band:
  """At most about 240 points; the curves are smooth, so that every n-th says enough."""
  stride = math.ceil(len(band.x) / _MOST_POINTS)
  keep = sorted({*range(0, len(band.x), stride), len(band.x) - 1})
  pick = lambda values: [values[i] for i in keep]
  return Band(band.name, pick(band.x), pick(band.mean), pick(band.low), pick(band.high))


def _area(band: Band, color: int, at_x, at_y) -> str:
  """One polygon for each unbroken stretch of the band."""
  stretches, current = [], []
  for x, low, high in zip(band.x, band.low, band.high):
    if low is None:
      stretches, current = stretches + [current], []
    else:
      current.append((at_x(x), at_y(low), at_y(high)))
  parts = []
  for stretch in stretches + [current]:
    if len(stretch) > 1:
      edge = [f"{x:.1f},{high:.1f}" for x, _, high in stretch]
      edge += [f"{x:.1f},{low:.1f}" for x, low, _ in reversed(stretch)]
      parts.append(f'<polygon class="band f{color}" points="{" ".join(edge)}"/>')
  return "".join(parts)


def _line(band: Band, color: int, dash: str, at_x, at_y, dots: bool) -> str:
  points = [(at_x(x), at_y(y)) for x, y in zip(band.x, band.mean)]
  line = (
    f'<path class="line s{color}"{dash} d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'
  )
  marks = "".join(
    f'<circle class="f{color}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points
  )
  return line + marks * (dots or len(points) == 1)


def _hover(
  shown: Sequence[Band], percent: bool, at_x, top: float, bottom: float, right: float
) -> str:
  """Invisible columns whose tooltip reads the values of all groups; a browser shows it without any
  script."""
  x = sorted({value for band in shown for value in band.x})
  x = x[:: math.ceil(len(x) / _MOST_HOVER)]
  edges = [_LEFT, *((at_x(a) + at_x(b)) / 2 for a, b in zip(x, x[1:])), right]
  lookup = [(band.name, dict(zip(band.x, band.mean))) for band in shown]
  parts = []
  for at, left, end in zip(x, edges, edges[1:]):
    values = [
      f"{name} {charts.number(known[at], percent)}" for name, known in lookup if at in known
    ]
    parts.append(
      f'<rect class="hover" x="{left:.1f}" y="{top}" width="{end - left:.1f}" '
      f'height="{bottom - top}">'
      f"<title>{charts.number(at)}: {html.escape(', '.join(values))}</title></rect>"
    )
  return "".join(parts)
