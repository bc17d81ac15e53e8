"""Timetables of pipeline schedules: the operation of each stage and tick.

A model of `num_stages * num_chunks` equal virtual stages runs on `num_stages`
stages, `num_chunks` on each: chunk c of stage s is virtual stage
`c * num_stages + s`. Every microbatch runs forward through the virtual stages
in order, and backward in the opposite order.

A table is written directly, with several slots in a tick, or built from the
order in which each stage works.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import functools


class Kind(enum.Enum):
  """Kinds of operations; the values are how errors and tests print them."""

  FORWARD = "F"
  BACKWARD = "B"


@dataclasses.dataclass(frozen=True)
class Operation:
  """A forward or backward pass of one microbatch through one chunk.

  Attributes:
    kind: Forward or backward.
    microbatch: Index of the microbatch.
    chunk: Index of the chunk on its stage.
  """

  kind: Kind
  microbatch: int
  chunk: int = 0

  def __str__(self) -> str:
    return (
      f"{self.kind.value}(microbatch {self.microbatch}, chunk {self.chunk})"
    )


@dataclasses.dataclass(frozen=True)
class Position:
  """Where a table has an operation.

  Attributes:
    tick: Index of the tick.
    slot: Index within the tick.
    stage: Index of the stage.
  """

  tick: int
  slot: int
  stage: int


# The operations of one stage in one tick, by slot.
Cell = tuple[Operation | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """Which operation runs when and where.

  A table is checked when it is made: every microbatch runs forward and backward
  once on every chunk of every stage, and after the operations it depends on.
  Messages of another stage arrive one tick later.

  Attributes:
    name: Name of the schedule in error messages.
    num_stages: Number of stages, P.
    num_chunks: Virtual stages on each stage, v.
    num_microbatches: Microbatches of a step, M.
    ticks: Cells by tick and stage.

  Raises:
    ValueError: The table is invalid; the message names tick and stage.
  """

  name: str
  num_stages: int
  num_chunks: int = 1
  num_microbatches: int
  ticks: tuple[tuple[Cell, ...], ...]

  def __post_init__(self) -> None:
    _check_sizes(self.num_stages, self.num_chunks, self.num_microbatches)
    _check(self)

  @property
  def num_virtual_stages(self) -> int:
    """Number of virtual stages, K = P v."""
    return self.num_stages * self.num_chunks

  @functools.cached_property
  def num_slots(self) -> int:
    """Operations that a stage may run in one tick."""
    return max((len(cell) for row in self.ticks for cell in row), default=0)

  @functools.cached_property
  def operations(self) -> Sequence[tuple[Position, Operation]]:
    """All operations, tick by tick, with their positions."""
    return [
      (Position(tick, slot, stage), op)
      for tick, row in enumerate(self.ticks)
      for stage, cell in enumerate(row)
      for slot, op in enumerate(cell)
      if op is not None
    ]

  def virtual_stage(self, stage: int, *, chunk: int) -> int:
    """Returns the index of the virtual stage that is a chunk of a stage."""
    return chunk * self.num_stages + stage

  def locate(self, virtual_stage: int) -> tuple[int, int]:
    """Returns the stage and the chunk of a virtual stage."""
    return virtual_stage % self.num_stages, virtual_stage // self.num_stages


def from_orders(
  orders: Sequence[Sequence[Operation]], *, name: str, num_chunks: int = 1
) -> Table:
  """Returns the table in which every operation runs as soon as possible.

  Args:
    orders: By stage, its operations in order, one a tick.
    name: Name of the schedule.
    num_chunks: Virtual stages on each stage.

  Raises:
    ValueError: Operations wait for each other, or for operations that no stage
      runs.
  """
  begun: dict[tuple[int, Operation], int] = {}
  index = [0] * len(orders)
  free = [0] * len(orders)
  while any(i < len(order) for i, order in zip(index, orders, strict=True)):
    progressed = False
    for stage, order in enumerate(orders):
      while index[stage] < len(order):
        op = order[index[stage]]
        needs = _dependencies(op, stage, len(orders), num_chunks)
        if any(need not in begun for need in needs):
          break
        ready = [free[stage], *(begun[need] + 1 for need in needs)]
        begun[stage, op] = max(ready)
        free[stage] = begun[stage, op] + 1
        index[stage] += 1
        progressed = True
    if not progressed:
      _raise_deadlock(orders, index, begun, name=name, num_chunks=num_chunks)
  ticks: list[list[Cell]] = [
    [() for _ in orders] for _ in range(max(free, default=0))
  ]
  for (stage, op), tick in begun.items():
    ticks[tick][stage] = (op,)
  return Table(
    name=name,
    num_stages=len(orders),
    num_chunks=num_chunks,
    num_microbatches=1 + max((op.microbatch for _, op in begun), default=-1),
    ticks=tuple(tuple(row) for row in ticks),
  )


def _check_sizes(stages: int, chunks: int, microbatches: int) -> None:
  for name, value in (
    ("num_stages", stages),
    ("num_chunks", chunks),
    ("num_microbatches", microbatches),
  ):
    if value <= 0:
      raise ValueError(f"{name} must be positive, got {value}.")


def _dependencies(
  op: Operation, stage: int, num_stages: int, num_chunks: int
) -> list[tuple[int, Operation]]:
  """Returns the stage and operation of each that must run before `op`."""
  k = op.chunk * num_stages + stage
  i = op.microbatch
  if op.kind is Kind.FORWARD:
    if k == 0:
      return []
    chunk, before = divmod(k - 1, num_stages)
    return [(before, Operation(Kind.FORWARD, i, chunk))]
  needs = [(stage, Operation(Kind.FORWARD, i, op.chunk))]
  if k + 1 < num_stages * num_chunks:
    chunk, after = divmod(k + 1, num_stages)
    needs.append((after, Operation(Kind.BACKWARD, i, chunk)))
  return needs


def _raise_deadlock(
  orders: Sequence[Sequence[Operation]],
  index: Sequence[int],
  begun: Mapping[tuple[int, Operation], int],
  *,
  name: str,
  num_chunks: int,
) -> None:
  waits = []
  for stage, order in enumerate(orders):
    if index[stage] < len(order):
      op = order[index[stage]]
      needs = _dependencies(op, stage, len(orders), num_chunks)
      on, need = next(need for need in needs if need not in begun)
      waits.append(f"stage {stage} runs {op} before {need} of stage {on}")
  raise ValueError(
    f"The orders of schedule {name!r} wait for each other: {'; '.join(waits)}."
  )


def _error(table: Table, at: Position, message: str) -> ValueError:
  return ValueError(
    f"Schedule {table.name!r}, tick {at.tick}, stage {at.stage}: {message}"
  )


def _check(table: Table) -> None:
  """Raises ValueError unless the table can be run and is complete."""
  for tick, row in enumerate(table.ticks):
    if len(row) != table.num_stages:
      raise ValueError(
        f"Schedule {table.name!r}, tick {tick}: expected"
        f" {table.num_stages} stages, got {len(row)}."
      )
  positions: dict[tuple[int, Operation], Position] = {}
  for at, op in table.operations:
    for field, value, size in (
      ("microbatch", op.microbatch, table.num_microbatches),
      ("chunk", op.chunk, table.num_chunks),
    ):
      if not 0 <= value < size:
        message = f"{op} has {field} {value}, which must be below {size}."
        raise _error(table, at, message)
    before = positions.setdefault((at.stage, op), at)
    if before != at:
      message = f"{op} runs again; it already ran at tick {before.tick}."
      raise _error(table, at, message)
  _check_complete(table, positions)
  for at, op in table.operations:
    needs = _dependencies(op, at.stage, table.num_stages, table.num_chunks)
    for stage, need in needs:
      there = positions[stage, need]
      if stage == at.stage:
        is_before = (there.tick, there.slot) < (at.tick, at.slot)
        required = "earlier"
      else:
        is_before = there.tick < at.tick
        required = "at an earlier tick"
      if not is_before:
        raise _error(
          table,
          at,
          f"{op} needs {need} of stage {stage} {required}, which runs at tick"
          f" {there.tick}.",
        )


def _check_complete(
  table: Table, positions: Mapping[tuple[int, Operation], Position]
) -> None:
  last = max(len(table.ticks) - 1, 0)
  for stage in range(table.num_stages):
    for chunk in range(table.num_chunks):
      for i in range(table.num_microbatches):
        for kind in Kind:
          op = Operation(kind, i, chunk)
          if (stage, op) not in positions:
            end = Position(last, 0, stage)
            raise _error(table, end, f"{op} has not run by the end.")
