"""Tests for the generators of schedules."""

import pytest

from paxon.pipeline.schedules import generators, testing


def _written(schedule):
  """Each stage as text, one column a tick: `F0`, `B1.1` on the second chunk."""

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
  assert _written(testing.gpipe(num_stages=2, num_microbatches=2)) == [
    "F0 F1 - - B0 B1",
    "- F0 F1 B0 B1 -",
  ]
  made = generators.one_f_one_b(num_stages=2, num_microbatches=3)
  assert _written(made) == [
    "F0 F1 - B0 F2 B1 - B2",
    "- F0 B0 F1 B1 F2 B2 -",
  ]
  made = generators.one_f_one_b_two_slots(num_stages=2, num_microbatches=3)
  assert _written(made) == [
    "F0 F1 F2+B0 B1 B2",
    "- F0+B0 F1+B1 F2+B2 -",
  ]
  made = generators.interleaved_two_slots(num_stages=2, num_microbatches=2)
  assert _written(made) == [
    "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1",
    "- F0 F1 F0.1+B0.1 F1.1+B1.1 B0 B1 -",
  ]


@pytest.mark.parametrize(
  ("p", "m"), [(1, 3), (2, 6), (4, 4), (4, 8), (3, 12), (4, 32)]
)
def test_ticks_and_memory_are_the_papers(p, m):
  """P stages, M microbatches, v chunks; memory in chunks in flight."""
  sizes = {"num_stages": p, "num_microbatches": m}
  plain = generators.one_f_one_b(**sizes)
  assert len(plain.ticks) == 2 * (m + p - 1)
  assert testing.count_in_flight(plain) == [min(m, p - s) for s in range(p)]
  made = generators.one_f_one_b_two_slots(**sizes)
  assert len(made.ticks) == m + 2 * (p - 1)
  assert testing.count_in_flight(made) == [
    min(m, 2 * (p - s) - 1) for s in range(p)
  ]
  for v in (2, 3):
    made = generators.interleaved_two_slots(**sizes, num_chunks=v)
    # F + B of M microbatches, and a bubble of 1/v of GPipe's.
    assert len(made.ticks) == v * m + v * p - 1 + p - 1
    assert testing.count_in_flight(made) == [
      min(v * m, 2 * (p - 1 - s) + (v - 1) * p + 1) for s in range(p)
    ]


def test_fewer_microbatches_than_stages():
  for make in (
    generators.one_f_one_b,
    generators.one_f_one_b_two_slots,
  ):
    made = make(num_stages=4, num_microbatches=2)
    assert max(testing.count_in_flight(made)) == 2


@pytest.mark.parametrize("make", list(generators.SCHEDULES.values()))
@pytest.mark.parametrize(
  ("stages", "microbatches", "message"),
  [
    (2, 0, r"num_microbatches must be positive, got 0"),
    (0, 2, r"num_stages must be positive, got 0"),
  ],
)
def test_sizes_must_be_positive(make, stages, microbatches, message):
  with pytest.raises(ValueError, match=message):
    make(num_stages=stages, num_microbatches=microbatches)


def test_interleaved_schedules_need_a_multiple_of_the_stages():
  with pytest.raises(
    ValueError,
    match=r"num_microbatches \(6\) must be a multiple of num_stages \(4\)",
  ):
    generators.interleaved_two_slots(num_stages=4, num_microbatches=6)


def test_schedules_are_found_by_name():
  assert generators.find("1f1b") is generators.one_f_one_b
  with pytest.raises(
    ValueError,
    match=r"'1f1b_two_slot' is not a schedule; use one of 1f1b, 1f1b_two_slots,"
    r" interleaved_two_slots, .* Did you mean '1f1b_two_slots'\?",
  ):
    generators.find("1f1b_two_slot")
  with pytest.raises(ValueError, match=r"'zb_h1' is not .* unset it for GPipe"):
    generators.find("zb_h1")
