"""A watchdog thread that reports a step that hangs, and ends the process.

It is armed between two steps: while the loop waits for data, the devices or a
checkpoint. It is suspended where durations are unknown: in compilation,
evaluation and sampling. A hang is reported once, with the stacks of all Python
threads. If it lasts, they are dumped again and the process ends, as all others
of the run do: each has a watchdog. If native code holds the interpreter's lock,
it does nothing.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import faulthandler
import math
import statistics
import sys
import tempfile
import threading
import time

from etils import epath

from paxon.runner import exit_status, files
from paxon.runner.settings import monitoring

_WINDOW_STEPS = 101
# The polling interval: a share of the limit, at most these seconds.
_SHARE, _MAX_PAUSE = 0.05, 5.0
# A poll that is later than this was in a process that did not run: stopped by
# SIGSTOP, as SLURM suspends a job, or on a machine that slept.
_STOPPED_SECONDS = 30.0
# A store that hangs must not keep the process from its end.
_WRITE_SECONDS = 10.0


class Watchdog:
  """Monitors a loop that calls `beat`; a context."""

  def __init__(
    self,
    settings: monitoring.WatchdogSettings,
    folder: epath.Path,
    *,
    host: str = "",
    clock: Callable[[], float] = time.monotonic,
    end: Callable[[int], object] | None = None,
  ) -> None:
    """Prepares a watchdog that writes `<folder>/stacks-<step><host>.txt`.

    Args:
      settings: The limits.
      folder: Where stacks are written.
      host: A suffix that distinguishes this process from the others.
      clock: Returns seconds.
      end: Ends the process with an exit status; None only reports.
    """
    self._settings = settings
    self._folder = folder
    self._host = host
    self._clock = clock
    self._end = end
    self._times: collections.deque[float] = collections.deque(
      maxlen=_WINDOW_STEPS
    )
    self._lock = threading.Lock()
    self._step = 0
    # When the last step finished; None while disarmed.
    self._since: float | None = None
    self._has_reported = False
    # Whether it waits for something whose typical duration is unknown.
    self._is_slow = False
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

  @contextlib.contextmanager
  def wait_longer(self) -> Iterator[None]:
    """While entered, the process ends after `slow_seconds` at the earliest."""
    self._is_slow = True
    try:
      yield
    finally:
      self._is_slow = False

  def is_hanging(self) -> bool:
    """Whether no step has finished within the limit."""
    with self._lock:
      since = self._since
    return since is not None and self._clock() - since >= self.limit()

  def limit(self) -> float:
    """Returns the time without a finished step that is a hang, in seconds."""
    typical = statistics.median(self._times) if self._times else 0.0
    return max(self._settings.min_seconds, self._settings.factor * typical)

  def end_limit(self) -> float:
    """Returns the time without a finished step that ends the process."""
    if self._end is None or self._settings.end_factor is None:
      return math.inf
    limit = self.limit() * self._settings.end_factor
    # The first step may contain more, such as autotuning.
    if self._is_slow or not self._times:
      limit = max(limit, self._settings.slow_seconds)
    return limit

  def check(self) -> str | None:
    """Dumps the stacks if a step hangs; ends the process if it has for long.

    Returns:
      The text written, or None.
    """
    with self._lock:
      if self._since is None:
        return None
      seconds, limit = self._clock() - self._since, self.limit()
      ends = seconds >= self.end_limit()
      if not ends and (seconds < limit or self._has_reported):
        return None
      self._has_reported = True
      step = self._step
    status = exit_status.ExitStatus.HANG
    what = (
      f"the process ends with status {status:d}"
      if ends
      else f"limit {limit:.1f} s"
    )
    text = (
      f"No step has finished for {seconds:.1f} s ({what}) since"
      f" step {step}. Stacks of all threads:\n{dump_stacks()}"
    )
    print(text, file=sys.stderr, flush=True)
    writing = threading.Thread(
      target=self._write, args=(step, text), daemon=True
    )
    writing.start()
    writing.join(_WRITE_SECONDS)
    if ends and self._end is not None:
      self._end(status)
    return text

  def _write(self, step: int, text: str) -> None:
    try:
      files.write_text(self._folder / f"stacks-{step}{self._host}.txt", text)
    except OSError as error:
      # Keeps monitoring, such as on a full disk.
      print(f"watchdog: {error}", file=sys.stderr, flush=True)

  def _watch(self) -> None:
    pause = 0.0
    before = self._clock()
    while not self._closed.wait(pause):
      self.skip_gap(self._clock() - before - pause)
      self.check()
      before = self._clock()
      pause = min(_SHARE * self.limit(), _MAX_PAUSE)

  def skip_gap(self, seconds: float) -> None:
    """Takes account of a late poll: the process may have been stopped."""
    with self._lock:
      if seconds > _STOPPED_SECONDS and self._since is not None:
        self._since += seconds


def dump_stacks() -> str:
  """Returns the stacks of all threads of this process."""
  # faulthandler writes to file descriptors only.
  with tempfile.TemporaryFile() as file:
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return file.read().decode(errors="replace")
