"""Tests for what schedules cost, and for their pictures."""

from xml.etree import ElementTree

import pytest

from paxon.pipeline.schedules import (
  choosing,
  costs,
  drawing,
  gpipe,
  interleaved,
  lifetimes,
  one_f_one_b,
  operation,
  simulation,
  table,
  zero_bubble,
)

RECOMPUTE = costs.Costs(recompute=1.0)


@pytest.mark.parametrize(
  ("make", "asynchronous", "lock_step", "again"),
  [
    # Counted by hand from the tables: ticks times the dearest operation.
    pytest.param(gpipe.make, 105, 105, 140, id="gpipe"),
    pytest.param(one_f_one_b.make, 105, 136, 202, id="1f1b"),
    pytest.param(one_f_one_b.two_slots, 105, 105, 140, id="two-slot"),
    pytest.param(one_f_one_b.split, 102, 102, 199, id="split"),
    pytest.param(interleaved.make, 100.5, 130, 193, id="interleaved"),
    pytest.param(
      interleaved.two_slots, 100.5, 100.5, 134, id="interleaved-two-slot"
    ),
    pytest.param(zero_bubble.make_h1, 99, 99, 193, id="zb-h1"),
    pytest.param(zero_bubble.make_v, 97.5, 97.5, 181.5, id="zb-v"),
  ],
)
def test_two_clocks(make, asynchronous, lock_step, again):
  made = make(num_stages=4, num_microbatches=32)
  figures = simulation.simulate(made)
  assert figures.asynchronous.total == pytest.approx(asynchronous)
  assert figures.lock_step.total == pytest.approx(lock_step)
  figures = simulation.simulate(made, costs=RECOMPUTE)
  assert figures.lock_step.total == pytest.approx(again)


def test_asynchronous_is_never_later_than_lock_step():
  for make in choosing.ALL:
    figures = simulation.simulate(
      make(num_stages=4, num_microbatches=8),
      costs=costs.Costs(forward=1.0, input_gradient=1.2, weight_gradient=0.8),
    )
    clocks = figures.asynchronous, figures.lock_step
    assert clocks[0].total <= clocks[1].total + 1e-9
    for clock in clocks:
      assert max(end for _, end in clock.spans.values()) <= clock.total + 1e-9


def test_messages_take_time_on_both_clocks():
  made = gpipe.make(num_stages=2, num_microbatches=1)
  figures = simulation.simulate(made, costs=costs.Costs(message=0.5))
  # F, sent, F and X on the last stage, sent back, X.
  assert figures.asynchronous.total == 1 + 0.5 + 1 + 2 + 0.5 + 2
  assert figures.lock_step.total == 6 + 4 * 0.5


@pytest.mark.parametrize(("message", "lock_step"), [(0.5, 7.0), (1.5, 10.0)])
def test_with_a_latency_of_two_messages_move_beside_a_tick(message, lock_step):
  made = gpipe.make(num_stages=2, num_microbatches=1)
  orders = [made.order(stage) for stage in range(2)]
  late = table.from_orders(orders, name="late", pieces=made.pieces, latency=2)
  figures = simulation.simulate(late, costs=costs.Costs(message=message))
  # F, sent, F and X on the last stage, sent back, X: six ticks.
  assert figures.lock_step.total == lock_step
  assert figures.asynchronous.total == 6 + 2 * message


@pytest.mark.parametrize(
  ("make", "allocated"),
  [
    pytest.param(gpipe.make, (0, 8, 0), id="gpipe"),
    pytest.param(one_f_one_b.make, (0, 4, 0), id="1f1b"),
    pytest.param(one_f_one_b.two_slots, (0, 7, 0), id="two-slot"),
    pytest.param(interleaved.make, (0, 11, 0), id="interleaved"),
    pytest.param(interleaved.two_slots, (0, 11, 0), id="interleaved-two-slot"),
    pytest.param(zero_bubble.make_h1, (0, 4, 4), id="zb-h1"),
    pytest.param(zero_bubble.make_v, (0, 8, 8), id="zb-v"),
  ],
)
def test_all_stages_allocate_what_one_needs(make, allocated):
  figures = simulation.simulate(make(num_stages=4, num_microbatches=8))
  assert tuple(figures.allocated.values()) == allocated


