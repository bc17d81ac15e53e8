"""Interleaved timing of two contenders, and medians with confidence intervals.

A machine gets slower and faster over seconds and minutes. Timing all rounds of
one contender before the other compares two states of the machine, so rounds
alternate, and the statistic is the median of the ratios of neighboring rounds.

Intervals are bootstrap percentile intervals (Efron 1979): medians of samples
drawn with replacement, of which the middle 95 % form the interval. No
distribution is assumed, and a few slow rounds hardly move it.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import time
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """A median with its confidence interval."""

  low: float
  median: float
  high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
  """Seconds per round of both contenders; rounds correspond."""

  first: tuple[float, ...]
  second: tuple[float, ...]

  def __post_init__(self) -> None:
    if not self.first or len(self.first) != len(self.second):
      raise ValueError(
        "Pairs need the same number of rounds for both contenders, at least"
        f" one; got {len(self.first)} and {len(self.second)}."
      )

  def ratios(self) -> list[float]:
    """Returns first over second, round by round."""
    return [a / b for a, b in zip(self.first, self.second, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """The result of a case: the time of one contender over another's.

  Attributes:
    case: Name of the case.
    first: The contender that is judged.
    second: The contender that it is compared with.
    pairs: Seconds of one unit of work of each, by round.
    limit: The largest acceptable ratio; None for no limit.
    facts: Sizes and rates to report; JSON values.
  """

  case: str
  first: str
  second: str
  pairs: Pairs
  limit: float | None = None
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def ratio(self) -> Interval:
    """First over second, the median of the rounds' ratios."""
    return median_interval(self.pairs.ratios())

  @property
  def verdict(self) -> str:
    """`holds`, `fails`, or `open` if the limit is inside the interval."""
    if self.limit is None:
      return ""
    if self.ratio.high <= self.limit:
      return "holds"
    if self.ratio.low > self.limit:
      return "fails"
    return "open"

  def to_json(self) -> dict[str, Any]:
    """Returns everything, with the times of each round."""
    return {
      "case": self.case,
      "first": self.first,
      "second": self.second,
      "ratio": dataclasses.asdict(self.ratio),
      "limit": self.limit,
      "verdict": self.verdict,
      "seconds": {
        "first": dataclasses.asdict(median_interval(self.pairs.first)),
        "second": dataclasses.asdict(median_interval(self.pairs.second)),
      },
      "rounds": dataclasses.asdict(self.pairs),
      "facts": dict(self.facts),
    }


def interleave(
  first: Callable[[], object],
  second: Callable[[], object],
  *,
  rounds: int,
  clock: Callable[[], float] = time.perf_counter,
) -> Pairs:
  """Times both in turn; which one goes first alternates between rounds.

  Each is called once before, untimed, to warm up.

  Args:
    first: Does one block of work and returns when it is done.
    second: Does the same amount of work in another way.
    rounds: Number of timed calls of each.
    clock: Seconds from any origin.

  Raises:
    ValueError: `rounds` is not positive.
  """
  if rounds <= 0:
    raise ValueError(f"rounds must be positive, got {rounds}.")
  contenders = (first, second)
  times: tuple[list[float], list[float]] = ([], [])
  for contender in contenders:
    contender()
  for i in range(rounds):
    for index in (0, 1) if i % 2 == 0 else (1, 0):
      begin = clock()
      contenders[index]()
      times[index].append(clock() - begin)
  return Pairs(first=tuple(times[0]), second=tuple(times[1]))


def median_interval(
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
    resamples: Number of samples drawn.
    seed: Of the draws, so that reports are reproducible.

  Raises:
    ValueError: `values` is empty, or `confidence` is outside (0, 1).
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
