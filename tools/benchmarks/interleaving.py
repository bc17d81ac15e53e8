"""Two contenders timed in turn, so that what disturbs one disturbs both.

A machine gets slower and faster over seconds and minutes. Timing first all of
one contender and then all of the other compares two weathers; a ratio of
neighbours, taken many times, compares the contenders.
"""

from collections.abc import Callable
import dataclasses
import time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
  """Seconds of both contenders, round by round.

  Attributes:
    first: Of the first.
    second: Of the second, in the same rounds.
  """

  first: tuple[float, ...]
  second: tuple[float, ...]

  def __post_init__(self) -> None:
    if not self.first or len(self.first) != len(self.second):
      raise ValueError(
        f"Pairs need as many times of one as of the other, got"
        f" {len(self.first)} and {len(self.second)}."
      )

  def ratios(self) -> list[float]:
    """Returns first over second, round by round."""
    return [a / b for a, b in zip(self.first, self.second, strict=True)]


def interleave(
  first: Callable[[], object],
  second: Callable[[], object],
  *,
  rounds: int,
  clock: Callable[[], float] = time.perf_counter,
) -> Pairs:
  """Times both in turn; who goes first changes from round to round.

  Each is called once before, untimed, to warm up.

  Args:
    first: Does one block of work and returns when it is done.
    second: The same amount of work in another way.
    rounds: How often each is timed.
    clock: Seconds from any origin.

  Raises:
    ValueError: There is no round.
  """
  if rounds <= 0:
    raise ValueError(f"rounds must be positive, got {rounds}.")
  contenders = (first, second)
  times: tuple[list[float], list[float]] = ([], [])
  for contender in contenders:
    contender()
  for i in range(rounds):
    for index in (0, 1) if i % 2 == 0 else (1, 0):
      begin = clock()
      contenders[index]()
      times[index].append(clock() - begin)
  return Pairs(first=tuple(times[0]), second=tuple(times[1]))
