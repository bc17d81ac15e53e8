"""When to write a growing file again, if it is written whole each time."""

from collections.abc import Callable
import time

_MIN_SECONDS = 2.0
# Writing takes at most about this share of the time.
_MAX_SHARE = 0.02


class FlushPace:
  """Spaces writes out, further where one takes longer.

  Args:
    clock: Gives seconds; another one in tests.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    self._next = clock() + _MIN_SECONDS

  def is_due(self) -> bool:
    """Whether enough time went by since the last write."""
    return self._clock() >= self._next

  def run(self, write: Callable[[], None]) -> None:
    """Writes, and sets the time of the next write by how long this one took."""
    start = self._clock()
    write()
    end = self._clock()
    self._next = end + max(_MIN_SECONDS, (end - start) / _MAX_SHARE)
