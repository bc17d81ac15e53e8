"""Line charts as SVG text, for a page that needs nothing else."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import html
import math

_LEFT, _TOP, _BOTTOM = 64, 12, 44
# Of the labels beside the curves, in pixels, on the safe side.
_LETTER = 7.6
# The share of the steps that does not stretch the vertical axis.
_BEGINNING = 0.05
_MAX_POINTS = 600
_MAX_DOTS = 60
_LABEL_SPACING = 16


@dataclasses.dataclass(frozen=True)
class Series:
  """One curve.

  Attributes:
    name: Its label.
    points: Pairs of step and value; values that are not finite are gaps.
    style: The CSS class that gives its color.
  """

  name: str
  points: Sequence[tuple[float, float]]
  style: str


def draw(
  series: Sequence[Series],
  *,
  title: str,
  levels: Mapping[str, float] | None = None,
  width: int = 760,
  height: int = 340,
) -> str:
  """Returns an `svg` element with axes, ticks, curves and their labels.

  Args:
    series: The curves; those without a finite point are left out.
    title: What the values are, for the vertical axis and screen readers.
    levels: Values to compare with, by name: dashed horizontal lines.
    width: In pixels of the drawing, which scales with the page.
    height: In pixels.
  """
  levels = {k: v for k, v in (levels or {}).items() if math.isfinite(v)}
  series = [s for s in series if _finite(s.points)]
  if not series:
    return ""
  labels = [(v, f"{name} {_short(v)}", "level") for name, v in levels.items()]
  for s in series:
    last = _finite(s.points)[-1][1]
    name = f"{s.name} " if len(series) > 1 else ""
    labels.append((last, f"{name}{_short(last)}", s.style))
  frame = _Frame(
    x=_x_range(series),
    y=_y_range(series, levels.values()),
    right=width - 16 - _LETTER * max(len(text) for _, text, _ in labels),
    bottom=float(height - _BOTTOM),
  )
  clip = f"inside-{title.replace(' ', '-')}"
  parts = [
    f'<svg viewBox="0 0 {width} {height}" role="img"'
    f' aria-label="{html.escape(title)} by step">',
    f'<clipPath id="{clip}"><rect x="{_LEFT}" y="{_TOP}"'
    # A little wider, so that the last dot is whole.
    f' width="{frame.right - _LEFT + 4:.1f}" height="{frame.bottom - _TOP}"/>'
    "</clipPath>",
    *frame.axes(title),
  ]
  for level in levels.values():
    y = frame.y_pixel(level)
    parts.append(
      f'<line class="level" x1="{_LEFT}" x2="{frame.right:.1f}" y1="{y:.1f}"'
      f' y2="{y:.1f}"/>'
    )
  parts.append(f'<g clip-path="url(#{clip})">')
  for s in series:
    parts += _curve(s, frame)
  parts.append("</g>")
  for y, text, style in _apart(
    [(frame.y_pixel(value), text, style) for value, text, style in labels]
  ):
    parts.append(
      f'<text class="label {style}" x="{frame.right + 8:.1f}"'
      f' y="{y + 4:.1f}">{html.escape(text)}</text>'
    )
  return "\n".join([*parts, "</svg>"])


@dataclasses.dataclass(frozen=True)
class _Frame:
  """The plotted ranges, and where they are in the picture."""

  x: tuple[float, float]
  y: tuple[float, float]
  right: float
  bottom: float

  def x_pixel(self, x: float) -> float:
    low, high = self.x
    return _LEFT + (x - low) / (high - low) * (self.right - _LEFT)

  def y_pixel(self, y: float) -> float:
    low, high = self.y
    return _TOP + (high - y) / (high - low) * (self.bottom - _TOP)

  def axes(self, title: str) -> list[str]:
    """Returns grid lines, tick labels and axis names."""
    right, bottom = round(self.right, 1), self.bottom
    parts = []
    for tick in ticks(*self.y, count=5):
      y = self.y_pixel(tick)
      parts.append(
        f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}"'
        f' y2="{y:.1f}"/><text class="tick" text-anchor="end"'
        f' x="{_LEFT - 8}" y="{y + 4:.1f}">{_short(tick)}</text>'
      )
    for tick in ticks(*self.x, count=6):
      x = self.x_pixel(tick)
      parts.append(
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}"'
        f' y2="{bottom + 4}"/><text class="tick" text-anchor="middle"'
        f' x="{x:.1f}" y="{bottom + 18}">{_short(tick)}</text>'
      )
    middle = (_TOP + bottom) / 2
    parts += [
      f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}"'
      f' y2="{bottom}"/>',
      f'<text class="name" text-anchor="middle" x="{(_LEFT + right) / 2}"'
      f' y="{bottom + 36}">step</text>',
      f'<text class="name" text-anchor="middle" transform="rotate(-90)"'
      f' x="{-middle}" y="14">{html.escape(title)}</text>',
    ]
    return parts


def ticks(low: float, high: float, *, count: int) -> list[float]:
  """Returns round numbers in a range, about `count` of them.

  Args:
    low: The begin of the range.
    high: Its end, above `low`.
    count: How many are wanted; there may be up to twice as many.
  """
  raw = (high - low) / count * (1 - 1e-9)  # 2.2 - 1.2 is above 1.
  magnitude = 10.0 ** math.floor(math.log10(raw))
  step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
  first = math.ceil(low / step - 1e-9)
  last = math.floor(high / step + 1e-9)
  return [i * step for i in range(first, last + 1)]


def _curve(series: Series, frame: _Frame) -> list[str]:
  """Returns the line of a curve in its pieces, and dots if they are few."""
  parts = []
  for piece in _pieces(_thinned(series.points)):
    path = " ".join(
      f"{frame.x_pixel(x):.1f},{frame.y_pixel(y):.1f}" for x, y in piece
    )
    parts.append(f'<polyline class="curve {series.style}" points="{path}"/>')
  finite = _finite(series.points)
  if len(finite) <= _MAX_DOTS:
    parts += [
      f'<circle class="dot {series.style}" r="3" cx="{frame.x_pixel(x):.1f}"'
      f' cy="{frame.y_pixel(y):.1f}"><title>{html.escape(series.name)}, step'
      f" {_short(x)}: {y:.6g}</title></circle>"
      for x, y in finite
    ]
  return parts


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  return [(x, y) for x, y in points if math.isfinite(y)]


def _thinned(
  points: Sequence[tuple[float, float]],
) -> list[tuple[float, float]]:
  """Returns fewer points with every spike: the extremes of equal groups."""
  if len(points) <= _MAX_POINTS:
    return list(points)
  size = math.ceil(2 * len(points) / _MAX_POINTS)
  kept = []
  for start in range(0, len(points), size):
    group = points[start : start + size]
    finite = _finite(group)
    if len(finite) < len(group):
      kept.append((group[0][0], math.nan))
    if finite:
      extremes = {
        min(finite, key=lambda p: p[1]),
        max(finite, key=lambda p: p[1]),
      }
      kept += sorted(extremes)
  return kept


def _pieces(
  points: Sequence[tuple[float, float]],
) -> list[list[tuple[float, float]]]:
  """Splits a curve at values that are not finite."""
  pieces: list[list[tuple[float, float]]] = [[]]
  for x, y in points:
    if math.isfinite(y):
      pieces[-1].append((x, y))
    elif pieces[-1]:
      pieces.append([])
  return [piece for piece in pieces if piece]


def _x_range(series: Sequence[Series]) -> tuple[float, float]:
  """Returns the steps from 0 to the last, never empty."""
  high = max(x for s in series for x, _ in s.points)
  return 0.0, high if high > 0 else 1.0


def _y_range(
  series: Sequence[Series], levels: Iterable[float]
) -> tuple[float, float]:
  """Returns the range of the values to draw, never empty.

  It leaves out how the curves begin: the first fall of a loss is so deep that
  all the rest would be a flat line. What is above the range is cut off.
  """
  points = [point for s in series for point in _finite(s.points)]
  start = _BEGINNING * max(x for x, _ in points)
  values = [*(y for x, y in points if x >= start), *levels]
  low, high = min(values), max(values)
  margin = (high - low) * 0.08 or abs(low) * 0.1 or 1.0
  return low - margin, high + margin


def _apart(
  labels: Sequence[tuple[float, str, str]],
) -> list[tuple[float, str, str]]:
  """Moves labels down until none covers another."""
  placed: list[tuple[float, str, str]] = []
  for y, text, style in sorted(labels):
    if placed:
      y = max(y, placed[-1][0] + _LABEL_SPACING)
    placed.append((y, text, style))
  return placed


def _short(value: float) -> str:
  """Returns a number as it is written beside an axis."""
  for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if 10_000 <= abs(value) < 1e15 and abs(value) >= size:
      return f"{value / size:.4g}{unit}"
  return f"{value:.4g}"
