"""Keeps orbax's log off the terminal of a run.

Orbax logs a failed save as several tracebacks, from its threads too, before
the error itself is raised. The error says all of it in one line, which must
not be buried. Warnings of what orbax does by itself are no user's business.
"""

from collections.abc import Callable
import logging
import os
import sys
import threading
from types import TracebackType

_ORBAX = f"{os.sep}orbax{os.sep}"


def silence() -> Callable[[], None]:
  """Drops what orbax causes to be logged; returns what ends it."""

  def is_of_others(record: logging.LogRecord) -> bool:
    return _ORBAX not in record.pathname

  def is_retrieved(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()

  # Orbax logs by absl, whose logger is a named one of Python's. Of several
  # writes that fail together it awaits one, and asyncio tells of the others.
  filters = {"absl": is_of_others, "asyncio": is_retrieved}
  for name, each in filters.items():
    logging.getLogger(name).addFilter(each)

  def end() -> None:
    for name, each in filters.items():
      logging.getLogger(name).removeFilter(each)

  return end


def silence_what_follows_a_failure() -> None:
  """Drops the complaints of TensorStore's threads, from here on.

  Writes that are still under way when another one has failed come to their end
  with nobody waiting. TensorStore then prints 'Event loop is closed' with a
  traceback, by `sys.excepthook`. The process is about to end anyway.
  """
  others = sys.excepthook

  def hook(
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
  ) -> None:
    is_main = threading.current_thread() is threading.main_thread()
    is_late = isinstance(error, RuntimeError) and "loop is closed" in str(error)
    if is_main or not is_late:
      others(kind, error, traceback)

  sys.excepthook = hook
