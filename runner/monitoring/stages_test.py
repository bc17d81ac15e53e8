"""Tests for stage lines."""

import threading
import time

import pytest

from paxon.runner.monitoring import stages


def test_a_long_stage_prints_until_it_ends():
  lines, enough = [], threading.Event()

  def write(line):
    lines.append(line)
    if len(lines) == 3:
      enough.set()

  with stages.shown("evaluating", pauses=(0.01,), write=write):
    assert enough.wait(30)
  count = len(lines)
  assert set(lines) == {"evaluating: 0 s"}
  assert not enough.wait(0.05) or len(lines) == count
  assert threading.active_count() == 1 or all(
    thread.name != "stages" for thread in threading.enumerate()
  )


def test_a_short_stage_prints_nothing(capsys):
  with stages.shown("evaluating"):
    pass
  assert not capsys.readouterr().out


def test_an_error_ends_the_stage():
  with pytest.raises(ValueError, match="no"), stages.shown("compiling"):
    raise ValueError("no")
  assert all(thread.name != "stages" for thread in threading.enumerate())


def _wait_for(lines, count):
  deadline = time.monotonic() + 30
  while len(lines) < count and time.monotonic() < deadline:
    time.sleep(0.005)
  assert len(lines) >= count


def test_slow_steps_print_the_last_finished_one():
  lines = []
  with stages.StepLines(pauses=(0.01,), write=lines.append) as steps:
    _wait_for(lines, 1)
    assert lines[0] == "waiting for the first step: 0 s of training"
    steps.finished(7)
    count = len(lines)
    _wait_for(lines, count + 2)
    assert lines[-1] == "finished step 7: 0 s of training"
    with steps.paused():
      time.sleep(0.03)  # A line that was due may still come.
      count = len(lines)
      time.sleep(0.1)
      assert len(lines) == count
    _wait_for(lines, count + 1)
  count = len(lines)
  time.sleep(0.05)
  assert len(lines) == count


def test_fast_steps_print_nothing():
  lines = []
  with stages.StepLines(pauses=(30.0,), write=lines.append) as steps:
    for step in range(10):
      steps.finished(step)
      steps.restart()
  assert not lines


def test_no_stage_is_silent_for_five_seconds_at_first():
  assert max(stages.PAUSES[:-1]) < 5
  # Nor two that follow each other.
  assert 2 * stages.PAUSES[0] < 5
  assert sum(stages.PAUSES[:-1]) == pytest.approx(300)