@pytest.mark.parametrize("make", choosing.ALL)
def test_slots_are_never_shared_by_what_lives_at_once(make):
  made = make(num_stages=4, num_microbatches=8)
  for stage in range(4):
    kept = lifetimes.of_stage(made, stage=stage)
    for lives in (kept.residuals, kept.weight_pairs, kept.in_flight):
      slots = lifetimes.assign(lives)
      # Written at its begin, every slot still holds the same at its end.
      events = sorted(
        [(life.begin, 1, life) for life in lives]
        + [(life.end, 0, life) for life in lives],
        key=lambda x: (x[0], x[1]),
      )
      memory = {}
      for _, is_begin, life in events:
        if is_begin:
          memory[slots[life]] = life
        else:
          assert memory[slots[life]] == life
      assert max(slots.values(), default=-1) + 1 == lifetimes.peak(lives)
      assert lifetimes.peak(lives) == _most_at_once(lives)


def _most_at_once(lives):
  return max(
    (
      sum(other.begin <= life.begin <= other.end for other in lives)
      for life in lives
    ),
    default=0,
  )


def test_recompute_keeps_inputs_first():
  made = gpipe.make(num_stages=1, num_microbatches=2)
  f, r, x = (
    operation.Kind.FORWARD,
    operation.Kind.RECOMPUTE,
    operation.Kind.BACKWARD,
  )
  op = operation.Operation
  ticks = (
    ((op(f, 0),),),
    ((op(f, 1),),),
    ((op(r, 0),),),
    ((op(x, 0),),),
    ((op(r, 1),),),
    ((op(x, 1),),),
  )
  made = made.__class__(
    name="again", pieces=made.pieces, num_microbatches=2, ticks=ticks
  )
  figures = simulation.simulate(made, costs=RECOMPUTE)
  assert figures.allocated == {"inputs": 2, "residuals": 1, "weight_pairs": 0}
  # The recomputation is an operation of its own and not counted twice.
  assert figures.asynchronous.total == 2 * (1 + 1 + 2)


def test_costs_must_be_times():
  with pytest.raises(ValueError, match=r"Costs.forward must be finite"):
    costs.Costs(forward=-1.0)
  with pytest.raises(ValueError, match=r"Costs.message must be finite.*nan"):
    costs.Costs(message=float("nan"))


def test_choice_is_fastest_in_lock_step_that_fits():
  sizes = {"num_stages": 4, "num_microbatches": 8}
  assert choosing.choose(**sizes).schedule.name == "ZB-V"
  again = choosing.choose(**sizes, costs=RECOMPUTE)
  assert again.schedule.name == "interleaved two-slot, 2 chunks"
  # Of two that are as fast, the simplest.
  pair = (one_f_one_b.two_slots, gpipe.make)
  chosen = choosing.choose(pair, **sizes)
  assert chosen.schedule.name == "1F1B two-slot"
  small = choosing.choose(
    (*pair, one_f_one_b.make), **sizes, costs=RECOMPUTE, max_in_flight=4.0
  )
  assert small.schedule.name == "1F1B"
  with pytest.raises(
    ValueError,
    match=r"No schedule suits 4 stages and 2 microbatches: GPipe keeps 2"
    r" microbatches on a stage, above max_in_flight \(1\).*at least 4, got 2",
  ):
    choosing.choose(
      (gpipe.make, zero_bubble.make_h1),
      num_stages=4,
      num_microbatches=2,
      max_in_flight=1.0,
    )


def test_pictures_have_a_box_an_operation():
  made = zero_bubble.make_h1(num_stages=2, num_microbatches=3)
  clock = simulation.simulate(made).lock_step
  svg = drawing.to_svg(made, clock=clock, title="a < b")
  root = ElementTree.fromstring(svg)
  titles = [str(e.text) for e in root.iter() if e.tag.endswith("title")]
  assert sorted(titles) == sorted(
    str(op) for stage in (0, 1) for op in made.order(stage)
  )
  texts = [e.text for e in root.iter() if e.tag.endswith("text")]
  assert texts[0] == "a < b"
  assert {"stage 0", "stage 1", "gradient of weights"} <= set(texts)
