"""Reader of Pax's checkpoints of kind FLAX: one msgpack file.

The file holds a map of two entries: `flattened_state`, the leaves of the train
state by their number, and `str_pytree_state`, the text of its pytree structure,
which is the only place of the names:

  PyTreeDef(CustomNode(TrainState[()], [*, CustomNode(NestedMap[('params',)],
  [...]), [...], ()]))

A leaf is an extension type of flax with its shape, dtype and bytes; larger ones
than 1 GiB are maps of chunks. The file is scanned once without keeping leaves,
and each array is read by its offset.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
import os
from typing import IO, Final

from etils import epath
import jax.numpy as jnp
import msgpack
import numpy as np

from paxon.runner import user_error

_LEAVES, _STRUCTURE = "flattened_state", "str_pytree_state"
# Bytes of a leaf that hold its shape and dtype.
_HEAD = 4096
# Bytes that are read at a time.
_PIECE = 1 << 26
# Of extension types: arrays and scalars.
_ARRAY, _SCALAR = 1, 3
# By the first byte of an extension type: bytes of its length.
_LENGTH_BYTES: Final = {
  **dict.fromkeys(range(0xD4, 0xD9), 0),
  **{0xC7: 1, 0xC8: 2, 0xC9: 4},
}
# The fields of node types whose text has none.
_FIELDS: Final = {
  "TrainState": ("step", "mdl_vars", "opt_states", "extra_state"),
  "namedtuple[ShardedAdafactorState]": (
    *("count", "m", "m_scale", "vr", "vc", "v"),
  ),
  "namedtuple[ScaleByAdamState]": ("count", "mu", "nu"),
  "namedtuple[ScaleByScheduleState]": ("count",),
  "namedtuple[TraceState]": ("trace",),
  "namedtuple[MaskedState]": ("inner_state",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """One array of the file.

  Attributes:
    name: Its path in the train state, joined by dots.
    shape: Its shape.
    dtype: Its dtype.
    read: Returns the array, or a region of it.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[..., np.ndarray]


def list_leaves(path: epath.Path) -> list[Leaf]:
  """Scans a file and returns its arrays, which are not read.

  Raises:
    user_error.UserError: It is not such a file, or is damaged.
  """
  try:
    offsets, structure = _scan(path)
    names = parse_names(structure)
    if len(names) != len(offsets):
      raise ValueError(
        f"it has {len(offsets)} leaves, and its structure names {len(names)}"
      )
    found = [
      _describe(path, name, offset)
      for name, offset in zip(names, offsets, strict=True)
    ]
  except (
    *(ValueError, KeyError, TypeError, IndexError, EOFError),
    *(msgpack.exceptions.UnpackException, RecursionError),
  ) as error:
    raise user_error.UserError(
      f"{os.fspath(path)} is no checkpoint of Pax in flax's format, or is"
      f" damaged: {str(error).rstrip('.') or type(error).__name__}."
    ) from error
  return [leaf for leaf in found if leaf is not None]


def parse_names(structure: str) -> list[str]:
  """Returns the path of each leaf in the text of a pytree structure.

  Fields of unknown node types are numbered.

  Raises:
    ValueError: The text is not that of a structure.
  """
  start, end = "PyTreeDef(", ")"
  if not (structure.startswith(start) and structure.endswith(end)):
    raise ValueError(f"its structure begins with {structure[:40]!r}")
  parser = _Structure(structure[len(start) : -len(end)])
  names = [".".join(path) for path in parser.parse(())]
  parser.expect_end()
  return names


