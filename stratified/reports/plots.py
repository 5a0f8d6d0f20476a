"""Draws line, band and area charts as SVG text: no script, legible on a phone, light and dark.

Colours come from CSS variables (templates/chart.css): a page with many charts states them once, and
a chart that is a file of its own (`standalone`) carries them along. Written here because the SVG of
matplotlib has neither tooltips nor the colours of the reader's scheme.
"""

from collections.abc import Sequence
import dataclasses
import math

from markupsafe import Markup

from stratified.reports import curves, svg
from stratified.reports import text as texts
from stratified.reports.axes import Axes, LEFT, RIGHT
from stratified.reports.curves import Series

PALETTE = 8  # colours of kinds
SHADES = 4  # shades of the phases of a run
ORDERED = 7  # shades of more and more of one thing: color PALETTE + i
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TITLE, _LEGEND_ROW, _MOST_HOVER = 26, 18, 48


@dataclasses.dataclass(frozen=True)
class Stage:
  """A part of a run.

  begin, last: its first and last x. end: where the next begins. shade: of its band; None for no
  band. phase: what it does, as a legend names it.
  """

  name: str
  begin: float
  last: float
  end: float
  shade: int | None = None
  phase: str = ""


@dataclasses.dataclass(frozen=True)
class Panel:
  """One plot.

  stacked: piles the series, which then share their x, up as areas.
  percent: shows fractions as percentages.
  limits: y values that the axis must include.
  alarms: x values marked with a dashed line.
  stages: parts of the run, in order: a line where each begins, a band of its shade, its name.
  x_limits: x values that the axis must include.
  meaning: what the plot tells, in a sentence, for a page to print below.
  y_label: what the y axis shows, where the title does not say it.
  """

  title: str
  series: tuple[Series, ...]
  stacked: bool = False
  percent: bool = False
  limits: tuple[float, ...] = (0.0,)
  alarms: tuple[float, ...] = ()
  stages: tuple[Stage, ...] = ()
  x_limits: tuple[float, ...] = ()
  meaning: str = ""
  y_label: str = ""


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
    parts.append(svg.tag("g", *_panel(panel, width, height, not legend), transform=at))
  bottom = tall + height * rows + 18
  for column in range(columns):
    middle = width * column + (width + LEFT - RIGHT) / 2
    parts.append(svg.text(x_label, middle, bottom - 5, "m"))
  head, extra = [], {}
  if standalone:
    extra = {"xmlns": "http://www.w3.org/2000/svg", "width": total, "height": bottom}
    back = svg.tag("rect", class_="bg", width="100%", height="100%", rx=10)
    head = [svg.tag("style", Markup(texts.render("chart.css"))), back]
  label = texts.one_line("; ".join(panel.title for panel in panels))
  box = f"0 0 {total} {bottom}"
  return svg.tag(
    "svg", *head, *parts, class_="chart", viewBox=box, role="img", aria_label=label, **extra
  )


def _shared_legend(names: Sequence[tuple[str, int, bool]], width: int) -> tuple[list[Markup], int]:
  parts, x, row = [], 10.0, 0
  longest = int((width - 60) / 6.6)
  for name, color, dashed in names:
    shown = name if len(name) <= longest else name[: longest - 1] + "…"
    needed = 26 + 6.6 * len(shown) + 14
    if x > 10 and x + needed > width:
      x, row = 10.0, row + 1
    y = 18 + _LEGEND_ROW * row
    parts.append(svg.path(f"M{x:.0f} {y - 4}h18", f"line s{color}", **svg.dash(dashed)))
    parts.append(svg.text(shown, x + 24, y, "k"))
    x += needed
  return parts, 8 + _LEGEND_ROW * (row + 1)


def _in_units(panel: Panel) -> Panel:
  """The panel in a unit that its title names, where all values are below 0.001 in size."""
  values = [abs(y) for one in panel.series for ys in (one.y, one.low, one.high) for y in ys if y]
  largest = max([*values, *map(abs, panel.limits)], default=0.0)
  if panel.percent or not 0 < largest < 1e-3:
    return panel
  power = 3 * math.floor(math.log10(largest) / 3)
  scaled = lambda ys: [None if y is None else y / 10.0**power for y in ys]
  series = [
    dataclasses.replace(one, y=scaled(one.y), low=scaled(one.low), high=scaled(one.high))
    for one in panel.series
  ]
  title = f"{panel.title}, × 10{str(power).translate(_RAISED)}"
  return dataclasses.replace(panel, title=title, series=tuple(series))


