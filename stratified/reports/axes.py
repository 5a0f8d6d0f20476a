"""Axes of a plot: round ticks, the map from data to pixels, smoothing and thinning of curves."""

from collections.abc import Sequence
import math

LEFT, RIGHT, BOTTOM = 48, 20, 24  # pixels around a plot
MOST_POINTS, MOST_WINDOW = 240, 101


def ticks(low: float, high: float, count: int = 4) -> list[float]:
  """Round numbers (1, 2, 5 times a power of ten) that lie in [low, high], about `count` of them."""
  if not high > low:
    return [low]
  raw = (high - low) / count
  power = 10.0 ** math.floor(math.log10(raw))
  step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
  first = math.ceil(low / step - 1e-9)
  # one digit more than the step's own: a range of 1e-15 has ticks too
  digits = 1 - math.floor(math.log10(step))
  # the sum turns -0.0 into 0.0
  return [round(i * step, digits) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Axes:
  """Maps data to pixels; the y range is widened to round numbers, a range of nothing to [y, y + 1].

  x: every x value; y: every y value, of which the range must include `limits`.
  """

  def __init__(self, x: Sequence[float], y: Sequence[float], width: int, height: int, top: float):
    self.x_low, self.x_high = min(x), max(max(x), min(x) + 1)
    low, high = min(y), max(y)
    high = high if high > low else low + 1
    found = ticks(low, high)
    step = found[1] - found[0] if len(found) > 1 else high - low
    self.y_low = math.floor(low / step + 1e-9) * step
    self.y_high = math.ceil(high / step - 1e-9) * step
    self.y_ticks = ticks(self.y_low, self.y_high, round((self.y_high - self.y_low) / step))
    self.x_ticks = [t for t in ticks(self.x_low, self.x_high, 5) if t == round(t)]
    self.left, self.right, self.top, self.bottom = LEFT, width - RIGHT, top, height - BOTTOM

  def x(self, value: float) -> float:
    return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.right - self.left)

  def y(self, value: float) -> float:
    share = (value - self.y_low) / (self.y_high - self.y_low)
    return self.bottom - share * (self.bottom - self.top)


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
  x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS
) -> tuple[list, list]:
  """Thins to about `most` points; the extremes of each bucket stay, so that no spike is lost."""
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


def every_nth(count: int, most: int = MOST_POINTS) -> list[int]:
  """At most about `most` of `count` positions, evenly, the last among them."""
  return sorted({*range(0, count, math.ceil(count / most)), count - 1}) if count else []
