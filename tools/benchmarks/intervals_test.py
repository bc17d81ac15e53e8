"""Tests of medians and their bootstrap intervals."""

import itertools

import numpy as np
import pytest

from paxon.tools.benchmarks import intervals


def test_a_constant_sample_is_certain():
  interval = intervals.of_median([1.5] * 7)
  assert (interval.low, interval.median, interval.high) == (1.5, 1.5, 1.5)


def test_agrees_with_all_resamples_of_a_small_sample():
  values = [1.0, 2.0, 4.0]
  medians = [np.median(s) for s in itertools.product(values, repeat=3)]
  low, high = np.quantile(medians, (0.2, 0.8))
  interval = intervals.of_median(values, confidence=0.6, resamples=20_000)
  assert interval.median == 2.0
  assert (interval.low, interval.high) == (low, high)


def test_covers_the_true_median_about_as_often_as_it_says():
  random = np.random.default_rng(0)
  hits = 0
  for _ in range(300):
    interval = intervals.of_median(
      list(random.lognormal(size=25)), resamples=400
    )
    hits += interval.low <= 1.0 <= interval.high
  assert 0.90 < hits / 300 < 0.99


def test_an_outlier_does_not_move_it():
  clean = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0, 1.0]
  disturbed = [*clean[:-1], 50.0]
  interval = intervals.of_median(disturbed)
  assert interval.high < 1.03
  assert interval.median == pytest.approx(1.0)


@pytest.mark.parametrize(
  ("values", "confidence", "message"),
  [
    ([], 0.95, "at least one value"),
    ([1.0], 1.0, r"confidence must lie in \(0, 1\), got 1.0"),
  ],
)
def test_refuses(values, confidence, message):
  with pytest.raises(ValueError, match=message):
    intervals.of_median(values, confidence=confidence)
