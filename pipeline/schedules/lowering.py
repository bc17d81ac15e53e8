"""A table as the integers that one program for all stages reads.

A piece is given its input and the gradient of its output by messages. Both have
one shape, so they share a pool, the box, in which each message has a slot from
its arrival to the last operation that reads it. Where backward operations run
the piece forward again, they read its input, too; else they read what forward
operations have kept, residuals, and what the gradient of the input has kept for
that of the weights, pairs, each in a pool of its own. Slots are given out here,
once for all ticks (`lifetimes.assign`).

The last slot of each pool is where goes what nobody waits for.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import enum

import numpy as np

from paxon.pipeline.schedules import (
  lifetimes,
  operation,
  table,
  validation,
)

_Kind = operation.Kind
_GRADIENTS = (*operation.INPUT_GRADIENT_KINDS, _Kind.WEIGHT_GRADIENT)

# Branches of the executor; an empty place of the table is the first.
KINDS = (
  None,
  _Kind.FORWARD,
  _Kind.BACKWARD,
  _Kind.INPUT_GRADIENT,
  _Kind.WEIGHT_GRADIENT,
)


class Residuals(enum.Enum):
  """What forward operations keep for backward ones."""

  # Nothing but the input of the piece; they run it forward again.
  RECOMPUTE = "recompute"
  # What gradients need: no operation computes anything twice.
  SAVE = "save"


# The columns of `Lowered.cells`.
COLUMNS = (
  # Index into `KINDS`.
  "kind",
  "microbatch",
  "chunk",
  "virtual_stage",
  # Of virtual stages: whether it begins, or ends, the model.
  "is_first",
  "is_last",
  # Slots of the box: the piece's input, the gradient of its output, and where
  # what it makes is put, for this stage itself.
  "x",
  "dy",
  "local",
  # Slots of the other pools: where an operation puts residuals, where it reads
  # them, and likewise pairs.
  "keeps",
  "kept",
  "pairs_kept",
  "pairs",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
  """Messages of one slot of a tick in one direction.

  Attributes:
    slot: Whose results are sent.
    direction: +1 or -1, from stage to stage.
    pairs: (sender, receiver), all that occur in the table.
  """

  slot: int
  direction: int
  pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
  """What the executor reads.

  Attributes:
    cells: int32 [ticks, stages, slots, COLUMNS].
    arrivals: int32 [ticks, stages, routes], the slot of the box into which goes
      what arrives at the end of a tick.
    routes: One collective-permute each.
    kinds: By slot, which kinds occur in it.
    has_local: By slot, whether any result stays on its stage.
    box: Slots of the box, the one of messages for nobody included.
    residuals: Slots of the residuals, likewise; 0 where none are kept.
    pairs: Slots of the pairs, likewise.
    latency: Of the table.
  """

  cells: np.ndarray
  arrivals: np.ndarray
  routes: tuple[Route, ...]
  kinds: tuple[tuple[operation.Kind, ...], ...]
  has_local: tuple[bool, ...]
  box: int
  residuals: int
  pairs: int
  latency: int


@dataclasses.dataclass(frozen=True)
class _Message:
  """A place in the box: the piece's input, or its output's gradient."""

  stage: int
  microbatch: int
  chunk: int
  is_gradient: bool


def lower(
  schedule: table.Table, residuals: Residuals = Residuals.RECOMPUTE
) -> Lowered:
  """Returns a table as integers.

  Args:
    schedule: Any valid one.
    residuals: What forward operations keep.

  Raises:
    ValueError: The table is invalid, or has operations of recomputation, which
      are part of backward operations here.
  """
  validation.check(schedule)
  for place, op in schedule.places():
    if op.kind is _Kind.RECOMPUTE:
      raise ValueError(
        f"Schedule {schedule.name!r}, tick {place.tick}, stage {place.stage}:"
        f" the executor recomputes inside X, B and W; leave {op} out."
      )
  senders = dict(_senders(schedule))
  saves = residuals is Residuals.SAVE
  slots, box = _assign(schedule, senders, saves=saves)
  kept, num_kept = _pool(schedule, "residuals") if saves else ({}, 0)
  pairs, num_pairs = _pool(schedule, "weight_pairs") if saves else ({}, 0)
  shape = (len(schedule.ticks), schedule.pieces.num_stages)
  routes = _routes(schedule, senders)
  numbers = {(r.slot, r.direction): n for n, r in enumerate(routes)}
  arrivals = np.full((*shape, len(routes)), box - 1, np.int32)
  for message, place in senders.items():
    if place.stage != message.stage:
      at = place.tick + schedule.latency - 1
      number = numbers[place.slot, _direction(schedule, message, place)]
      arrivals[at, message.stage, number] = slots[message]
  kinds: list[set[operation.Kind]] = [set() for _ in range(schedule.num_slots)]
  for place, op in schedule.places():
    kinds[place.slot].add(op.kind)
  local = {p.slot for m, p in senders.items() if p.stage == m.stage}
  return Lowered(
    cells=_cells(
      schedule, senders, slots, kept, pairs, (box, num_kept, num_pairs)
    ),
    arrivals=arrivals,
    routes=routes,
    kinds=tuple(tuple(k for k in KINDS[1:] if k in ks) for ks in kinds),
    has_local=tuple(slot in local for slot in range(schedule.num_slots)),
    box=box,
    residuals=num_kept,
    pairs=num_pairs,
    latency=schedule.latency,
  )


def _target(
  schedule: table.Table, stage: int, op: operation.Operation
) -> _Message | None:
  """Returns the message that an operation makes, if any."""
  pieces = schedule.pieces
  k = pieces.virtual_stage(stage, chunk=op.chunk)
  last = pieces.num_stages * pieces.num_chunks - 1
  if op.kind is _Kind.FORWARD:
    # The loss turns the model's output into the gradient of that output.
    receiver, chunk = pieces.home(min(k + 1, last))
    return _Message(receiver, op.microbatch, chunk, k == last)
  if op.kind in operation.INPUT_GRADIENT_KINDS and k > 0:
    receiver, chunk = pieces.home(k - 1)
    return _Message(receiver, op.microbatch, chunk, True)
  return None


def _senders(
  schedule: table.Table,
) -> Iterator[tuple[_Message, table.Place]]:
  for place, op in schedule.places():
    message = _target(schedule, place.stage, op)
    if message is not None:
      yield message, place


_Slots = Mapping[tuple[int, int, int], int]


def _pool(schedule: table.Table, name: str) -> tuple[_Slots, int]:
  """Returns slots by stage, microbatch and chunk, and the pool's size."""
  slots = {}
  for stage in range(schedule.pieces.num_stages):
    lives = getattr(lifetimes.of_stage(schedule, stage=stage), name)
    for life, slot in lifetimes.assign(lives).items():
      slots[stage, life.microbatch, life.chunk] = slot
  return slots, max(slots.values()) + 2 if slots else 0


