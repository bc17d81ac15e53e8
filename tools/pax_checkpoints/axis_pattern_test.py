"""Tests of axis patterns."""

import numpy as np
import pytest

from paxon.tools.pax_checkpoints import axis_pattern


def test_groups_transposes_and_stacks():
  x = np.arange(24).reshape(2, 12)
  pattern = axis_pattern.parse("D (N H) -> N H D")
  sizes = pattern.find_sizes((3, 4, 2))
  assert pattern.input_shape(sizes) == (2, 12)
  np.testing.assert_array_equal(
    pattern.apply([x], sizes), x.reshape(2, 3, 4).transpose(1, 2, 0)
  )
  stacked = axis_pattern.parse("D H -> D C H")
  assert stacked.stacked == "C"
  found = stacked.apply([x, x + 1], stacked.find_sizes((2, 2, 12)))
  np.testing.assert_array_equal(found, np.stack([x, x + 1], axis=1))
  assert str(pattern) == "D (N H) -> N H D"


def test_drops_the_axis_of_a_mean():
  pattern = axis_pattern.parse("C D N H -> D C N H").drop("N")
  assert str(pattern) == "C D H -> D C H"


@pytest.mark.parametrize(
  "text",
  ["D V", "D V -> V", "D -> D V W", "D D -> D", "D V -> (V D)", "1 V -> V"],
)
def test_rejects_what_is_no_pattern(text):
  with pytest.raises(ValueError, match="must"):
    axis_pattern.parse(text)
