"""Logs and late errors of orbax and TensorStore, which are dropped.

A failed save is reported once, by whoever waits for it.
"""

from collections.abc import Callable
import logging
import os
import sys
import threading

_ORBAX = f"{os.sep}orbax{os.sep}"


def _is_relevant(record: logging.LogRecord) -> bool:
  # Orbax logs through absl. It awaits one of several failed writes, and asyncio
  # logs the others.
  is_unawaited = "exception was never retrieved" in record.getMessage()
  return _ORBAX not in record.pathname and not is_unawaited


def filter_output() -> Callable[[], None]:
  """Drops the logs of orbax and late errors of TensorStore's threads.

  Pending writes raise 'Event loop is closed' when another one has failed,
  possibly before the failed save itself is reported.

  Returns:
    A function that restores logs and errors.
  """
  loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
  # A filter of this call only, because several may be active.
  each = logging.Filter()
  each.filter = _is_relevant
  for logger in loggers:
    logger.addFilter(each)
  previous = sys.excepthook

  def hook(*error: object) -> None:
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or "loop is closed" not in str(error[1]):
      previous(*error)  # pyrefly: ignore

  sys.excepthook = hook

  def restore() -> None:
    for logger in loggers:
      logger.removeFilter(each)
    # Another one that is active keeps its hook, and with it this one.
    if sys.excepthook is hook:
      sys.excepthook = previous

  return restore
