"""Arrays of ours from tensors of theirs, and back, one array at a time.

Nothing is computed, so a round trip keeps every bit. Memory holds the array
and one piece of a tensor.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paxon.layers.models.hugging_face import family

# `(tensor's name, first row, row after the last) -> those rows`.
ReadRows = Callable[[str, int, int], np.ndarray]


def to_leaf(
  leaf: family.Leaf, read_rows: ReadRows, dtype: Any = None
) -> np.ndarray:
  """Returns an array of ours.

  Args:
    leaf: Which.
    read_rows: Reads tensors of theirs.
    dtype: What values are cast to; `None` keeps them.
  """
  # Not a number of layers: a stacked leaf of one layer has that dimension too.
  if leaf.sources[0][1].layer is None:
    rows = _read(*leaf.sources[0], read_rows)
    return np.array(rows, dtype or rows.dtype)
  result: np.ndarray | None = None
  for tensor, piece in leaf.sources:
    rows = _read(tensor, piece, read_rows)
    if result is None:
      result = np.empty(leaf.shape, dtype or rows.dtype)
    result[piece.layer] = rows
  assert result is not None
  return result


def _read(
  tensor: family.Tensor, piece: family.Piece, read_rows: ReadRows
) -> np.ndarray:
  rows = read_rows(tensor.name, piece.start, piece.stop)
  return piece.layout.to_ours(rows)


def to_rows(
  leaf: family.Leaf, array: np.ndarray
) -> Iterator[tuple[str, int, np.ndarray]]:
  """Yields the pieces of tensors of theirs that an array of ours makes.

  Args:
    leaf: Which.
    array: Its values.

  Yields:
    The tensor's name, the first row of the piece, and its rows.
  """
  for tensor, piece in leaf.sources:
    ours = array if piece.layer is None else array[piece.layer]
    yield tensor.name, piece.start, piece.layout.to_theirs(ours)
