"""Tests for formatted quantities."""

import pytest

from paxon.runner import units


@pytest.mark.parametrize(
  ("number", "text"),
  [
    (0, "0 B"),
    (1023, "1023 B"),
    (1024, "1.00 KiB"),
    (3 * 2**19, "1.50 MiB"),
    (2**30, "1.00 GiB"),
    (3 * 2**40, "3.00 TiB"),
    (2**72, "4,096.00 EiB"),
  ],
)
def test_sizes(number, text):
  assert units.size(number) == text


@pytest.mark.parametrize(
  ("number", "text"),
  [(0, "0 s"), (1.25, "1.25 s"), (0.0125, "12.5 ms"), (1.84e-5, "18.4 us")],
)
def test_seconds(number, text):
  assert units.seconds(number) == text


def test_flops_and_shares():
  assert units.flops(12.897e9) == "12.897 GFLOP"
  assert units.share(0.42) == "42 %"
  assert units.share(0.0001) == "< 0.1 %"
