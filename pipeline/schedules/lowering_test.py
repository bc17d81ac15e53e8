"""Tests for tables as integers, run here by a plain interpreter."""

import dataclasses

import numpy as np
import pytest

from paxon.pipeline.schedules import (
  gpipe,
  interleaved,
  lowering,
  one_f_one_b,
  operation,
  table,
  zero_bubble,
)

COLUMN = {name: n for n, name in enumerate(lowering.COLUMNS)}


def _late(*, num_stages, num_microbatches):
  made = one_f_one_b.make(
    num_stages=num_stages, num_microbatches=num_microbatches
  )
  orders = [made.order(stage) for stage in range(num_stages)]
  return table.from_orders(orders, name="late", pieces=made.pieces, latency=2)


def _run(schedule):
  """Moves names of messages as the integers say; checks what is read."""
  lowered = lowering.lower(schedule)
  stages = schedule.pieces.num_stages
  last = stages * schedule.pieces.num_chunks - 1
  box = [[None] * lowered.box for _ in range(stages)]
  before = None
  num_ran = 0
  for tick, row in enumerate(lowered.cells):
    made = {}
    for slot in range(row.shape[1]):
      for stage in range(stages):
        cell = {name: int(row[stage, slot, n]) for name, n in COLUMN.items()}
        kind = lowering.KINDS[cell["kind"]]
        if kind is None:
          made[slot, stage] = None
          continue
        num_ran += 1
        i, k = cell["microbatch"], cell["virtual_stage"]
        assert (cell["is_first"], cell["is_last"]) == (k == 0, k == last)
        assert kind in lowered.kinds[slot]
        if k > 0:
          assert box[stage][cell["x"]] == ("x", i, k)
        if kind is not operation.Kind.FORWARD:
          assert box[stage][cell["dy"]] == ("dy", i, k)
          made[slot, stage] = ("dy", i, k - 1)
        else:
          made[slot, stage] = ("dy", i, k) if k == last else ("x", i, k + 1)
        box[stage][cell["local"]] = made[slot, stage]
    moving = made if lowered.latency == 1 else before
    before = made
    for number, route in enumerate(lowered.routes):
      for sender, receiver in route.pairs:
        if moving is not None:
          at = lowered.arrivals[tick, receiver, number]
          box[receiver][at] = moving[route.slot, sender]
  assert num_ran == len(list(schedule.places()))
  return lowered


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
  "make",
  [
    gpipe.make,
    one_f_one_b.make,
    one_f_one_b.two_slots,
    one_f_one_b.split,
    _late,
    interleaved.make,
    interleaved.two_slots,
    zero_bubble.make_h1,
    zero_bubble.make_v,
  ],
)
def test_every_operation_reads_what_it_needs(make, stages):
  _run(make(num_stages=stages, num_microbatches=2 * stages))


def test_slots_and_permutes_are_few():
  """GPipe keeps all inputs, 1F1B as many as there are stages."""
  sizes = {"num_stages": 4, "num_microbatches": 8}
  assert lowering.lower(gpipe.make(**sizes)).box == 17
  assert lowering.lower(one_f_one_b.make(**sizes)).box == 6
  two_slots = lowering.lower(one_f_one_b.two_slots(**sizes))
  assert [(r.slot, r.direction) for r in two_slots.routes] == [(0, 1), (1, -1)]
  # Nothing goes round where each stage has one piece.
  assert two_slots.routes[0].pairs == ((0, 1), (1, 2), (2, 3))
  looped = lowering.lower(interleaved.two_slots(**sizes))
  assert looped.routes[0].pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
  assert two_slots.has_local == (True, False)


def test_the_box_does_not_grow_with_microbatches():
  made = [
    lowering.lower(one_f_one_b.two_slots(num_stages=4, num_microbatches=m))
    for m in (16, 64)
  ]
  assert made[0].box == made[1].box
  np.testing.assert_array_equal(made[0].kinds, made[1].kinds)


def test_recomputation_by_itself_is_refused():
  made = gpipe.make(num_stages=1, num_microbatches=1)
  again = operation.Operation(operation.Kind.RECOMPUTE, 0)
  ticks = (made.ticks[0], ((again,),), made.ticks[1])
  with pytest.raises(
    ValueError, match=r"tick 1, stage 0: the executor recomputes inside X"
  ):
    lowering.lower(dataclasses.replace(made, ticks=ticks))


def test_invalid_tables_are_refused():
  made = gpipe.make(num_stages=2, num_microbatches=1)
  wrong = dataclasses.replace(made, ticks=made.ticks[1:])
  with pytest.raises(
    ValueError, match=r"'GPipe', tick \d, stage 0: F.* has not run"
  ):
    lowering.lower(wrong)
