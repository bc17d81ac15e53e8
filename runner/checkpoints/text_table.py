"""Columns of text, and sizes as people read them."""

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB")


def lines(
  rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> list[str]:
  """Returns the rows with their columns aligned, without trailing blanks.

  Args:
    rows: Cells; all rows have the same number.
    right: The columns whose cells end together, such as numbers.
  """
  if not rows:
    return []
  columns = range(len(rows[0]))
  widths = [max(len(row[column]) for row in rows) for column in columns]
  return [
    "  ".join(
      row[column].rjust(widths[column])
      if column in right
      else row[column].ljust(widths[column])
      for column in columns
    ).rstrip()
    for row in rows
  ]


def size(num_bytes: int) -> str:
  """Returns a number of bytes in decimal units: `36.8 kB`."""
  value, unit = float(num_bytes), 0
  # What would be rounded to 1000 takes the next unit.
  while value >= 999.95 and unit + 1 < len(_UNITS):
    value, unit = value / 1000, unit + 1
  return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def shape(dimensions: Sequence[int]) -> str:
  """Returns a shape as `[264,16]`."""
  return f"[{','.join(map(str, dimensions))}]"
