"""Tests for the report and its charts."""

import html.parser
import itertools
import math
import re
from xml.etree import ElementTree

import pytest

from paxon.runner.monitoring import (
  goodput,
  line_chart,
  metrics_file,
  report,
  spikes,
)

_VOID = ("meta", "!doctype", "img")


def _records():
  records = [
    metrics_file.Record(
      step,
      "train",
      {
        "loss": 5.0 - step / 100,
        "bits_per_byte": 7.0 - step / 100,
        "learning_rate": 1e-3,
      },
    )
    for step in range(10, 301, 10)
  ]
  records += [
    metrics_file.Record(s, "validation", {"loss": y, "bits_per_byte": 2 * y})
    for s, y in ((100, 4.5), (300, 2.125))
  ]
  return [
    *records,
    metrics_file.Record(0, "baseline/xz", {"bits_per_byte": 4.75}),
    metrics_file.Record(0, "baseline/a<b", {"bits_per_byte": 6.0}),
  ]


def _svgs(page):
  """Returns the charts, parsed: they must be well-formed XML."""
  texts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
  return {
    root.get("aria-label"): root for root in map(ElementTree.fromstring, texts)
  }


class _Balance(html.parser.HTMLParser):
  """Checks that every element is closed in order; collects what is loaded."""

  def __init__(self):
    super().__init__()
    self.open, self.loaded, self.text = [], [], ""

  def handle_starttag(self, tag, attrs):
    if tag not in _VOID:
      self.open.append(tag)
    self.loaded += [value for name, value in attrs if name in ("src", "href")]

  def handle_startendtag(self, tag, attrs):
    pass

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def _parsed(page):
  parser = _Balance()
  parser.feed(page)
  assert parser.open == []
  return parser


def test_page_is_complete_and_loads_nothing():
  page = report.make(
    _records(), sample="def f", config="seed = 0\n", folder="r"
  )
  parsed = _parsed(page)
  assert parsed.loaded == []
  assert "http" not in page
  assert "url(#" in page
  assert page.startswith("<!doctype html>")
  for word in ("Loss", "Bits per byte", "Final metrics", "Sample", "def f"):
    assert word in parsed.text


def test_title_is_the_experiment():
  config = '<root>: x\nexperiment = "paxon.tasks.lm.quick.Start"\nseed = 0\n'
  page = report.make([], config=config, folder="run-7")
  assert "<title>Start</title>" in page
  assert "paxon.tasks.lm.quick.Start · run-7 · 0 steps" in page
  assert "<title>run-7</title>" in report.make([], folder="run-7")


def test_curves_of_every_split_and_dashed_baselines_are_drawn():
  charts = _svgs(report.make(_records()))
  assert list(charts) == [
    *("loss by step", "bits per byte by step", "learning rate by step"),
  ]
  bits = charts["bits per byte by step"]
  curves = [e.get("class") for e in bits.iter("polyline")]
  assert curves == ["curve c0", "curve c1"]
  assert len([e for e in bits.iter("line") if e.get("class") == "level"]) == 2
  labels = [
    e.text or "" for e in bits.iter("text") if "label" in e.get("class", "")
  ]
  assert sorted(labels) == [
    *("a<b 6", "train 4", "validation 4.25", "xz 4.75"),
  ]
  # Baselines have no loss.
  loss = charts["loss by step"]
  assert not [e for e in loss.iter("line") if e.get("class") == "level"]


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


def test_first_decrease_of_a_loss_does_not_flatten_the_rest():
  points = [(float(i), 2.0 - i / 1000) for i in range(1, 1001)]
  steep = [(0.0, 100.0), *points]
  series = [line_chart.Series("a", steep, 0)]
  chart = _draw(series)
  ticks = [
    float(e.text or "nan")
    for e in chart.iter("text")
    if (e.get("class"), e.get("text-anchor")) == ("tick", "end")
  ]
  assert max(ticks) <= 2.2
  # Values above are drawn and clipped.
  assert "clip-path" in {key for e in chart.iter("g") for key in e.attrib}


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


def test_table_has_the_last_metrics():
  page = report.make(_records())
  rows = [
    [
      re.sub("<.*?>", "", cell)
      for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
    ]
    for row in re.findall(r"<tr>.*?</tr>", page)
  ]
  assert rows == [
    ["", "validation", "train", "a&lt;b (baseline)", "xz (baseline)"],
    ["step", "300", "300", "", ""],
    ["loss", "2.1250", "2.0000", "", ""],
    ["bits per byte", "4.2500", "4.0000", "6.0000", "4.7500"],
    ["learning rate", "", "1.000e-03", "", ""],
  ]


def test_metrics_of_submodules_are_collapsed():
  values = {"loss": 2.0, "grad_norm/stack": 1.0, "summaries/a/rms": 3.0}
  page = report.make([metrics_file.Record(1, "train", values)])
  folded = page[page.index("<details>") : page.index("</details>")]
  assert "Show 2 metrics" in folded
  assert "summaries/a/rms" in folded
  assert ">loss</th>" not in folded
  _parsed(page)


