"""Tables as integers, which one program for all stages reads.

A chunk receives its input and the gradient of its output as messages. Both have
one shape, so they share a pool of buffers, the mailbox, in which each message
has a slot from its arrival to the last operation that reads it. If backward
operations recompute the forward pass, they read the chunk's input again;
otherwise they read residuals, which have a pool of their own.

A pool has as many slots as are live at once at most: lifetimes on one stage are
intervals of ticks, and the interval that begins next takes the lowest free
slot. Every stage has the pools of the stage that needs most. The last slot of
each pool receives what no operation reads.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import enum
import heapq
from typing import TypeVar

import numpy as np

from paxon.pipeline.schedules import table

_FORWARD, _BACKWARD = table.Kind.FORWARD, table.Kind.BACKWARD

# Branches of the executor; the first is an empty slot of the table.
KINDS = (None, _FORWARD, _BACKWARD)


class Residuals(enum.Enum):
  """Values that forward operations save for backward operations."""

  # The input of the chunk; backward operations run the forward pass again.
  RECOMPUTE = "recompute"
  # All that gradients need; nothing is computed twice.
  SAVE = "save"


# The columns of `Lowered.cells`.
COLUMNS = (
  # Index into `KINDS`.
  "kind",
  "microbatch",
  "chunk",
  "virtual_stage",
  # Whether the virtual stage is the model's first, or last.
  "is_first",
  "is_last",
  # Slots of the mailbox: the input, the gradient of the output, and where to
  # put a result for this stage itself.
  "x",
  "dy",
  "local",
  # Slot of the residuals, written by forward and read by backward operations.
  "residuals",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
  """Messages of one slot of a tick in one direction.

  Attributes:
    slot: The slot whose results are sent.
    direction: +1 or -1, from stage to stage.
    pairs: All (sender, receiver) of the table.
  """

  slot: int
  direction: int
  pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
  """A table as the executor reads it.

  Attributes:
    cells: int32 [ticks, stages, slots, COLUMNS].
    arrivals: int32 [ticks, stages, routes], the mailbox slot of what arrives at
      the end of a tick.
    routes: One collective-permute each.
    kinds: By slot, the kinds that occur in it.
    has_local: By slot, whether any result stays on its stage.
    mailbox: Slots of the mailbox, including the one that is never read.
    residuals: Slots of the residuals, likewise; 0 without residuals.
  """

  cells: np.ndarray
  arrivals: np.ndarray
  routes: tuple[Route, ...]
  kinds: tuple[tuple[table.Kind, ...], ...]
  has_local: tuple[bool, ...]
  mailbox: int
  residuals: int


@dataclasses.dataclass(frozen=True)
class _Message:
  """The input of a chunk, or the gradient of its output."""

  stage: int
  microbatch: int
  chunk: int
  is_gradient: bool


_Key = TypeVar("_Key")
# When an operation runs on its stage: tick and slot.
_Time = tuple[int, int]
_Senders = Mapping[_Message, table.Position]


def lower(
  schedule: table.Table, residuals: Residuals = Residuals.RECOMPUTE
) -> Lowered:
  """Returns a table as integers."""
  senders: dict[_Message, table.Position] = {}
  for at, op in schedule.operations:
    message = _result(schedule, at.stage, op)
    if message is not None:
      senders[message] = at
  saves = residuals is Residuals.SAVE
  slots, mailbox = _assign_messages(schedule, senders, saves=saves)
  saved, num_saved = _assign_residuals(schedule) if saves else ({}, 0)
  routes = _routes(senders)
  numbers = {(r.slot, r.direction): n for n, r in enumerate(routes)}
  shape = (len(schedule.ticks), schedule.num_stages, len(routes))
  arrivals = np.full(shape, mailbox - 1, np.int32)
  for message, at in senders.items():
    if at.stage != message.stage:
      number = numbers[at.slot, _direction(message)]
      arrivals[at.tick, message.stage, number] = slots[message]
  kinds: list[set[table.Kind]] = [set() for _ in range(schedule.num_slots)]
  for at, op in schedule.operations:
    kinds[at.slot].add(op.kind)
  local = {at.slot for m, at in senders.items() if at.stage == m.stage}
  return Lowered(
    cells=_cells(schedule, slots, mailbox - 1, saved, max(num_saved - 1, 0)),
    arrivals=arrivals,
    routes=routes,
    kinds=tuple(tuple(k for k in table.Kind if k in found) for found in kinds),
    has_local=tuple(slot in local for slot in range(schedule.num_slots)),
    mailbox=mailbox,
    residuals=num_saved,
  )


def _result(
  schedule: table.Table, stage: int, op: table.Operation
) -> _Message | None:
  """Returns the message that an operation makes, if any."""
  k = schedule.virtual_stage(stage, chunk=op.chunk)
  last = schedule.num_virtual_stages - 1
  if op.kind is _FORWARD:
    # The loss turns the model's output into the gradient of that output.
    receiver, chunk = schedule.locate(min(k + 1, last))
    return _Message(receiver, op.microbatch, chunk, k == last)
  if k > 0:
    receiver, chunk = schedule.locate(k - 1)
    return _Message(receiver, op.microbatch, chunk, True)
  return None


def _in_flight(
  schedule: table.Table,
) -> list[dict[tuple[int, int], tuple[_Time, _Time]]]:
  """Returns by stage, microbatch and chunk, forward and backward times."""
  times: list[dict[tuple[int, int], list[_Time]]] = [
    {} for _ in range(schedule.num_stages)
  ]
  for at, op in schedule.operations:
    own = times[at.stage].setdefault((op.microbatch, op.chunk), [])
    own.append((at.tick, at.slot))
  return [{key: (min(t), max(t)) for key, t in own.items()} for own in times]


def _assign_slots(
  lives: Mapping[_Key, tuple[_Time, _Time]],
) -> dict[_Key, int]:
  """Returns a slot for each lifetime; those that overlap have different slots.

  A slot is free after the last operation that reads it.
  """
  slots: dict[_Key, int] = {}
  free: list[int] = []
  live: list[tuple[_Time, int]] = []
  for key, (begin, end) in sorted(lives.items(), key=lambda item: item[1]):
    while live and live[0][0] < begin:
      heapq.heappush(free, heapq.heappop(live)[1])
    slots[key] = heapq.heappop(free) if free else len(live)
    heapq.heappush(live, (end, slots[key]))
  return slots


def _num_slots(slots: Iterable[int]) -> int:
  return max(slots, default=-1) + 2


def _assign_residuals(
  schedule: table.Table,
) -> tuple[Mapping[tuple[int, int, int], int], int]:
  """Returns slots by stage, microbatch and chunk, and the pool's size."""
  slots = {
    (stage, *key): slot
    for stage, lives in enumerate(_in_flight(schedule))
    for key, slot in _assign_slots(lives).items()
  }
  return slots, _num_slots(slots.values())


