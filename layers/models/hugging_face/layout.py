"""How an array of ours lies in a tensor of theirs, in both directions.

A pattern names the dimensions of both: `(N H) D -> D N H` is a tensor of theirs
[N * H, D] and an array of ours [D, N, H]. There is no arithmetic, so a round
trip keeps every bit.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
import re

import numpy as np

_TOKEN = re.compile(r"\(([^()]*)\)|(\w+)")


@dataclasses.dataclass(frozen=True)
class Layout:
  """One pattern with the sizes of its dimensions.

  Attributes:
    pattern: Dimensions of theirs, those that are one in parentheses, an arrow,
      and the same dimensions in our order.
    sizes: By dimension, at least those of the pattern.
  """

  pattern: str
  sizes: Mapping[str, int]

  def __post_init__(self) -> None:
    if sorted(self._flat) != sorted(self._ours):
      raise ValueError(
        f"Both sides of the pattern {self.pattern!r} must have the same"
        " dimensions."
      )
    missing = [name for name in self._ours if name not in self.sizes]
    if missing:
      raise ValueError(
        f"The pattern {self.pattern!r} needs the size of {missing[0]!r}; sizes"
        f" are given of {sorted(self.sizes)}."
      )

  @functools.cached_property
  def _theirs(self) -> tuple[tuple[str, ...], ...]:
    found = _TOKEN.findall(self.pattern.partition("->")[0])
    return tuple(tuple((inside or one).split()) for inside, one in found)

  @functools.cached_property
  def _ours(self) -> tuple[str, ...]:
    return tuple(self.pattern.partition("->")[2].split())

  @functools.cached_property
  def _flat(self) -> tuple[str, ...]:
    return tuple(name for group in self._theirs for name in group)

  @property
  def their_shape(self) -> tuple[int, ...]:
    """The shape of the tensor of theirs."""
    return tuple(
      math.prod(self.sizes[name] for name in group) for group in self._theirs
    )

  @property
  def our_shape(self) -> tuple[int, ...]:
    """The shape of the array of ours."""
    return tuple(self.sizes[name] for name in self._ours)

  def to_ours(self, tensor: np.ndarray) -> np.ndarray:
    """Returns our view of a tensor of theirs; nothing is copied.

    Args:
      tensor: Of `their_shape`.
    """
    apart = tensor.reshape([self.sizes[name] for name in self._flat])
    return apart.transpose([self._flat.index(name) for name in self._ours])

  def to_theirs(self, array: np.ndarray) -> np.ndarray:
    """Returns a tensor of theirs with the values of an array of ours.

    Args:
      array: Of `our_shape`.
    """
    apart = array.transpose([self._ours.index(name) for name in self._flat])
    return apart.reshape(self.their_shape)
