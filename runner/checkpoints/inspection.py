"""The content of a checkpoint as a table, and the differences of two.

```
params                                                     9,424   36.8 KiB
  params/embedding/table  [264,16]  float32  vocab embed   4,224   16.5 KiB
```

Two checkpoints are compared by names, shapes, dtypes and values. Arrays are
read one pair at a time and compared in chunks, so that memory grows with the
largest array (about three times that), not with the checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import math
import os

import numpy as np

from paxon.runner import units
from paxon.runner.checkpoints import stored_checkpoint, text_table

_COLUMNS = ("name", "shape", "dtype", "axes", "values", "size")
_NUMBERS = (4, 5)
# Values per chunk, in float64: 8 MB per operand.
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """The difference of the values of one array.

  Attributes:
    max_absolute: The largest |a - b|; NaN where only one of the two is NaN.
    relative: `max_absolute` divided by the largest finite magnitude in either.
    count: Number of different values.
    size: Number of values.
  """

  max_absolute: float
  relative: float
  count: int
  size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """The differences of two checkpoints.

  Attributes:
    a: The first checkpoint.
    b: The second checkpoint.
    only_a: Names that only `a` has.
    only_b: Names that only `b` has.
    unlike: Names in both with different shapes or dtypes.
    different: By name, arrays in both with different values.
    equal: Names of arrays that are bitwise equal.
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
    """Whether both contain the same arrays, bitwise equal."""
    return not (self.only_a or self.only_b or self.unlike or self.different)


def explain(
  checkpoint: stored_checkpoint.StoredCheckpoint, *, prefix: str = ""
) -> list[str]:
  """Returns a table of the arrays below a prefix, with totals, in lines."""
  arrays = select(checkpoint.arrays, prefix)
  rows: list[tuple[str, ...]] = [_COLUMNS]
  groups: dict[str, list[stored_checkpoint.StoredArray]] = {}
  for name, array in arrays.items():
    groups.setdefault(name.partition("/")[0], []).append(array)
  for collection, group in groups.items():
    if [array.name for array in group] != [collection]:
      rows.append(_total(collection, group))
    rows += [_row(array) for array in group]
  rows.append(_total("total", arrays.values()))
  head = (
    f"{os.fspath(checkpoint.path)}: step {checkpoint.step}, format version"
    f" {checkpoint.format_version}, {len(checkpoint.arrays)} arrays"
  )
  return [head, "", *text_table.format_lines(rows, right=_NUMBERS)]


def select(
  arrays: Mapping[str, stored_checkpoint.StoredArray], prefix: str
) -> dict[str, stored_checkpoint.StoredArray]:
  """Returns the arrays with a name or below a prefix.

  `params/head` selects `params/head/kernel`, not `params/header`; the empty
  prefix selects all.
  """
  folder = prefix.rstrip("/")
  return {
    name: array
    for name, array in arrays.items()
    if not folder or name == folder or name.startswith(f"{folder}/")
  }


def compare(
  a: stored_checkpoint.StoredCheckpoint,
  b: stored_checkpoint.StoredCheckpoint,
  *,
  prefix: str = "",
) -> Comparison:
  """Reads and compares two checkpoints below a prefix (see `select`).

  Raises:
    user_error.UserError: One of them is damaged.
  """
  for each in (a, b):
    stored_checkpoint.verify(each)
  in_a, in_b = (select(c.arrays, prefix) for c in (a, b))
  unlike, equal, different = [], [], {}
  for name, array in in_a.items():
    other = in_b.get(name)
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
    only_a=tuple(name for name in in_a if name not in in_b),
    only_b=tuple(name for name in in_b if name not in in_a),
    unlike=tuple(unlike),
    different=different,
    equal=tuple(equal),
  )


def find_difference(x: np.ndarray, y: np.ndarray) -> Difference | None:
  """Returns how two equally shaped arrays differ; None if bitwise equal."""
  count, largest, scale, is_same, has_nan = 0, 0.0, 0.0, True, False
  for p, q in _chunks(x, y):
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


def format_comparison(comparison: Comparison) -> list[str]:
  """Returns a comparison in lines."""
  a, b = comparison.a, comparison.b
  lines = [f"a  {os.fspath(a.path)}", f"b  {os.fspath(b.path)}"]
  lines += _only("only in a", comparison.only_a, a)
  lines += _only("only in b", comparison.only_b, b)
  if comparison.unlike:
    lines += ["", f"different shape or dtype: {len(comparison.unlike)}"]
    rows = [
      (f"  {name}", _kind(a.arrays[name]), _kind(b.arrays[name]))
      for name in comparison.unlike
    ]
    lines += text_table.format_lines([("  name", "in a", "in b"), *rows])
  if comparison.different:
    lines += ["", f"different values: {len(comparison.different)}"]
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
    lines += text_table.format_lines([head, *rows], right=(1, 2, 3))
  return [*lines, "", f"bitwise equal: {len(comparison.equal)}"]


def _row(array: stored_checkpoint.StoredArray) -> tuple[str, ...]:
  return (
    f"  {array.name}" if "/" in array.name else array.name,
    text_table.format_shape(array.shape),
    array.dtype,
    " ".join(axis or "-" for axis in array.axes),
    f"{array.size:,}",
    units.size(array.num_bytes),
  )


def _total(
  name: str, arrays: Iterable[stored_checkpoint.StoredArray]
) -> tuple[str, ...]:
  arrays = list(arrays)
  values = sum(array.size for array in arrays)
  num_bytes = stored_checkpoint.total_bytes(arrays)
  return (name, "", "", "", f"{values:,}", units.size(num_bytes))


def _read_and_compare(
  a: stored_checkpoint.StoredCheckpoint,
  b: stored_checkpoint.StoredCheckpoint,
  name: str,
) -> Difference | None:
  # A function, so that one pair is freed before the next is read.
  return find_difference(
    *(stored_checkpoint.read_numpy(c, [name])[name] for c in (a, b))
  )


def _only(
  title: str,
  names: Iterable[str],
  checkpoint: stored_checkpoint.StoredCheckpoint,
) -> list[str]:
  names = tuple(names)
  if not names:
    return []
  rows = []
  for group in text_table.collapse_names(names, among=checkpoint.arrays):
    arrays = [checkpoint.arrays[name] for name in group.names]
    what = f"{len(arrays)} arrays" if len(arrays) > 1 else _kind(arrays[0])
    num_bytes = stored_checkpoint.total_bytes(arrays)
    rows.append((f"  {group.label}", what, units.size(num_bytes)))
  table = text_table.format_lines(rows, right=(2,))
  return ["", f"{title}: {len(names)}", *table]


def _kind(array: stored_checkpoint.StoredArray) -> str:
  return f"{array.dtype}{text_table.format_shape(array.shape)}"


def _scale(chunk: np.ndarray) -> float:
  """Returns the largest finite magnitude."""
  magnitudes = np.abs(chunk.astype(np.float64))
  return float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))


def _chunks(
  x: np.ndarray, y: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  x, y = x.reshape(-1), y.reshape(-1)
  for start in range(0, x.size, _CHUNK):
    yield x[start : start + _CHUNK], y[start : start + _CHUNK]
