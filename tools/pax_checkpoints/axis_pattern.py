"""Rearrangement of the axes of an array: `C D (N H) -> D C N H`.

Letters or words name axes, and parentheses several axes that are stored as one.
A name that only the right side has is an axis along which several arrays are
stacked. Sizes come from the result, so that a pattern needs none.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re

import numpy as np

# The axes that a side stores as one each.
_Side = tuple[tuple[str, ...], ...]
_TOKEN = re.compile(r"\(([A-Za-z ]+)\)|([A-Za-z]+)")


@dataclasses.dataclass(frozen=True)
class AxisPattern:
  """One rearrangement.

  Attributes:
    inputs: The axes of an array.
    outputs: The axes of the result.
  """

  inputs: _Side
  outputs: _Side

  @property
  def stacked(self) -> str | None:
    """The axis along which several arrays are stacked, or None."""
    missing = [x for x in _flatten(self.outputs) if x not in self._names]
    return missing[0] if missing else None

  @property
  def _names(self) -> list[str]:
    return _flatten(self.inputs)

  def find_sizes(self, shape: Sequence[int]) -> dict[str, int]:
    """Returns the size of each axis for a shape of the result.

    Raises:
      ValueError: The shape has another number of axes, or a group on the right
        side, whose sizes are unknown.
    """
    if len(shape) != len(self.outputs):
      raise ValueError(f"{self} does not give {len(shape)} axes")
    return {
      group[0]: size for group, size in zip(self.outputs, shape, strict=True)
    }

  def input_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of an array."""
    return tuple(math.prod(sizes[x] for x in group) for group in self.inputs)

  def drop(self, name: str) -> "AxisPattern":
    """Returns the pattern of arrays without an axis, as after a mean."""

    def without(side: _Side) -> _Side:
      return tuple(group for group in side if name not in group)

    return AxisPattern(without(self.inputs), without(self.outputs))

  def apply(
    self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int]
  ) -> np.ndarray:
    """Returns the result, a view where possible."""
    names, stacked = self._names, self.stacked
    split = [x.reshape([sizes[name] for name in names]) for x in arrays]
    if stacked is not None:
      names = [stacked, *names]
      split = [x[None] for x in split]
      if sizes[stacked] != len(split):
        raise ValueError(
          f"{self}: {len(split)} arrays for {sizes[stacked]} entries"
        )
    whole = split[0] if len(split) == 1 else np.concatenate(split)
    order = [names.index(name) for name in _flatten(self.outputs)]
    return whole.transpose(order)

  def add_axis(self, name: str) -> "AxisPattern":
    """Returns the pattern with one more axis, the first of both sides."""
    axis = ((name,),)
    return AxisPattern((*axis, *self.inputs), (*axis, *self.outputs))

  def locate(
    self, region: Sequence[slice], sizes: Mapping[str, int]
  ) -> dict[str, slice]:
    """Returns the range of each axis for a region of an array.

    The region must be one of those that `split_step` allows.
    """
    found = {}
    for group, part in zip(self.inputs, region, strict=True):
      start, stop = part.start, part.stop
      for i, name in enumerate(group):
        inner = math.prod(sizes[x] for x in group[i + 1 :])
        first = start // inner
        found[name] = slice(first, max(first + 1, stop // inner))
        if stop - start >= inner:
          # The axes within are complete.
          start, stop = 0, inner
        else:
          start, stop = start - first * inner, stop - first * inner
    return found

  def __str__(self) -> str:
    return " -> ".join(
      " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in side)
      for side in (self.inputs, self.outputs)
    )


def split_step(step: int, sizes: Sequence[int]) -> list[int] | None:
  """Returns the steps along the axes of a group for a step along the whole.

  Returns None if ranges of the whole would be no ranges of each axis.
  """
  first, *rest = sizes
  inner = math.prod(rest)
  if step >= first * inner:
    return list(sizes)
  if step % inner == 0:
    return [step // inner, *rest]
  if inner % step:
    return None
  below = split_step(step, rest)
  return below and [1, *below]


def make_identity(rank: int) -> AxisPattern:
  """Returns the pattern of `rank` axes that changes nothing."""
  side = tuple((chr(ord("a") + i),) for i in range(rank))
  return AxisPattern(side, side)


def parse(text: str) -> AxisPattern:
  """Returns the pattern of a text.

  Raises:
    ValueError: It is no pattern.
  """
  left, arrow, right = text.partition("->")
  inputs, outputs = _parse_side(left, text), _parse_side(right, text)
  names, results = _flatten(inputs), _flatten(outputs)
  missing = [x for x in results if x not in names]
  if (
    not arrow
    or not set(names) <= set(results)
    or len(missing) > 1
    or any(len(x) != len(set(x)) for x in (names, results))
    or any(len(group) > 1 for group in outputs)
  ):
    raise ValueError(
      f"{text!r} must be AXES -> AXES with the same names on both sides, at"
      " most one more on the right, and groups only on the left"
    )
  return AxisPattern(inputs, outputs)


def _parse_side(text: str, whole: str) -> _Side:
  if _TOKEN.sub("", text).strip():
    raise ValueError(
      f"{whole!r} must consist of names of axes, groups and one ->"
    )
  return tuple(tuple((a or b).split()) for a, b in _TOKEN.findall(text))


def _flatten(side: _Side) -> list[str]:
  return [name for group in side for name in group]
