"""Validation of dataclass fields, for `__post_init__`.

Errors name the class and the field. None passes every check, NaN fails every
check.
"""

from collections.abc import Callable
import math
import re
from typing import Any

import jax.numpy as jnp

# XLA uses int32 for the size of a dimension on most devices.
_MAX_SIZE = 2**31 - 1

# Largest divisor that an error proposes, except the number itself.
_MAX_PROPOSED = 256


def get_values(owner: object, *fields: str) -> list[tuple[str, Any]]:
  """Returns the names and values of fields, for further checks."""
  return [(field, getattr(owner, field)) for field in fields]


def check_size(owner: object, *fields: str) -> None:
  """Raises ValueError unless each field is a possible dimension of an array."""
  check_positive(owner, *fields)
  _check(owner, fields, lambda v: v <= _MAX_SIZE, "must be less than 2**31")


def check_positive(owner: object, *fields: str) -> None:
  """Raises ValueError unless each field is positive and finite."""
  _check(owner, fields, lambda v: 0 < v < math.inf, "must be positive")


def check_non_negative(owner: object, *fields: str) -> None:
  """Raises ValueError unless each field is at least zero and finite."""
  _check(owner, fields, lambda v: 0 <= v < math.inf, "must not be negative")


def check_interval(owner: object, interval: str, *fields: str) -> None:
  """Raises ValueError unless each field is in an interval, such as `"[0, 1)"`.

  Square brackets include the end.
  """
  low, high = (float(number) for number in interval[1:-1].split(","))

  def is_inside(value: float) -> bool:
    above = low <= value if interval[0] == "[" else low < value
    return above and (value <= high if interval[-1] == "]" else value < high)

  _check(owner, fields, is_inside, f"must be in {interval}")


def check_decay(owner: object, *fields: str) -> None:
  """Raises ValueError unless each field is in [0, 1), also in float32.

  Decays that float32 rounds to 1 are rejected because Adam divides by
  1 - decay.
  """
  check_interval(owner, "[0, 1)", *fields)
  _check(
    owner,
    fields,
    lambda v: jnp.dtype(jnp.float32).type(v) < 1,
    "must be in [0, 1) in float32",
  )


def check_floating(owner: object, *fields: str) -> None:
  """Raises ValueError unless each field is a floating dtype."""
  for field, value in get_values(owner, *fields):
    dtype = jnp.dtype(value)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        f"{type(owner).__name__}.{field} must be a floating dtype such as"
        f" bfloat16, got {dtype.name}."
      )


def check_pattern(field: str, pattern: str | None) -> None:
  """Raises ValueError if a value of `field` is no regular expression."""
  try:
    re.compile(pattern or "")
  except re.error as error:
    raise ValueError(
      f"{field} must be a regular expression, got {pattern!r}: {error}."
    ) from error


def check_multiple(owner: object, field: str, divisor: str) -> None:
  """Raises ValueError unless one positive field is a multiple of another."""
  (_, value), (_, by) = get_values(owner, field, divisor)
  if value % by == 0:
    return
  # A search up to a huge number would take long.
  small = range(1, min(value - 1, _MAX_PROPOSED) + 1)
  divisors = [*(n for n in small if value % n == 0), value]
  *first, last = map(str, divisors)
  proposed = f"{', '.join(first)} or {last}" if first else last
  raise ValueError(
    f"{type(owner).__name__}.{field} ({value}) must be a multiple of {divisor}"
    f" ({by}); use {proposed}."
  )


def _check(
  owner: object,
  fields: tuple[str, ...],
  holds: Callable[..., bool],
  requirement: str,
) -> None:
  for field, value in get_values(owner, *fields):
    if value is not None and not holds(value):
      got = repr(value) if isinstance(value, str) else value
      raise ValueError(
        f"{type(owner).__name__}.{field} {requirement}, got {got}."
      )
