"""Heartbeat lines during long stages.

Compilation, an evaluation or sampling may take minutes. `heartbeat` prints the
name of the stage: in a log at growing intervals, in a terminal or a notebook as
one line that is rewritten and removed at the end. A progress bar shows the
time itself, so nothing is printed next to it.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import itertools
import os
import sys
import threading
import time
from typing import Any

# Seconds until the first line of a log. Each pause is twice the one before, so
# that a stage of an hour prints eight lines.
_PAUSE_SECONDS = 10.0
_REWRITE_SECONDS = 1.0
_NOTEBOOK = "ipykernel"
# In the environment, not empty: logs get no line, as tests compare outputs.
_NO_LINES = "PAXON_NO_HEARTBEAT"


@contextlib.contextmanager
def heartbeat(
  text: str,
  *,
  pause: float = _PAUSE_SECONDS,
  write: Callable[[str], object] | None = None,
) -> Iterator[None]:
  """Prints `<text>: <seconds> s` while the context lasts, if it is long.

  Args:
    text: Name of the stage, such as `evaluating`.
    pause: Seconds until the first line of a log; the next pauses double.
    write: Prints a line as in a log; None prints as standard output requires.
  """
  pauses = make_pauses(pause)
  with contextlib.ExitStack() as stack:
    if write is not None:
      stack.enter_context(_repeat(text, pauses, write))
    elif _is_rewritable(sys.stdout):
      line = stack.enter_context(_RewrittenLine(sys.stdout).install())
      every = itertools.repeat(_REWRITE_SECONDS)
      stack.enter_context(_repeat(text, every, line.rewrite))
    elif not _is_terminal(sys.stdout) and not os.environ.get(_NO_LINES):
      stack.enter_context(_repeat(text, pauses, _print))
    # Else a progress bar, or the line of an outer stage, is shown already.
    yield


def make_pauses(first: float = _PAUSE_SECONDS) -> Iterator[float]:
  """Yields the seconds before each line of a log."""
  for index in itertools.count():
    yield first * 2**index


def _print(line: str) -> None:
  print(line, flush=True)


@contextlib.contextmanager
def _repeat(
  text: str, pauses: Iterable[float], write: Callable[[str], object]
) -> Iterator[None]:
  done = threading.Event()
  begin = time.monotonic()

  def repeat() -> None:
    for pause in pauses:
      if done.wait(pause):
        return
      write(f"{text}: {time.monotonic() - begin:.0f} s")

  thread = threading.Thread(target=repeat, name="stages", daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


def _is_rewritable(stream: Any) -> bool:
  """Whether a line of a stream can be rewritten: a terminal, or a notebook.

  A progress bar replaces standard output, as `_RewrittenLine` does.
  """
  if stream is sys.__stdout__:
    return _is_terminal(stream)
  return type(stream).__module__.partition(".")[0] == _NOTEBOOK


def _is_terminal(stream: Any) -> bool:
  # None is a closed standard output, and other streams may only have `write`.
  isatty = getattr(stream, "isatty", None)
  return isatty is not None and isatty()


class _RewrittenLine:
  """Standard output whose last line is removed before anything is printed."""

  def __init__(self, stream: Any) -> None:
    self._stream = stream
    # Reentrant, because a signal handler may print during a `print`.
    self._lock = threading.RLock()
    self._length = 0
    self._is_line_open = False

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  @contextlib.contextmanager
  def install(self) -> Iterator["_RewrittenLine"]:
    """Replaces standard output while the context lasts."""
    sys.stdout = self
    try:
      yield self
    finally:
      self.rewrite("")
      if sys.stdout is self:
        sys.stdout = self._stream

  def write(self, text: str) -> int:
    """Writes text in place of the line."""
    with self._lock:
      self._remove()
      self._is_line_open = not text.endswith("\n")
      return self._stream.write(text)

  def rewrite(self, line: str) -> None:
    """Writes the line, which has no end, in place of the one before."""
    with self._lock:
      if self._is_line_open:
        return
      self._remove()
      self._stream.write(line)
      self._stream.flush()
      self._length = len(line)

  def _remove(self) -> None:
    # Notebooks have no code that clears the rest of a line.
    if self._length:
      self._stream.write(f"\r{' ' * self._length}\r")
      self._length = 0