def _assign(
  schedule: table.Table,
  senders: Mapping[_Message, table.Place],
  *,
  saves: bool,
) -> tuple[Mapping[_Message, int], int]:
  """Returns the slot of each message, and the size of the box."""
  ends: dict[_Message, tuple[int, int]] = {}
  for place, op in schedule.places():
    at = (place.tick, place.slot)
    for is_gradient in (False, True):
      if _reads(op.kind, saves=saves, is_gradient=is_gradient):
        message = _Message(place.stage, op.microbatch, op.chunk, is_gradient)
        ends[message] = max(ends.get(message, at), at)
  slots: dict[_Message, int] = {}
  for stage in range(schedule.pieces.num_stages):
    lives = {}
    for message, place in senders.items():
      if message.stage == stage:
        begin = (place.tick, place.slot)
        if place.stage != stage:
          # Messages are put into the box at the end of a tick.
          begin = (place.tick + schedule.latency - 1, schedule.num_slots)
        lives[message] = lifetimes.Lifetime(
          microbatch=message.microbatch,
          chunk=message.chunk,
          begin=begin,
          end=ends[message],
        )
    found = lifetimes.assign(lives.values())
    slots |= {message: found[life] for message, life in lives.items()}
  return slots, max(slots.values(), default=-1) + 2


