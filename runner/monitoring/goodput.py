"""Goodput: the share of wall time spent on training steps that count.

The host's time is partitioned: at every moment it is attributed to one cause,
the innermost open span, so the seconds of all causes add up to the wall time.
An interrupted run has one record per attempt:

  wall time   from the start of the first attempt to the end of the last one
  productive  time of training steps, except repeated ones
  repeated    steps after the checkpoint from which a later attempt resumed, at
              the mean time of a step
  idle        between two attempts, unless the run was finished
  goodput     productive / wall time

Waiting for data counts only while the devices are idle: see `Ledger.waits`.
Background work, such as writing a checkpoint, does not count.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import enum
import itertools
import math
import threading
import time
from typing import Any, TypeVar

from etils import epath

from paxon.runner import files

_T = TypeVar("_T")
# Polling interval of the devices while waiting for data.
_POLL_SECONDS = 1e-3


class Cause(enum.Enum):
  """Categories of time; the values appear in files and reports."""

  PRODUCTIVE = "productive"
  STARTUP = "start-up"
  COMPILE = "compile"
  RESTORE = "restore"
  DATA = "data wait"
  CHECKPOINT = "checkpoint"
  EVALUATION = "evaluation"
  SAMPLING = "sampling"
  REPEATED = "repeated steps"
  IDLE = "idle"
  OTHER = "other"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """One process of a run, from its start to its last record.

  Attributes:
    begin: Seconds since the epoch.
    end: The same; of the last flush if the process died.
    first_step: The step it started from; the next one is its first own step.
    last_step: Its last step.
    finished: Whether it reached the last training step.
    seconds: By the value of a `Cause`.
  """

  begin: float
  end: float
  first_step: int
  last_step: int
  finished: bool
  seconds: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
  """The time of a whole run.

  Attributes:
    wall_seconds: The total.
    seconds: By cause, in the order of `Cause`; they add up to the wall time.
    attempts: Number of attempts.
  """

  wall_seconds: float
  seconds: dict[Cause, float]
  attempts: int

  @property
  def goodput(self) -> float:
    """The productive share, from 0 to 1."""
    if self.wall_seconds <= 0:
      return 0.0
    return self.seconds[Cause.PRODUCTIVE] / self.wall_seconds

  def sort_by_size(self) -> list[tuple[Cause, float]]:
    """Returns the productive time, then the losses in descending order."""
    first = Cause.PRODUCTIVE
    losses = [(c, s) for c, s in self.seconds.items() if s and c is not first]
    losses.sort(key=lambda item: -item[1])
    return [(first, self.seconds[first]), *losses]

  def line(self) -> str:
    """Returns one line for the terminal: goodput, and losses by size."""
    wall = max(self.wall_seconds, 1e-9)
    shown = ", ".join(
      f"{cause.value} {seconds / wall:.1%}"
      for cause, seconds in self.sort_by_size()[1:]
    )
    return (
      f"goodput {self.goodput:.1%} of {self.wall_seconds:,.1f} s"
      + (f" in {self.attempts} attempts" if self.attempts > 1 else "")
      + (f"; lost: {shown}" if shown else "")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Now:
  """The state of the main thread at one moment.

  Attributes:
    step: The last finished step.
    step_age: Seconds since it finished; None before the first one.
    cause: The category of the current time.
    cause_seconds: Seconds since it began.
  """

  step: int
  step_age: float | None
  cause: Cause
  cause_seconds: float


class Ledger:
  """Accounts for the main thread's time, in a file over all attempts."""

  def __init__(
    self,
    path: epath.PathLike | None = None,
    *,
    begin: float | None = None,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], None] = time.sleep,
  ) -> None:
    """Begins an attempt with start-up.

    Args:
      path: The path of `goodput.jsonl`; None writes no file.
      begin: When the process started, in seconds since the epoch; now by
        default. Clipped to the end of the previous attempt.
      clock: Returns seconds since the epoch, monotonic.
      sleep: Sleeps for seconds.
    """
    self._path = None if path is None else epath.Path(path)
    self._clock = clock or _steady_clock()
    self._sleep = sleep
    self._pace = files.FlushPace()
    self._before: list[Attempt] = []
    if self._path is not None and self._path.exists():
      self._before = read(self._path)
    self._mark = self._clock()
    self._begin = self._mark if begin is None else min(begin, self._mark)
    if self._before:
      self._begin = min(max(self._begin, self._before[-1].end), self._mark)
    self._seconds = dict.fromkeys(Cause, 0.0)
    self._seconds[Cause.STARTUP] = self._mark - self._begin
    self._cause = Cause.STARTUP
    # When the current cause began, and when the last step finished.
    self._since = self._begin
    self._step_time: float | None = None
    # Other threads read.
    self._lock = threading.Lock()
    self._first_step: int | None = None
    self._last_step = 0
    self._finished = False

  def start(self, step: int) -> None:
    """Records the step from which the attempt resumes."""
    self._first_step = self._last_step = step

  def record_step(self, step: int) -> None:
    """Records a finished step; flushes periodically."""
    self._last_step, self._step_time = step, self._clock()
    if self._pace.is_due():
      self.flush()

  @contextlib.contextmanager
  def span(self, cause: Cause) -> Iterator[None]:
    """Attributes the time in the context, without inner spans, to a cause."""
    before = self._cause
    self._enter(cause)
    try:
      yield
    finally:
      self._enter(before)

  def rest(self) -> None:
    """Attributes the time outside of all spans to `OTHER` from now on."""
    self._enter(Cause.OTHER)

  def waits(
    self,
    batches: Iterable[_T],
    *,
    is_ready: Callable[[], bool],
    is_busy: Callable[[], bool],
  ) -> Iterator[_T]:
    """Yields from `batches`; waits with idle devices are attributed to data."""
    iterator = iter(batches)
    while True:
      while not is_ready() and is_busy():
        self._sleep(_POLL_SECONDS)
      with self.span(Cause.DATA):
        try:
          item = next(iterator)
        except StopIteration:
          return
      yield item

  def now(self) -> Now:
    """Returns the state of the main thread; called by any thread."""
    with self._lock:
      now, since, cause = self._clock(), self._since, self._cause
    finished = self._step_time
    return Now(
      step=self._last_step,
      step_age=None if finished is None else now - finished,
      cause=cause,
      cause_seconds=now - since,
    )

  def count_seconds(self) -> dict[Cause, float]:
    """Returns the seconds of this process until now, by cause."""
    return {Cause(name): s for name, s in self._attempt().seconds.items()}

  def account(self) -> Account:
    """Returns the time of the whole run until now; called by any thread."""
    return account([*self._before, self._attempt()])

  def flush(self) -> None:
    """Writes the file; also called before a checkpoint is committed."""
    self._write([*self._before, self._attempt()])

  def finish(self, *, complete: bool) -> Account:
    """Writes the file a last time; returns the time of the whole run.

    Args:
      complete: Whether training has reached its last step. A later attempt
        without steps then leaves no record.
    """
    self._finished = complete
    nothing_done = self._last_step == (self._first_step or 0)
    if nothing_done and self._before and self._before[-1].finished:
      # Removes what was flushed meanwhile.
      self._write(self._before)
      return account(self._before)
    self.flush()
    return self.account()

  def _write(self, attempts: Sequence[Attempt]) -> None:
    path = self._path
    if path is not None:
      text = to_text(attempts)
      self._pace.run(lambda: files.write_text(path, text))

  def _enter(self, cause: Cause) -> None:
    now = self._clock()
    with self._lock:
      self._seconds[self._cause] += now - self._mark
      if cause is not self._cause:
        self._since = now
      self._mark, self._cause = now, cause

  def _attempt(self) -> Attempt:
    with self._lock:
      now = self._clock()
      every = dict(self._seconds)
      every[self._cause] += now - self._mark
    return Attempt(
      begin=self._begin,
      end=now,
      first_step=self._first_step or 0,
      last_step=self._last_step,
      finished=self._finished,
      seconds={c.value: s for c, s in every.items() if s},
    )


