"""A watchdog thread that dumps the stacks of all Python threads on a hang.

It is armed between two steps: while the loop waits for data, the devices or a
checkpoint. It is suspended where durations are unknown: in compilation,
evaluation and sampling. It terminates nothing and reports a hang once. If
native code holds the interpreter's lock, it reports nothing.
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

from etils import epath

from paxon.runner import files
from paxon.runner.settings import monitoring

_WINDOW_STEPS = 101
# The polling interval: a share of the limit, at most these seconds.
_SHARE, _MAX_PAUSE = 0.05, 5.0


class Watchdog:
  """Monitors a loop that calls `beat`; a context."""

  def __init__(
    self,
    settings: monitoring.WatchdogSettings,
    folder: epath.Path,
    *,
    host: str = "",
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    """Prepares a watchdog that writes `<folder>/stacks-<step><host>.txt`."""
    self._settings = settings
    self._folder = folder
    self._host = host
    self._clock = clock
    self._times: collections.deque[float] = collections.deque(
      maxlen=_WINDOW_STEPS
    )
    self._lock = threading.Lock()
    self._step = 0
    # When the last step finished; None while disarmed.
    self._since: float | None = None
    self._has_reported = False
    self._closed = threading.Event()
    self._thread: threading.Thread | None = None

  def __enter__(self) -> "Watchdog":
    self._thread = threading.Thread(
      target=self._watch, name="watchdog", daemon=True
    )
    self._thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._closed.set()
    if self._thread is not None:
      self._thread.join()

  def arm(self, step: int) -> None:
    """Starts monitoring; `step` is the last finished step."""
    with self._lock:
      self._step, self._since, self._has_reported = step, self._clock(), False

  def disarm(self) -> None:
    """Stops monitoring."""
    with self._lock:
      self._since = None

  def beat(self, step: int) -> None:
    """Records that a step has finished."""
    with self._lock:
      self._step = step
      if self._since is not None:
        now = self._clock()
        self._times.append(now - self._since)
        self._since, self._has_reported = now, False

  @contextlib.contextmanager
  def suspend(self) -> Iterator[None]:
    """Disarms within the context, whose time counts for no step."""
    with self._lock:
      was_armed, self._since = self._since is not None, None
    try:
      yield
    finally:
      if was_armed:
        self.arm(self._step)

  def limit(self) -> float:
    """Returns the time without a finished step that is a hang, in seconds."""
    typical = statistics.median(self._times) if self._times else 0.0
    return max(self._settings.min_seconds, self._settings.factor * typical)

  def check(self) -> str | None:
    """Dumps the stacks if a step hangs and has not been reported yet.

    Returns:
      The text written, or None.
    """
    with self._lock:
      if self._since is None or self._has_reported:
        return None
      seconds, limit = self._clock() - self._since, self.limit()
      if seconds < limit:
        return None
      self._has_reported = True
      step = self._step
    text = (
      f"No step has finished for {seconds:.1f} s (limit {limit:.1f} s) since"
      f" step {step}. Stacks of all threads:\n{dump_stacks()}"
    )
    print(text, file=sys.stderr, flush=True)
    files.write_text(self._folder / f"stacks-{step}{self._host}.txt", text)
    return text

  def _watch(self) -> None:
    while not self._closed.wait(min(_SHARE * self.limit(), _MAX_PAUSE)):
      try:
        self.check()
      except OSError as error:
        # Keeps monitoring, such as on a full disk.
        print(f"watchdog: {error}", file=sys.stderr, flush=True)


def dump_stacks() -> str:
  """Returns the stacks of all threads of this process."""
  # faulthandler writes to file descriptors only.
  with tempfile.TemporaryFile() as file:
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return file.read().decode(errors="replace")
