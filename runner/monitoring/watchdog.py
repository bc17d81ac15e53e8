"""A thread that dumps all Python stacks when a run hangs.

It is armed between two steps: while the loop waits for data, for the devices or
for a checkpoint. It is suspended where nobody knows how long something takes:
while a step is compiled, and in evaluation and sampling. It kills nothing, and
speaks once a hang. The stacks are those of Python, so a process whose
interpreter is locked up by native code stays silent.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import faulthandler
import statistics
import sys
import tempfile
import threading
import time
from types import TracebackType

from etils import epath

from paxon.runner import files
from paxon.runner.settings import monitoring

_MEMORY_STEPS = 101
# How often the thread looks, as a share of the limit, and at most in seconds.
_SHARE, _MAX_PAUSE = 0.05, 5.0


class Watchdog:
  """Watches the loop that calls `beat`; use it as a context."""

  def __init__(
    self,
    settings: monitoring.WatchdogSettings,
    folder: epath.Path,
    *,
    host: str = "",
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    """Prepares; nothing is watched before `arm`.

    Args:
      settings: When a step hangs.
      folder: Gets `stacks-<step>.txt`.
      host: Stands in the name of the file, where several write there.
      clock: Gives seconds.
    """
    self._settings = settings
    self._folder = folder
    self._host = host
    self._clock = clock
    self._times: collections.deque[float] = collections.deque(
      maxlen=_MEMORY_STEPS
    )
    self._lock = threading.Lock()
    self._step = 0
    # When the last step was finished; None while nothing is watched.
    self._since: float | None = None
    self._has_spoken = False
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None

  def __enter__(self) -> "Watchdog":
    self._thread = threading.Thread(
      target=self._watch, name="watchdog", daemon=True
    )
    self._thread.start()
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._closed.set()
    if self._thread is not None:
      self._thread.join()

  def arm(self, step: int) -> None:
    """Watches from here on; the loop is about to make the step after `step`."""
    with self._lock:
      self._step, self._since, self._has_spoken = step, self._clock(), False

  def disarm(self) -> None:
    """Watches no longer."""
    with self._lock:
      self._since = None

  def beat(self, step: int) -> None:
    """Says that a step has finished."""
    with self._lock:
      self._step = step
      if self._since is not None:
        now = self._clock()
        self._times.append(now - self._since)
        self._since, self._has_spoken = now, False

  @contextlib.contextmanager
  def suspended(self) -> Iterator[None]:
    """Watches nothing in the context; the time in it is nobody's step."""
    with self._lock:
      was_armed, self._since = self._since is not None, None
    try:
      yield
    finally:
      if was_armed:
        self.arm(self._step)

  def limit(self) -> float:
    """Returns after how many seconds without a finished step it speaks."""
    usual = statistics.median(self._times) if self._times else 0.0
    return max(self._settings.min_seconds, self._settings.factor * usual)

  def check(self) -> str | None:
    """Dumps the stacks if the step hangs and they were not dumped yet.

    Returns:
      What was written, or None.
    """
    with self._lock:
      if self._since is None or self._has_spoken:
        return None
      seconds, limit = self._clock() - self._since, self.limit()
      if seconds < limit:
        return None
      self._has_spoken = True
      step = self._step
    text = (
      f"No step has finished for {seconds:.1f} s (limit {limit:.1f} s), after"
      f" step {step}. Stacks of all threads:\n{stacks()}"
    )
    print(text, file=sys.stderr, flush=True)
    files.write_text(self._folder / f"stacks-{step}{self._host}.txt", text)
    return text

  def _watch(self) -> None:
    while not self._closed.wait(min(_SHARE * self.limit(), _MAX_PAUSE)):
      try:
        self.check()
      except OSError as error:
        # A full disk is no reason to stop watching.
        print(f"watchdog: {error}", file=sys.stderr, flush=True)


def stacks() -> str:
  """Returns the stacks of all threads of this process."""
  # faulthandler writes to file descriptors only.
  with tempfile.TemporaryFile() as file:
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return file.read().decode(errors="replace")
