"""Tests for filters and sequential streams."""

import dataclasses

import numpy as np
import pytest

from paxon.inputs import packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import example_source
from paxon.inputs.streams import (
  example_stream,
  filtered,
  mixture,
  sequential_stream,
)


@dataclasses.dataclass
class Recorded:
  """Sequential examples that record where reading starts."""

  size: int
  starts: list[int] = dataclasses.field(default_factory=list)
  reads: int = 0

  def iterate(self, start, /):
    self.starts.append(start)
    for i in range(start, self.size):
      self.reads += 1
      yield example_source.lm_features(np.array([i, i], np.int32))


def _stream(source, **kwargs):
  defaults = {"shuffle_seed": 0, "shuffle_window": 10, "num_epochs": 1}
  return sequential_stream.SequentialExamples(
    source=source, **defaults | kwargs
  )


def _read(stream, position=None):
  position = stream.start() if position is None else position
  found = []
  while following := stream.next_example(position, step=0):
    reference, position = following
    found.append(int(stream.read(reference)["inputs"][0]))
  return found


def test_windows_are_shuffled_differently_in_each_epoch():
  found = _read(_stream(Recorded(25), num_epochs=2))
  first, second = found[:25], found[25:]
  assert sorted(first) == sorted(second) == list(range(25))
  assert first != second
  assert sorted(first[:10]) == list(range(10)) != first[:10]
  assert _read(_stream(Recorded(5), shuffle_seed=None)) == [0, 1, 2, 3, 4]


def test_resuming_reads_only_one_window():
  whole = _read(_stream(Recorded(95)))
  source = Recorded(95)
  stream = _stream(source)
  reference, _ = stream.next_example([0, 73], step=0)
  assert int(stream.read(reference)["inputs"][0]) == whole[73]
  assert source.starts == [70]
  assert source.reads == 10
  assert _read(stream, [0, 73]) == whole[73:]
  assert source.starts == [70]


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: _read(_stream(Recorded(0))), r"holds no examples"),
    (lambda: _stream(Recorded(1), shuffle_window=0), r"window must be posit"),
    (lambda: _stream(Recorded(1), num_epochs=0), r"num_epochs must be posit"),
    (lambda: _stream(Recorded(1)).check(3), r"must be an epoch and an index"),
    (lambda: _stream(Recorded(1)).check([0, -1]), r"index must be an integer"),
  ],
)
def test_rejects_invalid_fields_and_positions(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def _runs(lengths):
  return example_stream.Examples(
    source=example_source.InMemoryExamples(
      [np.arange(n + 1, dtype=np.int32) for n in lengths]
    ),
    shuffle_seed=None,
  )


def test_a_filter_keeps_long_examples():
  kept = filtered.Filtered(
    stream=_runs((1, 5, 2, 6)), keep=filtered.MinTokens(tokens=3)
  )
  made = packed_input.PackedInput(
    examples=kept,
    packing=packing_lib.Packing.NONE,
    global_batch_size=2,
    length=6,
  )
  assert made.get_next()["weights"].sum(axis=1).tolist() == [5, 6]
  # Two examples before that position were rejected.
  assert made.get_state()["position"] == 4
  made.check_readable()


def test_a_filter_that_keeps_nothing_is_an_error():
  kept = filtered.Filtered(
    stream=_runs((1, 2)), keep=filtered.MinTokens(tokens=3)
  )
  with pytest.raises(ValueError, match=r"MinTokens\(tokens=3\)\) rejected"):
    kept.next_example(0, step=0)


def test_a_finite_filter_that_keeps_nothing_is_an_error():
  stream = _runs((1, 2))
  stream.num_epochs = 1
  kept = filtered.Filtered(stream=stream, keep=filtered.MinTokens(tokens=3))
  with pytest.raises(ValueError, match=r"rejected every example of the str"):
    kept.next_example(0, step=0)
  # From a later position the filter cannot see the earlier examples.
  assert kept.next_example(1, step=0) is None


def test_a_filter_ends_where_a_mixture_never_reads_a_member():
  mixed = mixture.Mixture(
    members={"short": _runs((1, 2)), "long": _runs((5,))},
    weights={"short": 1.0, "long": 0.0},
    weight_changes={9: {"short": 0.0, "long": 1.0}},
  )
  kept = filtered.Filtered(
    stream=mixed, keep=filtered.MinTokens(tokens=3), max_rejected=20
  )
  with pytest.raises(ValueError, match=r"rejected 21 consecutive .* is 20"):
    kept.next_example(kept.start(), step=0)
  assert kept.next_example(kept.start(), step=9)[0] == ["long", 0]
  with pytest.raises(ValueError, match=r"max_rejected must be positive"):
    filtered.Filtered(stream=mixed, keep=bool, max_rejected=0)