def _assign_messages(
  schedule: table.Table, senders: _Senders, *, saves: bool
) -> tuple[Mapping[_Message, int], int]:
  """Returns the slot of each message, and the size of the mailbox."""
  ends: dict[_Message, _Time] = {}
  for at, op in schedule.operations:
    for is_gradient in (False, True):
      if _reads(op.kind, saves=saves, is_gradient=is_gradient):
        message = _Message(at.stage, op.microbatch, op.chunk, is_gradient)
        time = (at.tick, at.slot)
        ends[message] = max(ends.get(message, time), time)
  slots: dict[_Message, int] = {}
  for stage in range(schedule.num_stages):
    lives = {}
    for message, at in senders.items():
      if message.stage == stage:
        # Messages are put into the mailbox at the end of a tick.
        is_local = at.stage == stage
        begin = (at.tick, at.slot if is_local else schedule.num_slots)
        lives[message] = (begin, ends[message])
    slots |= _assign_slots(lives)
  return slots, _num_slots(slots.values())


def _reads(kind: table.Kind, *, saves: bool, is_gradient: bool) -> bool:
  """Returns whether an operation reads its input, or its output's gradient."""
  if is_gradient:
    return kind is _BACKWARD
  return kind is _FORWARD or not saves


def _direction(message: _Message) -> int:
  # With two stages both neighbors are the same stage.
  return -1 if message.is_gradient else 1


def _routes(senders: _Senders) -> tuple[Route, ...]:
  pairs: dict[tuple[int, int], set[tuple[int, int]]] = {}
  for message, at in senders.items():
    if at.stage != message.stage:
      key = (at.slot, _direction(message))
      pairs.setdefault(key, set()).add((at.stage, message.stage))
  return tuple(
    Route(slot=slot, direction=direction, pairs=tuple(sorted(found)))
    for (slot, direction), found in sorted(pairs.items())
  )


def _cells(
  schedule: table.Table,
  slots: Mapping[_Message, int],
  unread: int,
  saved: Mapping[tuple[int, int, int], int],
  unread_residuals: int,
) -> np.ndarray:
  shape = (len(schedule.ticks), schedule.num_stages, schedule.num_slots)
  cells = np.zeros((*shape, len(COLUMNS)), np.int32)
  for name in ("x", "dy", "local"):
    cells[..., COLUMNS.index(name)] = unread
  cells[..., COLUMNS.index("residuals")] = unread_residuals
  for at, op in schedule.operations:
    k = schedule.virtual_stage(at.stage, chunk=op.chunk)
    key = (at.stage, op.microbatch, op.chunk)
    result = _result(schedule, at.stage, op)
    is_local = result is not None and result.stage == at.stage
    is_backward = op.kind is _BACKWARD
    values = {
      "kind": KINDS.index(op.kind),
      "microbatch": op.microbatch,
      "chunk": op.chunk,
      "virtual_stage": k,
      "is_first": k == 0,
      "is_last": k + 1 == schedule.num_virtual_stages,
      "x": unread
      if saved and is_backward
      else slots.get(_Message(*key, False), unread),
      "dy": slots[_Message(*key, True)] if is_backward else unread,
      "local": slots[result] if is_local and result is not None else unread,
      "residuals": saved.get(key, unread_residuals),
    }
    for name, value in values.items():
      cells[at.tick, at.stage, at.slot, COLUMNS.index(name)] = value
  return cells