def account(attempts: Sequence[Attempt]) -> Account:
  """Returns the time of a run; see the module."""
  seconds = dict.fromkeys(Cause, 0.0)
  for attempt in attempts:
    for name, value in attempt.seconds.items():
      seconds[Cause(name)] += value
  # The lowest step from which a later attempt resumed.
  kept = attempts[-1].last_step if attempts else 0
  for attempt in reversed(attempts):
    made = attempt.last_step - attempt.first_step
    again = attempt.last_step - max(kept, attempt.first_step)
    if made > 0 and again > 0:
      lost = attempt.seconds.get(Cause.PRODUCTIVE.value, 0.0) * again / made
      seconds[Cause.PRODUCTIVE] -= lost
      seconds[Cause.REPEATED] += lost
    kept = min(kept, attempt.first_step)
  for before, after in itertools.pairwise(attempts):
    if not before.finished:
      seconds[Cause.IDLE] += max(after.begin - before.end, 0.0)
  return Account(
    wall_seconds=sum(seconds.values()),
    seconds=seconds,
    attempts=len(attempts),
  )


def to_text(attempts: Sequence[Attempt]) -> str:
  """Returns the content of `goodput.jsonl`, one line per attempt."""
  return files.to_json_lines(map(dataclasses.asdict, attempts))


def read(path: epath.PathLike) -> list[Attempt]:
  """Returns the attempts of a run, in order; raises files.DamagedFileError."""

  def make(fields: dict[str, Any]) -> Attempt:
    attempt = files.to_record(Attempt, fields)
    for cause, seconds in attempt.seconds.items():
      files.check_type(Cause(cause).value, seconds, float)
      if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} seconds are not a duration")
    return attempt

  return files.read_json_lines(path, make, kind="goodput")


def _steady_clock() -> Callable[[], float]:
  """Returns a monotonic clock of seconds since the epoch."""
  origin = time.time() - time.monotonic()
  return lambda: origin + time.monotonic()