def _panel(panel: Panel, width: int, height: int, own_legend: bool) -> list[Markup]:
  panel = _in_units(panel)
  shown = [series for series in panel.series if any(v is not None for v in series.y)]
  legend, legend_rows = _legend(panel, shown, width) if own_legend else ([], 0)
  top = _TITLE + _LEGEND_ROW * legend_rows + 10 + 14 * bool(panel.stages)
  parts = [svg.text(panel.title, 10, 18, "t"), *legend]
  if not shown:
    return [*parts, svg.text("nothing recorded", width / 2, height / 2, "m")]
  parts_of = [curves.pieces(one) for one in shown]
  piles = [curves.stack(pile) for pile in zip(*parts_of)] if panel.stacked else []
  edges = [upper for pile in piles for _, _, upper, _ in pile] or [one.y for one in shown]
  y = [v for values in edges for v in values if v is not None] + list(panel.limits)
  y += [v for one in shown for edge in (one.low, one.high) for v in edge if v is not None]
  axes = Axes([*panel.x_limits, *(x for one in shown for x in one.x)], y, width, height, top)
  parts += _stage_bands(axes, panel.stages)
  parts += _grid(axes, panel.percent)
  if panel.y_label:
    at = f"translate(12 {(axes.top + axes.bottom) / 2:.0f}) rotate(-90)"
    parts.append(svg.tag("g", svg.text(panel.y_label, 0, 0, "m"), transform=at))
  parts += _stage_marks(axes, panel.stages)
  parts += [curves.area(axes, *layer) for pile in piles for layer in pile]
  if not panel.stacked:
    each = [(i, piece) for i, whole in enumerate(parts_of) for piece in whole]
    parts += [drawn for _, piece in each for drawn in curves.band(axes, piece)]
    parts += [drawn for i, piece in each for drawn in curves.curve(axes, piece, i)]
  parts += [
    svg.path(f"M{axes.x(at):.1f} {top}V{axes.bottom}", "alarm")
    for at in panel.alarms
    if axes.x_low <= at <= axes.x_high
  ]
  return parts + _hover(axes, shown, panel.percent)


def _legend(panel: Panel, shown: Sequence[Series], width: int) -> tuple[list[Markup], int]:
  """Names with their last values. One series needs only the value, beside the title."""
  last = [next((v for v in reversed(series.y) if v is not None), None) for series in shown]
  if len(shown) == 1:
    said = texts.number(last[0], panel.percent)
    return [svg.text(said, width - RIGHT, 18, f"e f{shown[0].color}")], 0
  parts, x, row = [], 10.0, 0
  for series, value in zip(shown, last):
    said = f"{value:.0%}" if panel.stacked and panel.percent else texts.number(value, panel.percent)
    label = f"{series.name} {said}"
    needed = 16 + 6.4 * len(label) + 10
    if x > 10 and x + needed > width:
      x, row = 10.0, row + 1
    y = _TITLE + _LEGEND_ROW * row + 9
    parts.append(
      svg.tag("rect", class_=f"f{series.color}", x=x, y=y - 9, width=10, height=10, rx=2)
    )
    parts.append(svg.text(label, x + 14, y))
    x += needed
  return parts, row + 1 if shown else 0


def _grid(axes: Axes, percent: bool) -> list[Markup]:
  parts = []
  for tick in axes.y_ticks:
    y = axes.y(tick)
    parts.append(svg.path(f"M{axes.left} {y:.1f}H{axes.right}", "g"))
    parts.append(svg.text(texts.number(tick, percent), axes.left - 6, y + 4, "e"))
  return parts + [
    svg.text(texts.number(tick), axes.x(tick), axes.bottom + 16, "m") for tick in axes.x_ticks
  ]


def _stage_bands(axes: Axes, stages: Sequence[Stage]) -> list[Markup]:
  """A shaded rectangle behind each stage that has a shade, its name in the tooltip."""
  parts = []
  for stage in stages:
    low, high = max(stage.begin, axes.x_low), min(stage.end, axes.x_high)
    if stage.shade is None or low >= high:
      continue
    x, top = axes.x(low), axes.top - 4
    size = {"width": axes.x(high) - x, "height": axes.bottom - top}
    title = svg.tag("title", Markup.escape(texts.one_line(stage.name)))
    kind = f"phase p{stage.shade % SHADES}"
    parts.append(svg.tag("rect", title, class_=kind, x=x, y=float(top), **size))
  return parts


def _stage_marks(axes: Axes, stages: Sequence[Stage]) -> list[Markup]:
  """A line where each stage begins and its name above, shortened to what fits, or left out."""
  shown = [stage for stage in stages if axes.x_low <= stage.begin <= axes.x_high]
  parts, free = [], -math.inf
  for stage, after in zip(shown, [*shown[1:], None]):
    x, name = axes.x(stage.begin), stage.name
    parts.append(svg.path(f"M{x:.1f} {axes.top - 4}V{axes.bottom}", "stage"))
    end = axes.right + RIGHT - 6
    if stage.shade is not None:  # every band has a name: "reinforcement 1", "r 1", by its width
      end = axes.x(after.begin) if after else end
      room = int((end - x) / 6.4)
      name = name if len(name) <= room else _short(name)
    if x >= free and x + 6.4 * len(name) <= end:
      parts.append(svg.text(name, x + 2, axes.top - 8))
      free = x + 6.4 * len(name) + (8 if stage.shade is None else 0)
  return parts


def _short(name: str) -> str:
  """`reinforcement 1` as `r1`."""
  return "".join(word if word.isdigit() else word[0] for word in name.split())


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
        svg.tag(
          "rect",
          svg.tag("title", Markup.escape(title)),
          class_="hover",
          x=axes.left + i * step,
          y=axes.top,
          width=step,
          height=axes.bottom - axes.top,
        )
      )
  return parts