def _reads(kind: operation.Kind, *, saves: bool, is_gradient: bool) -> bool:
  """Returns whether an operation reads its input, or its output's gradient."""
  if not is_gradient:
    return kind is _Kind.FORWARD or not saves
  return kind in (operation.INPUT_GRADIENT_KINDS if saves else _GRADIENTS)


def _direction(
  schedule: table.Table, message: _Message, place: table.Place
) -> int:
  """In a ring of two, both neighbours are one: the kind tells them apart."""
  if schedule.pieces.placement is operation.Placement.V:
    return message.stage - place.stage
  return -1 if message.is_gradient else 1


def _routes(
  schedule: table.Table, senders: Mapping[_Message, table.Place]
) -> tuple[Route, ...]:
  pairs: dict[tuple[int, int], set[tuple[int, int]]] = {}
  for message, place in senders.items():
    if place.stage != message.stage:
      key = (place.slot, _direction(schedule, message, place))
      pairs.setdefault(key, set()).add((place.stage, message.stage))
  return tuple(
    Route(slot=slot, direction=direction, pairs=tuple(sorted(found)))
    for (slot, direction), found in sorted(pairs.items())
  )


def _cells(
  schedule: table.Table,
  senders: Mapping[_Message, table.Place],
  slots: Mapping[_Message, int],
  kept: _Slots,
  pairs: _Slots,
  sizes: tuple[int, int, int],
) -> np.ndarray:
  pieces = schedule.pieces
  shape = (len(schedule.ticks), pieces.num_stages, schedule.num_slots)
  cells = np.zeros((*shape, len(COLUMNS)), np.int32)
  dump, kept_dump, pairs_dump = (max(size - 1, 0) for size in sizes)
  for name in ("x", "dy", "local"):
    cells[..., COLUMNS.index(name)] = dump
  for name in ("keeps", "kept"):
    cells[..., COLUMNS.index(name)] = kept_dump
  for name in ("pairs_kept", "pairs"):
    cells[..., COLUMNS.index(name)] = pairs_dump
  saves = bool(sizes[1])
  for place, op in schedule.places():
    k = pieces.virtual_stage(place.stage, chunk=op.chunk)
    own = (place.stage, op.microbatch, op.chunk)
    made = _target(schedule, place.stage, op)
    is_local = made is not None and made.stage == place.stage
    values = {
      "kind": KINDS.index(op.kind),
      "microbatch": op.microbatch,
      "chunk": op.chunk,
      "virtual_stage": k,
      "is_first": k == 0,
      "is_last": k + 1 == pieces.num_stages * pieces.num_chunks,
      "x": slots.get(_Message(*own, False), dump)
      if _reads(op.kind, saves=saves, is_gradient=False)
      else dump,
      "dy": slots[_Message(*own, True)]
      if _reads(op.kind, saves=saves, is_gradient=True)
      else dump,
      "local": slots[made] if is_local and made is not None else dump,
    }
    own_kept, own_pairs = kept.get(own, kept_dump), pairs.get(own, pairs_dump)
    if op.kind is _Kind.FORWARD:
      values["keeps"] = own_kept
    elif op.kind is _Kind.WEIGHT_GRADIENT:
      values["pairs"] = own_pairs
    else:
      values["kept"], values["pairs_kept"] = own_kept, own_pairs
    for name, value in values.items():
      cells[place.tick, place.stage, place.slot, COLUMNS.index(name)] = value
  return cells
