"""Tests for charts as objects."""

import math
from xml.etree import ElementTree

import pytest

from paxon.runner import user_error
from paxon.runner.monitoring import metric_chart, metrics_file

_TRAIN = [
  metrics_file.Record(n, "train", {"loss": 4.0 / n}) for n in range(1, 9)
]
_HELD_OUT = [
  metrics_file.Record(8, "validation", {"loss": 1.0}),
  metrics_file.Record(0, "baseline/xz", {"loss": 0.9}),
]


def _find_all(svg, name):
  return ElementTree.fromstring(svg).iter(
    f"{{http://www.w3.org/2000/svg}}{name}"
  )


def test_a_notebook_shows_each_split_and_the_baselines():
  chart = metric_chart.make({"a": [*_TRAIN, *_HELD_OUT]}, "loss")
  assert [each.name for each in chart.series] == ["train", "validation"]
  assert chart.levels == {"xz": 0.9}
  svg = chart._repr_svg_()
  texts = [element.text for element in _find_all(svg, "text")]
  assert {"train 0.5", "validation 1", "xz 0.9"} <= set(texts)


def test_the_style_of_a_chart_applies_to_charts_only():
  svg = metric_chart.make({"a": _TRAIN}, "loss").to_svg()
  (style,) = _find_all(svg, "style")
  assert style.text is not None
  rules = [rule for rule in style.text.split("}") if rule.strip()]
  assert len(rules) > 20
  assert all(rule.strip().startswith(".paxon-chart") for rule in rules)


def test_curves_of_several_runs_have_their_names_and_colors():
  runs = {"a": [*_TRAIN, *_HELD_OUT], "b": _TRAIN}
  chart = metric_chart.make(runs, "loss")
  names = [each.name for each in chart.series]
  assert names == ["a train", "a validation", "b train"]
  assert [each.color for each in chart.series] == [0, 1, 2]
  assert not chart.levels


def test_a_metric_that_no_run_has_is_an_error_with_those_it_has():
  with pytest.raises(
    user_error.UserError, match="'los' in a; metrics are loss"
  ):
    metric_chart.make({"a": _TRAIN}, "los")


def test_a_chart_without_finite_values_says_so():
  records = [metrics_file.Record(1, "train", {"loss": math.nan})]
  svg = metric_chart.make({"a": records}, "loss").to_svg()
  assert "loss: no finite value" in svg


def test_a_chart_is_stored_as_a_document(tmp_path):
  chart = metric_chart.make({"a": _TRAIN}, "loss")
  path = chart.save(tmp_path / "loss.svg")
  assert path.read_text() == chart.to_svg()


class _Axes:
  """Records calls as `matplotlib.axes.Axes` takes them."""

  def __init__(self):
    self.calls = []

  def __getattr__(self, name):
    return lambda *args, **given: self.calls.append((name, args, given))


def test_the_same_curves_are_drawn_on_axes():
  axes = _Axes()
  metric_chart.make({"a": [*_TRAIN, *_HELD_OUT]}, "loss").draw_on(axes)
  assert [call[0] for call in axes.calls] == [
    *("plot", "plot", "axhline", "set_xlabel", "set_ylabel", "legend")
  ]
  _, (steps, values), given = axes.calls[0]
  assert (steps[-1], values[-1], given) == (8.0, 0.5, {"label": "train"})
