"""Line and area charts as SVG text: no dependency, no script, legible on a phone, light and dark.

Colours come from CSS variables (`STYLE`), so a page that holds many charts states them once and a
chart that is a file of its own (`standalone`) carries them along.
"""

from collections.abc import Sequence
import dataclasses
import html
import math
from typing import Literal

PALETTE = 8  # colours of kinds
ORDERED = 7  # shades of more and more of one thing: color PALETTE + i
STYLE = (
  """
:root{--ink:#1d2330;--soft:#5d6675;--grid:#e4e7ec;--card:#ffffff;--c0:#2563eb;--c1:#e0700d;--c2:#15936b;
--c3:#8b46e0;
--c4:#d6336c;--c5:#0c8599;--c6:#a07b00;--c7:#7b8494;--c8:#b9bec7;--c9:#bfe0f2;--c10:#7fbde6;--c11:#3f8fd2;
--c12:#2463ad;
--c13:#1b3f80;--c14:#142750}
@media (prefers-color-scheme:dark){:root{--ink:#e8ebf1;--soft:#9aa4b5;--grid:#30353f;--card:#1b1e24;
--c0:#6ea0ff;--c1:#ff9f4a;
--c2:#3ecf9b;--c3:#b78bff;--c4:#ff7aa8;--c5:#4cc5d6;--c6:#dcb52e;--c7:#8d97a8;--c8:#5a616d;--c9:#1f4a78;
--c10:#2b6cb0;--c11:#4a97dd;--c12:#7dbcf0;
--c13:#b0daf8;--c14:#dff1fd}}
.chart{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;font-size:12px}
.chart text{fill:var(--soft)}.chart .t{fill:var(--ink);font-weight:600;font-size:13.5px}
.chart .e{text-anchor:end}
.chart .m{text-anchor:middle}.chart .g{stroke:var(--grid);stroke-width:1}.chart .bg{fill:var(--card)}
.chart path{fill:none;stroke-linejoin:round;stroke-linecap:round}.chart .line{stroke-width:2.2}
.chart .raw{stroke-width:1;opacity:.35}.chart .area{stroke:var(--card);stroke-width:.75}
.chart .alarm{stroke:var(--c4);stroke-width:1.2;stroke-dasharray:3 3}.chart .hover{fill:var(--ink);
opacity:0}
.chart .hover:hover{opacity:.08}
"""
  + "".join(
    f".chart .s{i}{{stroke:var(--c{i})}}.chart .f{i}{{fill:var(--c{i})}}"
    f".chart text.f{i}{{fill:var(--c{i});font-weight:600}}"
    for i in range(PALETTE + ORDERED)
  )
  + "\n"
)

_LEFT, _RIGHT, _BOTTOM, _TITLE, _LEGEND_ROW = 46, 20, 24, 26, 17
_MAX_POINTS, _MAX_HOVER, _MAX_WINDOW = 240, 48, 101


@dataclasses.dataclass(frozen=True)
class Series:
  """One curve. `y` may hold None (a gap). "noisy" draws the values thinly under their moving
  average."""

  name: str
  x: Sequence[float]
  y: Sequence[float | None]
  color: int = 0
  style: Literal["line", "noisy", "dots"] = "line"


@dataclasses.dataclass(frozen=True)
class Panel:
  """One plot. `stacked` piles the series, which then share their x, up as areas.

  `limits` are y values that the axis must include; `alarms` are steps marked with a dashed line;
  `percent` shows fractions as percentages.
  """

  title: str
  series: tuple[Series, ...]
  stacked: bool = False
  percent: bool = False
  limits: tuple[float, ...] = (0.0,)
  alarms: tuple[float, ...] = ()


def chart_svg(
  panels: Sequence[Panel],
  *,
  width: int = 400,
  height: int = 190,
  columns: int = 1,
  x_label: str = "step",
  standalone: bool = False,
) -> str:
  """Draws panels in a grid and returns one <svg> element.

  Args:
    panels: what to draw; panels without a single point say so.
    width, height: of one panel, in CSS pixels at scale 1 (the element scales with its container).
    columns: panels side by side.
    x_label: what the x axis counts.
    standalone: a file of its own: style, background and XML namespace included.
  """
  rows = math.ceil(len(panels) / columns)
  total_width, total_height = width * columns, height * rows + 18
  body = [
    f'<g transform="translate({width * (i % columns)} {height * (i // columns)})">'
    f"{_panel(panel, width, height)}</g>"
    for i, panel in enumerate(panels)
  ]
  body += [
    f'<text class="m" x="{width * column + (width + _LEFT - _RIGHT) / 2:.0f}" '
    f'y="{total_height - 4}">'
    f"{html.escape(x_label)}</text>"
    for column in range(columns)
  ]
  name = html.escape("; ".join(panel.title for panel in panels))
  size = f'width="{total_width}" height="{total_height}"'
  extra = f' xmlns="http://www.w3.org/2000/svg" {size}' if standalone else ""
  head = (
    f'<style>{STYLE}</style><rect class="bg" width="100%" height="100%" rx="10"/>'
    if standalone
    else ""
  )
  box = f"0 0 {total_width} {total_height}"
  return (
    f'<svg class="chart" viewBox="{box}" role="img" aria-label="{name}"{extra}>'
    f"{head}{''.join(body)}</svg>"
  )


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
  """Centred moving average over `window` values, gaps left out of it; a gap stays a gap."""
  half = window // 2
  total, count = [0.0], [0]
  for value in values:
    total.append(total[-1] + (value or 0.0))
    count.append(count[-1] + (value is not None))
  ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
  return [
    None if value is None else (total[high] - total[low]) / (count[high] - count[low])
    for value, (low, high) in zip(values, ends)
  ]


