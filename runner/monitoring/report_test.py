"""Tests for when the report of a run is written."""

import os

from paxon.runner.monitoring import metrics_file, report


def _write(folder):
  writer = metrics_file.MetricsFile(folder / "metrics.jsonl", resume_step=0)
  for step in range(1, 31):
    writer.write(step, "train", {"loss": 4.0 / step})
  writer.close()


def test_report_is_regenerated_from_the_folder(tmp_path):
  _write(tmp_path)
  (tmp_path / "samples.txt").write_text("a sample")
  (tmp_path / "settings.json").write_text('{"experiment": "a.B"}')
  path = report.write(tmp_path)
  first = path.read_text()
  assert path.name == "report.html"
  assert "a sample" in first
  assert "<title>B</title>" in first
  path.unlink()
  assert report.write(tmp_path).read_text() == first
  (tmp_path / "samples.txt").unlink()
  assert "Samples" not in report.write(tmp_path).read_text()


def test_the_report_is_written_from_the_first_metrics_on(tmp_path):
  now = 0.0
  metrics = metrics_file.MetricsFile(
    tmp_path / "metrics.jsonl", resume_step=0, clock=lambda: now
  )
  file = report.ReportFile(tmp_path, clock=lambda: now)
  writer = metrics_file.CompositeWriter([metrics, file])
  path = tmp_path / "report.html"
  writer.write(1, "train", {"loss": 4.0})
  assert '"metrics":[]' in path.read_text()
  writer.write(2, "train", {"loss": 3.0})
  assert "2 steps" not in path.read_text()
  now = 1000.0
  writer.write(3, "train", {"loss": 2.0})
  assert "3 steps" in path.read_text()
  writer.write(4, "train", {"loss": 1.0})
  assert "3 steps" in path.read_text()
  writer.close()
  assert "4 steps" in path.read_text()


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path):
  (tmp_path / "report.html").mkdir()
  file = report.ReportFile(tmp_path)
  file.write(1, "train", {"loss": 4.0})
  file.close()
  assert os.listdir(tmp_path) == ["report.html"]
