"""Checks of the fields of settings."""

import math
from typing import Any


def check_positive(settings: Any, *fields: str) -> None:
  """Checks that fields are positive, finite numbers.

  Args:
    settings: Has the fields; its class is named in the message.
    *fields: Names.

  Raises:
    ValueError: One of them is not.
  """
  for field in fields:
    value = getattr(settings, field)
    if not (value > 0 and math.isfinite(value)):
      raise ValueError(
        f"{type(settings).__name__}.{field} must be positive and finite, got"
        f" {value}."
      )
