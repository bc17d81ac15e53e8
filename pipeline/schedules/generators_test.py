"""Tests for the generators of schedules."""

import itertools

import pytest

from paxon.pipeline.schedules import (
  closed_forms,
  costs,
  dependencies,
  gpipe,
  interleaved,
  one_f_one_b,
  operation,
  simulation,
  table,
  validation,
  zero_bubble,
)

SIZES = ((1, 3), (2, 6), (4, 4), (4, 8))
UNEQUAL = costs.Costs(
  forward=1.0, input_gradient=1.25, weight_gradient=0.75, recompute=0.0
)


def _written(schedule):
  """Each stage as text, one column a tick: `F0`, `X1.1` on the second chunk."""

  def cell(ops):
    words = []
    for op in ops:
      if op is not None:
        chunk = f".{op.chunk}" if op.chunk else ""
        words.append(f"{op.kind.value}{op.microbatch}{chunk}")
    return "+".join(words) or "-"

  stages = zip(*schedule.ticks, strict=True)
  return [" ".join(cell(ops) for ops in stage) for stage in stages]


def test_tables_are_those_of_the_papers():
  assert _written(gpipe.make(num_stages=2, num_microbatches=2)) == [
    "F0 F1 - - X0 X1",
    "- F0 F1 X0 X1 -",
  ]
  assert _written(one_f_one_b.make(num_stages=2, num_microbatches=3)) == [
    "F0 F1 - X0 F2 X1 - X2",
    "- F0 X0 F1 X1 F2 X2 -",
  ]
  assert _written(one_f_one_b.two_slots(num_stages=2, num_microbatches=3)) == [
    "F0 F1 F2+X0 X1 X2",
    "- F0+X0 F1+X1 F2+X2 -",
  ]
  assert _written(
    interleaved.two_slots(num_stages=2, num_microbatches=2, num_chunks=2)
  ) == [
    "F0 F1 F0.1 F1.1 X0.1 X1.1 X0 X1",
    "- F0 F1 F0.1+X0.1 F1.1+X1.1 X0 X1 -",
  ]
  assert _written(zero_bubble.make_h1(num_stages=2, num_microbatches=2)) == [
    "F0 F1 - B0 W0 B1 W1",
    "- F0 B0 F1 B1 W0 W1",
  ]


@pytest.mark.parametrize(
  ("form", "size"),
  list(itertools.product(closed_forms.CLOSED_FORMS, SIZES)),
  ids=lambda x: x.make.__module__.split(".")[-1] if hasattr(x, "make") else x,
)
def test_bubble_and_memory_are_the_closed_forms(form, size):
  num_stages, num_microbatches = size
  made = form.make(num_stages=num_stages, num_microbatches=num_microbatches)
  validation.check(made)
  equal = costs.Costs()
  figures = simulation.simulate(made, costs=equal)
  bubble = form.bubble(num_stages, equal)
  if form.is_bound:
    assert figures.asynchronous.bubble >= bubble
    h1 = simulation.simulate(
      zero_bubble.make_h1(
        num_stages=num_stages, num_microbatches=num_microbatches
      )
    )
    assert figures.asynchronous.bubble <= h1.asynchronous.bubble
  else:
    assert figures.asynchronous.bubble == pytest.approx(bubble)
  for stage, in_flight in enumerate(figures.in_flight):
    expected = form.in_flight(num_stages, num_microbatches, stage)
    if form.is_bound:
      assert in_flight <= expected
    else:
      assert in_flight == expected


@pytest.mark.parametrize(
  "make",
  [
    gpipe.make,
    one_f_one_b.make,
    one_f_one_b.two_slots,
    interleaved.make,
    interleaved.two_slots,
    zero_bubble.make_h1,
  ],
)
def test_bubble_is_the_closed_form_at_unequal_costs(make):
  (form,) = [f for f in closed_forms.CLOSED_FORMS if f.make is make]
  figures = simulation.simulate(
    make(num_stages=4, num_microbatches=8), costs=UNEQUAL
  )
  assert figures.asynchronous.bubble == pytest.approx(form.bubble(4, UNEQUAL))


def test_three_chunks_have_a_third_of_the_bubble():
  for make in (interleaved.make, interleaved.two_slots):
    made = make(num_stages=4, num_microbatches=8, num_chunks=3)
    validation.check(made)
    figures = simulation.simulate(made)
    assert figures.asynchronous.bubble == pytest.approx(3 * 3 / 3)
    # 2 (P - 1 - s) + (v - 1) P + 1 thirds of a stage.
    assert figures.in_flight[0] == pytest.approx((2 * 3 + 2 * 4 + 1) / 3)


def test_greedy_v_keeps_a_small_bubble():
  bubbles = {}
  for p, m in ((4, 8), (2, 6)):
    made = zero_bubble.make_v(num_stages=p, num_microbatches=m)
    bubbles[p, m] = simulation.simulate(made).asynchronous.bubble
  assert bubbles == {(4, 8): 1.5, (2, 6): 1.0}


def test_wide_latency_needs_more_ticks():
  """Sending that overlaps with a tick: 38 ticks instead of 22."""
  made = one_f_one_b.make(num_stages=4, num_microbatches=8)
  orders = [made.order(stage) for stage in range(4)]
  late = table.from_orders(orders, name="late", pieces=made.pieces, latency=2)
  validation.check(late)
  assert (len(made.ticks), len(late.ticks)) == (22, 38)


def test_fewer_microbatches_than_stages():
  for make in (gpipe.make, one_f_one_b.make, one_f_one_b.two_slots):
    validation.check(make(num_stages=4, num_microbatches=2))


@pytest.mark.parametrize(
  ("make", "stages", "microbatches", "message"),
  [
    (gpipe.make, 2, 0, r"num_microbatches must be at least 1, got 0"),
    (gpipe.make, 0, 2, r"num_stages must be positive, got 0|has orders for 0"),
    (
      interleaved.make,
      4,
      6,
      r"num_microbatches \(6\) must be a multiple of num_stages \(4\)",
    ),
    (interleaved.two_slots, 4, 6, r"must be a multiple of num_stages"),
    (zero_bubble.make_h1, 4, 3, r"must be at least 4, got 3"),
    (zero_bubble.make_v, 4, 3, r"must be at least 4, got 3"),
  ],
)
def test_sizes_that_do_not_suit_are_refused(
  make, stages, microbatches, message
):
  with pytest.raises(ValueError, match=message):
    make(num_stages=stages, num_microbatches=microbatches)


def test_orders_that_wait_for_each_other_are_named():
  f, x = operation.Kind.FORWARD, operation.Kind.BACKWARD
  first = [operation.Operation(x, 0), operation.Operation(f, 0)]
  second = [operation.Operation(f, 0), operation.Operation(x, 0)]
  with pytest.raises(
    ValueError,
    match=(
      r"'mine' wait for each other: stage 0 runs X\(microbatch 0, chunk 0\)"
      r" before F\(microbatch 0, chunk 0\) of stage 0; stage 1"
    ),
  ):
    table.from_orders(
      [first, second], name="mine", pieces=dependencies.Pieces(num_stages=2)
    )


def test_orders_for_other_stages_are_refused():
  with pytest.raises(ValueError, match=r"orders for 1 stages, needed are 2"):
    table.from_orders(
      [[]], name="mine", pieces=dependencies.Pieces(num_stages=2)
    )