def test_metrics_have_units():
  values = {
    "goodput": 0.5,
    "mfu": 0.4321,
    "host_memory_peak_bytes": 3 * 2.0**20,
  }
  page = report.make([metrics_file.Record(1, "train", values)])
  assert ">goodput</th><td>50.0%</td></tr>" in page
  assert ">mfu</th><td>43.2%</td></tr>" in page
  assert ">host memory peak</th><td>3 MiB</td></tr>" in page


def _attempt(begin, end, first_step, last_step, **seconds):
  return goodput.Attempt(
    begin=begin,
    end=end,
    first_step=first_step,
    last_step=last_step,
    finished=False,
    seconds=seconds,
  )


def test_time_is_shown_by_cause():
  account = goodput.account(
    [
      _attempt(0.0, 60.0, 0, 10, productive=40.0, compile=20.0),
      _attempt(80.0, 120.0, 5, 20, productive=40.0),
    ]
  )
  page = report.make(_records(), account=account)
  assert "Goodput 50.0% of 120.0 s in 2 attempts" in _parsed(page).text
  rows = re.findall(
    r"<th [^>]+>([\w -]+)</th><td>([\d.]+)</td><td>([\d.]+%)</td></tr>", page
  )
  assert rows == [
    ("productive", "60.0", "50.0%"),
    ("compile", "20.0", "16.7%"),
    ("repeated steps", "20.0", "16.7%"),
    ("idle", "20.0", "16.7%"),
  ]


def test_spikes_are_listed():
  spike = spikes.Spike(
    step=1234,
    metric="grad_norm",
    value=math.nan,
    expected=1.5,
    limit=2.0,
    position_before={},
    position_after={},
  )
  page = report.make(_records(), spikes=[spike])
  cells = ">1,234</th><td>grad norm</td><td>nan</td><td>1.5000</td>"
  assert cells in page
  _parsed(page)


def test_sample_and_configuration_are_escaped():
  evil = "</pre><script>alert('x')</script>\x00\x1b&"
  page = report.make(_records(), sample=evil, config=f"a = {evil}\n")
  parsed = _parsed(page)
  assert "<script" not in page
  assert "\x00" not in page
  assert parsed.text.count("<script>alert('x')</script>\ufffd\ufffd&") == 2


def test_examples_are_images_and_sounds_with_captions():
  image, sound = "data:image/png;base64,AAAA", "data:audio/wav;base64,BBBB"
  examples = {
    "split": "test",
    "step": 3000,
    "examples": [
      {"caption": "label <3>", "image": image},
      {"caption": "yes", "audio": sound},
    ],
  }
  parsed = _parsed(report.make(_records(), examples=examples))
  assert parsed.loaded == [image, sound]
  assert "test, step 3,000" in parsed.text
  assert "label <3>" in parsed.text
  assert "Examples" not in _parsed(report.make(_records())).text


def test_the_rate_has_the_unit_of_the_run():
  values = {"loss": 1.0, "images_per_second": 70.0}
  records = [metrics_file.Record(s, "train", values) for s in (1, 2)]
  page = report.make(records)
  assert "images per second by step" in _svgs(page)
  assert "tokens" not in page


def test_empty_run_has_a_report():
  assert "No metrics have been written yet." in _parsed(report.make([])).text


def test_report_is_regenerated_from_the_folder(tmp_path):
  writer = metrics_file.MetricsFile(tmp_path / "metrics.jsonl", resume_step=0)
  for record in _records():
    writer.write(record.step, record.split, record.values)
  writer.close()
  (tmp_path / "samples.txt").write_text("a sample")
  (tmp_path / "config.txt").write_text('experiment = "a.B"\n')
  path = report.write(tmp_path)
  first = path.read_text()
  assert path.name == "report.html"
  assert "a sample" in first
  assert "<title>B</title>" in first
  path.unlink()
  assert report.write(tmp_path).read_text() == first
  (tmp_path / "samples.txt").unlink()
  assert "Sample" not in report.write(tmp_path).read_text()


def test_the_report_is_written_from_the_first_metrics_on(tmp_path):
  now = 0.0
  metrics = metrics_file.MetricsFile(
    tmp_path / "metrics.jsonl", resume_step=0, clock=lambda: now
  )
  file = report.ReportFile(tmp_path, clock=lambda: now)
  writer = metrics_file.CompositeWriter([metrics, file])
  path = tmp_path / "report.html"
  writer.write(1, "train", {"loss": 4.0})
  assert "No metrics have been written yet" in path.read_text()
  writer.write(2, "train", {"loss": 3.0})
  assert "2 steps" not in path.read_text()
  now = 1000.0
  writer.write(3, "train", {"loss": 2.0})
  assert "3 steps" in path.read_text()
  writer.write(4, "train", {"loss": 1.0})
  assert "3 steps" in path.read_text()
  writer.close()
  assert "4 steps" in path.read_text()


@pytest.mark.parametrize("name", ["spikes.jsonl", "examples.json"])
def test_a_report_that_cannot_be_made_does_not_end_the_run(tmp_path, name):
  (tmp_path / name).write_text("{damaged\n")
  file = report.ReportFile(tmp_path)
  file.write(1, "train", {"loss": 4.0})
  file.close()
  assert not (tmp_path / "report.html").exists()
