"""Ctrl-C and SIGTERM as requests to stop, seen between two steps.

SIGUSR1 is a request as well, which a supervisor sends. It never kills while
requests are noted, because the signal that it stands for may come here too.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REQUEST = signal.SIGUSR1
_NOTED = (*_SIGNALS, _REQUEST)
_SHOW_CURSOR = "\x1b[?25h"


class StopSignals:
  """While entered, the first signal is noted and the second one kills.

  SIGUSR1 is noted if it is the first, and does nothing if it is a later one.

  Python calls signal handlers in the main thread only; entered in another one,
  it does nothing.

  Several processes stop together: what one of them noted, all are told when
  they `poll`, which all do at the same places.

  Attributes:
    requested: The name of the signal that asked to stop, or `None`.
  """

  def __init__(
    self,
    *,
    when: str = "after this step and a checkpoint",
    agree: Callable[[int], int] | None = None,
  ) -> None:
    """Prepares; signals are noted once it is entered.

    Args:
      when: Said to the user: when the program stops.
      agree: Takes a number of this process and returns the largest of all
        processes, of this call or of the one before; None for one process.
    """
    self._when = when
    self._agree = agree
    self._noted = 0
    self.requested: str | None = None
    self._before: dict[signal.Signals, Any] = {}
    self._is_at_once = False

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in _NOTED:
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

  @property
  def is_noted(self) -> bool:
    """Whether this process has heard of a request, agreed on or not."""
    return bool(self._noted) or self.requested is not None

  def poll(self) -> bool:
    """Returns whether to stop, after an exchange with the other processes."""
    if self._agree is not None and self.requested is None:
      number = self._agree(self._noted)
      self.requested = signal.Signals(number).name if number else None
    return self.requested is not None

  def settle(self) -> bool:
    """As `poll`, with all that was noted before the call."""
    # The first of two may answer what was so before it.
    return self.poll() or self.poll()

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """While entered, a signal ends the process: nothing would be lost.

    A compilation runs native code for minutes, and Python calls no handler
    meanwhile. So a thread hears of the signal, which the interpreter writes to
    a socket at once. The exit status is the shell's, 128 and the signal.

    One of several processes would take the others with it; there the signal is
    noted, as everywhere.
    """
    if not self._before or self.is_noted or self._agree is not None:
      yield
      return
    heard, told = socket.socketpair()
    told.setblocking(False)
    thread = threading.Thread(
      target=_end_at_signal, args=(heard,), name="stop_signals", daemon=True
    )
    thread.start()
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    self._is_at_once = True
    try:
      yield
    finally:
      self._is_at_once = False
      signal.set_wakeup_fd(before)
      # After the signals that came before, if there are any.
      told.send(b"\0")
      thread.join()
      told.close()
      heard.close()

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    if self._is_at_once or (number == _REQUEST and self._noted):
      return
    self._noted = number
    if self._agree is None:
      self.requested = signal.Signals(number).name
    # The system's own action, which needs no Python to run: a second signal
    # ends the process even while it is deep in a compilation.
    for each in _SIGNALS:
      signal.signal(each, signal.SIG_DFL)
    _show_cursor()
    name = signal.Signals(number).name
    print(
      f"{name}: stopping {self._when}; once more to stop at once,"
      " without that.",
      flush=True,
    )


def _end_at_signal(heard: socket.socket) -> None:
  """Ends the process at the first of the signals; returns at a zero byte."""
  while number := heard.recv(1)[0]:
    if number in _NOTED:
      _show_cursor()
      name = signal.Signals(number).name
      line = f"{name}: stopped before the first step; nothing is lost.\n"
      os.write(1, line.encode())
      # Not `sys.exit`, which would wait for the main thread.
      os._exit(128 + number)


def _show_cursor() -> None:
  # A process that dies leaves the cursor as it is, and the bar hides it.
  # Past `sys.stdout`, which the bar replaces by one that drops such codes.
  terminal = sys.__stdout__
  if terminal is not None and terminal.isatty():
    terminal.write(_SHOW_CURSOR)
    terminal.flush()
