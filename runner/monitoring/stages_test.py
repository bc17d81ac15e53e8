"""Tests for stage lines."""

import threading

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
