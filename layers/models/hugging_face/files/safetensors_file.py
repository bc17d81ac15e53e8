"""Partial reads and writes of tensors in safetensors files.

A file has the length of the header (8 bytes, little-endian), a JSON header with
dtype, shape and offsets of each tensor, and the bytes of the tensors. Unlike
the `safetensors` package, this module reads rows from any `epath` (such as
`gs://`), and writes rows one at a time, so memory need not hold a tensor.
"""

import collections
from collections.abc import Mapping
import dataclasses
import functools
import json
import math
import os
from typing import Any

from etils import epath
import fsspec
import jax.numpy as jnp
import numpy as np

_LENGTH_BYTES = 8
# The limit of the package.
_MAX_HEADER_BYTES = 100_000_000
# Far more than a file of any model has. With the limit on brackets and commas
# it bounds the time and memory of parsing a header.
_MAX_TENSORS = 1 << 17
_MAX_DETAILS = 1 << 20
_DETAILS_OF_TENSOR = 32
_METADATA = "__metadata__"
# The first bytes of a file that Git LFS did not fetch.
_POINTER = b"version https://git-lfs"
# Dtypes by their names in the format.
_DTYPES: Mapping[str, Any] = {
  "BF16": jnp.bfloat16,
  "F16": np.float16,
  "F8_E4M3": jnp.float8_e4m3fn,
  "F8_E8M0": jnp.float8_e8m0fnu,
  "F32": np.float32,
  "F64": np.float64,
  "I8": np.int8,
  "I16": np.int16,
  "I32": np.int32,
  "I64": np.int64,
  "U8": np.uint8,
  "BOOL": np.bool_,
}


