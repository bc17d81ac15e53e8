"""Documents in JSON-lines files, plain or compressed by gzip or zstd.

Each line is an object with the document in one of its strings, as in C4
(`c4-train.00000-of-01024.json.gz`, `{"text": ...}`).

Documents are read by number, or in order from any offset in a file's text
(`read_shard`). By number, each file is read once before the first document to
index its line offsets; for random access in a gzip file, the decompressor's
state (40 kB) is saved every `_SPAN` bytes of text. Indexing one file of C4
(800 MB of text) takes seconds and 35 MB of memory: list only the files that a
run needs. A line may have `$PAXON_MAX_LINE_BYTES`, by default 128 MiB.

Files in object stores are read by ranges (`data_files`). By number, `.zst`
files are decompressed to a disk first, and files of a store must fit in its
cache.
"""

import bisect
from collections.abc import Iterator
import dataclasses
import functools
import io
import json
import os
from typing import Any
import zlib

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import data_files, record_files

# Whether a byte is no blank.
_IS_TEXT = np.ones(256, bool)
_IS_TEXT[list(b" \t\r\v\f\n")] = False
# Largest number of bytes of a line, unless the environment sets another one.
_MAX_LINE = 1 << 27
_LIMIT = "PAXON_MAX_LINE_BYTES"
# Bytes per read.
_CHUNK = 1 << 20
# Bytes of text between saved states of the decompressor.
_SPAN = 1 << 20
# Selects the gzip format: its header and checksum.
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(record_files.RecordFiles):
  """Documents from one string field of JSON lines; blank lines are skipped.

  Attributes:
    text_key: The key of the document in each line.
  """

  text_key: str = "text"

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_not_empty(self, "text_key")

  def __getitem__(self, index: int, /) -> bytes:
    """Returns one document as UTF-8.

    Raises:
      ValueError: Its line is not an object with the string `text_key`; the
        error has the file and the number of the line, from 1.
    """
    number, line = self._locate(index)
    file = self._parts[number]
    text = file.line(line)
    try:
      return self.document(text, file.path)
    except ValueError as error:
      number = file.line_number(line)
      raise ValueError(f"{error} (line {number} of the file)") from error

  def name(self, index: int) -> str:
    """Returns the file and the number of a document's line, from 1."""
    number, line = self._locate(index)
    file = self._parts[number]
    return f"{file.path}, line {file.line_number(line)}"

  def document(self, line: bytes, path: str) -> bytes:
    """Returns the document of a line, the bytes of a JSON object.

    Raises:
      ValueError: The line is not an object with the string `text_key`.
    """
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}: a line is no JSON ({error}).") from error
    text = row.get(self.text_key) if isinstance(row, dict) else None
    if not isinstance(text, str):
      others = (
        [key for key in row if isinstance(row[key], str)]
        if isinstance(row, dict)
        else []
      )
      advice = f" (text_key can be one of {others[:8]})" if others else ""
      raise ValueError(
        f"{path}: a line has no string {self.text_key!r}{advice}:"
        f" {line[:60].decode(errors='replace')}"
      )
    # JSON can encode lone surrogates, which UTF-8 cannot.
    return text.encode(errors="replace")

  def read_shard(
    self, number: int, offset: int
  ) -> Iterator[tuple[int, bytes, str]]:
    """Yields the documents of a file from an offset in its text.

    Args:
      number: The number of the file.
      offset: 0, or an offset that was yielded.

    Yields:
      The offset after a document, the document, and its name for messages.
    """
    path = self.paths[number]
    with data_files.DataFile(path).open_text(offset) as file:
      for begin, line in read_lines(file, path, begin=offset):
        offset = begin + len(line)
        if line.strip():
          name = f"{path}, byte {begin:,} of the text"
          yield offset, self.document(line, name), name

  @functools.cached_property
  def _parts(self) -> "tuple[_File, ...]":
    data_files.check_fits(self.paths)
    return tuple(_File(path) for path in self.paths)


