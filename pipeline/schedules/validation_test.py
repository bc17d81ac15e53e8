"""Tests for the refusal of invalid tables."""

import dataclasses

import pytest

from paxon.pipeline.schedules import (
  gpipe,
  one_f_one_b,
  operation,
  validation,
)

F = operation.Kind.FORWARD
R = operation.Kind.RECOMPUTE
X = operation.Kind.BACKWARD
B = operation.Kind.INPUT_GRADIENT
W = operation.Kind.WEIGHT_GRADIENT


def _base():
  """Two stages, two microbatches: F0 F1 - - X0 X1 and - F0 F1 X0 X1 -."""
  return gpipe.make(num_stages=2, num_microbatches=2)


def _with(schedule, changes, **fields):
  """The table with other cells: (tick, stage) to operations."""
  ticks = [list(row) for row in schedule.ticks]
  for (tick, stage), ops in changes.items():
    ticks[tick][stage] = tuple(ops)
  return dataclasses.replace(
    schedule, ticks=tuple(tuple(row) for row in ticks), **fields
  )


def _op(kind, microbatch, chunk=0):
  return operation.Operation(kind, microbatch, chunk)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    pytest.param(
      {(0, 0): [_op(F, 1)], (1, 0): [_op(F, 0)]},
      r"tick 1, stage 1: F\(microbatch 0, chunk 0\) needs F\(microbatch 0,"
      r" chunk 0\) of stage 0 1 tick\(s\) earlier, which runs at tick 1",
      id="two-swapped",
    ),
    pytest.param(
      {(0, 0): []},
      r"stage 0: F\(microbatch 0, chunk 0\) has not run by the end",
      id="one-dropped",
    ),
    pytest.param(
      {(4, 0): []},
      r"stage 0: microbatch 0, chunk 0 needs X, or B and W, for its backward"
      r" pass; it has nothing",
      id="no-backward",
    ),
    pytest.param(
      {(4, 0): [_op(B, 0)]}, r"it has B", id="gradient-of-weights-missing"
    ),
    pytest.param(
      {(2, 0): [_op(F, 0)]},
      r"tick 2, stage 0: F\(microbatch 0, chunk 0\) runs again, it ran at"
      r" tick 0",
      id="twice",
    ),
    pytest.param(
      {(2, 0): [_op(F, 7)]},
      r"tick 2, stage 0: F\(microbatch 7, chunk 0\) has microbatch 7, it must"
      r" be below 2",
      id="no-such-microbatch",
    ),
    pytest.param(
      {(2, 0): [_op(F, 0, 3)]},
      r"has chunk 3, it must be below 1",
      id="no-such-chunk",
    ),
    pytest.param(
      {(3, 0): [_op(X, 0)], (4, 0): []},
      r"tick 3, stage 0: X\(microbatch 0, chunk 0\) needs X\(microbatch 0,"
      r" chunk 0\) of stage 1 1 tick\(s\) earlier, which runs at tick 3",
      id="same-tick-on-another-stage",
    ),
    pytest.param(
      {(4, 0): [_op(X, 0), _op(R, 0)]},
      r"tick 4, stage 0: X\(microbatch 0, chunk 0\) needs R\(microbatch 0,"
      r" chunk 0\) of stage 0 earlier",
      id="recompute-after-its-use",
    ),
    pytest.param(
      {(4, 0): [_op(W, 0), _op(B, 0)]},
      r"W\(microbatch 0, chunk 0\) needs B\(microbatch 0, chunk 0\) of stage 0"
      r" earlier",
      id="weights-before-input",
    ),
  ],
)
def test_says_where_and_what(changes, message):
  validation.check(_base())
  with pytest.raises(ValueError, match=message):
    validation.check(_with(_base(), changes))


def test_accepts_recompute_and_split_backward():
  validation.check(
    _with(
      _base(),
      {(4, 0): [_op(R, 0), _op(B, 0)], (5, 0): [_op(X, 1), _op(W, 0)]},
    )
  )


def test_earlier_slots_of_a_tick_count_on_the_same_stage():
  made = one_f_one_b.two_slots(num_stages=2, num_microbatches=2)
  validation.check(made)
  cell = made.ticks[1][1]
  with pytest.raises(ValueError, match=r"tick 1, stage 1: X\(microbatch 0"):
    validation.check(_with(made, {(1, 1): cell[::-1]}))


def test_latency_is_kept():
  made = dataclasses.replace(_base(), latency=2)
  with pytest.raises(ValueError, match=r"tick 1, stage 1.*2 tick\(s\) earlier"):
    validation.check(made)
  with pytest.raises(ValueError, match=r"latency must be 1 or 2 ticks, got 3"):
    validation.check(dataclasses.replace(_base(), latency=3))


def test_rows_have_all_stages():
  made = _base()
  with pytest.raises(ValueError, match=r"tick 6: has 1 stages, needed are 2"):
    validation.check(dataclasses.replace(made, ticks=(*made.ticks, ((),))))
