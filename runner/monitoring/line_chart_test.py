"""Tests for line charts."""

import itertools
import math
from xml.etree import ElementTree

import pytest

from paxon.runner.monitoring import line_chart


def _draw(series):
  chart = line_chart.draw(series, title="loss")
  assert chart is not None
  return chart


def test_points_match_the_axes():
  points = [(0.0, 2.0), (50.0, 3.0), (100.0, 1.0)]
  chart = _draw([line_chart.Series("a", points, 0)])
  ticks = {
    (e.get("text-anchor"), float(e.text or "nan")): e
    for e in chart.iter("text")
    if e.get("class") == "tick"
  }
  dots = [
    (float(e.get("cx") or "nan"), float(e.get("cy") or "nan"))
    for e in chart.iter("circle")
  ]
  for (step, value), (x, y) in zip(
    ((0, 2), (50, 3), (100, 1)), dots, strict=True
  ):
    if ("middle", step) in ticks:
      assert float(ticks["middle", step].get("x") or "nan") == pytest.approx(x)
    # The label is a little below its line.
    found = float(ticks["end", value].get("y") or "nan") - 4
    assert found == pytest.approx(y, abs=0.2)


def test_the_first_loss_is_inside_of_the_chart():
  points = [(float(i), 2.0 - i / 1000) for i in range(1, 1001)]
  steep = [(0.0, 100.0), *points]
  series = [line_chart.Series("a", steep, 0)]
  chart = _draw(series)
  ticks = [
    float(e.text or "nan")
    for e in chart.iter("text")
    if (e.get("class"), e.get("text-anchor")) == ("tick", "end")
  ]
  assert max(ticks) == 100


def test_labels_do_not_cover_each_other():
  series = [
    line_chart.Series(f"s{i}", [(0.0, 1.0), (1.0, 1.0)], 0) for i in range(4)
  ]
  chart = _draw(series)
  heights = [
    float(e.get("y") or "nan")
    for e in chart.iter("text")
    if "label" in e.get("class", "")
  ]
  assert len(heights) == 4
  assert all(b - a >= 12 for a, b in itertools.pairwise(heights))


def test_non_finite_values_are_gaps():
  points = [
    (0.0, 1.0),
    (1.0, math.nan),
    (2.0, 2.0),
    (3.0, math.inf),
    (4.0, 1.0),
  ]
  chart = _draw([line_chart.Series("a", points, 0)])
  assert len(list(chart.iter("polyline"))) == 3
  assert b"nan" not in ElementTree.tostring(chart)
  nothing = [line_chart.Series("a", [(0.0, math.nan)], 0)]
  assert line_chart.draw(nothing, title="l") is None


def test_many_points_are_thinned_but_spikes_remain():
  points = [(float(i), 1.0) for i in range(100_000)]
  points[54_321] = (54_321.0, 9.0)
  [line] = _draw([line_chart.Series("a", points, 0)]).iter("polyline")
  pixels = [tuple(map(float, p.split(","))) for p in line.get("points").split()]  # pyrefly: ignore
  assert len(pixels) <= 1200
  assert min(y for _, y in pixels) < 100 < max(y for _, y in pixels)


@pytest.mark.parametrize(
  ("low", "high", "expected"),
  [
    (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
    (1.2, 2.2, [1.2, 1.4, 1.6, 1.8, 2.0, 2.2]),
    (-0.003, 0.002, [-0.003, -0.002, -0.001, 0, 0.001, 0.002]),
    (0.0, 70_000.0, [0, 20_000, 40_000, 60_000]),
  ],
)
def test_ticks_are_round_numbers(low, high, expected):
  assert line_chart.ticks(low, high, count=5) == pytest.approx(expected)


def test_single_point_and_equal_values_can_be_drawn():
  for points in ([(5.0, 2.0)], [(0.0, 0.0)], [(1.0, 3.0), (2.0, 3.0)]):
    _draw([line_chart.Series("a", points, 0)])
