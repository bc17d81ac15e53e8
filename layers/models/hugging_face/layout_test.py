"""Tests for the places of arrays in tensors."""

import numpy as np
import pytest

from paxon.layers.models.hugging_face import layout

_SIZES = {"N": 2, "H": 3, "D": 5, "C": 4}


def test_dimensions_are_taken_apart_and_moved():
  found = layout.Layout("(N C H) D -> D C N H", _SIZES)
  assert found.their_shape == (24, 5)
  assert found.our_shape == (5, 4, 2, 3)
  theirs = np.arange(120).reshape(24, 5)
  ours = found.to_ours(theirs)
  assert ours.shape == found.our_shape
  for n, c, h, d in np.ndindex(2, 4, 3, 5):
    assert ours[d, c, n, h] == theirs[(n * 4 + c) * 3 + h, d]
  np.testing.assert_array_equal(found.to_theirs(ours), theirs)


def test_a_vector():
  found = layout.Layout("(N H) -> N H", _SIZES)
  assert found.to_ours(np.arange(6)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_both_sides_have_the_same_dimensions():
  with pytest.raises(ValueError, match="'N D -> D' must have the same"):
    layout.Layout("N D -> D", _SIZES)


def test_sizes_are_given():
  with pytest.raises(ValueError, match=r"needs the size of 'F'.*\['C', 'D'"):
    layout.Layout("F D -> F D", _SIZES)