class _Structure:
  """Recursive descent through the text of a pytree structure."""

  def __init__(self, text: str) -> None:
    self._text = text
    self._at = 0

  def parse(self, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the paths of the leaves of the node at the current position."""
    if self._skip("*"):
      yield path
    elif self._skip("None"):
      return
    elif self._skip("CustomNode("):
      label = self._read_label()
      data = self._read_brackets()
      self._require(", [")
      keys = self._find_keys(label, data)
      yield from self._children(path, "]", keys)
      self._require(")")
    elif self._skip("["):
      yield from self._children(path, "]", str)
    elif self._skip("("):
      yield from self._children(path, ")", str)
    elif self._skip("{"):
      yield from self._entries(path)
    else:
      raise ValueError(
        f"its structure has {self._text[self._at : self._at + 20]!r} at"
        f" character {self._at}"
      )

  def expect_end(self) -> None:
    """Raises ValueError unless all of the text is read."""
    if self._at != len(self._text):
      raise ValueError(f"its structure ends at character {self._at}")

  def _find_keys(self, label: str, data: str) -> Callable[[int], str]:
    """Returns the key of each child of a node type with its static data."""
    name = f"{label}[{data}]" if label == "namedtuple" else label
    if name in _FIELDS:
      return lambda i: _FIELDS[name][i]
    try:
      keys = ast.literal_eval(data)
    except (ValueError, SyntaxError):
      return str
    if isinstance(keys, tuple | list) and all(isinstance(k, str) for k in keys):
      # Of a node without keys, such as a dataclass: `()`.
      return lambda i: keys[i] if i < len(keys) else str(i)
    return str

  def _children(
    self, path: tuple[str, ...], end: str, key: Callable[[int], str]
  ) -> Iterator[tuple[str, ...]]:
    index = 0
    while not self._skip(end):
      yield from self.parse((*path, key(index)))
      index += 1
      if not self._skip(", "):
        self._skip(",")

  def _entries(self, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    while not self._skip("}"):
      end = self._text.index(": ", self._at)
      key = str(ast.literal_eval(self._text[self._at : end]))
      self._at = end + 2
      yield from self.parse((*path, key))
      self._skip(", ")

  def _read_label(self) -> str:
    end = self._text.index("[", self._at)
    label, self._at = self._text[self._at : end], end + 1
    return label

  def _read_brackets(self) -> str:
    """Returns the text up to the bracket that closes the current one."""
    start, depth = self._at, 1
    while depth:
      depth += {"[": 1, "]": -1}.get(self._text[self._at], 0)
      self._at += 1
    return self._text[start : self._at - 1]

  def _skip(self, word: str) -> bool:
    if not self._text.startswith(word, self._at):
      return False
    self._at += len(word)
    return True

  def _require(self, word: str) -> None:
    if not self._skip(word):
      raise ValueError(f"its structure lacks {word!r} at {self._at}")


def _scan(path: epath.Path) -> tuple[list[int], str]:
  """Returns the offset of each leaf, by its number, and the structure."""
  offsets: dict[int, int] = {}
  structure = ""
  with path.open("rb") as file:
    stream = msgpack.Unpacker(file, max_buffer_size=0, raw=False)
    for _ in range(stream.read_map_header()):
      key = stream.unpack()
      if key == _LEAVES:
        for _ in range(stream.read_map_header()):
          number = int(stream.unpack())
          offsets[number] = stream.tell()
          stream.skip()
      elif key == _STRUCTURE:
        structure = stream.unpack()
      else:
        stream.skip()
  if not offsets or not structure:
    raise ValueError(f"it has no {_LEAVES} or {_STRUCTURE}")
  return [offsets[number] for number in range(len(offsets))], structure


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Segment:
  """The values of an array, or of a chunk of one, in a file."""

  start: int
  size: int
  shape: tuple[int, ...]
  dtype: np.dtype


def _describe(path: epath.Path, name: str, offset: int) -> Leaf | None:
  """Returns an array from its first bytes; None for other objects."""
  with path.open("rb") as file:
    file.seek(offset)
    kind = file.read(1)[0]
    if kind & 0xF0 == 0x80 or kind in (0xDE, 0xDF):
      shape, segments = _find_chunks(file, offset)
    else:
      # None is in the place of an object that was not stored.
      segment = _find_segment(file, offset)
      if segment is None:
        return None
      shape, segments = segment.shape, [segment]
  dtype = segments[0].dtype
  return Leaf(
    name=name,
    shape=shape,
    dtype=dtype,
    read=functools.partial(_read, path, segments, shape, dtype),
  )


def _find_segment(file: IO[bytes], offset: int) -> _Segment | None:
  """Returns the place of an array that begins at an offset, or None."""
  file.seek(offset)
  head = file.read(_HEAD)
  width = _LENGTH_BYTES.get(head[0])
  if width is None or head[1 + width] not in (_ARRAY, _SCALAR):
    return None
  length = int.from_bytes(head[1 : 1 + width], "big")
  if not width:
    length = 1 << (head[0] - 0xD4)
  stream = msgpack.Unpacker(raw=False)
  stream.feed(head[2 + width :])
  stream.read_array_header()
  shape = tuple(stream.unpack())
  dtype = jnp.dtype(stream.unpack())
  size = math.prod(shape) * dtype.itemsize
  # The values are last.
  start = offset + 2 + width + length - size
  return _Segment(start=start, size=size, shape=shape, dtype=dtype)


def _find_chunks(
  file: IO[bytes], offset: int
) -> tuple[tuple[int, ...], list[_Segment]]:
  """Returns the shape and the chunks of a large array."""
  file.seek(offset)
  stream = msgpack.Unpacker(file, max_buffer_size=0, raw=False)
  shape: tuple[int, ...] = ()
  places: dict[int, int] = {}
  for _ in range(stream.read_map_header()):
    key = stream.unpack()
    if key == "shape":
      sizes = stream.unpack()
      shape = tuple(sizes[str(i)] for i in range(len(sizes)))
    elif key == "chunks":
      for _ in range(stream.read_map_header()):
        number = int(stream.unpack())
        places[number] = offset + stream.tell()
        stream.skip()
    else:
      stream.skip()
  found = [_find_segment(file, places[i]) for i in range(len(places))]
  segments = [each for each in found if each is not None]
  if not segments or len(segments) != len(found):
    raise ValueError("a chunk is no array")
  return shape, segments


def _read(
  path: epath.Path,
  segments: Sequence[_Segment],
  shape: tuple[int, ...],
  dtype: np.dtype,
  region: tuple[slice, ...] | None = None,
) -> np.ndarray:
  """Returns an array, or a region of it, of which it reads whole rows."""
  first = region[0] if region else slice(0, shape[0] if shape else 1)
  result = np.empty((first.stop - first.start, *shape[1:]), dtype)
  row = math.prod(shape[1:]) * dtype.itemsize
  skipped = first.start * row
  # numpy has no buffers of bfloat16.
  rest = memoryview(result.reshape(-1).view(np.uint8).data)
  with path.open("rb") as file:
    for segment in segments:
      begin = min(skipped, segment.size)
      skipped -= begin
      file.seek(segment.start + begin)
      while begin < segment.size and len(rest):
        size = min(_PIECE, segment.size - begin, len(rest))
        piece = file.read(size)
        if len(piece) != size:
          break
        rest[:size] = piece
        rest, begin = rest[size:], begin + size
  if len(rest):
    raise user_error.UserError(
      f"{os.fspath(path)} is damaged: an array of shape {shape} is not"
      " complete."
    )
  if not shape:
    return result.reshape(())
  return result[(slice(None), *region[1:])] if region else result
