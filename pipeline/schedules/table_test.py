"""Tests for timetables and their validation."""

import dataclasses

import pytest

from paxon.pipeline.schedules import generators, table, testing

F, B = table.Kind.FORWARD, table.Kind.BACKWARD


def _base():
  """Two stages, two microbatches: F0 F1 - - B0 B1 and - F0 F1 B0 B1 -."""
  return testing.gpipe(num_stages=2, num_microbatches=2)


def _with(schedule, changes):
  """The table with other cells: (tick, stage) to operations."""
  ticks = [list(row) for row in schedule.ticks]
  for (tick, stage), ops in changes.items():
    ticks[tick][stage] = tuple(ops)
  return dataclasses.replace(schedule, ticks=tuple(tuple(row) for row in ticks))


def _op(kind, microbatch, chunk=0):
  return table.Operation(kind, microbatch, chunk)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    pytest.param(
      {(0, 0): [_op(F, 1)], (1, 0): [_op(F, 0)]},
      r"tick 1, stage 1: F\(microbatch 0, chunk 0\) needs F\(microbatch 0,"
      r" chunk 0\) of stage 0 at an earlier tick, which runs at tick 1",
      id="two-swapped",
    ),
    pytest.param(
      {(0, 0): []},
      r"stage 0: F\(microbatch 0, chunk 0\) has not run by the end",
      id="one-dropped",
    ),
    pytest.param(
      {(4, 0): []},
      r"stage 0: B\(microbatch 0, chunk 0\) has not run by the end",
      id="no-backward",
    ),
    pytest.param(
      {(2, 0): [_op(F, 0)]},
      r"tick 2, stage 0: F\(microbatch 0, chunk 0\) runs again; it already ran"
      r" at tick 0",
      id="twice",
    ),
    pytest.param(
      {(2, 0): [_op(F, 7)]},
      r"tick 2, stage 0: F\(microbatch 7, chunk 0\) has microbatch 7, which"
      r" must be below 2",
      id="no-such-microbatch",
    ),
    pytest.param(
      {(2, 0): [_op(F, 0, 3)]},
      r"has chunk 3, which must be below 1",
      id="no-such-chunk",
    ),
    pytest.param(
      {(3, 0): [_op(B, 0)], (4, 0): []},
      r"tick 3, stage 0: B\(microbatch 0, chunk 0\) needs B\(microbatch 0,"
      r" chunk 0\) of stage 1 at an earlier tick, which runs at tick 3",
      id="same-tick-on-another-stage",
    ),
    pytest.param(
      {(2, 1): [_op(B, 1), _op(F, 1)], (4, 1): []},
      r"tick 2, stage 1: B\(microbatch 1, chunk 0\) needs F\(microbatch 1,"
      r" chunk 0\) of stage 1 earlier, which runs at tick 2",
      id="backward-before-forward",
    ),
  ],
)
def test_errors_name_tick_stage_and_operation(changes, message):
  with pytest.raises(ValueError, match=message):
    _with(_base(), changes)


def test_earlier_slots_of_a_tick_count_on_the_same_stage():
  made = generators.one_f_one_b_two_slots(num_stages=2, num_microbatches=2)
  cell = made.ticks[1][1]
  with pytest.raises(ValueError, match=r"tick 1, stage 1: B\(microbatch 0"):
    _with(made, {(1, 1): cell[::-1]})


def test_every_tick_needs_all_stages():
  made = _base()
  with pytest.raises(ValueError, match=r"tick 6: expected 2 stages, got 1"):
    dataclasses.replace(made, ticks=(*made.ticks, ((),)))


def test_orders_that_wait_for_each_other_are_rejected():
  first = [_op(B, 0), _op(F, 0)]
  second = [_op(F, 0), _op(B, 0)]
  with pytest.raises(
    ValueError,
    match=(
      r"'mine' wait for each other: stage 0 runs B\(microbatch 0, chunk 0\)"
      r" before F\(microbatch 0, chunk 0\) of stage 0; stage 1"
    ),
  ):
    table.from_orders([first, second], name="mine")
