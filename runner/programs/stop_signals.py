"""Ctrl-C and SIGTERM as requests to stop, seen between two steps."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class StopSignals:
  """While entered, the first signal is noted and the second one kills.

  Python calls signal handlers in the main thread only; entered in another one,
  it does nothing.

  Attributes:
    requested: The name of the signal that asked to stop, or `None`.
  """

  def __init__(self) -> None:
    self.requested: str | None = None
    self._before: dict[signal.Signals, Any] = {}

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in _SIGNALS:
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.requested = signal.Signals(number).name
    # The system's own action, which needs no Python to run: a second signal
    # ends the process even while it is deep in a compilation.
    for each in _SIGNALS:
      signal.signal(each, signal.SIG_DFL)
    # A process that dies so leaves the cursor as it is, and the bar hides it.
    # Past `sys.stdout`, which the bar replaces by one that drops such codes.
    terminal = sys.__stdout__
    if terminal is not None and terminal.isatty():
      terminal.write(_SHOW_CURSOR)
      terminal.flush()
    print(
      f"{self.requested}: stopping after this step and a checkpoint;"
      " once more to stop at once, without one.",
      flush=True,
    )
