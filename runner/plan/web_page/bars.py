"""Stacked bar charts as SVG text."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Final

from paxon.runner.plan.web_page import markup

STYLES: Final = 8

_WIDTH: Final = 860
_WIDEST_LABEL: Final = 330
_ROW: Final = 22
_GAP: Final = 10
_LETTER: Final = 6.8
# A segment that is there is seen.
_THINNEST: Final = 1.5


@dataclasses.dataclass(frozen=True)
class Segment:
  """One part of a bar.

  Attributes:
    name: What it is.
    value: Its length.
    style: Number of its color, below `STYLES`.
  """

  name: str
  value: float | int
  style: int


@dataclasses.dataclass(frozen=True)
class Row:
  """One bar.

  Attributes:
    label: Beside it.
    segments: From the left to the right.
    start: Where the first one begins.
    text: At its end; by default the sum of the segments.
    whisker: Two values between which the end is expected, if not certain.
  """

  label: str
  segments: tuple[Segment, ...]
  start: float | int = 0.0
  text: str | None = None
  whisker: tuple[float | int, float | int] | None = None

  @property
  def end(self) -> float | int:
    """The largest value that is drawn."""
    total = self.start + sum(segment.value for segment in self.segments)
    return max(total, *(self.whisker or (0.0,)))

  def shown(self, form: Callable[[float | int], str]) -> str:
    """Returns what stands at the end."""
    if self.text is not None:
      return self.text
    return form(sum(segment.value for segment in self.segments))


@dataclasses.dataclass(frozen=True)
class _Frame:
  """Where values are in the picture."""

  left: float | int
  scale: float | int
  form: Callable[[float | int], str]

  def at(self, value: float | int) -> float | int:
    return self.left + value * self.scale


def draw(
  rows: Sequence[Row],
  *,
  title: str,
  form: Callable[[float | int], str],
  limits: Sequence[tuple[str, float | int]] = (),
) -> str:
  """Returns an `svg` element; nothing where all values are 0.

  Args:
    rows: From the top to the bottom.
    title: What is drawn, for screen readers.
    form: Writes a value.
    limits: Names and values of dashed lines across all bars.
  """
  most = max([0.0, *(r.end for r in rows), *(value for _, value in limits)])
  if not most:
    return ""
  left = min(_WIDEST_LABEL, 16 + _LETTER * max(len(r.label) for r in rows))
  right = 16 + _LETTER * max(len(row.shown(form)) for row in rows)
  frame = _Frame(left, (_WIDTH - left - right) / most, form)
  top = 20 * len(limits) + 4
  height = top + len(rows) * (_ROW + _GAP) + 2
  parts = [
    f'<svg viewBox="0 0 {_WIDTH} {height}" role="img"'
    f' aria-label="{markup.escape(title)}"><title>{markup.escape(title)}'
    "</title>",
  ]
  for i, row in enumerate(rows):
    parts += _bar(row, top + i * (_ROW + _GAP), frame)
  # The furthest on top, so that no line crosses the name of another.
  for i, (name, value) in enumerate(sorted(limits, key=lambda n: -n[1])):
    parts += _limit(f"{name} {form(value)}", frame.at(value), 20 * i, height)
  return "\n".join([*parts, "</svg>"])


def legend(entries: Sequence[tuple[str, int]]) -> str:
  """Returns names beside squares in the colors of their segments."""
  items = "".join(
    f'<li><span class="swatch c{style}" aria-hidden="true"></span>'
    f"{markup.escape(name)}</li>"
    for name, style in entries
  )
  return f'<ul class="legend">{items}</ul>'


def _bar(row: Row, y: int, frame: _Frame) -> list[str]:
  label = _shortened(row.label, frame.left - 14)
  parts = [
    f'<text class="name" x="{frame.left - 10:.1f}" y="{y + 15}"'
    f' text-anchor="end">{markup.escape(label)}'
    f"<title>{markup.escape(row.label)}</title></text>"
  ]
  at = row.start
  for segment in row.segments:
    if segment.value > 0:
      width = max(segment.value * frame.scale, _THINNEST)
      words = f"{segment.name}: {frame.form(segment.value)}"
      parts.append(
        f'<rect class="c{segment.style}" x="{frame.at(at):.1f}" y="{y}"'
        f' width="{width:.1f}" height="{_ROW}"><title>{markup.escape(words)}'
        "</title></rect>"
      )
    at += segment.value
  if row.whisker is not None:
    low, high = map(frame.at, row.whisker)
    parts.append(
      f'<path class="whisker" d="M{low:.1f} {y + 5}v12M{low:.1f} {y + 11}'
      f'H{high:.1f}M{high:.1f} {y + 5}v12"/>'
    )
  text = markup.escape(row.shown(frame.form))
  parts.append(
    f'<text x="{frame.at(row.end) + 8:.1f}" y="{y + 15}">{text}</text>'
  )
  return parts


def _limit(text: str, x: float | int, y: int, height: int) -> list[str]:
  # Beside the line, on the side that has room.
  is_left = len(text) * _LETTER < x
  anchor, shift = ("end", -6) if is_left else ("start", 6)
  return [
    f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2}"'
    f' y2="{height}"/><text x="{x + shift:.1f}" y="{y + 14}"'
    f' text-anchor="{anchor}">{markup.escape(text)}</text>'
  ]


def _shortened(text: str, width: float | int) -> str:
  """Returns the end of a text that is too long: paths differ there."""
  most = int(width / _LETTER)
  return text if len(text) <= most else "\u2026" + text[len(text) - most + 1 :]
