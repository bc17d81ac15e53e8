"""Logs and late errors of orbax and TensorStore, which are dropped.

A failed save is reported once, by whoever waits for it.
"""

import asyncio.base_events
from collections.abc import Callable
import gc
import logging
import os
import sys
import traceback
import types

_ORBAX = f"{os.sep}orbax{os.sep}"


def _is_relevant(record: logging.LogRecord) -> bool:
  # Orbax logs through absl. It awaits one of several failed writes, and asyncio
  # logs the others.
  is_unawaited = "exception was never retrieved" in record.getMessage()
  return _ORBAX not in record.pathname and not is_unawaited


def _is_late(
  error: BaseException | None, frames: types.TracebackType | None
) -> bool:
  """Whether TensorStore reported a write to the loop of a finished save.

  It calls asyncio from threads without Python frames, or from any thread that
  collects the last reference to a write.
  """
  return (
    frames is not None
    and frames.tb_frame.f_code.co_filename == asyncio.base_events.__file__
    and "loop is closed" in str(error)
  )


def _is_unread(frames: types.TracebackType | None) -> bool:
  """Whether a read was dropped that orbax has started with one that failed."""
  while frames is not None:
    if _ORBAX in frames.tb_frame.f_code.co_filename:
      return True
    frames = frames.tb_next
  return False


def drop_reads(error: BaseException) -> None:
  """Frees the reads of a failed restore, which report errors when freed.

  Call it while the output is filtered.
  """
  traceback.clear_frames(error.__traceback__)
  gc.collect()


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
  previous = sys.unraisablehook

  def hook(args: "sys.UnraisableHookArgs") -> None:
    frames = args.exc_traceback
    if not _is_late(args.exc_value, frames) and not _is_unread(frames):
      previous(args)

  sys.unraisablehook = hook

  def restore() -> None:
    for logger in loggers:
      logger.removeFilter(each)
    # Another one that is active keeps its hook, and with it this one.
    if sys.unraisablehook is hook:
      sys.unraisablehook = previous

  return restore
