"""Validation of dataclass fields, for `__post_init__`."""


def check_positive(owner: object, *fields: str) -> None:
  """Raises ValueError unless each field is positive, or None."""
  for field in fields:
    value = getattr(owner, field)
    if value is not None and value <= 0:
      raise ValueError(
        f"{type(owner).__name__}.{field} must be positive, got {value}."
      )


def check_not_empty(owner: object, *fields: str) -> None:
  """Raises ValueError if a field is empty."""
  for field in fields:
    if not getattr(owner, field):
      raise ValueError(f"{type(owner).__name__}.{field} must not be empty.")


def check_ids(owner: object, *fields: str, vocab_size: int | None) -> None:
  """Raises ValueError unless each field is None or an id below `vocab_size`."""
  for field in fields:
    value = getattr(owner, field)
    if value is None or 0 <= value < (vocab_size or value + 1):
      continue
    raise ValueError(
      f"{type(owner).__name__}.{field} must be an id below vocab_size"
      f" ({vocab_size}), got {value}."
    )
