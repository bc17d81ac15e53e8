"""Documents in JSON-lines files, plain or compressed by gzip or zstd.

Each line is an object with the document in one of its strings, as in C4
(`c4-train.00000-of-01024.json.gz`, `{"text": ...}`).

Before the first document, each file is read once to index its line offsets. For
random access in a gzip file, the decompressor's state (40 kB) is saved every
`_SPAN` bytes of text. Indexing one file of C4 (800 MB of text) takes seconds
and 35 MB of memory: list only the files that a run needs. Files in object
stores and `.zst` files are first copied to a disk; see `data_files`.
"""

import bisect
from collections.abc import Iterator
import dataclasses
import functools
import json
from typing import Any
import zlib

import numpy as np

from paxon.inputs import checks, data_files, record_files

_GZIP = (".gz", ".gzip")
_BLANK = b" \t\r\v\f"
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

  @functools.cached_property
  def _parts(self) -> "tuple[_File, ...]":
    return tuple(_File(path) for path in self.paths)


class _File:
  """One file with an index of its lines."""

  def __init__(self, path: str) -> None:
    self.path = path
    self._local = data_files.local(path)
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
    """Returns the begin and end offsets of nonblank lines, int64 [n]."""
    ends, firsts, befores, size, last = [], [], [], 0, b"\n"
    for text in self._chunks():
      array = np.frombuffer(last + text, np.uint8)
      found = np.flatnonzero(array == ord("\n"))
      firsts.append(array[found[found < len(text)] + 1])
      found = found[found > 0] - 1
      ends.append(found + size)
      befores.append(array[found])
      size += len(text)
      last = array[-1:].tobytes()
    found = np.concatenate([np.zeros(0, np.int64), *ends])
    first, before = (
      np.concatenate([np.zeros(0, np.uint8), *parts])
      for parts in (firsts, befores)
    )
    if size and last != b"\n":
      found, before = np.append(found, size), np.append(before, ord(last))
    begins = np.append(0, found[:-1] + 1) if len(found) else found
    # Skips blank lines; only lines with blanks at both ends need a full check.
    is_blank = np.isin([first, before], np.frombuffer(_BLANK, np.uint8)).all(0)
    kept = found > begins
    for i in np.flatnonzero(kept & is_blank):
      kept[i] = bool(self._text(int(begins[i]), int(found[i])).strip())
    return begins[kept], found[kept]

  def _chunks(self) -> Iterator[bytes]:
    """Yields the text of the file; saves decompressor states."""
    if not self._local.endswith(_GZIP):
      with open(self._local, "rb") as file:
        while chunk := file.read(_CHUNK):
          yield chunk
      return
    size = 0
    for place, state, text in self._decompressed(0, _new_state()):
      if not self._starts or size - self._starts[-1] >= _SPAN:
        self._starts.append(size)
        self._states.append((place, state))
      size += len(text)
      yield text

  def _read(self, begin: int, end: int) -> tuple[int, bytes]:
    """Returns text that includes [begin, end), preceded by its offset."""
    if not self._local.endswith(_GZIP):
      with open(self._local, "rb") as file:
        file.seek(begin)
        return begin, file.read(end - begin)
    number = bisect.bisect_right(self._starts, begin) - 1
    first, (place, state) = self._starts[number], self._states[number]
    parts, size = [], 0
    for _, _, text in self._decompressed(place, state.copy()):
      parts.append(text)
      size += len(text)
      if first + size >= end:
        break
    return first, b"".join(parts)

  def _decompressed(
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
    with open(self._local, "rb") as file:
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


def _new_state() -> Any:
  return zlib.decompressobj(_GZIP_FORMAT)
