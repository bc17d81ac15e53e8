"""The period of a sequence of layers, which a stack repeats."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def one_period(layers: Sequence[T]) -> tuple[T, ...]:
  """Returns the shortest beginning that, repeated, gives all layers.

  The last repetition need not be whole. Layers that follow no pattern are one
  period altogether, and a program is compiled for each.

  Args:
    layers: What distinguishes each.
  """
  for period in range(1, len(layers) + 1):
    if all(layers[i] == layers[i % period] for i in range(len(layers))):
      return tuple(layers[:period])
  return tuple(layers)
