"""The arrays of planned rows: what each place of a batch holds."""

from collections.abc import Callable
from typing import Any

import numpy as np

from paxon.inputs import example_source, packing_plan

_PREFIXES = ("", example_source.ENCODER)
_PAD_KEYS = ("inputs", "targets")


def fill(
  rows: list[list[packing_plan.Part]],
  *,
  read: Callable[[Any], example_source.Example],
  lengths: packing_plan.Lengths,
  pad_id: int,
  name: Callable[[Any], str],
  like: Any,
  scalars: bool,
) -> dict[str, np.ndarray]:
  """Returns the arrays of some rows.

  Args:
    rows: The parts in each row.
    read: Returns an example.
    lengths: The places of a row, and those of its encoder if there is one.
    pad_id: The input and target of an empty place.
    name: Returns words for an example.
    like: An example with the keys that all must have.
    scalars: Whether arrays without dimensions are wanted; there is one example
      a row then.

  Returns:
    Arrays [rows, length] or [rows, encoder length], by key, and [rows] of
    scalars. Integers are int32, other numbers and all `weights` float32.

  Raises:
    ValueError: An example has other keys or arrays of another kind, an integer
      that int32 cannot hold, or `inputs` and `targets` lack.
  """
  first = read(like)
  _check_keys(first, name(like), scalars=scalars)
  batch = _empty(first, len(rows), lengths, pad_id)
  for number, row in enumerate(rows):
    columns = [0] * len(lengths)
    for segment, part in enumerate(row, start=1):
      example = read(part.reference)
      if example.keys() != first.keys():
        raise ValueError(
          f"{name(part.reference)} has the arrays {sorted(example)}, and"
          f" {name(like)} has {sorted(first)}; all examples of an input must"
          " have the same."
        )
      for key, value in example.items():
        if problem := _problem(key, value, first[key]):
          raise ValueError(f"{name(part.reference)} has {key!r} {problem}")
      for i, prefix in enumerate(_PREFIXES[: len(lengths)]):
        columns[i] = _put(
          batch, number, columns[i], segment, example, part, prefix, lengths[i]
        )
      if scalars:
        for key, value in example.items():
          if not value.ndim:
            batch[key][number] = value[()]
  return batch


def _put(
  batch: dict[str, np.ndarray],
  row: int,
  column: int,
  segment: int,
  example: example_source.Example,
  part: packing_plan.Part,
  prefix: str,
  length: int,
) -> int:
  """Writes a part; returns the next free column."""
  if prefix:
    begin = 0
    end = min(example_source.num_places(example, prefix), length)
  else:
    begin, end = part.begin, part.end
  count = end - begin
  where = row, slice(column, column + count)
  for key, value in example.items():
    if value.ndim and key.startswith(example_source.ENCODER) == bool(prefix):
      batch[key][where] = value[begin:end]
  batch[prefix + "positions"][where] = np.arange(count, dtype=np.int32)
  batch[prefix + "segment_ids"][where] = segment
  if not prefix and "weights" not in example:
    batch["weights"][where] = 1
  return column + count


def _empty(
  example: example_source.Example,
  num_rows: int,
  lengths: packing_plan.Lengths,
  pad_id: int,
) -> dict[str, np.ndarray]:
  batch: dict[str, np.ndarray] = {}
  for prefix, length in zip(_PREFIXES, lengths, strict=False):
    for key in ("positions", "segment_ids"):
      batch[prefix + key] = np.zeros((num_rows, length), np.int32)
  batch["weights"] = np.zeros((num_rows, lengths[0]), np.float32)
  for key, value in example.items():
    if not value.ndim:
      batch[key] = np.zeros(num_rows, _dtype(key, value))
      continue
    is_encoder = key.startswith(example_source.ENCODER)
    length = lengths[1] if is_encoder else lengths[0]
    is_token = key.removeprefix(example_source.ENCODER) in _PAD_KEYS
    shape = (num_rows, length, *value.shape[1:])
    batch[key] = np.full(shape, pad_id if is_token else 0, _dtype(key, value))
  return batch


def _dtype(key: str, value: np.ndarray) -> np.dtype:
  if key == "weights":
    return np.dtype(np.float32)
  if value.dtype.kind in "iu":
    return np.dtype(np.int32)
  if value.dtype.kind == "f":
    return np.dtype(np.float32)
  return np.dtype(bool) if value.dtype.kind == "b" else np.dtype(object)


def _check_keys(
  example: example_source.Example, name: str, *, scalars: bool
) -> None:
  for key in ("inputs", "targets"):
    if key not in example:
      raise ValueError(
        f"{name} must have the array {key!r}, got {sorted(example)}."
      )
  for key, value in example.items():
    if not value.ndim and not scalars:
      raise ValueError(
        f"{name} has {key!r} without dimensions, which belongs to an example"
        " and not to a place; only packing NONE, one example a row, has room."
      )


def _problem(key: str, value: np.ndarray, like: np.ndarray) -> str | None:
  """Returns why an array cannot stand where those like another do."""
  dtype, form = _dtype(key, value), value.shape[1:]
  if (dtype, value.ndim, form) != (
    _dtype(key, like),
    like.ndim,
    like.shape[1:],
  ):
    return (
      f"of {value.dtype} {list(value.shape)}, and another example of"
      f" {like.dtype} {list(like.shape)}; they must be of one kind."
    )
  # Most are int32 already, and are not looked at.
  if dtype == np.int32 and value.size and not np.can_cast(value.dtype, dtype):
    low, high = int(value.min()), int(value.max())
    if low < -(2**31) or high >= 2**31:
      return f"from {low} to {high}; integers of a batch are int32."
  return None
