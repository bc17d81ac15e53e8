"""Reliable KeyboardInterrupt.

Python raises `KeyboardInterrupt` in whatever the main thread executes. In the
callback of a weak reference or of the garbage collector, such as JAX's, Python
prints the exception and continues; while an extension module is imported, it
may become another error. A quarter of the interrupts during start-up were lost.
While the interpreter exits, an interrupt prints a traceback (`exit_quietly`).
"""

import _thread
from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

_SOON_SECONDS = 0.01
_INTERRUPTED = 130


@contextlib.contextmanager
def reliable_interrupts() -> Iterator[None]:
  """While entered, SIGINT raises a `KeyboardInterrupt` that is not lost.

  Does nothing outside the main thread and where SIGINT has another handler.

  Raises:
    KeyboardInterrupt: SIGINT arrived, even if it became another exception.
  """
  if not _is_default():
    yield
    return
  has_arrived = is_due = False

  def interrupt(number: int, frame: FrameType | None) -> None:
    nonlocal has_arrived, is_due
    has_arrived, is_due = True, False
    signal.default_int_handler(number, frame)

  def interrupt_soon() -> None:
    # By then the callback, and the hook, have ended.
    time.sleep(_SOON_SECONDS)
    if is_due:
      _thread.interrupt_main()

  report = sys.unraisablehook

  def raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    nonlocal is_due
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
      report(unraisable)
    elif not is_due:
      is_due = True
      # A `threading.Thread` takes locks, which the main thread may hold.
      _thread.start_new_thread(interrupt_soon, ())

  signal.signal(signal.SIGINT, interrupt)
  sys.unraisablehook = raise_again
  try:
    yield
  except Exception as error:
    if has_arrived:
      raise KeyboardInterrupt from error
    raise
  finally:
    is_due = False
    sys.unraisablehook = report
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
  """While entered, SIGINT and SIGTERM do nothing; for the main thread.

  For a process that ends when another one does, which gets them too.
  """
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = {each: signal.signal(each, signal.SIG_IGN) for each in numbers}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def run_program(main: Callable[[Sequence[str]], int]) -> NoReturn:
  """Runs a program on the process's arguments; exits with its status.

  An interrupt gives status 130; a closed pipe, as by `head`, is not an error.
  """
  try:
    with reliable_interrupts():
      status = main(sys.argv[1:])
    sys.stdout.flush()
  except KeyboardInterrupt:
    status = _INTERRUPTED
  except BrokenPipeError:
    # Otherwise the interpreter flushes, and fails, again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 0
  exit_quietly(status)


def end_as_first_process() -> None:
  """Makes SIGTERM and SIGHUP end the first process of a container.

  Linux ignores a signal to process 1 that has no handler. A pod that is deleted
  while its program starts would wait for the end of its grace period.
  """
  if os.getpid() != 1:
    return
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_DFL:
      signal.signal(number, lambda number, _: os._exit(128 + number))


def exit_quietly(status: int) -> NoReturn:
  """Exits the process; from now on SIGINT kills without a traceback."""
  if _is_default():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  sys.exit(status)


def _is_default() -> bool:
  """Whether SIGINT has Python's handler, which this thread may replace."""
  return (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
  )
