"""The table of a schedule: what each stage runs at each tick.

A table can be written directly, as a two-slot schedule is, or follow from the
order in which each stage works: every operation then runs at the first tick at
which what it needs has arrived.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools

from paxon.pipeline.schedules import dependencies, operation

# What one stage runs in one tick, slot after slot.
Cell = tuple[operation.Operation | None, ...]


@dataclasses.dataclass(frozen=True)
class Place:
  """Where an operation stands.

  Attributes:
    tick: From 0.
    stage: From 0.
    slot: Within the tick, from 0.
  """

  tick: int
  stage: int
  slot: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """Which operation runs when and where.

  Attributes:
    name: Of the schedule, as pictures and errors show it.
    pieces: The virtual stages.
    num_microbatches: Of a step.
    ticks: By tick, stage and slot. Messages leave at the end of a tick.
    latency: Ticks from one that sends to the first that may use what came: 1,
      or 2 where sending overlaps with the tick between.
  """

  name: str
  pieces: dependencies.Pieces
  num_microbatches: int
  ticks: tuple[tuple[Cell, ...], ...]
  latency: int = 1

  @functools.cached_property
  def num_slots(self) -> int:
    """Operations that a stage may run in one tick."""
    return max((len(cell) for row in self.ticks for cell in row), default=0)

  def places(self) -> Sequence[tuple[Place, operation.Operation]]:
    """Returns all operations, tick by tick, each with its place."""
    return self._places

  def places_of(
    self, stage: int
  ) -> Sequence[tuple[Place, operation.Operation]]:
    """Returns the operations of a stage, tick by tick."""
    return self._stages[stage]

  def order(self, stage: int) -> list[operation.Operation]:
    """Returns what a stage runs, in order."""
    return self._orders[stage]

  def needed(
    self, stage: int, op: operation.Operation
  ) -> Sequence[tuple[int, operation.Operation]]:
    """Returns the stage and operation of each that must have run before.

    Args:
      stage: Of the table.
      op: That it runs.
    """
    return self._needed[stage, op]

  # Whoever looks at a table looks at all of it, several times.
  @functools.cached_property
  def _places(self) -> list[tuple[Place, operation.Operation]]:
    return [
      (Place(tick, stage, slot), op)
      for tick, row in enumerate(self.ticks)
      for stage, cell in enumerate(row)
      for slot, op in enumerate(cell)
      if op is not None
    ]

  @functools.cached_property
  def _stages(self) -> list[list[tuple[Place, operation.Operation]]]:
    width = max(self.pieces.num_stages, *map(len, self.ticks), 0)
    stages: list[list[tuple[Place, operation.Operation]]] = [
      [] for _ in range(width)
    ]
    for place, op in self._places:
      stages[place.stage].append((place, op))
    return stages

  @functools.cached_property
  def _orders(self) -> list[list[operation.Operation]]:
    return [[op for _, op in places] for places in self._stages]

  @functools.cached_property
  def _needed(
    self,
  ) -> Mapping[
    tuple[int, operation.Operation],
    Sequence[tuple[int, operation.Operation]],
  ]:
    kinds, pieces = self.kinds(), self.pieces
    return {
      (place.stage, op): tuple(
        pieces.needed(op, stage=place.stage, kinds=kinds)
      )
      for place, op in self._places
    }

  def kinds(self) -> Mapping[tuple[int, int, int], Collection[operation.Kind]]:
    """Returns the kinds that each (stage, microbatch, chunk) has."""
    return _kinds(self._orders[: self.pieces.num_stages])


def from_orders(
  orders: Sequence[Sequence[operation.Operation]],
  *,
  name: str,
  pieces: dependencies.Pieces,
  latency: int = 1,
) -> Table:
  """Returns the table in which everything runs as soon as possible.

  Args:
    orders: What each stage runs, one after the other, one a tick.
    name: Of the schedule.
    pieces: The virtual stages.
    latency: Ticks that a message takes.

  Raises:
    ValueError: The orders wait for each other, or for what nobody runs.
  """
  if len(orders) != pieces.num_stages:
    raise ValueError(
      f"Schedule {name!r} has orders for {len(orders)} stages, needed are"
      f" {pieces.num_stages}."
    )
  kinds = _kinds(orders)
  begun: dict[tuple[int, operation.Operation], int] = {}
  at = [0] * len(orders)
  free = [0] * len(orders)
  while any(i < len(order) for i, order in zip(at, orders, strict=True)):
    moved = False
    for stage, order in enumerate(orders):
      while at[stage] < len(order):
        op = order[at[stage]]
        needs = list(pieces.needed(op, stage=stage, kinds=kinds))
        if any(need not in begun for need in needs):
          break
        ready = (
          begun[need] + (1 if need[0] == stage else latency) for need in needs
        )
        begun[stage, op] = max(free[stage], *ready, 0)
        free[stage] = begun[stage, op] + 1
        at[stage] += 1
        moved = True
    if not moved:
      _raise_stuck(orders, at, name=name, pieces=pieces, begun=begun)
  ticks: list[list[Cell]] = [
    [() for _ in orders] for _ in range(max(free, default=0))
  ]
  for (stage, op), tick in begun.items():
    ticks[tick][stage] = (op,)
  microbatches = {op.microbatch for order in orders for op in order}
  return Table(
    name=name,
    pieces=pieces,
    num_microbatches=max(microbatches, default=-1) + 1,
    ticks=tuple(tuple(row) for row in ticks),
    latency=latency,
  )


def _raise_stuck(
  orders: Sequence[Sequence[operation.Operation]],
  at: Sequence[int],
  *,
  name: str,
  pieces: dependencies.Pieces,
  begun: Mapping[tuple[int, operation.Operation], int],
) -> None:
  kinds = _kinds(orders)
  waits = []
  for stage, order in enumerate(orders):
    if at[stage] < len(order):
      op = order[at[stage]]
      needs = pieces.needed(op, stage=stage, kinds=kinds)
      missing = [(s, need) for s, need in needs if (s, need) not in begun]
      on, need = missing[0]
      waits.append(f"stage {stage} runs {op} before {need} of stage {on}")
  raise ValueError(
    f"The orders of schedule {name!r} wait for each other: {'; '.join(waits)}."
  )


def _kinds(
  orders: Sequence[Sequence[operation.Operation]],
) -> Mapping[tuple[int, int, int], Collection[operation.Kind]]:
  kinds: dict[tuple[int, int, int], list[operation.Kind]] = {}
  for stage, order in enumerate(orders):
    for op in order:
      kinds.setdefault((stage, op.microbatch, op.chunk), []).append(op.kind)
  return _OrNothing(kinds)


class _OrNothing(dict[tuple[int, int, int], list[operation.Kind]]):
  """Kinds; none of a piece that nobody runs."""

  def __missing__(self, key: tuple[int, int, int]) -> list[operation.Kind]:
    return []
