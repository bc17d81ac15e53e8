"""Tokens per second of the time that is spent on steps."""

from collections.abc import Callable, Iterator
import contextlib
import time


class Throughput:
  """Counts tokens and time, from one report to the next."""

  def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Starts the time.

    Args:
      clock: Seconds from any origin.
    """
    self._clock = clock
    self._restart()

  def add(self, tokens: float) -> None:
    """Counts a finished step and its tokens."""
    self._tokens += tokens
    self._steps += 1

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves out the time spent in the context, such as an evaluation."""
    begin = self._clock()
    try:
      yield
    finally:
      self._start += self._clock() - begin

  def step_seconds(self) -> float:
    """Returns the mean time of the steps since the report before."""
    return (self._clock() - self._start) / max(self._steps, 1)

  def report(self) -> float:
    """Returns the tokens per second since the report before."""
    seconds = self._clock() - self._start
    rate = self._tokens / seconds if seconds > 0 else 0.0
    self._restart()
    return rate

  def _restart(self) -> None:
    self._start = self._clock()
    self._tokens = 0.0
    self._steps = 0
