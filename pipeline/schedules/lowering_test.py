"""Tests for tables as integers, run here by a plain interpreter."""

import numpy as np
import pytest

from paxon.pipeline.schedules import generators, lowering, table, testing

COLUMN = {name: n for n, name in enumerate(lowering.COLUMNS)}


def _run(schedule, residuals):
  """Moves names of messages as the integers say; checks what is read."""
  lowered = lowering.lower(schedule, residuals)
  saves = residuals is lowering.Residuals.SAVE
  stages = schedule.num_stages
  last = schedule.num_virtual_stages - 1
  mailbox = [[None] * lowered.mailbox for _ in range(stages)]
  saved = [[None] * lowered.residuals for _ in range(stages)]
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
        is_forward = kind is table.Kind.FORWARD
        if k > 0 and (is_forward or not saves):
          assert mailbox[stage][cell["x"]] == ("x", i, k)
        if is_forward:
          made[slot, stage] = ("dy", i, k) if k == last else ("x", i, k + 1)
        else:
          assert mailbox[stage][cell["dy"]] == ("dy", i, k)
          made[slot, stage] = ("dy", i, k - 1)
        if saves and not is_forward:
          assert saved[stage][cell["residuals"]] == (i, k)
        if saves:
          saved[stage][cell["residuals"]] = (i, k) if is_forward else None
        mailbox[stage][cell["local"]] = made[slot, stage]
    for number, route in enumerate(lowered.routes):
      for sender, receiver in route.pairs:
        at = lowered.arrivals[tick, receiver, number]
        mailbox[receiver][at] = made[route.slot, sender]
  assert num_ran == len(schedule.operations)


@pytest.mark.parametrize("residuals", lowering.Residuals)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
  "make", [testing.gpipe, *generators.SCHEDULES.values()]
)
def test_every_operation_reads_what_it_needs(make, stages, residuals):
  _run(make(num_stages=stages, num_microbatches=2 * stages), residuals)


def test_slots_and_permutes_are_few():
  """GPipe keeps all inputs, 1F1B as many as there are stages."""
  sizes = {"num_stages": 4, "num_microbatches": 8}
  assert lowering.lower(testing.gpipe(**sizes)).mailbox == 17
  assert lowering.lower(generators.one_f_one_b(**sizes)).mailbox == 6
  two_slots = lowering.lower(generators.one_f_one_b_two_slots(**sizes))
  assert [(r.slot, r.direction) for r in two_slots.routes] == [(0, 1), (1, -1)]
  # The stages form a ring only if they have several chunks.
  assert two_slots.routes[0].pairs == ((0, 1), (1, 2), (2, 3))
  ring = lowering.lower(generators.interleaved_two_slots(**sizes))
  assert ring.routes[0].pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
  assert two_slots.has_local == (True, False)


@pytest.mark.parametrize(
  ("make", "slots"),
  [
    pytest.param(testing.gpipe, 8, id="gpipe"),
    pytest.param(generators.one_f_one_b, 4, id="1f1b"),
    pytest.param(generators.one_f_one_b_two_slots, 7, id="two-slot"),
    pytest.param(generators.interleaved_two_slots, 11, id="interleaved"),
  ],
)
def test_residuals_have_the_slots_of_the_neediest_stage(make, slots):
  made = make(num_stages=4, num_microbatches=8)
  lowered = lowering.lower(made, lowering.Residuals.SAVE)
  # One more is never read.
  assert lowered.residuals == slots + 1
  assert slots == max(testing.count_in_flight(made))


def test_memory_does_not_grow_with_microbatches():
  made = [
    lowering.lower(
      generators.one_f_one_b_two_slots(num_stages=4, num_microbatches=m)
    )
    for m in (16, 64)
  ]
  assert made[0].mailbox == made[1].mailbox
  np.testing.assert_array_equal(made[0].kinds, made[1].kinds)
