"""Interleaved timing with a fake clock, and bootstrap intervals."""

import itertools

import numpy as np
import pytest

from paxon.tools.benchmarks import timing


class _Machine:
  """Contenders that take known times on a machine that gets slower."""

  def __init__(self, slowdown: float = 1.0) -> None:
    self.now = 0.0
    self.speed = 1.0
    self.calls: list[str] = []
    self._slowdown = slowdown

  def contender(self, name: str, seconds: float):
    def run() -> None:
      self.calls.append(name)
      self.now += seconds * self.speed
      self.speed *= self._slowdown

    return run

  def clock(self) -> float:
    return self.now


def _interleave(machine, rounds):
  return timing.interleave(
    machine.contender("a", 3.0),
    machine.contender("b", 2.0),
    rounds=rounds,
    clock=machine.clock,
  )


def test_warms_up_and_then_takes_turns_in_who_goes_first():
  machine = _Machine()
  pairs = _interleave(machine, rounds=3)
  assert "".join(machine.calls) == "ab" + "ab" + "ba" + "ab"
  assert pairs.first == (3.0,) * 3
  assert pairs.second == (2.0,) * 3
  assert pairs.ratios() == [1.5] * 3


def test_a_machine_that_gets_slower_favors_nobody():
  pairs = _interleave(_Machine(slowdown=1.1), rounds=10)
  # One after the other, the ratio of the means would be 1.5 / 1.1 ** 10 = 0.58.
  low, high = sorted(pairs.ratios())[4:6]
  assert low <= 1.5 <= high
  assert 1.3 < min(pairs.ratios()) <= max(pairs.ratios()) < 1.7


def test_rejects_zero_rounds():
  with pytest.raises(ValueError, match=r"rounds must be positive, got 0\."):
    _interleave(_Machine(), rounds=0)


@pytest.mark.parametrize("times", [((), ()), ((1.0,), (1.0, 2.0))])
def test_rejects_unequal_numbers_of_rounds(times):
  with pytest.raises(ValueError, match="same number of rounds for both"):
    timing.Pairs(first=times[0], second=times[1])


def test_a_constant_sample_is_certain():
  interval = timing.median_interval([1.5] * 7)
  assert (interval.low, interval.median, interval.high) == (1.5, 1.5, 1.5)


def test_agrees_with_all_resamples_of_a_small_sample():
  values = [1.0, 2.0, 4.0]
  medians = [np.median(s) for s in itertools.product(values, repeat=3)]
  low, high = np.quantile(medians, (0.2, 0.8))
  interval = timing.median_interval(values, confidence=0.6, resamples=20_000)
  assert interval.median == 2.0
  assert (interval.low, interval.high) == (low, high)


def test_covers_the_true_median_about_as_often_as_it_says():
  random = np.random.default_rng(0)
  hits = 0
  for _ in range(300):
    interval = timing.median_interval(
      list(random.lognormal(size=25)), resamples=400
    )
    hits += interval.low <= 1.0 <= interval.high
  assert 0.90 < hits / 300 < 0.99


def test_an_outlier_does_not_move_it():
  clean = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0, 1.0]
  disturbed = [*clean[:-1], 50.0]
  interval = timing.median_interval(disturbed)
  assert interval.high < 1.03
  assert interval.median == pytest.approx(1.0)


@pytest.mark.parametrize(
  ("values", "confidence", "message"),
  [
    ([], 0.95, "at least one value"),
    ([1.0], 1.0, r"confidence must lie in \(0, 1\), got 1.0"),
  ],
)
def test_rejects_bad_samples(values, confidence, message):
  with pytest.raises(ValueError, match=message):
    timing.median_interval(values, confidence=confidence)
