"""Tests for curves that are read for a page."""

import itertools
import json
import math
import time

import pytest

from paxon.runner.monitoring import curves, metrics_file


def _write(folder, count, *, evaluated=()):
  folder.mkdir(parents=True, exist_ok=True)
  lines = [
    f'{{"step": {step}, "split": "train", "loss": {1 / step}}}'
    for step in range(1, count + 1)
  ]
  lines += [
    f'{{"step": {step}, "split": "validation", "loss": {step}.0}}'
    for step in evaluated
  ]
  (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def _curve(records, split="train"):
  return [(r.step, r.values["loss"]) for r in records if r.split == split]


def test_all_lines_of_a_short_run_are_read(tmp_path):
  _write(tmp_path, 10, evaluated=[5, 10])
  records = curves.read(tmp_path, max_lines=100)
  assert _curve(records) == [(step, 1 / step) for step in range(1, 11)]
  assert _curve(records, "validation") == [(5, 5.0), (10, 10.0)]


def test_of_a_long_run_lines_are_spaced_and_no_evaluation_is_lost(tmp_path):
  evaluated = [*range(100, 5001, 100)]
  _write(tmp_path, 5000, evaluated=evaluated)
  records = curves.read(tmp_path, max_lines=300)
  steps = [step for step, _ in _curve(records)]
  assert 250 <= len(steps) <= 302
  # The file ends with evaluations.
  assert (steps[0], steps[-1]) == (1, 5000)
  assert max(b - a for a, b in itertools.pairwise(steps)) < 50
  assert all(value == 1 / step for step, value in _curve(records))
  assert [step for step, _ in _curve(records, "validation")] == evaluated


def test_damaged_lines_hide_a_point(tmp_path):
  _write(tmp_path, 3)
  path = tmp_path / "metrics.jsonl"
  more = ["{damaged", "7", '{"step": 4, "split": "train", "loss": "NaN"}']
  path.write_text(path.read_text() + "\n".join(more))
  records = curves.read(tmp_path, max_lines=9)
  assert [record.step for record in records] == [1, 2, 3, 4]
  assert math.isnan(records[-1].values["loss"])


def test_separate_evaluations_take_precedence(tmp_path):
  _write(tmp_path, 2, evaluated=[2])
  line = '{"step": 2, "split": "validation", "loss": 7.5}\n'
  (tmp_path / "eval").mkdir()
  (tmp_path / "eval" / "metrics.jsonl").write_text(line)
  records = curves.read(tmp_path, max_lines=9)
  assert _curve(records, "validation") == [(2, 7.5)]
  assert len(_curve(records)) == 2


def test_a_run_that_starts_has_no_metrics(tmp_path):
  assert curves.read(tmp_path, max_lines=9) == []


def test_thin_keeps_spikes_and_the_last_point():
  curve = [(step, 1.0) for step in range(10_000)]
  curve[5_555] = (5_555, 99.0)
  curve[7_777] = (7_777, -99.0)
  kept = curves.thin(curve, 1_000)
  assert len(kept) <= 1_001
  assert {(5_555, 99.0), (7_777, -99.0), curve[-1]} <= set(kept)
  assert kept == sorted(kept)
  assert curves.thin(curve[:10], 1_000) == curve[:10]


def _records(values):
  return [
    metrics_file.Record(step, "train", {"loss": value, "other": 1 / 3})
    for step, value in enumerate(values, 1)
  ]


@pytest.mark.parametrize("metrics", [["loss"], None])
def test_tables_have_the_curves_of_each_run(metrics):
  runs = {"a": _records([3.0, math.nan]), "b": _records([2.0])}
  found = curves.make_tables(runs, metrics, max_points=10)
  assert found["metrics"] == ["loss", "other"]
  loss = {"a": {"train": [[1, 2], [3.0, None]]}, "b": {"train": [[1], [2.0]]}}
  other = {
    "a": {"train": [[1, 2], [0.333333, 0.333333]]},
    "b": {"train": [[1], [0.333333]]},
  }
  wanted = {"loss": loss} if metrics else {"loss": loss, "other": other}
  assert found["curves"] == wanted
  json.dumps(found, allow_nan=False)


def test_long_runs_are_read_in_seconds(tmp_path):
  _write(tmp_path, 100_000)
  start = time.process_time()
  records = curves.read(tmp_path, max_lines=5_000)
  curves.make_tables({"a": records}, max_points=1_000)
  # Seconds of CPU, as other tests run at the same time.
  assert time.process_time() - start < 5