def thin(
  x: Sequence[float], y: Sequence[float | None], most: int = _MAX_POINTS
) -> tuple[list, list]:
  """At most about `most` points; the smallest and largest of each bucket stay, so that no spike is
  lost."""
  if len(x) <= most:
    return list(x), list(y)
  size = math.ceil(2 * len(x) / most)
  kept = {0, len(x) - 1}
  for start in range(0, len(x), size):
    bucket = range(start, min(start + size, len(x)))
    known = [i for i in bucket if y[i] is not None]
    kept |= {min(known, key=y.__getitem__), max(known, key=y.__getitem__)} if known else {bucket[0]}
  order = sorted(kept)
  return [x[i] for i in order], [y[i] for i in order]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
  """Round numbers (1, 2, 5 times a power of ten) that lie in [low, high], about `count` of them."""
  if not high > low:
    return [low]
  raw = (high - low) / count
  power = 10.0 ** math.floor(math.log10(raw))
  step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
  first = math.ceil(low / step - 1e-9)
  digits = 1 - math.floor(
    math.log10(step)
  )  # one more than the step's own: a range of 1e-15 has ticks too
  return [round(i * step, digits) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float | None, percent: bool = False) -> str:
  """A short form: 0.031, 1.25, 12.3, 4.1k; percent turns fractions into 12.3%."""
  if value is None:
    return "–"
  if percent:
    return f"{100 * value:.1f}%".replace(".0%", "%")
  size = abs(value)
  if size >= 10_000:
    return f"{value / 1000:.0f}k" if size < 1e6 else f"{value:.1e}"
  if size >= 100 or value == round(value):
    return f"{value:.0f}"
  if size >= 0.001:
    return f"{value:.3g}"
  digits, power = f"{value:.1e}".split("e")
  return f"{digits.removesuffix('.0')}e{int(power)}"


def _panel(panel: Panel, width: int, height: int) -> str:
  shown = [series for series in panel.series if any(v is not None for v in series.y)]
  legend, legend_rows = _legend(panel, shown, width)
  top = _TITLE + _LEGEND_ROW * legend_rows + 12
  parts = [f'<text class="t" x="10" y="18">{html.escape(panel.title)}</text>', legend]
  if not shown:
    parts.append(
      f'<text class="m" x="{width / 2:.0f}" y="{height / 2:.0f}">nothing recorded</text>'
    )
    return "".join(parts)
  curves = (
    _stack(shown) if panel.stacked else [(series, series.x, series.y, None) for series in shown]
  )
  xs = [x for series in shown for x in series.x]
  ys = [v for _, _, y, _ in curves for v in y if v is not None] + list(panel.limits)
  frame = _Frame(min(xs), max(xs), min(ys), max(ys), width, height, top)
  parts.append(_axes(frame, panel.percent))
  for series, x, y, base in curves:
    parts.append(_area(frame, series, x, y, base) if panel.stacked else _curve(frame, series, x, y))
  for step in panel.alarms:
    parts.append(f'<path class="alarm" d="M{frame.x(step):.1f} {top}V{height - _BOTTOM}"/>')
  return "".join(parts) + _hover(frame, shown, panel.percent)


class _Frame:
  """Maps data to pixels; the y range is widened to round numbers."""

  def __init__(self, x_low, x_high, y_low, y_high, width, height, top):
    self.x_low, self.x_high = x_low, x_high if x_high > x_low else x_low + 1
    y_high = y_high if y_high > y_low else y_low + 1
    self.y_ticks = ticks(y_low, y_high)
    step = self.y_ticks[1] - self.y_ticks[0] if len(self.y_ticks) > 1 else y_high - y_low
    self.y_low = math.floor(y_low / step + 1e-9) * step
    self.y_high = math.ceil(y_high / step - 1e-9) * step
    self.y_ticks = ticks(self.y_low, self.y_high, round((self.y_high - self.y_low) / step))
    self.left, self.right, self.top, self.bottom = _LEFT, width - _RIGHT, top, height - _BOTTOM

  def x(self, value):
    return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

  def y(self, value):
    return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (
      self.bottom - self.top
    )


