"""Medians with bootstrap intervals.

The median of a sample says nothing of how sure it is. Medians of samples drawn
from it with replacement do: the middle 95 % of them are the interval (Efron
1979, percentile method). It supposes no distribution; a few slow rounds, which
every shared machine has, move it little.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A median, and where it may lie.

  Attributes:
    low: The lower end.
    median: Of the sample.
    high: The upper end.
  """

  low: float
  median: float
  high: float


def of_median(
  values: Sequence[float],
  *,
  confidence: float = 0.95,
  resamples: int = 4000,
  seed: int = 0,
) -> Interval:
  """Returns the median and its bootstrap interval.

  Args:
    values: The sample.
    confidence: The share of resampled medians inside the interval.
    resamples: How many samples are drawn.
    seed: Of the drawing, so that a report can be made again.

  Raises:
    ValueError: The sample is empty, or the confidence no share.
  """
  if not values:
    raise ValueError("A median needs at least one value.")
  if not 0 < confidence < 1:
    raise ValueError(f"confidence must lie in (0, 1), got {confidence}.")
  sample = np.asarray(values, np.float64)
  random = np.random.default_rng(seed)
  drawn = random.choice(sample, size=(resamples, sample.size))
  tail = (1 - confidence) / 2
  low, high = np.quantile(np.median(drawn, axis=1), (tail, 1 - tail))
  return Interval(
    low=float(low), median=float(np.median(sample)), high=float(high)
  )
