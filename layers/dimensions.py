"""Checks of fields that are sizes: dimensions, numbers of heads or layers."""

# XLA counts the entries of a dimension in int32 on most devices, and no array
# of this width was meant.
_LIMIT = 2**31


def check(part: object, *fields: str) -> None:
  """Raises ValueError unless each field is positive and less than 2**31.

  Args:
    part: Whose `__post_init__` asks; its class is named in the message.
    *fields: Names of integer fields; None is unset and passes.
  """
  for field in fields:
    value = getattr(part, field)
    if value is None:
      continue
    name = f"{type(part).__name__}.{field}"
    if value <= 0:
      raise ValueError(f"{name} must be positive, got {value}.")
    if value >= _LIMIT:
      raise ValueError(f"{name} must be less than 2**31, got {value}.")
