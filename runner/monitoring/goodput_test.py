"""Tests for the ledger of wall time."""

import math

import pytest

from paxon.runner import user_error
from paxon.runner.monitoring import goodput

Cause = goodput.Cause


class _Clock:
  def __init__(self, now=1000.0):
    self.now = now

  def __call__(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds


def _ledger(path=None, clock=None, **options):
  clock = clock or _Clock()
  return goodput.Ledger(path, clock=clock, sleep=clock.sleep, **options), clock


def _lost(account):
  seconds = {c: round(s, 6) for c, s in account.seconds.items() if s}
  assert math.isclose(sum(account.seconds.values()), account.wall_seconds)
  return seconds


def test_every_second_counts_for_the_innermost_cause():
  ledger, clock = _ledger(begin=990.0)
  clock.now += 2
  with ledger.span(Cause.RESTORE):
    clock.now += 3
  ledger.start(0)
  with ledger.span(Cause.COMPILE):
    clock.now += 4
  with ledger.span(Cause.PRODUCTIVE):
    clock.now += 50
    with ledger.span(Cause.CHECKPOINT):
      clock.now += 1
    clock.now += 30
    ledger.record_step(8)
  ledger.rest()
  with ledger.span(Cause.SAMPLING):
    clock.now += 6
  clock.now += 0.5
  account = ledger.account()
  assert _lost(account) == {
    Cause.STARTUP: 12.0,
    Cause.RESTORE: 3.0,
    Cause.COMPILE: 4.0,
    Cause.PRODUCTIVE: 80.0,
    Cause.CHECKPOINT: 1.0,
    Cause.SAMPLING: 6.0,
    Cause.OTHER: 0.5,
  }
  assert account.wall_seconds == 106.5
  assert account.goodput == pytest.approx(80 / 106.5)
  assert account.line() == (
    "goodput 75.1% of 106.5 s; lost: start-up 11.3%, sampling 5.6%,"
    " compile 3.8%, restore 2.8%, checkpoint 0.9%, other 0.5%"
  )


def test_span_ends_with_an_error():
  ledger, clock = _ledger()

  def fail():
    with ledger.span(Cause.EVALUATION):
      clock.now += 2
      raise OSError("disk")

  with pytest.raises(OSError, match="disk"):
    fail()
  clock.now += 1
  assert _lost(ledger.account()) == {Cause.EVALUATION: 2.0, Cause.STARTUP: 1.0}


def test_waits_count_only_while_the_devices_are_idle():
  ledger, clock = _ledger()
  # The batch comes 5 s later; the devices are busy for 2 of them.
  ready_at, busy_until = 1005.0, 1002.0

  def batches():
    clock.now = max(clock.now, ready_at)
    yield "a"
    yield "b"

  with ledger.span(Cause.PRODUCTIVE):
    found = list(
      ledger.waits(
        batches(),
        is_ready=lambda: clock.now >= ready_at,
        is_busy=lambda: clock.now < busy_until,
      )
    )
  assert found == ["a", "b"]
  lost = ledger.account().seconds
  assert lost[Cause.DATA] == pytest.approx(3.0, abs=0.01)
  assert lost[Cause.PRODUCTIVE] == pytest.approx(2.0, abs=0.01)


def _attempt(begin, end, first, last, productive, **more):
  seconds = {
    "productive": float(productive),
    "start-up": float(end - begin - productive),
  }
  return goodput.Attempt(
    begin=float(begin),
    end=float(end),
    first_step=first,
    last_step=last,
    finished=more.get("finished", False),
    seconds=seconds,
  )


def test_repeated_steps_and_idle_time_are_losses():
  account = goodput.account(
    [
      _attempt(0, 120, 0, 100, 100),  # Killed; the newest checkpoint is of 80.
      _attempt(150, 200, 80, 120, 40),
    ]
  )
  assert _lost(account) == {
    Cause.PRODUCTIVE: 120.0,
    Cause.REPEATED: 20.0,
    Cause.STARTUP: 30.0,
    Cause.IDLE: 30.0,
  }
  assert account.wall_seconds == 200
  assert account.attempts == 2
  assert " in 2 attempts; lost: " in account.line()


def test_resuming_from_an_older_checkpoint_repeats_several_attempts():
  account = goodput.account(
    [
      _attempt(0, 100, 0, 100, 100),
      _attempt(100, 150, 100, 150, 50),
      _attempt(150, 210, 60, 120, 60),  # The checkpoint of 100 was damaged.
    ]
  )
  assert account.seconds[Cause.REPEATED] == 40 + 50
  assert account.seconds[Cause.PRODUCTIVE] == 60 + 60


def test_time_after_a_finished_run_is_not_idle():
  attempts = [
    _attempt(0, 10, 0, 10, 10, finished=True),
    _attempt(9999, 10_009, 10, 20, 10),
  ]
  assert goodput.account(attempts).seconds[Cause.IDLE] == 0


def test_attempt_keeps_the_history(tmp_path):
  path = tmp_path / "goodput.jsonl"
  first, clock = _ledger(path)
  first.start(0)
  with first.span(Cause.PRODUCTIVE):
    clock.now += 10
    first.record_step(10)
    first.flush()
    clock.now += 3  # Killed here: nothing is written of it.
  second, _ = _ledger(path, clock, begin=900.0)  # The attempts do not overlap.
  second.start(5)
  with second.span(Cause.PRODUCTIVE):
    clock.now += 7
    second.record_step(12)
  second.finish(complete=True)
  # The second one begins where the first was last seen.
  assert _lost(second.account()) == {
    Cause.PRODUCTIVE: 5.0 + 7.0,
    Cause.REPEATED: 5.0,
    Cause.STARTUP: 3.0,
  }
  again = goodput.account(goodput.read(path))
  assert again == second.account()


def test_attempt_without_steps_leaves_no_record(tmp_path):
  path = tmp_path / "goodput.jsonl"
  for _ in range(3):
    ledger, clock = _ledger(path)
    ledger.start(0 if not path.exists() else 10)
    clock.now += 5
    ledger.record_step(10)
    ledger.flush()  # As before each save, also of what is saved already.
    ledger.finish(complete=True)
    assert len(goodput.read(path)) == 1


def test_nothing_is_written_without_a_path():
  ledger, _ = _ledger()
  ledger.flush()
  ledger.finish(complete=True)
  assert ledger.account().wall_seconds == 0
  assert ledger.account().goodput == 0


@pytest.mark.parametrize(
  "line", ['{"begin": 1}', "[1]", "x", '{"seconds": {"coffee": 3}}']
)
def test_damaged_file(tmp_path, line):
  path = tmp_path / "goodput.jsonl"
  path.write_text(line + "\n")
  with pytest.raises(
    user_error.UserError, match=r"line 1, is not a valid goodput record"
  ):
    goodput.Ledger(path)


def test_clock_is_wall_time():
  ledger = goodput.Ledger()
  with ledger.span(Cause.COMPILE):
    pass
  account = ledger.account()
  assert 0 <= account.wall_seconds < 5
