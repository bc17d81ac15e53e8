"""Tests for checks of sizes."""

import dataclasses

import pytest

from paxon.layers import dimensions


@dataclasses.dataclass
class _Part:
  width: int | None


@pytest.mark.parametrize("width", [1, 2**31 - 1, None])
def test_sizes_pass(width):
  dimensions.check(_Part(width), "width")


@pytest.mark.parametrize("width", [0, -1])
def test_a_size_that_is_not_positive_is_refused(width):
  with pytest.raises(
    ValueError, match=rf"_Part\.width must be positive, got {width}\.$"
  ):
    dimensions.check(_Part(width), "width")


def test_a_size_beyond_int32_is_refused():
  message = r"_Part\.width must be less than 2\*\*31, got 2147483648\.$"
  with pytest.raises(ValueError, match=message):
    dimensions.check(_Part(2**31), "width")
