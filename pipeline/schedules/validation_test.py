"""Tests for the refusal of invalid tables."""

import dataclasses

import pytest

from paxon.pipeline.schedules import (
  gpipe,
  interleaved,
  one_f_one_b,
  operation,
  table,
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


def test_messages_that_meet_are_refused():
  """Two operations that send to one stage in one slot, from both sides."""
  made = interleaved.two_slots(num_stages=3, num_microbatches=3)
  validation.check(made)
  places = {(p.stage, op): p for p, op in made.places()}
  # One slot a tick for both: what was the second slot comes a tick later.
  ticks = []
  for row in made.ticks:
    ticks.append(tuple((cell or (None,))[:1] for cell in row))
    ticks.append(tuple(cell[1:2] if len(cell) > 1 else (None,) for cell in row))
  spread = table.Table(
    name="spread",
    pieces=made.pieces,
    num_microbatches=3,
    ticks=tuple(ticks),
  )
  validation.check(spread)
  assert len({op for _, op in places}) == 3 * 2 * 2


def test_receivers():
  made = interleaved.make(num_stages=2, num_microbatches=2, num_chunks=2)
  receive = {
    (stage, op.kind.value, op.chunk): validation.receiver(
      made.pieces, stage, op
    )
    for stage in (0, 1)
    for op in made.order(stage)
  }
  assert receive == {
    (0, "F", 0): 1,
    (1, "F", 0): 0,
    (0, "F", 1): 1,
    (1, "F", 1): None,
    (1, "X", 1): 0,
    (0, "X", 1): 1,
    (1, "X", 0): 0,
    (0, "X", 0): None,
  }
