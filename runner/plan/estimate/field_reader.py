"""Checks of the fields of a calibration file."""

import datetime
import math
from typing import Any

from paxon.runner import user_error


class FieldReader:
  """Checks fields, and names the file in what it says of wrong ones.

  Each method returns the value that it checked, or raises `UserError`.
  """

  def __init__(self, name: str) -> None:
    self._name = name

  def wrong(self, what: str) -> user_error.UserError:
    """Returns the error that says `what` of the file."""
    return user_error.UserError(f"The calibration {self._name} {what}.")

  def names(self, content: Any, known: tuple[str, ...], where: str) -> None:
    """Checks that an object has exactly these names."""
    if not isinstance(content, dict):
      raise self.wrong(f"needs an object as {where}, not {content!r}")
    for missing in (name for name in known if name not in content):
      raise self.wrong(f"lacks {missing!r} in {where}")
    for more in (name for name in content if name not in known):
      raise self.wrong(f"has {more!r} in {where}; known are {', '.join(known)}")

  def typed(self, value: Any, wanted: type, field: str) -> Any:
    """Checks the type of a value."""
    if not isinstance(value, wanted):
      raise self.wrong(f"needs a {wanted.__name__} as {field}, not {value!r}")
    return value

  def number(
    self, value: Any, field: str, *, least: float | None = None, most: float
  ) -> float:
    """Checks a finite number: above 0, or at least `least`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
      not is_number
      or not math.isfinite(value)
      or value > most
      or (value <= 0 if least is None else value < least)
    ):
      low = "more than 0" if least is None else f"at least {least:g}"
      raise self.wrong(
        f"has {field} = {value!r}; it must be {low} and at most {most:g}"
      )
    return float(value)

  def by_dtype(
    self, value: Any, field: str, *, most: float
  ) -> dict[str, float]:
    """Checks numbers above 0 by dtype, at least one."""
    found = self.typed(value, dict, field)
    if not found:
      raise self.wrong(f"needs a number by dtype as {field}, not {{}}")
    return {
      dtype: self.number(share, f"{field}.{dtype}", most=most)
      for dtype, share in found.items()
    }

  def date(self, value: Any) -> str:
    """Checks a date."""
    try:
      return datetime.date.fromisoformat(value).isoformat()
    except (TypeError, ValueError) as error:
      raise self.wrong(
        f"has date = {value!r}; write it as 2026-01-31"
      ) from error

  def band(self, value: Any) -> tuple[float, float]:
    """Checks two multiples, one at most 1 and one at least 1."""
    if not isinstance(value, list) or len(value) != 2:
      raise self.wrong(f"needs two numbers as band, not {value!r}")
    lower = self.number(value[0], "band[0]", most=1.0)
    upper = self.number(value[1], "band[1]", least=1.0, most=10.0)
    return lower, upper
