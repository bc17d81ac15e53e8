"""Checks of fields, for `__post_init__`.

Messages name the field as the user wrote it. NaN fails every check; a field
that is `None` is unset and passes.
"""

from collections.abc import Callable
import math

import jax.numpy as jnp


def positive(part: object, *fields: str) -> None:
  """Raises ValueError unless each field is more than zero and finite."""
  _check(part, fields, lambda v: 0 < v < math.inf, "be positive")


def not_negative(part: object, *fields: str) -> None:
  """Raises ValueError unless each field is at least zero and finite."""
  _check(part, fields, lambda v: 0 <= v < math.inf, "not be negative")


def decay(part: object, *fields: str) -> None:
  """Raises ValueError unless each field is the decay of a running mean.

  What float32 rounds to 1 is none: Adam would divide by 1 - 1.
  """
  requirement = "be at least 0 and less than 1"
  _check(part, fields, lambda v: 0 <= v < 1, requirement)
  float32 = jnp.dtype(jnp.float32).type
  _check(part, fields, lambda v: float32(v) < 1, f"{requirement} in float32")


def floating(part: object, *fields: str) -> None:
  """Raises ValueError unless each field is a dtype of real numbers."""
  for field in fields:
    dtype = jnp.dtype(getattr(part, field))
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(
        f"{type(part).__name__}.{field} must be a floating dtype such as"
        f" bfloat16, got {dtype.name}."
      )


def _check(
  part: object,
  fields: tuple[str, ...],
  holds: Callable[[float], bool],
  requirement: str,
) -> None:
  for field in fields:
    value = getattr(part, field)
    if value is not None and not holds(value):
      raise ValueError(
        f"{type(part).__name__}.{field} must {requirement}, got {value}."
      )
