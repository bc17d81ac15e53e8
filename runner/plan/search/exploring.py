"""The Pareto front of time and memory over meshes, remat and microbatches.

For each mesh and remat policy, an analytical estimate finds the fewest
microbatches that fit. The best candidates of that front are compiled, and the
front of the compiled ones is returned.
"""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Final

from paxon.runner.plan import result
from paxon.runner.plan.search import candidates, chains, fixing, front, oracle

# Traces between two lines about them.
_EVERY: Final = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explored:
  """What was found.

  Attributes:
    forecasts: All that were traced and fit, by analytical estimate.
    attempts: Those compiled.
    is_cut_short: Whether the budget was spent before all was traced.
  """

  forecasts: tuple[oracle.Forecast, ...]
  attempts: tuple[fixing.Attempt, ...]
  is_cut_short: bool


def explore(
  space: candidates.Space,
  oracle_: oracle.Oracle,
  *,
  usable: float,
  budget: oracle.Budget,
  correction: oracle.Correction,
  is_compiled: bool = True,
  say: Callable[[str], None] = lambda text: None,
) -> Explored:
  """Returns what was traced and compiled.

  Args:
    space: What can be changed; its dtypes are not, as they change what is
      learned.
    oracle_: Answers about candidates.
    usable: Bytes of a device.
    budget: How much may be asked.
    correction: Of the forecasts.
    is_compiled: Whether there is a compiler.
    say: Is told what is going on.
  """
  forecasts: dict[candidates.Candidate, oracle.Forecast] = {}

  def ask(candidate: candidates.Candidate) -> oracle.Forecast | None:
    if candidate not in forecasts and budget.take_trace():
      found = oracle_.forecast(candidate)
      if found is not None:
        forecasts[candidate] = found
      if budget.traces % _EVERY == 0:
        fitting = sum(map(fits, forecasts.values()))
        say(f"{len(forecasts)} traced, of which {fitting} fit ...")
    return forecasts.get(candidate)

  def fits(forecast: oracle.Forecast) -> bool:
    return correction.peak(forecast) <= usable

  for chain in chains.of(_product(space)):
    chain = [
      candidate
      for candidate in chain
      if oracle_.is_possible(candidate) and oracle_.state(candidate) <= usable
    ]
    first = chains.first_that_fits(chain, ask, fits)
    if first is not None and _is_thriftiest(first.candidate, space):
      # One more, for who wants memory left.
      for candidate in chain[chain.index(first.candidate) + 1 :][:1]:
        ask(candidate)
  fitting = [forecast for forecast in forecasts.values() if fits(forecast)]
  best = front.pareto(fitting, key=lambda f: (f.cost.total, correction.peak(f)))
  attempts = []
  for forecast in front.spread(best, budget.compiles) if is_compiled else ():
    if not budget.take_compile():
      break
    say(f"compiling, to {forecast.candidate.words} ...")
    plan = oracle_.compiled(forecast.candidate)
    if plan is not None:
      attempts.append(fixing.Attempt(forecast=forecast, plan=plan))
  return Explored(
    forecasts=tuple(best),
    attempts=tuple(attempts),
    is_cut_short=budget.traces <= 0 or budget.is_out_of_time,
  )


def time_of(plan: result.Plan, *, is_estimate: bool) -> float:
  """Returns seconds of a step.

  Args:
    plan: Compiled.
    is_estimate: Whether the estimate is meant, or the bound; plans that are
      compared are compared by the same.
  """
  found = plan.estimate if is_estimate else plan.bound
  assert found is not None
  return found.step


def _product(space: candidates.Space) -> list[candidates.Candidate]:
  """Every candidate; the mesh changes last, the promising ones first."""
  return [
    candidates.Candidate(tuple(choice for choice in choices if choice))
    for choices in itertools.product(
      (None, *space.meshes), (None, *space.remat), (None, *space.microbatches)
    )
  ]


def _is_thriftiest(
  candidate: candidates.Candidate, space: candidates.Space
) -> bool:
  chosen = candidate.of_kind(candidates.Kind.REMAT)
  return chosen == (space.remat[-1] if space.remat else None)
