"""Tests for the texts of a run by step."""

import pytest

from paxon.runner import files
from paxon.runner.monitoring import sample_file


def _steps(path):
  return [each.step for each in sample_file.read(path)]


def test_texts_are_kept_by_step(tmp_path):
  path = tmp_path / "samples.jsonl"
  file = sample_file.SampleFile(path, resume_step=0)
  file.add(5, "a\n<b>\ud800")
  file.add(10, "c")
  file.add(10, "d")
  assert sample_file.read(path) == [
    sample_file.StepText(5, "a\n<b>\ud800"),
    sample_file.StepText(10, "d"),
  ]


def test_a_resumed_run_drops_later_steps(tmp_path):
  path = tmp_path / "samples.jsonl"
  file = sample_file.SampleFile(path, resume_step=0)
  for step in (5, 10, 15):
    file.add(step, "a")
  sample_file.SampleFile(path, resume_step=12).add(14, "b")
  assert _steps(path) == [5, 10, 14]


def test_the_number_of_steps_is_bounded(tmp_path):
  path = tmp_path / "samples.jsonl"
  file = sample_file.SampleFile(path, resume_step=0)
  steps = []
  for step in range(1, 201):
    file.add(step, "a")
    steps = _steps(path)
    assert (steps[0], steps[-1]) == (1, step)
    assert len(steps) <= sample_file.MAX_STEPS
  assert len(steps) > sample_file.MAX_STEPS // 3


def test_a_damaged_line_is_an_error(tmp_path):
  path = tmp_path / "samples.jsonl"
  path.write_text('{"step": 1}\n')
  with pytest.raises(files.DamagedFileError, match="line 1, is not a valid"):
    sample_file.read(path)
