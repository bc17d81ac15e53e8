"""Line charts as SVG elements: curves by step, with labels and levels."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math

from paxon.runner import web_page
from paxon.runner.monitoring import curves

_LEFT, _TOP, _BOTTOM = 64, 12, 44
# Upper bound of a letter's width in the labels beside the curves, in pixels.
_LETTER = 7.6
_MAX_POINTS = 600
_MAX_DOTS = 60
_LABEL_SPACING = 16

_Points = Sequence[tuple[float, float]]
_element = web_page.element


@dataclasses.dataclass(frozen=True)
class Series:
  """One curve.

  Attributes:
    name: Its label.
    points: Pairs of step and value; non-finite values are gaps.
    color: Its number among the colors of `web_page`.
  """

  name: str
  points: _Points
  color: int


def draw(
  series: Sequence[Series],
  *,
  title: str,
  levels: Mapping[str, float] | None = None,
  width: int = 760,
  height: int = 340,
) -> web_page.Element | None:
  """Returns an `svg` element; None without any finite point.

  `levels` are drawn as dashed horizontal lines. Sizes are in pixels.
  """
  levels = {k: v for k, v in (levels or {}).items() if math.isfinite(v)}
  series = [s for s in series if _finite(s.points)]
  if not series:
    return None
  labels = [(v, f"{name} {_short(v)}", "level") for name, v in levels.items()]
  for s in series:
    last = _finite(s.points)[-1][1]
    name = f"{s.name} " if len(series) > 1 else ""
    labels.append((last, f"{name}{_short(last)}", f"c{s.color}"))
  frame = _Frame(
    x=_x_range(series),
    y=_y_range(series, levels.values()),
    right=width - 16 - _LETTER * max(len(text) for _, text, _ in labels),
    bottom=float(height - _BOTTOM),
  )
  clip = f"inside-{title.replace(' ', '-')}"
  area = _element(
    "rect",
    x=_LEFT,
    y=_TOP,
    # A little wider, so that the last dot is not cut.
    width=frame.right - _LEFT + 4,
    height=frame.bottom - _TOP,
  )
  curves = [shape for s in series for shape in _curve(s, frame)]
  heights = [(frame.y_pixel(v), text, style) for v, text, style in labels]
  return _element(
    "svg",
    _element("clipPath", area, id=clip),
    *frame.axes(title),
    *(frame.horizontal(frame.y_pixel(v), "level") for v in levels.values()),
    _element("g", *curves, clip_path=f"url(#{clip})"),
    *(
      _element(
        "text", text, class_=f"label {style}", x=frame.right + 8, y=y + 4
      )
      for y, text, style in _spread(heights)
    ),
    viewBox=f"0 0 {width} {height}",
    role="img",
    aria_label=f"{title} by step",
  )


@dataclasses.dataclass(frozen=True)
class _Frame:
  """The plotted ranges and their pixels."""

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

  def horizontal(self, y: float, kind: str) -> web_page.Element:
    return _element("line", class_=kind, x1=_LEFT, x2=self.right, y1=y, y2=y)

  def axes(self, title: str) -> list[web_page.Element]:
    """Returns grid lines, tick labels and axis names."""
    bottom, middle = self.bottom, (_TOP + self.bottom) / 2
    center = (_LEFT + self.right) / 2
    shapes = []
    for tick in ticks(*self.y, count=5):
      y = self.y_pixel(tick)
      shapes.append(self.horizontal(y, "rule"))
      shapes.append(_text(_short(tick), "tick", "end", _LEFT - 8, y + 4))
    for tick in ticks(*self.x, count=6):
      x = self.x_pixel(tick)
      shapes.append(
        _element("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 4)
      )
      shapes.append(_text(_short(tick), "tick", "middle", x, bottom + 18))
    name = _text(title, "name", "middle", -middle, 14)
    name.set("transform", "rotate(-90)")
    return [
      *shapes,
      self.horizontal(bottom, "axis"),
      _text("step", "name", "middle", center, bottom + 36),
      name,
    ]


def ticks(low: float, high: float, *, count: int) -> list[float]:
  """Returns round numbers in a range: `count` to twice as many."""
  raw = (high - low) / count * (1 - 1e-9)  # 2.2 - 1.2 is above 1.
  magnitude = 10.0 ** math.floor(math.log10(raw))
  step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
  first = math.ceil(low / step - 1e-9)
  last = math.floor(high / step + 1e-9)
  return [i * step for i in range(first, last + 1)]


def _text(
  text: str, kind: str, anchor: str, x: float | int, y: float | int
) -> web_page.Element:
  return _element("text", text, class_=kind, text_anchor=anchor, x=x, y=y)


def _curve(series: Series, frame: _Frame) -> list[web_page.Element]:
  """Returns a line per finite segment, and dots if there are few."""
  shapes = []
  for segment in _segments(curves.thin(series.points, _MAX_POINTS)):
    points = " ".join(
      f"{frame.x_pixel(x):.1f},{frame.y_pixel(y):.1f}" for x, y in segment
    )
    kind = f"curve c{series.color}"
    shapes.append(_element("polyline", class_=kind, points=points))
  finite = _finite(series.points)
  for x, y in finite if len(finite) <= _MAX_DOTS else ():
    title = f"{series.name}, step {_short(x)}: {y:.6g}"
    shapes.append(
      _element(
        "circle",
        _element("title", title),
        class_=f"c{series.color}",
        r=3,
        cx=frame.x_pixel(x),
        cy=frame.y_pixel(y),
      )
    )
  return shapes


def _finite(points: _Points) -> list[tuple[float, float]]:
  return [(x, y) for x, y in points if math.isfinite(y)]


def _segments(points: _Points) -> list[list[tuple[float, float]]]:
  """Splits a curve at non-finite values."""
  segments: list[list[tuple[float, float]]] = [[]]
  for x, y in points:
    if math.isfinite(y):
      segments[-1].append((x, y))
    elif segments[-1]:
      segments.append([])
  return [segment for segment in segments if segment]


def _x_range(series: Sequence[Series]) -> tuple[float, float]:
  """Returns the steps from 0 to the last, never empty."""
  high = max(x for s in series for x, _ in s.points)
  return 0.0, high if high > 0 else 1.0


def _y_range(
  series: Sequence[Series], levels: Iterable[float]
) -> tuple[float, float]:
  """Returns the range of all values, never empty."""
  values = [*(y for s in series for _, y in _finite(s.points)), *levels]
  low, high = min(values), max(values)
  margin = (high - low) * 0.08 or abs(low) * 0.1 or 1.0
  return low - margin, high + margin


def _spread(
  labels: Sequence[tuple[float, str, str]],
) -> list[tuple[float, str, str]]:
  """Moves labels down until none overlap."""
  placed: list[tuple[float, str, str]] = []
  for y, text, style in sorted(labels):
    if placed:
      y = max(y, placed[-1][0] + _LABEL_SPACING)
    placed.append((y, text, style))
  return placed


def _short(value: float) -> str:
  """Returns a number with at most four digits and a unit prefix."""
  for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if 10_000 <= abs(value) < 1e15 and abs(value) >= size:
      return f"{value / size:.4g}{unit}"
  return f"{value:.4g}"
