"""The smallest change that makes an experiment fit.

Changes are tried in groups: one thing, then two, then three, and in each first
those that leave what is learned alone. In a group, the cheapest
candidate that fits by the analytical estimate is compiled. If the compiled
program does not fit, the estimate is corrected and the next one is compiled.
"""

from collections.abc import Callable
import dataclasses

from paxon.runner.plan import result
from paxon.runner.plan.search import candidates, chains, oracle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """A candidate that was compiled.

  Attributes:
    forecast: By analytical estimate.
    plan: Compiled.
  """

  forecast: oracle.Forecast
  plan: result.Plan

  @property
  def fits(self) -> bool:
    """Whether the compiled program fits."""
    return self.plan.memory.fit in (result.Fit.FITS, result.Fit.TIGHT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """What a search for a change has found.

  Attributes:
    attempts: Those compiled; the one that fits, if any, is the last.
    forecast: Without a compiler, what fits by analytical estimate.
    is_cut_short: Whether the budget was spent before all was tried.
  """

  attempts: tuple[Attempt, ...] = ()
  forecast: oracle.Forecast | None = None
  is_cut_short: bool = False


def smallest(
  space: candidates.Space,
  oracle_: oracle.Oracle,
  *,
  usable: float,
  budget: oracle.Budget,
  correction: oracle.Correction,
  is_compiled: bool = True,
  say: Callable[[str], None] = lambda text: None,
) -> Found:
  """Returns the smallest change that fits, verified by compiling.

  Args:
    space: What can be changed.
    oracle_: Answers about candidates.
    usable: Bytes of a device.
    budget: How much may be asked.
    correction: Of the forecasts; learns from each compiled program.
    is_compiled: Whether there is a compiler; if not, the estimate decides.
    say: Called with progress messages.
  """
  attempts: list[Attempt] = []
  tried: set[candidates.Candidate] = set()
  known: dict[candidates.Candidate, oracle.Forecast | None] = {}

  def ask(candidate: candidates.Candidate) -> oracle.Forecast | None:
    if candidate not in known and budget.take_trace():
      known[candidate] = oracle_.forecast(candidate)
    return known.get(candidate)

  def fits(forecast: oracle.Forecast) -> bool:
    is_new = forecast.candidate not in tried
    return is_new and correction.peak(forecast) <= usable

  for level in space.levels():
    possible = [
      candidate
      for candidate in level
      if oracle_.is_possible(candidate) and oracle_.state(candidate) <= usable
    ]
    # Anew after each program, because what it shows may move the first of a
    # chain that fits.
    while fitting := _that_fit(possible, ask, fits):
      best = fitting[0]
      tried.add(best.candidate)
      if not is_compiled:
        return Found(forecast=best)
      if not budget.take_compile():
        return Found(attempts=tuple(attempts), is_cut_short=True)
      say(f"compiling, to {best.candidate.words} ...")
      plan = oracle_.compiled(best.candidate)
      if plan is None:
        continue
      attempts.append(Attempt(forecast=best, plan=plan))
      if attempts[-1].fits:
        return Found(attempts=tuple(attempts))
      if plan.memory.peak is None:
        correction.doubt()
      else:
        correction.learn(best, plan.memory.peak)
    if budget.is_out_of_time or budget.traces <= 0:
      return Found(attempts=tuple(attempts), is_cut_short=True)
  return Found(attempts=tuple(attempts))


def _that_fit(
  possible: list[candidates.Candidate],
  ask: Callable[[candidates.Candidate], oracle.Forecast | None],
  fits: Callable[[oracle.Forecast], bool],
) -> list[oracle.Forecast]:
  """The first of each chain that fits, the cheapest first."""
  found = [
    chains.first_that_fits(chain, ask, fits) for chain in chains.of(possible)
  ]
  return sorted(
    (forecast for forecast in found if forecast is not None),
    key=lambda forecast: forecast.cost.total,
  )
