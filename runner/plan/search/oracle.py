"""Analytical estimates and compiled plans of search candidates.

The searches know no experiment and start no process; whoever calls them gives
an `Oracle`, and a `Budget` that bounds how often it is asked.
"""

from collections.abc import Callable
import dataclasses
import math
import time
from typing import Protocol, runtime_checkable

from paxon.runner.plan import result
from paxon.runner.plan.search import candidates, cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
  """A candidate by analytical estimate.

  Attributes:
    candidate: Which.
    arguments: Bytes of what the step is given, of one device.
    peak: Bytes in use at most.
    cost: Of a step.
    recomputed_share: Of all FLOPs.
  """

  candidate: candidates.Candidate
  arguments: int
  peak: int
  cost: cost.Cost
  recomputed_share: float


@runtime_checkable
class Oracle(Protocol):
  """Answers about candidates. `None` is for one that cannot run."""

  def is_possible(self, candidate: candidates.Candidate) -> bool:
    """Whether sizes divide; needs no trace."""
    ...

  def state(self, candidate: candidates.Candidate) -> int:
    """Returns the bytes of state and batch on a device; needs no trace."""
    ...

  def forecast(self, candidate: candidates.Candidate) -> Forecast | None:
    """Returns the analytical estimates; takes seconds."""
    ...

  def compiled(self, candidate: candidates.Candidate) -> result.Plan | None:
    """Returns the compiled plan; takes up to minutes."""
    ...


@dataclasses.dataclass(kw_only=True)
class Budget:
  """How much may still be asked.

  Attributes:
    traces: Forecasts.
    compiles: Compiled plans.
    seconds: Of both together.
    clock: Seconds since any time.
  """

  traces: int
  compiles: int
  seconds: float
  clock: Callable[[], float] = time.monotonic

  def __post_init__(self) -> None:
    self._end = self.clock() + self.seconds

  @property
  def is_out_of_time(self) -> bool:
    """Whether the seconds are over."""
    return self.clock() > self._end

  def take_trace(self) -> bool:
    """Whether one more forecast may be asked for; counts it."""
    if self.traces <= 0 or self.is_out_of_time:
      return False
    self.traces -= 1
    return True

  def take_compile(self) -> bool:
    """Whether one more program may be compiled; counts it."""
    if self.compiles <= 0 or self.is_out_of_time:
      return False
    self.compiles -= 1
    return True


@dataclasses.dataclass
class Correction:
  """What compilers make of the part of the peak that forecasts are unsure of.

  The arguments are known exactly; the rest is scaled by the last program of
  which both figures are known, so that one compiled program corrects all.
  """

  factor: float = 1.0

  def learn(self, forecast: Forecast, peak: int | None) -> None:
    """Takes in the peak of a compiled program.

    Args:
      forecast: Of the same candidate.
      peak: As compiled; nothing is learned from None.
    """
    rest = forecast.peak - forecast.arguments
    if peak is not None and rest > 0 and peak > forecast.arguments:
      # A program a few times off is another program; it says nothing here.
      ratio = (peak - forecast.arguments) / rest
      self.factor = min(max(ratio, 0.5), 2.0)

  def doubt(self) -> None:
    """Takes in that a program does not fit whose peak is not known."""
    self.factor = min(1.2 * self.factor, 2.0)

  def peak(self, forecast: Forecast) -> int:
    """Returns the corrected peak."""
    rest = forecast.peak - forecast.arguments
    return forecast.arguments + math.ceil(self.factor * max(rest, 0))
