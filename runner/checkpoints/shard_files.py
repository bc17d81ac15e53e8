"""Files of array shards on a local disk: one file of data and its index.

A folder has two files:

  data.bin    the shards, one after another, in C order
  index.json  a header of the caller, and of each shard its array, bounds,
              dtype, offset, size and CRC-32; and a checksum of all that

The index is written last and atomically, so a folder without one is
incomplete.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
import pathlib
from typing import Any
import zlib

from etils import epath
import jax.numpy as jnp
import numpy as np

from paxon.runner import files

Array = np.ndarray[Any, np.dtype[Any]]
_DATA, _INDEX = "data.bin", "index.json"
# Of a state with many arrays on many devices.
_MAX_INDEX_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, order=True)
class Box:
  """A rectangular part of an array.

  Attributes:
    name: Logical name of the array.
    bounds: First index and end, by dimension.
  """

  name: str
  bounds: tuple[tuple[int, int], ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """The number of indices, by dimension."""
    return tuple(end - begin for begin, end in self.bounds)

  @property
  def size(self) -> int:
    """The number of values."""
    return math.prod(self.shape)

  def to_json(self) -> list[Any]:
    """Returns JSON values for `from_json`."""
    return [self.name, [list(bound) for bound in self.bounds]]

  @classmethod
  def from_json(cls, value: list[Any]) -> "Box":
    """Returns the box of `to_json`."""
    name, bounds = value
    return cls(name, tuple((int(begin), int(end)) for begin, end in bounds))

  @classmethod
  def from_index(
    cls, name: str, index: tuple[slice, ...] | None, shape: tuple[int, ...]
  ) -> "Box":
    """Returns the box of a shard's index in an array of a shape.

    JAX gives scalars the index None in some places.
    """
    bounds = zip(index or (), shape, strict=True)
    return cls(name, tuple(part.indices(size)[:2] for part, size in bounds))

  def overlap(self, other: "Box") -> "Box | None":
    """Returns the common part of two boxes of one array; None if empty."""
    bounds = tuple(
      (max(a, c), min(b, d))
      for (a, b), (c, d) in zip(self.bounds, other.bounds, strict=True)
    )
    if any(begin >= end for begin, end in bounds):
      return None
    return Box(self.name, bounds)

  def within(self, outer: "Box") -> tuple[slice, ...]:
    """Returns the slices of this box in the array of an outer one."""
    return tuple(
      slice(begin - start, end - start)
      for (begin, end), (start, _) in zip(
        self.bounds, outer.bounds, strict=True
      )
    )


@dataclasses.dataclass(frozen=True)
class Shard:
  """One shard in a file.

  Attributes:
    box: Its part of its array.
    dtype: The name of its dtype.
    path: The file.
    offset: Of its first byte.
    size: In bytes.
    crc32: Of its bytes.
  """

  box: Box
  dtype: str
  path: pathlib.Path
  offset: int
  size: int
  crc32: int

  def read(self) -> Array:
    """Reads the values.

    Raises:
      OSError: The file is missing, or shorter than its index says.
    """
    data = np.empty(self.size, np.uint8)
    with self.path.open("rb", buffering=0) as file:
      file.seek(self.offset)
      view, found = data.data, 0
      while found < self.size:
        count = file.readinto(view[found:])
        if not count:
          raise OSError(f"{self.path} is too short")
        found += count
    return data.view(jnp.dtype(self.dtype)).reshape(self.box.shape)

  def is_intact(self) -> bool:
    """Whether the file has the bytes that were written."""
    try:
      data = self.read()
    except OSError:
      return False
    return zlib.crc32(to_bytes(data)) == self.crc32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
  """The content of a complete folder.

  Attributes:
    header: The argument of `write`.
    shards: The shards.
  """

  header: Mapping[str, Any]
  shards: tuple[Shard, ...]


def write(
  folder: pathlib.Path,
  shards: Iterable[tuple[Box, Array]],
  *,
  header: Mapping[str, Any],
) -> None:
  """Writes shards, and then their index.

  Args:
    folder: It is created.
    shards: Contiguous arrays, each taken when the one before is written.
    header: JSON values.

  Raises:
    OSError: The disk is full, for example.
  """
  folder.mkdir(parents=True)
  entries, offset = [], 0
  with (folder / _DATA).open("wb", buffering=0) as file:
    for box, values in shards:
      data = to_bytes(values)
      written = 0
      while written < len(data):
        written += file.write(data[written:])
      crc32 = zlib.crc32(data)
      entries.append(
        [*box.to_json(), values.dtype.name, offset, len(data), crc32]
      )
      offset += len(data)
  content = {"header": dict(header), "shards": entries}
  text = json.dumps({"crc32": _checksum(content), "content": content})
  files.write_text(epath.Path(folder / _INDEX), text)


def read_index(folder: pathlib.Path) -> Index | None:
  """Returns the index of a folder; None if it is incomplete or damaged."""
  try:
    text = files.read_text(folder / _INDEX, max_bytes=_MAX_INDEX_BYTES)
    parsed = json.loads(text)
    content = parsed["content"]
    if parsed["crc32"] != _checksum(content):
      return None
    return Index(
      header=dict(content["header"]),
      shards=tuple(
        Shard(
          Box.from_json([name, bounds]),
          dtype,
          folder / _DATA,
          int(offset),
          int(size),
          int(crc32),
        )
        for name, bounds, dtype, offset, size, crc32 in content["shards"]
      ),
    )
  except (*files.PARSE_ERRORS, OSError):
    return None


def to_bytes(values: Array) -> memoryview:
  """Returns the memory of a contiguous array."""
  return np.atleast_1d(values).view(np.uint8).reshape(-1).data


def _checksum(content: Any) -> int:
  return zlib.crc32(json.dumps(content, sort_keys=True).encode())
