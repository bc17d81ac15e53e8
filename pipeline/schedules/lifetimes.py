"""What a stage must keep from one operation to another, and in which slots.

Three things are kept, each in a pool of its own: the input of a piece, until it
has run forward again (where it does), what the forward pass keeps for the
backward pass, and what the gradient of weights needs when it is apart.

A pool has as many slots as are live at once at most: lifetimes on one stage are
intervals of ticks, and the interval that begins next takes the lowest free
slot, which is optimal for intervals. In one program for all stages every stage
has the pool of the stage that needs most.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import heapq

from paxon.pipeline.schedules import operation, table

_Kind = operation.Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetime:
  """How long something of one microbatch and chunk is kept on its stage.

  Attributes:
    microbatch: Whose.
    chunk: Of the stage.
    begin: (tick, slot) of the operation that makes it.
    end: (tick, slot) of the last that reads it.
  """

  microbatch: int
  chunk: int
  begin: tuple[int, int]
  end: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetimes:
  """What one stage keeps.

  Attributes:
    inputs: Inputs of pieces that run forward again; empty where none does.
    residuals: What the backward pass needs.
    weight_pairs: Inputs of layers and gradients of their outputs, from the
      gradient of the input to that of the weights.
    in_flight: From the forward pass to the end of the backward pass, whatever
      is kept: what papers count.
  """

  inputs: tuple[Lifetime, ...]
  residuals: tuple[Lifetime, ...]
  weight_pairs: tuple[Lifetime, ...]
  in_flight: tuple[Lifetime, ...]


def of_stage(schedule: table.Table, *, stage: int) -> Lifetimes:
  """Returns what a stage keeps.

  Args:
    schedule: A valid table.
    stage: From 0.
  """
  found: dict[tuple[int, int], dict[operation.Kind, tuple[int, int]]] = {}
  for place, op in schedule.places_of(stage):
    pieces = found.setdefault((op.microbatch, op.chunk), {})
    pieces[op.kind] = (place.tick, place.slot)
  pools: dict[str, list[Lifetime]] = {
    "inputs": [],
    "residuals": [],
    "weight_pairs": [],
    "in_flight": [],
  }
  for (i, chunk), at in sorted(found.items()):

    def keep(
      pool: str,
      begin: tuple[int, int],
      end: tuple[int, int],
      *,
      i: int = i,
      chunk: int = chunk,
    ) -> None:
      life = Lifetime(microbatch=i, chunk=chunk, begin=begin, end=end)
      pools[pool].append(life)

    begin = at[_Kind.FORWARD]
    last = max(at.values())
    if _Kind.RECOMPUTE in at:
      keep("inputs", begin, at[_Kind.RECOMPUTE])
      begin = at[_Kind.RECOMPUTE]
    if _Kind.WEIGHT_GRADIENT in at:
      middle = at[_Kind.INPUT_GRADIENT]
      keep("residuals", begin, middle)
      keep("weight_pairs", middle, at[_Kind.WEIGHT_GRADIENT])
    else:
      keep("residuals", begin, last)
    keep("in_flight", at[_Kind.FORWARD], last)
  return Lifetimes(**{name: tuple(lives) for name, lives in pools.items()})


def peak(lives: Iterable[Lifetime]) -> int:
  """Returns how many are live at once at most."""
  return max(assign(lives).values(), default=-1) + 1


def assign(lives: Iterable[Lifetime]) -> Mapping[Lifetime, int]:
  """Returns a slot for each lifetime; two that overlap have different ones.

  What ends in an operation is free after it, not in it.
  """
  slots: dict[Lifetime, int] = {}
  free: list[int] = []
  live: list[tuple[tuple[int, int], int]] = []
  for life in sorted(lives, key=lambda x: (x.begin, x.end, x.microbatch)):
    while live and live[0][0] < life.begin:
      heapq.heappush(free, heapq.heappop(live)[1])
    slot = heapq.heappop(free) if free else len(live)
    slots[life] = slot
    heapq.heappush(live, (life.end, slot))
  return slots
