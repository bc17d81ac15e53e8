"""Views of arrays: a selection of the entries of one axis, or another order.

Other trainers store several projections in one array, pad the vocabulary, or
order the features of a head by pairs. A view selects the entries of one
variable; only those are read.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Final

import numpy as np

from paxon.tools.pax_checkpoints import axis_pattern, pax_files

UNPAD: Final = "unpad"


def _order_pairs(stored: int, wanted: int, width: int) -> np.ndarray:
  """Neighbours form a pair of rotary positions; here, halves do."""
  del wanted
  return np.arange(stored).reshape(-1, width // 2, 2).swapaxes(1, 2)


def _select_queries(stored: int, wanted: int, width: int) -> np.ndarray:
  """The queries of each group come before its key and its value."""
  groups = (stored - wanted) // (2 * width)
  return np.arange(stored).reshape(groups, -1, width)[:, :-2]


def _select_keys(stored: int, wanted: int, width: int) -> np.ndarray:
  return np.arange(stored).reshape(wanted // width, -1, width)[:, -2]


def _select_values(stored: int, wanted: int, width: int) -> np.ndarray:
  return np.arange(stored).reshape(wanted // width, -1, width)[:, -1]


def _select_first_half(stored: int, wanted: int, width: int) -> np.ndarray:
  del wanted, width
  return np.arange(stored).reshape(2, -1)[0]


def _select_second_half(stored: int, wanted: int, width: int) -> np.ndarray:
  del wanted, width
  return np.arange(stored).reshape(2, -1)[1]


def _unpad(stored: int, wanted: int, width: int) -> np.ndarray:
  del width
  return np.arange(stored)[:wanted]


# From the stored number of entries, that of the variable, and the width of a
# head, to indices.
_INDICES: Final[Mapping[str, Callable[[int, int, int], np.ndarray]]] = {
  "pairs": _order_pairs,
  "query": _select_queries,
  "key": _select_keys,
  "value": _select_values,
  "first_half": _select_first_half,
  "second_half": _select_second_half,
  UNPAD: _unpad,
}
NAMES: Final = tuple(_INDICES)


def make(
  array: pax_files.PaxArray,
  view: str,
  pattern: axis_pattern.AxisPattern,
  sizes: Mapping[str, int],
) -> pax_files.PaxArray:
  """Returns the entries of a variable.

  The axis is that of heads' features, the last one of the pattern's result, if
  the view depends on heads; otherwise the first one of a layer.

  Args:
    array: An array, with axes of layers or without.
    view: One of `NAMES`.
    pattern: The rearrangement of a layer's axes.
    sizes: The size of each axis of the pattern.

  Raises:
    ValueError: The array does not have the entries.
  """
  wanted = pattern.input_shape(sizes)
  feature = pattern.outputs[-1][0]
  axis, width = 0, 1
  if view in ("pairs", "query", "key", "value"):
    axis = [feature in group for group in pattern.inputs].index(True)
    width = sizes[feature]
  at = len(array.shape) - len(wanted) + axis
  if at < 0:
    raise ValueError(
      f"{array.name} has shape {array.shape}, expected {wanted} at its end"
    )
  indices = _find_indices(array, view, at, wanted[axis], width)
  shape = (*array.shape[:at], len(indices), *array.shape[at + 1 :])

  def read(region: pax_files.Region | None = None) -> np.ndarray:
    if region is None:
      region = tuple(slice(0, size) for size in shape)
    chosen = indices[region[at]]
    order = np.argsort(chosen)
    ends = np.flatnonzero(np.diff(chosen[order]) != 1) + 1
    runs = [
      array.read(
        (
          *region[:at],
          slice(int(run[0]), int(run[-1]) + 1),
          *region[at + 1 :],
        )
      )
      for run in np.split(chosen[order], ends)
    ]
    whole = runs[0] if len(runs) == 1 else np.concatenate(runs, at)
    if np.array_equal(order, np.arange(len(order))):
      return whole
    return np.take(whole, np.argsort(order), at)

  def find_chunks() -> tuple[int, ...]:
    chunks = list(array.find_chunks())
    # Whole heads, where any region can be read.
    chunks[at] = max(chunks[at], width)
    return tuple(chunks)

  return dataclasses.replace(
    array,
    shape=shape,
    unpadded=array.unpadded and shape,
    read=read,
    find_chunks=find_chunks,
  )


def _find_indices(
  array: pax_files.PaxArray, view: str, at: int, wanted: int, width: int
) -> np.ndarray:
  """Returns the indices of the entries along an axis."""
  try:
    found = _INDICES[view](array.shape[at], wanted, width).reshape(-1)
  except (ValueError, ZeroDivisionError):
    found = np.arange(0)
  if len(found) != wanted:
    raise ValueError(
      f"needs {wanted} entries by {view}(...), and {array.name} has shape"
      f" {array.shape}"
    )
  return found
