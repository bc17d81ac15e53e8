"""Signals that stop a program between two steps: Ctrl-C, SIGTERM and others.

SIGUSR1 is sent by a supervisor that received a signal. It never kills, because
the process may receive that signal too. Nor does SIGHUP, of which a terminal
that is closed sends several; where `nohup` ignores it, it stays ignored.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import socket
import stat
import sys
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_REQUEST = signal.SIGUSR1
_HANGUP = signal.SIGHUP
_NOTED = (*_SIGNALS, _REQUEST, _HANGUP)
_SHOW_CURSOR = "\x1b[?25h"


class StopSignals:
  """While entered, the first signal is a request and the second one kills.

  A second SIGUSR1 or SIGHUP is ignored.

  Python calls signal handlers only in the main thread; entered in another
  thread, this does nothing.

  Several processes stop together: all call `poll` at the same points, and a
  request to one of them reaches all.

  Attributes:
    requested: The name of the signal that requested the stop, or `None`.
  """

  def __init__(
    self,
    *,
    when: str = "after this step and a checkpoint",
    agree: Callable[[int], int] | None = None,
  ) -> None:
    """Prepares; signals are handled while it is entered.

    Args:
      when: When the program will stop, for the printed line.
      agree: Takes a number of this process and returns the maximum over all
        processes, of this call or of the last one; None for one process.
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
        if number == _HANGUP and signal.getsignal(number) == signal.SIG_IGN:
          continue
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}

  @property
  def is_noted(self) -> bool:
    """Whether this process has received a request, agreed on or not."""
    return bool(self._noted) or self.requested is not None

  def poll(self) -> bool:
    """Returns whether to stop, after an exchange with the other processes."""
    if self._agree is not None and self.requested is None:
      number = self._agree(self._noted)
      self.requested = signal.Signals(number).name if number else None
    return self.requested is not None

  def settle(self) -> bool:
    """Polls including every signal that arrived before the call."""
    # The first result may be that of the call before.
    return self.poll() or self.poll()

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """While entered, a signal ends the process immediately.

    For use before the first step, when nothing would be lost. A compilation
    runs native code for minutes, and Python calls no handler meanwhile. So a
    thread reads the signal from a socket, to which the interpreter writes it
    immediately. The exit status is the shell's, 128 + signal.

    One of several processes would end the others too; there the signal is
    handled as everywhere.
    """
    if not self._before or self.is_noted or self._agree is not None:
      yield
      return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    thread = threading.Thread(
      target=_end_at_signal, args=(receiver,), name="stop_signals", daemon=True
    )
    thread.start()
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    self._is_at_once = True
    try:
      yield
    finally:
      self._is_at_once = False
      signal.set_wakeup_fd(before)
      # Ends the thread, after any signals.
      sender.send(b"\0")
      thread.join()
      sender.close()
      receiver.close()

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    if self._is_at_once or (number in (_REQUEST, _HANGUP) and self._noted):
      return
    if number == _HANGUP:
      _leave_terminal()
    self._noted = number
    if self._agree is None:
      self.requested = signal.Signals(number).name
    # The default action needs no Python: a second signal ends the process even
    # during a compilation.
    for each in _SIGNALS:
      signal.signal(each, signal.SIG_DFL)
    _show_cursor()
    name = signal.Signals(number).name
    line = f"{name}: stopping {self._when}; send it again to stop immediately."
    try:
      print(line, flush=True)
    except RuntimeError:
      # The signal arrived while this thread was writing to the stream.
      os.write(1, f"{line}\n".encode())


def find_exit_status(stopped_by: str | None) -> int:
  """Returns the exit status of a program, as a shell would report it.

  Args:
    stopped_by: The name of the signal that stopped it before its end, or None.

  Returns:
    128 + the number of the signal, so that a cluster does not take the program
    for a finished one; 0 without a signal.
  """
  return 0 if stopped_by is None else 128 + signal.Signals[stopped_by]


def _end_at_signal(receiver: socket.socket) -> None:
  """Ends the process at the first of the signals; returns at a zero byte."""
  while number := receiver.recv(1)[0]:
    if number in _NOTED:
      _show_cursor()
      name = signal.Signals(number).name
      line = f"{name}: stopped before the first step; nothing is lost.\n"
      os.write(1, line.encode())
      # Not `sys.exit`, which would wait for the main thread.
      os._exit(128 + number)


def _leave_terminal() -> None:
  """Discards what would be written to a terminal that is gone."""
  for stream in (sys.__stdout__, sys.__stderr__):
    if stream is None:
      continue
    # Not `isatty`, which is false once the terminal is gone.
    if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
      with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def _show_cursor() -> None:
  # The progress bar hides the cursor, and a killed process would leave it so.
  # Not `sys.stdout`, which the bar replaces by a stream that drops such codes.
  terminal = sys.__stdout__
  if terminal is not None and terminal.isatty():
    # Not `write`, which fails where a signal arrives during another one.
    os.write(terminal.fileno(), _SHOW_CURSOR.encode())
