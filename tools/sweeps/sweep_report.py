"""Table and page of a sweep: trials by rank, and parallel coordinates."""

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import Protocol, TypeAlias, runtime_checkable

from paxon.runner import web_page
from paxon.runner.checkpoints import text_table

_SPACING, _TOP, _HEIGHT, _MARGIN = 150, 40, 300, 90
_MAX_LABELS = 8


@runtime_checkable
class Result(Protocol):
  """Result of a trial as it is shown; see `sweep_study.Result`."""

  @property
  def status(self) -> str:
    """Finished, stopped or failed."""
    ...

  @property
  def step(self) -> int:
    """The step of the value."""
    ...

  @property
  def value(self) -> float:
    """The metric."""
    ...

  @property
  def point(self) -> Mapping[str, str]:
    """The knobs."""
    ...


Trial: TypeAlias = tuple[int, Result]


def rank(trials: Iterable[Trial], *, sign: int) -> list[Trial]:
  """Returns trials by rank; `sign` is 1 if small values are good.

  Later steps come first: trials that were stopped early are worse.
  """
  return sorted(
    trials, key=lambda each: (-each[1].step, sign * each[1].value, each[0])
  )


def _rows(trials: Sequence[Trial]) -> list[list[str]]:
  return [
    [
      str(number),
      result.status,
      str(result.step),
      f"{result.value:.6g}",
      *result.point.values(),
    ]
    for number, result in trials
  ]


def _names(trials: Sequence[Trial]) -> list[str]:
  return ["trial", "status", "step", "value", *trials[0][1].point]


def format_table(trials: Sequence[Trial]) -> str:
  """Returns the table of ranked trials, at least one, as text."""
  lines = text_table.format_lines([_names(trials), *_rows(trials)])
  return "".join(f"{line}\n" for line in lines)


def format_page(trials: Sequence[Trial], metric: str) -> str:
  """Returns a self-contained page: parallel coordinates and the table."""
  return web_page.page(
    "Sweep",
    web_page.element(
      "p",
      f"{len(trials)} trials, {metric}. A line is a trial; the best ones are"
      " drawn most strongly.",
    ),
    _coordinates(trials),
    web_page.table(_names(trials), _rows(trials)),
  )


def _coordinates(trials: Sequence[Trial]) -> web_page.Element:
  """Returns an axis for each knob and for the value, a line for each trial."""
  columns = {
    name: [result.point[name] for _, result in trials]
    for name in trials[0][1].point
  }
  columns["value"] = [f"{result.value:.6g}" for _, result in trials]
  heights = {name: _place(texts) for name, texts in columns.items()}
  parts = []
  for index, (name, texts) in enumerate(columns.items()):
    x = _MARGIN + _SPACING * index
    parts.append(
      web_page.element(
        "line",
        class_="axis",
        x1=x,
        x2=x,
        y1=_TOP,
        y2=_TOP + _HEIGHT,
        stroke="currentColor",
        stroke_opacity="0.4",
      )
    )
    parts.append(_label(x, _TOP - 20, name, anchor="middle"))
    labels = sorted({*zip(heights[name], texts, strict=True)})
    parts += [
      _label(x + 5, _y(height), text)
      for height, text in labels
      if height in (0, 1) or len(labels) <= _MAX_LABELS
    ]
  for place, (number, result) in enumerate(trials):
    points = " ".join(
      f"{_MARGIN + _SPACING * i},{_y(heights[name][place]):.1f}"
      for i, name in enumerate(columns)
    )
    parts.append(
      web_page.element(
        "polyline",
        web_page.element("title", f"trial {number}: {result.value:.6g}"),
        points=points,
        fill="none",
        stroke="var(--c0)",
        stroke_width=2,
        stroke_opacity=f"{1 - 0.85 * place / max(1, len(trials) - 1):.2f}",
      )
    )
  width = _SPACING * (len(columns) - 1) + 2 * _MARGIN
  return web_page.element(
    "svg",
    *parts,
    viewBox=f"0 0 {width} {_TOP + _HEIGHT + 20}",
    role="img",
    style="width: 100%; font-size: 11px",
  )


def _label(
  x: float | int, y: float | int, text: str, *, anchor: str = "start"
) -> web_page.Element:
  return web_page.element(
    "text", text, x=x, y=f"{y:.1f}", fill="currentColor", text_anchor=anchor
  )


def _y(height: float) -> float:
  return _TOP + _HEIGHT * (1 - height)


def _place(texts: Sequence[str]) -> list[float]:
  """Returns heights in [0, 1]: by rank, of numbers or of text."""
  try:
    numbers = [float(text) for text in texts]
    ordered = sorted({*texts}, key=float)
    if any(math.isnan(number) for number in numbers):
      raise ValueError
  except ValueError:
    ordered = sorted({*texts})
  return [ordered.index(text) / max(1, len(ordered) - 1) for text in texts]