class DamagedFileError(ValueError):
  """A file is truncated or not a safetensors file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """One tensor of a file.

  Attributes:
    dtype: Name in the format, such as `BF16`.
    shape: Shape.
    start: Offset of its first byte in the file.
    stop: Offset after its last byte.
  """

  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int

  @functools.cached_property
  def numpy_dtype(self) -> np.dtype:
    """Its numpy dtype.

    Raises:
      DamagedFileError: The dtype is not supported.
    """
    if self.dtype not in _DTYPES:
      raise DamagedFileError(
        f"Unsupported dtype {self.dtype}; supported: {', '.join(_DTYPES)}."
      )
    return np.dtype(_DTYPES[self.dtype])

  @property
  def row_bytes(self) -> int:
    """Bytes of one entry of the first dimension."""
    return math.prod(self.shape[1:]) * self.numpy_dtype.itemsize


def dtype_name(dtype: Any) -> str:
  """Returns the name of a numpy dtype in the format.

  Raises:
    ValueError: The format does not have it.
  """
  for name, each in _DTYPES.items():
    if np.dtype(each) == np.dtype(dtype):
      return name
  raise ValueError(f"safetensors does not support dtype {np.dtype(dtype)}.")


def read_header(path: epath.Path) -> dict[str, Entry]:
  """Returns the tensors of a file by name, without reading their values.

  Raises:
    DamagedFileError: The file is truncated or not a safetensors file.
  """
  size = path.stat().length
  first = _read_range(path, 0, len(_POINTER))
  if first == _POINTER:
    raise _make_damaged_error(
      path,
      "it is a pointer of Git LFS, not the file; get the file with"
      " `git lfs pull`",
    )
  length = int.from_bytes(first[:_LENGTH_BYTES], "little")
  if size < _LENGTH_BYTES or not 2 <= length <= _MAX_HEADER_BYTES:
    raise _make_damaged_error(path, "it is not a safetensors file")
  begin = _LENGTH_BYTES + length
  if size < begin:
    raise _make_damaged_error(
      path, f"it is truncated to {size:,} bytes; the header has {length:,}"
    )
  text = _read_range(path, _LENGTH_BYTES, begin)
  try:
    entries = {
      name: Entry(
        dtype=str(each["dtype"]),
        shape=_to_sizes(each["shape"]),
        start=begin + start,
        stop=begin + stop,
      )
      for name, each in _parse_header(text).items()
      for start, stop in [_to_sizes(each["data_offsets"])]
    }
  except (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
  ) as error:
    raise _make_damaged_error(
      path, f"its header is invalid ({error})"[:300]
    ) from error
  _check_layout(path, entries, begin=begin, size=size)
  return entries


def _read_range(path: epath.Path, begin: int, end: int) -> bytes:
  """Returns the bytes [begin, end) of a file, fewer at its end."""
  if "://" in os.fspath(path):
    # An open file of a store would read 50 MB ahead for each tensor.
    store, name = fsspec.core.url_to_fs(os.fspath(path))
    return store.cat_file(name, start=begin, end=end)
  with path.open("rb") as file:
    file.seek(begin)
    return file.read(end - begin)


def _parse_header(text: bytes) -> dict[str, Any]:
  """Returns the tensors of a header by name; raises ValueError."""
  tensors = text.count(b'"data_offsets"')
  details = sum(map(text.count, (b"[", b"{", b",")))
  if tensors > _MAX_TENSORS:
    raise ValueError(f"it has more than {_MAX_TENSORS:,} tensors")
  if details > _MAX_DETAILS + _DETAILS_OF_TENSOR * tensors:
    raise ValueError(f"it has {details:,} values for {tensors:,} tensors")
  parsed = json.loads(text, object_pairs_hook=_to_dict)
  metadata = parsed.pop(_METADATA, {})
  if not all(isinstance(each, str) for each in metadata.values()):
    raise ValueError(f"a value of {_METADATA} is no text")
  return parsed


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found = dict(pairs)
  if len(found) < len(pairs):
    counts = collections.Counter(name for name, _ in pairs)
    ((twice, _),) = counts.most_common(1)
    raise ValueError(f"{twice!r} is there twice")
  return found


def _to_sizes(value: Any) -> tuple[int, ...]:
  """Returns sizes or offsets, which are not negative; raises ValueError."""
  if not isinstance(value, list) or any(
    type(each) is not int or not 0 <= each < 1 << 63 for each in value
  ):
    raise ValueError(f"{str(value)[:60]} is no list of sizes")
  return tuple(value)


def _check_layout(
  path: epath.Path, entries: Mapping[str, Entry], *, begin: int, size: int
) -> None:
  """Raises DamagedFileError unless tensors fill the file without overlaps."""
  end = max((entry.stop for entry in entries.values()), default=begin)
  if end > size:
    raise _make_damaged_error(
      path,
      f"it is truncated to {size:,} of {end:,} bytes; copy it again",
    )
  at = begin
  order = sorted(entries, key=lambda n: (entries[n].start, entries[n].stop))
  for name in order:
    entry = entries[name]
    if entry.dtype in _DTYPES:
      expected = math.prod(entry.shape) * entry.numpy_dtype.itemsize
      if entry.stop - entry.start != expected:
        raise _make_damaged_error(
          path, f"the bytes of {name} do not match its shape"
        )
    if entry.start != at or entry.stop < at:
      what = "overlaps another tensor" if entry.start < at else "follows a gap"
      raise _make_damaged_error(path, f"{name} {what}")
    at = entry.stop
  if at != size:
    raise _make_damaged_error(path, f"{size - at:,} bytes belong to no tensor")


def read_rows(
  path: epath.Path, entry: Entry, start: int, stop: int
) -> np.ndarray:
  """Returns rows `start` to `stop` of a tensor, read-only.

  Raises:
    DamagedFileError: The file is truncated, or the dtype is not supported.
  """
  if entry.dtype not in _DTYPES:
    raise _make_damaged_error(
      path,
      f"Unsupported dtype {entry.dtype}; supported: {', '.join(_DTYPES)}",
    )
  shape = (stop - start, *entry.shape[1:])
  wanted = (stop - start) * entry.row_bytes
  begin = entry.start + start * entry.row_bytes
  content = _read_range(path, begin, begin + wanted) if wanted else b""
  if len(content) != wanted:
    raise _make_damaged_error(path, "it ends within a tensor")
  return np.frombuffer(content, entry.numpy_dtype).reshape(shape)


class Writer:
  """Writes rows of tensors to a local file, in any order; a context manager.

  The layout is that of the `safetensors` package, byte by byte.
  """

  def __init__(
    self, path: epath.Path, tensors: Mapping[str, tuple[Any, tuple[int, ...]]]
  ) -> None:
    """Creates or overwrites the file with zeros, from dtypes and shapes."""
    # The order of the package: by item size, largest first, then by name.
    order = sorted(tensors, key=lambda n: (-_itemsize(tensors[n]), n))
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    stop = 0
    for name in order:
      dtype, shape = tensors[name]
      start, stop = stop, stop + math.prod(shape) * np.dtype(dtype).itemsize
      header[name] = {
        "dtype": dtype_name(dtype),
        "shape": list(shape),
        "data_offsets": [start, stop],
      }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    encoded = text.encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    self._path = path
    self._file = open(path, "w+b")  # noqa: SIM115
    self._file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
    self._file.truncate(_LENGTH_BYTES + len(encoded) + stop)
    self._file.flush()
    self._entries = read_header(path)

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *exception: object) -> None:
    self._file.close()

  def write_rows(
    self,
    name: str,
    start: int,
    rows: np.ndarray,
    columns: slice = slice(None),
  ) -> None:
    """Writes rows of a tensor, which have its dtype, from row `start` on.

    Only some `columns` of the last dimension may be written; others are kept.
    """
    entry = self._entries[name]
    assert rows.dtype == entry.numpy_dtype
    if columns != slice(None):
      self._file.flush()
      for i, row in enumerate(rows, start=start):
        whole = np.array(read_rows(self._path, entry, i, i + 1))
        whole[..., columns] = row
        self.write_rows(name, i, whole)
      return
    assert rows.shape[1:] == entry.shape[1:]
    self._file.seek(entry.start + start * entry.row_bytes)
    self._file.write(np.ascontiguousarray(rows).tobytes())


def _itemsize(tensor: tuple[Any, tuple[int, ...]]) -> int:
  return np.dtype(tensor[0]).itemsize


def _make_damaged_error(path: epath.Path, what: str) -> DamagedFileError:
  return DamagedFileError(f"{os.fspath(path)} cannot be read: {what}.")
