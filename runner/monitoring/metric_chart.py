"""Charts of a metric as objects, for notebooks and files.

A notebook shows a chart as SVG, without a plotting library. `draw_on` draws the
same curves with matplotlib, to change them or to add others.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any
from xml.etree import ElementTree

from etils import epath

from paxon.runner import files, user_error, web_page
from paxon.runner.monitoring import line_chart, metrics_file

_TRAIN = "train"
# Charts of one notebook share a page, so nothing else may be styled.
_CLASS = "paxon-chart"
_SVG = "http://www.w3.org/2000/svg"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
  """The curves of one metric by step.

  Attributes:
    metric: Its name.
    series: The curves.
    levels: Values of baselines by name, drawn as horizontal lines.
  """

  metric: str
  series: tuple[line_chart.Series, ...]
  levels: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def to_svg(self) -> str:
    """Returns an SVG document with its style."""
    title = metrics_file.to_words(self.metric)
    drawn = line_chart.draw(self.series, title=title, levels=self.levels)
    if drawn is None:
      drawn = web_page.element("svg", viewBox="0 0 760 40")
      text = web_page.element("text", f"{title}: no finite value", x=8, y=24)
      drawn.append(text)
    drawn.set("xmlns", _SVG)
    drawn.set("class", _CLASS)
    drawn.set("style", "max-width: 760px")
    style = web_page.element("style", web_page.chart_css(f".{_CLASS}"))
    drawn.insert(0, style)
    return ElementTree.tostring(drawn, encoding="unicode")

  def save(self, path: epath.PathLike) -> epath.Path:
    """Writes the SVG document and returns its path."""
    files.write_text(epath.Path(path), self.to_svg())
    return epath.Path(path)

  def draw_on(self, axes: Any) -> None:
    """Draws the same curves on `axes`, a `matplotlib.axes.Axes`."""
    for each in self.series:
      axes.plot(*zip(*each.points, strict=True), label=each.name)
    for name, value in self.levels.items():
      axes.axhline(value, linestyle="--", color="0.5", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(metrics_file.to_words(self.metric))
    if len(self.series) + len(self.levels) > 1:
      axes.legend()

  def _repr_svg_(self) -> str:
    """Returns the SVG that a notebook shows."""
    return self.to_svg()


def make(
  runs: Mapping[str, Sequence[metrics_file.Record]], metric: str
) -> Chart:
  """Returns the chart of a metric of one run or several.

  Args:
    runs: Metrics by the name of the run. The names of several runs are labels.
    metric: The name of a metric of one of them.

  Raises:
    UserError: No run has the metric.
  """
  if not any(metric in r.values for rs in runs.values() for r in rs):
    names = sorted({n for rs in runs.values() for r in rs for n in r.values})
    raise user_error.UserError(
      f"There is no metric {metric!r} in {', '.join(runs) or 'no run'}; metrics"
      f" are {', '.join(names) or 'not written yet'}."
    )
  series = [
    dataclasses.replace(each, name=f"{name} {each.name}")
    if len(runs) > 1
    else each
    for name, records in runs.items()
    for each in make_series(records, metric)
  ]
  if len(runs) > 1:
    colors = itertools.cycle(range(web_page.NUM_COLORS))
    series = [
      dataclasses.replace(each, color=color)
      for each, color in zip(series, colors, strict=False)
    ]
  levels = {}
  if len(runs) == 1:
    ((_, records),) = runs.items()
    levels = read_levels(records, metric)
  return Chart(metric=metric, series=tuple(series), levels=levels)


def make_series(
  records: Sequence[metrics_file.Record], metric: str
) -> list[line_chart.Series]:
  """Returns the curve of each split; `train` is drawn first, below others."""
  points: dict[str, list[tuple[float, float]]] = {}
  for record in sorted(records, key=lambda r: (r.split != _TRAIN, r.step)):
    if metric in record.values and not metrics_file.is_baseline(record):
      point = float(record.step), record.values[metric]
      points.setdefault(record.split, []).append(point)
  evaluated = sorted(split for split in points if split != _TRAIN)
  # Color 0 is that of training.
  num_colors = web_page.NUM_COLORS - 1
  colors = {s: 1 + i % num_colors for i, s in enumerate(evaluated)}
  return [
    line_chart.Series(split, values, colors.get(split, 0))
    for split, values in points.items()
  ]


def read_levels(
  records: Sequence[metrics_file.Record], metric: str
) -> dict[str, float]:
  """Returns the values of baselines by name."""
  return {
    r.split.removeprefix(metrics_file.BASELINE_PREFIX): r.values[metric]
    for r in records
    if metrics_file.is_baseline(r) and metric in r.values
  }
