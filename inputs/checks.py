"""Validation of dataclass fields, for `__post_init__`."""

from collections.abc import Iterable, Sequence
from typing import Any


def get_values(owner: object, *fields: str) -> list[tuple[str, Any]]:
  """Returns the names and values of fields, for further checks."""
  return [(field, getattr(owner, field)) for field in fields]


def check_positive(
  owner: object, *fields: str, optional: Sequence[str] = ()
) -> None:
  """Raises ValueError unless each field is positive; `optional` may be None."""
  for field, value in get_values(owner, *fields, *optional):
    if value is None and field in optional:
      continue
    if value is None or value <= 0:
      raise ValueError(
        f"{type(owner).__name__}.{field} must be positive, got {value}."
      )


def check_not_empty(owner: object, *fields: str) -> None:
  """Raises ValueError if a field is empty."""
  for field, value in get_values(owner, *fields):
    if not value:
      raise ValueError(f"{type(owner).__name__}.{field} must not be empty.")


def check_ids(owner: object, *fields: str, vocab_size: int | None) -> None:
  """Raises ValueError unless each field is None or an id below `vocab_size`."""
  for field, value in get_values(owner, *fields):
    if value is None:
      continue
    if value >= 0 and (vocab_size is None or value < vocab_size):
      continue
    raise ValueError(
      f"{type(owner).__name__}.{field} must be an id below vocab_size"
      f" ({vocab_size}), got {value}."
    )


def check_keys(
  owner: object, state: Iterable[str], keys: Iterable[str]
) -> None:
  """Raises ValueError unless a state of `owner` has exactly these keys."""
  if set(state) != set(keys):
    raise ValueError(
      f"The state of a {type(owner).__name__} must have the keys"
      f" {sorted(keys)}, got {sorted(state)}."
    )
