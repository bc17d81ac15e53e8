"""Refuses tables that cannot be run, or that would compute something else."""

from collections.abc import Mapping

from paxon.pipeline.schedules import operation, table

_Kind = operation.Kind
_BACKWARD = frozenset({_Kind.BACKWARD})
_SPLIT = frozenset({_Kind.INPUT_GRADIENT, _Kind.WEIGHT_GRADIENT})


def check(schedule: table.Table) -> None:
  """Raises ValueError, naming tick and stage, unless the table is valid.

  Valid is: every microbatch runs forward and backward on every chunk of every
  stage, once; nothing runs before what it needs has arrived.

  Args:
    schedule: Of any making.
  """
  _check_shape(schedule)
  places = _places(schedule)
  _check_complete(schedule, places)
  _check_order(schedule, places)


_Places = Mapping[tuple[int, operation.Operation], table.Place]


def _fail(schedule: table.Table, place: table.Place, what: str) -> ValueError:
  return ValueError(
    f"Schedule {schedule.name!r}, tick {place.tick}, stage {place.stage}:"
    f" {what}"
  )


def _check_shape(schedule: table.Table) -> None:
  if schedule.latency not in (1, 2):
    raise ValueError(
      f"Schedule {schedule.name!r}: latency must be 1 or 2 ticks, got"
      f" {schedule.latency}."
    )
  stages = schedule.pieces.num_stages
  for tick, row in enumerate(schedule.ticks):
    if len(row) != stages:
      raise ValueError(
        f"Schedule {schedule.name!r}, tick {tick}: has {len(row)} stages,"
        f" needed are {stages}."
      )
  for place, op in schedule.places():
    for field, size in (
      ("microbatch", schedule.num_microbatches),
      ("chunk", schedule.pieces.num_chunks),
    ):
      if not 0 <= getattr(op, field) < size:
        raise _fail(
          schedule,
          place,
          f"{op} has {field} {getattr(op, field)}, it must be below {size}.",
        )


def _places(schedule: table.Table) -> _Places:
  places: dict[tuple[int, operation.Operation], table.Place] = {}
  for place, op in schedule.places():
    before = places.setdefault((place.stage, op), place)
    if before != place:
      raise _fail(
        schedule, place, f"{op} runs again, it ran at tick {before.tick}."
      )
  return places


def _check_complete(schedule: table.Table, places: _Places) -> None:
  """Each piece has a forward pass and one form of the backward pass."""
  kinds = schedule.kinds()
  pieces = schedule.pieces
  last = max((place.tick for place in places.values()), default=0)
  for stage in range(pieces.num_stages):
    for chunk in range(pieces.num_chunks):
      for i in range(schedule.num_microbatches):
        has = set(kinds[stage, i, chunk]) - {_Kind.FORWARD, _Kind.RECOMPUTE}
        end = table.Place(last, stage, 0)
        forward = operation.Operation(_Kind.FORWARD, i, chunk)
        if (stage, forward) not in places:
          raise _fail(schedule, end, f"{forward} has not run by the end.")
        if has not in (_BACKWARD, _SPLIT):
          found = ", ".join(sorted(kind.value for kind in has)) or "nothing"
          raise _fail(
            schedule,
            end,
            f"microbatch {i}, chunk {chunk} needs X, or B and W, for its"
            f" backward pass; it has {found}.",
          )


def _check_order(schedule: table.Table, places: _Places) -> None:
  for place, op in schedule.places():
    for stage, need in schedule.needed(place.stage, op):
      there = places[stage, need]
      if stage == place.stage:
        before = (there.tick, there.slot) < (place.tick, place.slot)
        wanted = "earlier"
      else:
        before = there.tick + schedule.latency <= place.tick
        wanted = f"{schedule.latency} tick(s) earlier"
      if not before:
        raise _fail(
          schedule,
          place,
          f"{op} needs {need} of stage {stage} {wanted}, which runs at tick"
          f" {there.tick}.",
        )
