"""The Pareto front: what nothing else beats in both time and memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def pareto(
  points: Iterable[_T], *, key: Callable[[_T], tuple[float, float]]
) -> list[_T]:
  """Returns the points that no other beats, by their first figure.

  Args:
    points: Of any kind; of equal ones the first is kept.
    key: Two figures of a point, less is better.
  """
  best = float("inf")
  front = []
  # Stable, so that of points with equal figures the first one stays.
  for point in sorted(points, key=key):
    if key(point)[1] < best:
      best = key(point)[1]
      front.append(point)
  return front


def spread(points: Sequence[_T], count: int) -> list[_T]:
  """Returns at most `count` points, the first, the last, and some between.

  Args:
    points: A front, in order.
    count: At least 1.
  """
  if len(points) <= count:
    return list(points)
  if count == 1:
    return [points[0]]
  step = (len(points) - 1) / (count - 1)
  return [points[round(i * step)] for i in range(count)]
