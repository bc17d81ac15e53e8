"""Comparison of one experiment's plans, one table line per target.

The best of a column is marked among the targets that the program fits. Cost is
chips times seconds for each token, relative to the best; what a chip costs is
not in it.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Final

from paxon.runner import units
from paxon.runner.plan import result


@dataclasses.dataclass(frozen=True)
class Cell:
  """One figure of one target.

  Attributes:
    text: As it is shown.
    is_best: Whether it is the best of its column.
  """

  text: str
  is_best: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
  """The comparison.

  Attributes:
    titles: Of the columns.
    rows: One a plan, a cell a column.
    failures: Targets without a plan, which stand below.
    legend: What a title does not say.
  """

  titles: tuple[str, ...]
  rows: tuple[tuple[Cell, ...], ...]
  failures: tuple[result.Failure, ...]
  legend: str


# Of each ranked column: how it is shown, and whether more is better.
_RANKED: Final[Mapping[str, tuple[Callable[[float], str], bool]]] = {
  "bound": (units.seconds, False),
  "estimate": (units.seconds, False),
  "tokens/s": ("{:,.0f}".format, True),
  "MFU": (units.share, True),
  "exposed": (units.seconds, False),
  "cost": ("{:.2f}".format, False),
}


def compare(
  plans: Sequence[result.Plan], failures: Sequence[result.Failure] = ()
) -> Table:
  """Returns the comparison.

  Args:
    plans: At least one, of one experiment.
    failures: Targets that have none.
  """
  # Bounds and estimates are not compared with each other.
  timed = [plan for plan in plans if plan.bound is not None]
  timed = [plan for plan in timed if _fits(plan)] or timed
  is_estimated = bool(timed) and all(plan.estimate for plan in timed)
  figures = [_figures(plan, is_estimated=is_estimated) for plan in plans]
  costs = [f["cost"] for f, p in zip(figures, plans, strict=True) if _fits(p)]
  cheapest = min((cost for cost in costs if cost is not None), default=None)
  for found in figures:
    cost = found["cost"]
    found["cost"] = cost and cheapest and cost / cheapest
  best = {
    name: _best(
      [f[name] for f, p in zip(figures, plans, strict=True) if _fits(p)],
      is_more_better=is_more_better,
    )
    for name, (_, is_more_better) in _RANKED.items()
  }
  rows = []
  for plan, found in zip(plans, figures, strict=True):
    cells = [Cell(text) for text in _texts(plan)]
    for name, (form, _) in _RANKED.items():
      number = found[name]
      text = "-" if number is None else form(number)
      is_best = number is not None and number == best[name] and _fits(plan)
      cells.append(Cell(text, is_best))
    rows.append(tuple(cells))
  basis = "the estimate" if is_estimated else "the bound"
  legend = (
    f"tokens/s, MFU and cost are by {basis}. Cost is chips x seconds for each"
    " token, relative to the best that fits; prices of chips are not in it."
  )
  titles = ("target", "chips", "peak", "usable", "fit", *_RANKED)
  return Table(titles, tuple(rows), tuple(failures), legend)


def _texts(plan: result.Plan) -> tuple[str, ...]:
  sizes = plan.memory.peak, plan.memory.usable
  return (
    plan.target,
    f"{plan.num_chips:,}",
    *("-" if n is None else units.size(n) for n in sizes),
    plan.fit,
  )


def _figures(
  plan: result.Plan, *, is_estimated: bool
) -> dict[str, float | None]:
  bound, estimate = plan.bound, plan.estimate
  basis = estimate if is_estimated else bound
  tokens = None if basis is None else basis.tokens_per_second
  return {
    "bound": None if bound is None else bound.step,
    "estimate": None if estimate is None else estimate.step,
    "tokens/s": tokens,
    "MFU": None if basis is None else basis.mfu,
    "exposed": None if estimate is None else sum(estimate.exposed.values()),
    "cost": plan.num_chips / tokens if tokens else None,
  }


def _best(
  numbers: Sequence[float | None], *, is_more_better: bool
) -> float | None:
  """The best of some figures; None where there is no choice."""
  known = [number for number in numbers if number is not None]
  if len(known) < 2:
    return None
  return max(known) if is_more_better else min(known)


def _fits(plan: result.Plan) -> bool:
  return plan.memory.fit is not result.Fit.DOES_NOT_FIT
