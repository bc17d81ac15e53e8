"""Tests of verdicts, tables and JSON on made-up times."""

import datetime
import json

import pytest

from paxon.tools.benchmarks import report, timing


def _comparison(ratios, limit=1.05, **fields) -> timing.Comparison:
  return timing.Comparison(
    case="train_step",
    first="ours",
    second="theirs",
    pairs=timing.Pairs(
      first=tuple(0.2 * ratio for ratio in ratios),
      second=(0.2,) * len(ratios),
    ),
    limit=limit,
    **fields,
  )


@pytest.mark.parametrize(
  ("ratios", "limit", "verdict"),
  [
    pytest.param([1.0, 1.01, 0.99] * 5, 1.05, "holds", id="below"),
    pytest.param([1.2, 1.21, 1.19] * 5, 1.05, "fails", id="above"),
    pytest.param([0.8, 1.3] * 8, 1.05, "open", id="on both sides"),
    pytest.param([1.2] * 5, None, "", id="no limit"),
  ],
)
def test_a_verdict_needs_the_whole_interval(ratios, limit, verdict):
  assert _comparison(ratios, limit).verdict == verdict


def test_terminal_table():
  text = report.to_text(
    [_comparison([1.02] * 3, facts={"layers": 4, "MFU": 0.51234})]
  )
  assert text.splitlines() == [
    "case        compared       median  over    ratio                 limit",
    "train_step  ours / theirs  204 ms  200 ms  1.020 [1.020, 1.020]  1.05  "
    " holds",
    "train_step: layers 4, MFU 0.5123",
  ]


def test_json_holds_every_round():
  data = json.loads(json.dumps(_comparison([1.02, 1.0]).to_json()))
  assert data["rounds"]["first"] == pytest.approx([0.204, 0.2])
  assert data["rounds"]["second"] == [0.2, 0.2]
  assert data["ratio"]["median"] == pytest.approx(1.01)
  assert data["verdict"] == "holds"


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 us"), (3e-9, "3 ns")],
)
def test_durations_have_a_unit(seconds, text):
  assert report.duration(seconds) == text


def test_environment_says_when_and_on_what(tmp_path):
  facts = report.environment(datetime.datetime(2026, 1, 2))
  assert facts["date"] == "2026-01-02"
  assert facts["device"] == "cpu"
  assert facts["cores"] > 0
  assert {"jax", "python", "cpu", "num_devices"} <= facts.keys()
  cpuinfo = tmp_path / "cpuinfo"
  cpuinfo.write_text("processor : 0\nmodel name : Some CPU @ 2 GHz\n")
  assert report.cpu_model(str(cpuinfo)) == "Some CPU @ 2 GHz"
  assert report.cpu_model(str(tmp_path / "none"))
