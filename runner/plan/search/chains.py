"""Candidates in chains along which memory only falls.

A chain's candidates differ in the number of microbatches alone, so the first
that fits is found by bisection, and all after it fit too but cost more.
"""

from collections.abc import Callable, Iterable, Sequence

from paxon.runner.plan.search import candidates, oracle


def of(
  given: Iterable[candidates.Candidate],
) -> list[list[candidates.Candidate]]:
  """Returns the candidates in chains, in the order of their first ones.

  Args:
    given: Of the same microbatches the fewer first.
  """
  chains: dict[frozenset[candidates.Choice], list[candidates.Candidate]] = {}
  for candidate in given:
    others = frozenset(
      c for c in candidate.choices if c.kind is not candidates.Kind.MICROBATCHES
    )
    chains.setdefault(others, []).append(candidate)
  return list(chains.values())


def first_that_fits(
  chain: Sequence[candidates.Candidate],
  forecast: Callable[[candidates.Candidate], oracle.Forecast | None],
  fits: Callable[[oracle.Forecast], bool],
) -> oracle.Forecast | None:
  """Returns the forecast of the first candidate that fits, or None.

  Args:
    chain: Memory falls from one to the next.
    forecast: May return None for one that is not to be had, which counts as one
      that does not fit.
    fits: Whether a forecast fits.
  """
  best = None
  low, high = 0, len(chain)
  while low < high:
    # The cheapest first: often it fits, and then nothing else is asked.
    middle = low if best is None and low == 0 else (low + high) // 2
    found = forecast(chain[middle])
    if found is not None and fits(found):
      best, high = found, middle
    else:
      low = middle + 1
  return best
