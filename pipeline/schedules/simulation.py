"""How long a schedule takes and what it keeps, on two clocks.

The asynchronous clock is the papers': a stage begins its next operation as soon
as what it needs is there. The lock-step clock is that of one program for all
stages, whose neighbours meet at every tick: a tick takes as long as the stage
that has most to do in it. A schedule that is faster on the first may be slower
on the second, where neighbours run operations of different cost.
"""

from collections.abc import Mapping
import dataclasses

from paxon.pipeline.schedules import costs as costs_lib
from paxon.pipeline.schedules import lifetimes, operation, table

_Kind = operation.Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
  """One way to count time.

  Attributes:
    total: From the first operation to the last.
    bubble: The longest time in which a stage does nothing.
    spans: When each (stage, operation) begins and ends.
  """

  total: float
  bubble: float
  spans: Mapping[tuple[int, operation.Operation], tuple[float, float]]

  @property
  def bubble_fraction(self) -> float:
    """The bubble over the whole time, not over the time of the work."""
    return self.bubble / self.total if self.total else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
  """What a schedule costs.

  Attributes:
    asynchronous: Everything begins as soon as it can.
    lock_step: Everybody waits for the dearest stage of a tick.
    in_flight: By stage, microbatches and chunks at once between their forward
      pass and the end of their backward pass, in whole stages: a chunk of two
      counts one half.
    allocated: What every stage allocates of each pool of `Lifetimes`, in
      chunks, since one program for all has the pools of the neediest.
  """

  asynchronous: Clock
  lock_step: Clock
  in_flight: tuple[float, ...]
  allocated: Mapping[str, int]


def simulate(
  schedule: table.Table, *, costs: costs_lib.Costs | None = None
) -> Simulation:
  """Returns what a valid schedule costs.

  Args:
    schedule: Checked by `validation.check`.
    costs: Of operations; by default all three parts cost 1.
  """
  durations = _durations(schedule, costs or costs_lib.Costs())
  stages = range(schedule.pieces.num_stages)
  kept = [lifetimes.of_stage(schedule, stage=s) for s in stages]
  chunks = schedule.pieces.num_chunks
  return Simulation(
    asynchronous=_asynchronous(
      schedule, durations, message=(costs or costs_lib.Costs()).message
    ),
    lock_step=_lock_step(
      schedule, durations, message=(costs or costs_lib.Costs()).message
    ),
    in_flight=tuple(lifetimes.peak(k.in_flight) / chunks for k in kept),
    allocated={
      name: max(lifetimes.peak(getattr(k, name)) for k in kept)
      for name in ("inputs", "residuals", "weight_pairs")
    },
  )


_Durations = Mapping[tuple[int, operation.Operation], float]


def _durations(schedule: table.Table, costs: costs_lib.Costs) -> _Durations:
  kinds = schedule.kinds()
  return {
    (place.stage, op): costs.of(
      op.kind,
      num_chunks=schedule.pieces.num_chunks,
      has_recompute=_Kind.RECOMPUTE
      in kinds[place.stage, op.microbatch, op.chunk],
    )
    for place, op in schedule.places()
  }


def _asynchronous(
  schedule: table.Table, durations: _Durations, *, message: float
) -> Clock:
  """Each stage keeps its order; what ticks say beside it does not count."""
  spans: dict[tuple[int, operation.Operation], tuple[float, float]] = {}
  free = [0.0] * schedule.pieces.num_stages
  # In the order of ticks everything needed has been seen before.
  for place, op in schedule.places():
    stage = place.stage
    begin = free[stage]
    for other, need in schedule.needed(stage, op):
      arrival = spans[other, need][1] + (message if other != stage else 0.0)
      begin = max(begin, arrival)
    free[stage] = begin + durations[stage, op]
    spans[stage, op] = (begin, free[stage])
  return _clock(schedule, durations, spans, total=max(free))


def _lock_step(
  schedule: table.Table, durations: _Durations, *, message: float
) -> Clock:
  """A tick begins when all stages have ended the one before."""
  spans: dict[tuple[int, operation.Operation], tuple[float, float]] = {}
  now = 0.0
  for row in schedule.ticks:
    ends = [now]
    for stage, cell in enumerate(row):
      at = now
      for op in cell:
        if op is not None:
          spans[stage, op] = (at, at + durations[stage, op])
          at = spans[stage, op][1]
      ends.append(at)
    # With a latency of two, messages move beside the tick after the one that
    # made them, and only those that take longer are waited for.
    beside = schedule.latency > 1
    now = max(*ends, now + message) if beside else max(ends) + message
  return _clock(schedule, durations, spans, total=now)


def _clock(
  schedule: table.Table,
  durations: _Durations,
  spans: Mapping[tuple[int, operation.Operation], tuple[float, float]],
  *,
  total: float,
) -> Clock:
  work = [0.0] * schedule.pieces.num_stages
  for (stage, _), duration in durations.items():
    work[stage] += duration
  return Clock(total=total, bubble=total - min(work), spans=spans)
