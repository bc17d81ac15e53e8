"""Tests for the validation of fields."""

import dataclasses
import math
import re
from typing import Any

import pytest

from paxon.sharding import checks


@dataclasses.dataclass
class _Layer:
  width: Any = None
  groups: Any = None


_CHECKS = {
  "size": checks.check_size,
  "positive": checks.check_positive,
  "non_negative": checks.check_non_negative,
  "open": lambda owner, field: checks.check_interval(owner, "(0, 1)", field),
  "closed": lambda owner, field: checks.check_interval(owner, "[0, 1]", field),
}


@pytest.mark.parametrize(
  ("name", "values"),
  [
    ("size", (1, 2**31 - 1)),
    ("positive", (1, 1e-30)),
    ("non_negative", (0, 2.5)),
    ("open", (1e-6, 0.5)),
    ("closed", (0, 1)),
  ],
)
def test_valid_values_pass(name, values):
  for value in (*values, None):
    _CHECKS[name](_Layer(value), "width")


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    ("size", 0, "must be positive, got 0."),
    ("size", 2**31, "must be less than 2**31, got 2147483648."),
    ("positive", -1, "must be positive, got -1."),
    ("positive", math.inf, "must be positive, got inf."),
    ("positive", math.nan, "must be positive, got nan."),
    ("non_negative", -0.5, "must not be negative, got -0.5."),
    ("non_negative", math.nan, "must not be negative, got nan."),
    ("open", 1.0, "must be in (0, 1), got 1.0."),
    ("open", 0, "must be in (0, 1), got 0."),
    ("open", math.nan, "must be in (0, 1), got nan."),
    ("closed", 1.1, "must be in [0, 1], got 1.1."),
  ],
)
def test_invalid_values_are_rejected(name, value, message):
  expected = f"^{re.escape(f'_Layer.width {message}')}$"
  with pytest.raises(ValueError, match=expected):
    _CHECKS[name](_Layer(value), "width")


def test_the_first_invalid_field_is_named():
  with pytest.raises(ValueError, match=r"_Layer\.groups must be positive"):
    checks.check_positive(_Layer(width=1, groups=0), "width", "groups")


@pytest.mark.parametrize(
  ("width", "groups", "proposed"),
  [
    (12, 5, "1, 2, 3, 4, 6 or 12"),
    (1, 2, "1"),
    (2 * 10_007, 4, "1, 2 or 20014"),
  ],
)
def test_rejects_non_multiples(width, groups, proposed):
  checks.check_multiple(_Layer(width, groups=1), "width", "groups")
  expected = re.escape(
    f"_Layer.width ({width}) must be a multiple of groups ({groups}); use"
    f" {proposed}."
  )
  with pytest.raises(ValueError, match=f"^{expected}$"):
    checks.check_multiple(_Layer(width, groups), "width", "groups")
