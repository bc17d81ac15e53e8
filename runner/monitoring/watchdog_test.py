"""Tests for the watchdog."""

import threading
import time

from etils import epath
import pytest

from paxon.runner.monitoring import watchdog
from paxon.runner.settings import monitoring


class _Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def _make(tmp_path, clock, **settings):
  return watchdog.Watchdog(
    monitoring.WatchdogSettings(**settings), epath.Path(tmp_path), clock=clock
  )


def test_reports_each_hang_once(tmp_path, capsys):
  clock = _Clock()
  dog = _make(tmp_path, clock, min_seconds=10.0, factor=3.0)
  dog.arm(4)
  clock.now = 9.9
  assert dog.check() is None
  clock.now = 10.0
  text = dog.check()
  assert text.startswith("No step has finished for 10.0 s (limit 10.0 s) since")
  assert "since step 4." in text
  assert "test_reports_each_hang_once" in text
  assert capsys.readouterr().err == text + "\n"
  assert (tmp_path / "stacks-4.txt").read_text() == text
  clock.now = 1000.0
  assert dog.check() is None
  dog.beat(5)
  clock.now += 5000
  assert "since step 5." in dog.check()
  assert {p.name for p in tmp_path.iterdir()} == {
    "stacks-4.txt",
    "stacks-5.txt",
  }


def test_limit_follows_the_median_step(tmp_path):
  clock = _Clock()
  dog = _make(tmp_path, clock, min_seconds=1.0, factor=3.0)
  dog.arm(0)
  assert dog.limit() == 1.0
  # One slow step among many moves nothing.
  for step, seconds in enumerate((2.0, 2.0, 50.0, 2.0, 2.0), start=1):
    clock.now += seconds
    dog.beat(step)
  assert dog.limit() == 6.0
  clock.now += 5.9
  assert dog.check() is None
  clock.now += 0.2
  assert dog.check()


def test_reports_nothing_while_suspended(tmp_path):
  clock = _Clock()
  dog = _make(tmp_path, clock, min_seconds=10.0)
  clock.now = 99.0
  assert dog.check() is None
  dog.arm(0)
  with dog.suspend():
    clock.now += 1000
    assert dog.check() is None
  clock.now += 9
  assert dog.check() is None
  dog.beat(1)
  # The time of the context is no step's.
  assert dog.limit() == max(10.0, 20 * 9.0)
  clock.now += 181
  assert dog.check()


def test_thread_finds_a_real_hang(tmp_path, capsys):
  release = threading.Event()

  def the_place_that_hangs():
    release.wait()

  stuck = threading.Thread(target=the_place_that_hangs)
  stuck.start()
  path = tmp_path / "stacks-7-host3.txt"
  settings = monitoring.WatchdogSettings(min_seconds=0.1)
  with watchdog.Watchdog(settings, epath.Path(tmp_path), host="-host3") as dog:
    dog.arm(7)
    while not path.exists():
      time.sleep(0.01)
  release.set()
  stuck.join()
  assert "the_place_that_hangs" in path.read_text()
  assert "the_place_that_hangs" in capsys.readouterr().err
  assert not [t for t in threading.enumerate() if t.name == "watchdog"]


def test_ends_the_process_after_a_multiple_of_the_limit(tmp_path, capsys):
  clock, ends = _Clock(), []
  settings = monitoring.WatchdogSettings(
    min_seconds=10.0, factor=1.0, end_factor=3.0, slow_seconds=1000.0
  )
  dog = watchdog.Watchdog(
    settings, epath.Path(tmp_path), clock=clock, end=ends.append
  )

  def end_after(seconds):
    """Hangs, and finds when the process ends: not a moment earlier."""
    clock.now += seconds - 0.1
    dog.check()
    assert ends == []
    clock.now += 0.1
    assert "(the process ends with status 76)" in dog.check()
    assert ends.pop() == 76
    assert "test_ends_the_process" in capsys.readouterr().err

  dog.arm(0)
  end_after(1000.0)  # The first step.
  dog.beat(1)
  clock.now += 20.0
  dog.beat(2)
  clock.now += 20.0
  dog.beat(3)
  end_after(3 * 20.0)
  dog.beat(4)
  with dog.wait_longer():
    end_after(1000.0)
  # Compilation and evaluation may take any time.
  dog.beat(5)
  with dog.suspend():
    clock.now += 1e6
    assert dog.check() is None
  assert not dog.is_hanging()
  clock.now += dog.limit()
  assert dog.is_hanging()


def test_never_ends_what_is_not_asked_to_end(tmp_path):
  clock, ends = _Clock(), []
  for settings, end in (
    (monitoring.WatchdogSettings(end_factor=None), ends.append),
    (monitoring.WatchdogSettings(), None),
  ):
    dog = watchdog.Watchdog(
      settings, epath.Path(tmp_path), clock=clock, end=end
    )
    dog.arm(0)
    clock.now += 1e9
    assert "(limit 300.0 s)" in dog.check()
  assert ends == []


def test_time_of_a_stopped_process_is_no_hang(tmp_path):
  clock = _Clock()
  dog = _make(tmp_path, clock, min_seconds=100.0)
  dog.arm(0)
  clock.now = 1000.0
  dog.skip_gap(990.0)
  assert dog.check() is None
  # A busy machine polls late, too.
  clock.now = 1091.0
  dog.skip_gap(29.0)
  assert dog.check()


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("end_factor", 0.5, r"end_factor must be in \[1, inf\), got 0.5"),
    ("slow_seconds", 0.0, "slow_seconds must be positive, got 0"),
  ],
)
def test_rejects(field, value, message):
  with pytest.raises(ValueError, match=message):
    monitoring.WatchdogSettings(**{field: value})


def test_unwritable_file_does_not_end_the_watchdog(tmp_path, capsys):
  (tmp_path / "file").write_text("")
  folder = epath.Path(tmp_path) / "file"
  settings = monitoring.WatchdogSettings(min_seconds=0.02)
  with watchdog.Watchdog(settings, folder) as dog:
    said = ""
    for step in (1, 2):
      dog.arm(step)
      while said.count("No step has finished") < step:
        time.sleep(0.01)
        said += capsys.readouterr().err
  said += capsys.readouterr().err
  assert said.count("No step has finished") == 2