class _File:
  """One file with an index of its lines."""

  def __init__(self, path: str) -> None:
    self.path = path
    is_zstd = path.endswith(data_files.ZSTD)
    self._file = data_files.DataFile(
      data_files.local(path) if is_zstd else path
    )
    self._is_gzip = self._file.path.endswith(data_files.GZIP)
    # Offsets in the decompressed text, one for each of the states.
    self._starts: list[int] = []
    self._states: list[tuple[int, Any]] = []
    self._cached: tuple[int, bytes] = (0, b"")
    self._begins, self._ends = self._find_lines()

  def __len__(self) -> int:
    return len(self._begins)

  def line(self, number: int) -> bytes:
    """Returns a line without its newline."""
    return self._text(int(self._begins[number]), int(self._ends[number]))

  def line_number(self, number: int) -> int:
    """Returns the number of a line in the file, from 1, blank ones included."""
    begin = int(self._begins[number])
    parts = range(0, begin, _CHUNK)
    return 1 + sum(
      self._text(at, min(at + _CHUNK, begin)).count(b"\n") for at in parts
    )

  def _text(self, begin: int, end: int) -> bytes:
    first, text = self._cached
    if not first <= begin <= end <= first + len(text):
      first, text = self._read(begin, end)
      # The next document is often in the same chunk.
      self._cached = first, text
    return text[begin - first : end - first]

  def _find_lines(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the begin and end offsets of nonblank lines, int64 [n].

    Blank lines take no memory, however many and long they are.

    Raises:
      ValueError: A line is longer than the limit.
    """
    found: list[np.ndarray] = []
    # State of the line in which a chunk ends.
    size, begin, has_text = 0, 0, False
    for text in self._chunks():
      array = np.frombuffer(text, np.uint8)
      ends = np.flatnonzero(array == ord("\n"))
      counts = None
      if len(ends):
        begins = np.append(begin - size, ends[:-1] + 1)
        kept = ends > begins
        # Most lines begin with text; the first may have begun earlier.
        kept[0] = has_text or bool(text[: ends[0]].strip())
        unsure = np.flatnonzero(kept & ~_IS_TEXT[array[np.maximum(begins, 0)]])
        unsure = unsure[unsure > 0]
        if len(unsure):
          counts = np.append(0, np.cumsum(_IS_TEXT[array], dtype=np.int32))
          kept[unsure] = counts[ends[unsure]] > counts[begins[unsure]]
        found.append(np.stack([begins[kept], ends[kept]]) + size)
        self._check_length(found[-1])
        begin, has_text = size + int(ends[-1]) + 1, False
      rest = text[begin - size :] if len(ends) else text
      has_text = has_text or bool(rest.strip())
      size += len(text)
      if has_text:
        self._check_length(np.array([[begin], [size]]))
    if has_text:
      found.append(np.array([[begin], [size]]))
    begins, ends = np.concatenate([np.zeros((2, 0), np.int64), *found], axis=1)
    return begins, ends

  def _check_length(self, spans: np.ndarray) -> None:
    """Raises ValueError if a line, from begin to end, is too long."""
    limit = find_max_line()
    begins, ends = spans
    if (ends - begins > limit).any():
      raise make_length_error(
        self.path, int(begins[ends - begins > limit][0]), limit
      )

  def _chunks(self) -> Iterator[bytes]:
    """Yields the text of the file; saves decompressor states."""
    if not self._is_gzip:
      with self._file.open() as file:
        while chunk := file.read(_CHUNK):
          yield chunk
      return
    size = 0
    for place, state, text in self._decompress(0, _new_state()):
      if not self._starts or size - self._starts[-1] >= _SPAN:
        self._starts.append(size)
        self._states.append((place, state))
      size += len(text)
      # A chunk of blanks is a thousand times as long as compressed.
      for begin in range(0, len(text), _CHUNK):
        yield text[begin : begin + _CHUNK]

  def _read(self, begin: int, end: int) -> tuple[int, bytes]:
    """Returns text that includes [begin, end), preceded by its offset."""
    if not self._is_gzip:
      return begin, self._file.read(begin, end)
    number = bisect.bisect_right(self._starts, begin) - 1
    first, (place, state) = self._starts[number], self._states[number]
    parts, size = [], 0
    for _, _, text in self._decompress(place, state.copy()):
      parts.append(text)
      size += len(text)
      if first + size >= end:
        break
    return first, b"".join(parts)

  def _decompress(
    self, place: int, state: Any
  ) -> Iterator[tuple[int, Any, bytes]]:
    """Decompresses the file from an offset.

    Yields:
      The file offset and a copy of the decompressor before a chunk of text, and
      the chunk.

    Raises:
      ValueError: The file is damaged or truncated.
    """
    # Whether the state is within a gzip member.
    has_begun = place > 0
    with self._file.open() as file:
      file.seek(place)
      while data := file.read(_CHUNK // 8):
        while data:
          if state.eof:  # A file may have several gzip members.
            state, has_begun = _new_state(), False
          if not has_begun:  # Members may be separated by zero padding.
            rest = data.lstrip(b"\0")
            place, data = place + len(data) - len(rest), rest
            if not data:
              break
          has_begun, before = True, (place, state.copy())
          try:
            text = state.decompress(data)
          except zlib.error as error:
            raise ValueError(f"{self.path} is damaged: {error}.") from error
          place += len(data) - len(state.unused_data)
          data = state.unused_data
          yield *before, text
    if has_begun and not state.eof:
      raise ValueError(f"{self.path} is cut off; it does not end as gzip does.")


def read_lines(
  file: io.BufferedIOBase, path: str, *, begin: int
) -> Iterator[tuple[int, bytes]]:
  """Yields the offset of each line and the line, from an open file's position.

  Raises:
    ValueError: A line is longer than the limit.
  """
  limit = find_max_line()
  while line := file.readline(limit + 1):
    if len(line) > limit and not line.endswith(b"\n"):
      raise make_length_error(path, begin, limit)
    yield begin, line
    begin += len(line)


def find_max_line() -> int:
  """Returns the largest number of bytes of a line."""
  return int(os.environ.get(_LIMIT) or _MAX_LINE)


def make_length_error(path: str, begin: int, limit: int) -> ValueError:
  """Returns the error of a line that is longer than a limit in bytes."""
  return ValueError(
    f"{path}: the line at byte {begin:,} of the text has more than"
    f" {limit:,} bytes; {_LIMIT} in the environment sets another limit."
  )


def _new_state() -> Any:
  return zlib.decompressobj(_GZIP_FORMAT)
