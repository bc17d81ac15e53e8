"""How two checkpoints differ: in names, in shapes and dtypes, in values.

Arrays are read one pair at a time, and differences are computed in pieces, so
that memory grows with the largest array (about three times that) and not with
the checkpoints.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import math
import os

import numpy as np

from paxon.runner.checkpoints import (
  explanation,
  name_groups,
  stored_arrays,
  stored_checkpoint,
  text_table,
)

# Values of a piece, in float64: 8 MB an operand.
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """How the values of one array differ.

  Attributes:
    max_absolute: The largest |a - b|; NaN where only one of the two is NaN.
    relative: That, divided by the largest finite magnitude in either.
    count: How many values differ.
    size: How many there are.
  """

  max_absolute: float
  relative: float
  count: int
  size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """How two checkpoints differ.

  Attributes:
    a: The one.
    b: The other.
    only_a: Names that `b` does not have.
    only_b: Names that `a` does not have.
    unlike: Names in both whose shapes or dtypes differ.
    different: By name, arrays in both whose values differ.
    equal: Names of those that are equal bit for bit.
  """

  a: stored_checkpoint.StoredCheckpoint
  b: stored_checkpoint.StoredCheckpoint
  only_a: tuple[str, ...]
  only_b: tuple[str, ...]
  unlike: tuple[str, ...]
  different: dict[str, Difference]
  equal: tuple[str, ...]

  @property
  def is_same(self) -> bool:
    """Whether the checkpoints hold the same arrays, bit for bit."""
    return not (self.only_a or self.only_b or self.unlike or self.different)


def compare(
  a: stored_checkpoint.StoredCheckpoint,
  b: stored_checkpoint.StoredCheckpoint,
  *,
  prefix: str = "",
) -> Comparison:
  """Reads and compares two checkpoints.

  Args:
    a: The one.
    b: The other.
    prefix: Only names of this folder, or this one name; the empty one is all.

  Raises:
    checkpointer.DamagedCheckpointError: An array cannot be read.
  """
  of_a, of_b = (explanation.within(c.arrays, prefix) for c in (a, b))
  unlike, equal, different = [], [], {}
  for name, array in of_a.items():
    other = of_b.get(name)
    if other is None:
      continue
    if (array.shape, array.dtype) != (other.shape, other.dtype):
      unlike.append(name)
      continue
    difference = _read_and_compare(a, b, name)
    if difference is None:
      equal.append(name)
    else:
      different[name] = difference
  return Comparison(
    a=a,
    b=b,
    only_a=tuple(name for name in of_a if name not in of_b),
    only_b=tuple(name for name in of_b if name not in of_a),
    unlike=tuple(unlike),
    different=different,
    equal=tuple(equal),
  )


def _read_and_compare(
  a: stored_checkpoint.StoredCheckpoint,
  b: stored_checkpoint.StoredCheckpoint,
  name: str,
) -> Difference | None:
  # A function, so that one pair is gone before the next is read.
  return difference_of(
    *(stored_arrays.read_numpy(c, [name])[name] for c in (a, b))
  )


def difference_of(x: np.ndarray, y: np.ndarray) -> Difference | None:
  """Returns how two arrays differ, `None` if they are equal bit for bit.

  Args:
    x: An array.
    y: One of the same shape and dtype.
  """
  count, largest, scale, is_same, has_nan = 0, 0.0, 0.0, True, False
  for p, q in _pieces(x, y):
    if p.tobytes() == q.tobytes():
      scale = max(scale, _scale(p))
      continue
    is_same = False
    scale = max(scale, _scale(p), _scale(q))
    p, q = p.astype(np.float64), q.astype(np.float64)
    differs = (p != q) & ~(np.isnan(p) & np.isnan(q))
    count += int(differs.sum())
    with np.errstate(invalid="ignore"):
      gaps = np.abs(p[differs] - q[differs])
    has_nan |= bool(np.isnan(gaps).any())
    largest = max(largest, float(np.nanmax(gaps, initial=0.0)))
  if is_same:
    return None
  largest = math.nan if has_nan else largest
  relative = largest / scale if scale else (math.inf if largest else 0.0)
  return Difference(
    max_absolute=largest, relative=relative, count=count, size=x.size
  )


def lines(comparison: Comparison) -> list[str]:
  """Returns what to print of a comparison.

  Args:
    comparison: Of two checkpoints.
  """
  a, b = comparison.a, comparison.b
  shown = [f"a  {os.fspath(a.path)}", f"b  {os.fspath(b.path)}"]
  shown += _only("only in a", comparison.only_a, a)
  shown += _only("only in b", comparison.only_b, b)
  if comparison.unlike:
    shown += ["", f"of another shape or dtype: {len(comparison.unlike)}"]
    rows = [
      (f"  {name}", _kind(a.arrays[name]), _kind(b.arrays[name]))
      for name in comparison.unlike
    ]
    shown += text_table.lines([("  name", "in a", "in b"), *rows])
  if comparison.different:
    shown += ["", f"of other values: {len(comparison.different)}"]
    rows = [
      (
        f"  {name}",
        f"{found.max_absolute:.3g}",
        f"{found.relative:.3g}",
        f"{found.count:,} of {found.size:,}",
      )
      for name, found in comparison.different.items()
    ]
    head = ("  name", "max |a-b|", "relative", "values")
    shown += text_table.lines([head, *rows], right=(1, 2, 3))
  return [*shown, "", f"equal bit for bit: {len(comparison.equal)}"]


def _only(
  title: str,
  names: Iterable[str],
  checkpoint: stored_checkpoint.StoredCheckpoint,
) -> list[str]:
  names = tuple(names)
  if not names:
    return []
  rows = []
  for group in name_groups.collapse(names, among=checkpoint.arrays):
    arrays = [checkpoint.arrays[name] for name in group.names]
    what = f"{len(arrays)} arrays" if len(arrays) > 1 else _kind(arrays[0])
    num_bytes = stored_checkpoint.total_bytes(arrays)
    rows.append((f"  {group.label}", what, text_table.size(num_bytes)))
  return ["", f"{title}: {len(names)}", *text_table.lines(rows, right=(2,))]


def _kind(array: stored_checkpoint.StoredArray) -> str:
  return f"{array.dtype}{text_table.shape(array.shape)}"


def _scale(piece: np.ndarray) -> float:
  """Returns the largest finite magnitude."""
  magnitudes = np.abs(piece.astype(np.float64))
  return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))


def _pieces(
  x: np.ndarray, y: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  x, y = x.reshape(-1), y.reshape(-1)
  for start in range(0, x.size, _PIECE):
    yield x[start : start + _PIECE], y[start : start + _PIECE]
