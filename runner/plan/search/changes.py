"""Search results, in the form that a plan stores."""

from collections.abc import Sequence

from paxon.runner.plan import result
from paxon.runner.plan.search import (
  candidates,
  exploring,
  fixing,
  front,
  oracle,
)


def of_plan(
  candidate: candidates.Candidate, *, before: result.Plan, after: result.Plan
) -> result.Change:
  """Returns the change from one compiled plan to another.

  Args:
    candidate: What was changed.
    before: Without it.
    after: With it.
  """
  return result.Change(
    overrides=candidate.overrides,
    words=candidate.words,
    compiled=after.compiled,
    fit=after.fit,
    peak_before=before.memory.peak,
    peak_after=after.memory.peak,
    recomputed_share=after.flops.recomputed / max(after.flops.hardware, 1),
    bound_before=None if before.bound is None else before.bound.step,
    bound_after=None if after.bound is None else after.bound.step,
    estimate_before=None if before.estimate is None else before.estimate.step,
    estimate_after=None if after.estimate is None else after.estimate.step,
  )


def of_forecast(
  forecast: oracle.Forecast,
  *,
  before: oracle.Forecast | None,
  usable: float,
  correction: oracle.Correction,
) -> result.Change:
  """Returns the change to a candidate that was not compiled.

  Args:
    forecast: Of the candidate.
    before: Without the change, if known.
    usable: Bytes of a device.
    correction: Of the forecasts.
  """
  peak = correction.peak(forecast)
  fit = result.Fit.FITS
  if peak > usable:
    fit = result.Fit.DOES_NOT_FIT
  elif peak > result.TIGHT * usable:
    fit = result.Fit.TIGHT
  return result.Change(
    overrides=forecast.candidate.overrides,
    words=forecast.candidate.words,
    compiled=False,
    fit=fit.value,
    peak_before=None if before is None else correction.peak(before),
    peak_after=peak,
    recomputed_share=forecast.recomputed_share,
    bound_before=None if before is None else before.cost.bound,
    bound_after=forecast.cost.bound,
  )


def verified(
  found: fixing.Found, *, before: result.Plan
) -> tuple[result.Change, ...]:
  """Returns the changes that were compiled, the one that fits first.

  Args:
    found: What was searched for.
    before: The plan that does not fit.
  """
  return tuple(
    of_plan(attempt.forecast.candidate, before=before, after=attempt.plan)
    for attempt in reversed(found.attempts)
  )


def front_of(
  attempts: Sequence[fixing.Attempt], *, before: result.Plan
) -> tuple[result.Change, ...]:
  """Returns the Pareto front of compiled programs that fit, fastest first.

  Args:
    attempts: What was compiled.
    before: The experiment as it is.
  """
  fitting = [attempt for attempt in attempts if attempt.fits]
  has_estimates = all(a.plan.estimate is not None for a in fitting)
  best = front.pareto(
    fitting,
    key=lambda a: (
      exploring.time_of(a.plan, is_estimate=has_estimates),
      a.plan.memory.peak or 0,
    ),
  )
  return tuple(
    of_plan(a.forecast.candidate, before=before, after=a.plan) for a in best
  )
