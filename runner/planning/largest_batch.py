"""Search for the largest batch that fits (`--plan_batches=largest`).

Memory is nearly linear in the batch, so a line through two programs gives the
next batch to compile. Where padding makes it a staircase, a line may advance by
a single batch, so every second time the bounds are halved.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Final

from paxon.runner.plan import result

# Programs that are compiled at most, besides the first.
_MAX_COMPILED: Final = 10


@dataclasses.dataclass(frozen=True)
class Found:
  """Result of the search.

  Attributes:
    plans: Plans by batch, the smallest first.
    batch: The largest batch that fits; None if none does.
    is_certain: Whether the next batch does not fit.
  """

  plans: dict[int, result.Plan]
  batch: int | None
  is_certain: bool


def find(
  first: int,
  plan: result.Plan,
  make: Callable[[int], result.Plan | result.Failure],
  *,
  unit: int,
) -> Found:
  """Returns the largest batch that fits.

  Args:
    first: The batch of the job.
    plan: Its plan.
    make: Makes the plan of another batch.
    unit: The batch is a multiple of it.
  """
  tried = {first: plan}
  low, high = 0, math.inf
  for number in range(_MAX_COMPILED + 1):
    fitting = [b for b, p in tried.items() if _fits(p)]
    low = max(fitting, default=0)
    high = min((b for b in tried if b not in fitting), default=math.inf)
    if high - low <= unit or number == _MAX_COMPILED:
      break
    guess = (
      _halve(low, high)
      if number > 2 and number % 2
      else _extend(tried, low, high)
    )
    rounded = math.floor(guess / unit) * unit
    batch = int(max(low + unit, min(rounded, high - unit)))
    made = make(batch)
    if isinstance(made, result.Failure):
      break
    tried[batch] = made
  return Found(
    dict(sorted(tried.items())), low or None, is_certain=high - low <= unit
  )


def _halve(low: int, high: float | int) -> float:
  return 2.0 * low if math.isinf(high) else (low + high) / 2


def _extend(
  tried: dict[int, result.Plan], low: int, high: float | int
) -> float:
  """Returns the batch that fills the memory by a line through two programs.

  Args:
    tried: Plans by batch.
    low: Largest batch that fits, or 0.
    high: Smallest batch that does not, or infinity.
  """
  known = {b: p.memory.peak for b, p in tried.items() if p.memory.peak}
  nearest = sorted(known, key=lambda b: min(abs(b - low), abs(b - high)))[:2]
  usable = next(iter(tried.values())).memory.usable
  if len(nearest) < 2 or usable is None:
    return _halve(low, high)
  one, other = nearest
  slope = (known[other] - known[one]) / (other - one)
  if slope <= 0:
    return _halve(low, high)
  return one + (usable - known[one]) / slope


def _fits(plan: result.Plan) -> bool:
  return plan.memory.fit in (result.Fit.FITS, result.Fit.TIGHT)