def _legend(panel: Panel, shown: Sequence[Series], width: int) -> tuple[str, int]:
  """Names with their last values. One series needs only the value, beside the title."""
  last = [next((v for v in reversed(series.y) if v is not None), None) for series in shown]
  if len(shown) == 1:
    text = number(last[0], panel.percent)
    return f'<text class="e f{shown[0].color}" x="{width - _RIGHT}" y="18">{text}</text>', 0
  parts, x, row = [], 10.0, 0
  for series, value in zip(shown, last):
    text = f"{value:.0%}" if panel.stacked and panel.percent else number(value, panel.percent)
    label = f"{series.name} {text}"
    needed = 16 + 6.4 * len(label) + 10
    if x > 10 and x + needed > width:
      x, row = 10.0, row + 1
    y = _TITLE + _LEGEND_ROW * row + 9
    parts.append(
      f'<rect class="f{series.color}" x="{x:.0f}" y="{y - 9}" width="10" height="10" rx="2"/>'
      f'<text x="{x + 14:.0f}" y="{y}">{html.escape(label)}</text>'
    )
    x += needed
  return "".join(parts), row + 1 if shown else 0


def _axes(frame: _Frame, percent: bool) -> str:
  parts = []
  for tick in frame.y_ticks:
    y = frame.y(tick)
    parts.append(
      f'<path class="g" d="M{frame.left} {y:.1f}H{frame.right}"/>'
      f'<text class="e" x="{frame.left - 6}" y="{y + 4:.1f}">{number(tick, percent)}</text>'
    )
  x_ticks = [t for t in ticks(frame.x_low, frame.x_high, 5) if t == round(t)]
  for tick in x_ticks:
    parts.append(
      f'<text class="m" x="{frame.x(tick):.1f}" y="{frame.bottom + 16}">{number(tick)}</text>'
    )
  return "".join(parts)


def _curve(frame: _Frame, series: Series, x: Sequence[float], y: Sequence[float | None]) -> str:
  if series.style == "dots" or sum(v is not None for v in y) == 1:
    dots = "".join(
      f'<circle class="f{series.color}" cx="{frame.x(a):.1f}" cy="{frame.y(b):.1f}" r="4"/>'
      for a, b in zip(x, y)
      if b is not None
    )
    joined = (
      f'<path class="raw s{series.color}" d="{_path(frame, x, y)}"/>'
      if series.style == "dots"
      else ""
    )
    return joined + dots
  parts = []
  if series.style == "noisy" and len(x) >= 8:
    parts.append(f'<path class="raw s{series.color}" d="{_path(frame, *thin(x, y))}"/>')
    y = smooth(y, min(2 * (len(y) // 24) + 3, _MAX_WINDOW))
  return "".join(parts) + f'<path class="line s{series.color}" d="{_path(frame, *thin(x, y))}"/>'


def _area(frame: _Frame, series: Series, x, y, base) -> str:
  upper = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in zip(x, y))
  lower = " ".join(
    f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in zip(reversed(x), reversed(base))
  )
  return f'<polygon class="area f{series.color}" points="{upper} {lower}"/>'


def _stack(shown: Sequence[Series]) -> list[tuple[Series, list, list, list]]:
  """(series, x, upper edge, lower edge) of moving averages piled up.

  A missing value counts as nothing; a single point becomes a bar.
  """
  size = math.ceil(len(shown[0].x) / _MAX_POINTS)
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


def _path(frame: _Frame, x: Sequence[float], y: Sequence[float | None]) -> str:
  parts, pen = [], "M"
  for a, b in zip(x, y):
    if b is None:
      pen = "M"
      continue
    parts.append(f"{pen}{frame.x(a):.1f} {frame.y(b):.1f}")
    pen = "L"
  return "".join(parts)


def _hover(frame: _Frame, shown: Sequence[Series], percent: bool) -> str:
  """Invisible columns whose tooltip reads the values; a browser shows it without any script."""
  longest = max(shown, key=lambda series: len(series.x))
  count = min(_MAX_HOVER, len(longest.x))
  step, tall = (frame.right - frame.left) / count, frame.bottom - frame.top
  lookup = [(series.name, dict(zip(series.x, series.y))) for series in shown]
  parts = []
  for i in range(count):
    at = longest.x[min(len(longest.x) - 1, round((i + 0.5) * len(longest.x) / count - 0.5))]
    values = [(name, at_x.get(at)) for name, at_x in lookup]
    text = ", ".join(
      f"{name} {number(value, percent)}" for name, value in values if value is not None
    )
    box = f'x="{frame.left + i * step:.1f}" y="{frame.top}" width="{step:.1f}" height="{tall}"'
    parts.append(
      f'<rect class="hover" {box}><title>{number(at)}: {html.escape(text)}</title></rect>'
    )
  return "".join(parts)
