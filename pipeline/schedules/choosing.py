"""The schedule that is fastest in one program for all stages, if it fits."""

from collections.abc import Callable, Sequence
import dataclasses

from paxon.pipeline.schedules import (
  costs as costs_lib,
)
from paxon.pipeline.schedules import (
  gpipe,
  interleaved,
  one_f_one_b,
  simulation,
  table,
  validation,
  zero_bubble,
)

# In the order in which ties are decided: the simplest first.
ALL: tuple[Callable[..., table.Table], ...] = (
  one_f_one_b.two_slots,
  gpipe.make,
  one_f_one_b.make,
  interleaved.two_slots,
  interleaved.make,
  one_f_one_b.split,
  zero_bubble.make_h1,
  zero_bubble.make_v,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A schedule and what it costs.

  Attributes:
    schedule: Its table.
    simulation: Its time and memory.
  """

  schedule: table.Table
  simulation: simulation.Simulation


def choose(
  makers: Sequence[Callable[..., table.Table]] = ALL,
  *,
  num_stages: int,
  num_microbatches: int,
  costs: costs_lib.Costs | None = None,
  max_in_flight: float | None = None,
) -> Choice:
  """Returns the fastest schedule on the lock-step clock.

  Args:
    makers: Tried in turn; those that such numbers do not suit are left out.
    num_stages: P.
    num_microbatches: M.
    costs: Of operations.
    max_in_flight: Microbatches that a stage's memory has room for.

  Raises:
    ValueError: None suits.
  """
  best: Choice | None = None
  refused = []
  for make in makers:
    try:
      made = make(num_stages=num_stages, num_microbatches=num_microbatches)
    except ValueError as error:
      refused.append(str(error))
      continue
    validation.check(made)
    figures = simulation.simulate(made, costs=costs)
    needed = max(figures.in_flight)
    if max_in_flight is not None and needed > max_in_flight:
      refused.append(
        f"{made.name} keeps {needed:g} microbatches on a stage, above"
        f" max_in_flight ({max_in_flight:g})."
      )
      continue
    # Sums of floats in another order are no gain.
    if best is None or (
      figures.lock_step.total < best.simulation.lock_step.total * (1 - 1e-9)
    ):
      best = Choice(schedule=made, simulation=figures)
  if best is None:
    raise ValueError(
      f"No schedule suits {num_stages} stages and {num_microbatches}"
      f" microbatches: {' '.join(refused)}"
    )
  return best
