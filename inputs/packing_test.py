"""Tests for packing: matrices by hand, and properties of any packing."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from paxon.inputs import packing


def _runs(*runs):
  return [np.array(run, np.int32) for run in runs]


def _assert_batch(batch, **expected):
  assert batch.keys() == expected.keys()
  for key, rows in expected.items():
    np.testing.assert_array_equal(batch[key], rows, err_msg=key)
    assert batch[key].dtype == (np.float32 if key == "weights" else np.int32)


def test_two_documents_in_two_rows():
  # The matrices of the module's docstring, with a = 5, b = 6, c = 7.
  batch = packing.pack_rows(
    _runs([1, 5, 6, 2], [1, 7, 2]), num_rows=2, length=4
  )
  _assert_batch(
    batch,
    inputs=[[1, 5, 6, 1], [7, 0, 0, 0]],
    targets=[[5, 6, 2, 7], [2, 0, 0, 0]],
    weights=[[1, 1, 1, 1], [1, 0, 0, 0]],
    positions=[[0, 1, 2, 0], [0, 0, 0, 0]],
    segment_ids=[[1, 1, 1, 2], [1, 0, 0, 0]],
  )


def test_one_document_over_three_rows_and_an_empty_one_after_it():
  batch = packing.pack_rows(
    _runs([1, 5, 6, 7, 8, 9, 2], [1, 2]), num_rows=4, length=3, pad_id=4
  )
  _assert_batch(
    batch,
    inputs=[[1, 5, 6], [7, 8, 9], [1, 4, 4], [4, 4, 4]],
    targets=[[5, 6, 7], [8, 9, 2], [2, 4, 4], [4, 4, 4]],
    weights=[[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]],
    positions=[[0, 1, 2], [0, 1, 2], [0, 0, 0], [0, 0, 0]],
    segment_ids=[[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]],
  )


def test_equal_documents_beside_each_other_are_two_segments():
  batch = packing.pack_rows(
    _runs([1, 2], [1, 2], [1, 5, 2]), num_rows=1, length=4
  )
  _assert_batch(
    batch,
    inputs=[[1, 1, 1, 5]],
    targets=[[2, 2, 5, 2]],
    weights=[[1, 1, 1, 1]],
    positions=[[0, 0, 0, 1]],
    segment_ids=[[1, 2, 3, 3]],
  )


def test_a_run_that_begins_in_a_document_is_a_segment_of_its_own():
  # Tokens 6 7 2 go on from a row of an earlier batch.
  batch = packing.pack_rows(_runs([6, 7, 2]), num_rows=1, length=2)
  _assert_batch(
    batch,
    inputs=[[6, 7]],
    targets=[[7, 2]],
    weights=[[1, 1]],
    positions=[[0, 1]],
    segment_ids=[[1, 1]],
  )


def test_no_runs_are_empty_rows():
  batch = packing.pack_rows([], num_rows=2, length=2, pad_id=4)
  zeros = np.zeros((2, 2))
  _assert_batch(
    batch,
    inputs=zeros + 4,
    targets=zeros + 4,
    weights=zeros,
    positions=zeros,
    segment_ids=zeros,
  )


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  counts=st.lists(st.integers(1, 9), max_size=12),
  length=st.integers(1, 7),
  spare=st.integers(0, 3),
)
def test_packing_keeps_every_pair_in_order(counts, length, spare):
  # Every token of every run is different, so that a pair names its place.
  starts = np.cumsum([0, *[count + 1 for count in counts]]) + 10
  runs = [
    np.arange(start, start + count + 1, dtype=np.int32)
    for start, count in zip(starts, counts, strict=False)
  ]
  num_rows = -(-sum(counts) // length) + spare
  batch = packing.pack_rows(runs, num_rows=num_rows, length=length)

  filled = batch["weights"] > 0
  pairs = list(
    zip(batch["inputs"][filled], batch["targets"][filled], strict=True)
  )
  assert pairs == [(t, t + 1) for run in runs for t in run[:-1]]
  assert batch["weights"].sum() == sum(counts)
  np.testing.assert_array_equal(filled, batch["segment_ids"] > 0)
  # Empty places come last.
  assert filled.ravel()[: sum(counts)].all()
  for row in range(num_rows):
    segments, positions = batch["segment_ids"][row], batch["positions"][row]
    previous = 0
    for place in range(length):
      if segments[place] == 0:
        assert not filled[row, place:].any()
        assert not batch["inputs"][row, place:].any()
        assert not positions[place:].any()
        break
      assert segments[place] - previous in (0, 1)
      is_new = segments[place] != previous
      if is_new:
        assert positions[place] == 0
      else:
        assert positions[place] == positions[place - 1] + 1
        # Only within a segment is the input the target before it.
        assert batch["inputs"][row, place] == batch["targets"][row, place - 1]
      previous = segments[place]


def test_rejects_too_many_targets():
  with pytest.raises(ValueError, match=r"7 targets do not fit in 2 rows of 3"):
    packing.pack_rows(_runs(range(8)), num_rows=2, length=3)


def test_rejects_a_run_without_a_target():
  with pytest.raises(ValueError, match=r"at least 2 tokens .* got runs of \[1"):
    packing.pack_rows(_runs([1, 5, 2], [1]), num_rows=1, length=8)
