"""Documents in text files: one per file, line or paragraph.

Documents are raw bytes in any encoding. They are read by number, for which each
file is read once before the first document to index the offsets; or in order,
file by file (`read_shard`).
"""

from collections.abc import Iterator
import dataclasses
import enum
import functools
import re
from typing import ClassVar

import numpy as np

from paxon.inputs.sources import data_files, record_files

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class Documents(enum.Enum):
  """The unit of text that makes one document."""

  FILE = "file"
  LINE = "line"
  PARAGRAPH = "paragraph"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles(record_files.RecordFiles):
  """Documents from text files; documents of white space only are skipped.

  Attributes:
    documents: One per file, line or paragraph (separated by blank lines).
  """

  documents: Documents = Documents.FILE
  _hint: ClassVar[str] = ", only files that are empty or blank"

  def __getitem__(self, index: int, /) -> bytes:
    number, place = self._locate(index)
    begin, end = self._parts[number][place]
    document = self._files[number].read(int(begin), int(end))
    if len(document) < end - begin:
      raise ValueError(
        f"{self.paths[number]} has become shorter since it was indexed: a"
        f" document at bytes {begin} to {end} is cut off; restore the file and"
        " resume the run."
      )
    return document

  @functools.cached_property
  def _parts(self) -> tuple[np.ndarray, ...]:
    """The begin and end offsets of each file's documents, int64 [n, 2]."""
    data_files.check_fits(self.paths)
    return tuple(self._find_spans(file) for file in self._files)

  @functools.cached_property
  def _files(self) -> tuple[data_files.DataFile, ...]:
    """The files; a store is asked for each once."""
    return tuple(map(_open, self.paths))

  def read_shard(
    self, number: int, offset: int
  ) -> Iterator[tuple[int, bytes, str]]:
    """Yields the documents of a file from an offset, which reads all of it.

    Args:
      number: The number of the file.
      offset: 0, or an offset that was yielded.

    Yields:
      The offset after a document, the document, and its name for messages.
    """
    path = self.paths[number]
    file = _open(path)
    for begin, end in self._find_spans(file).tolist():
      if begin >= offset:
        name = f"{path}, byte {begin:,} of the text"
        yield max(end, 1), file.read(begin, end), name

  def _find_spans(self, file: data_files.DataFile) -> np.ndarray:
    data = file.read(0, file.size)
    # Separators between documents.
    if self.documents is Documents.FILE:
      gaps = []
    elif self.documents is Documents.LINE:
      ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
      gaps = [(end, end + 1) for end in ends.tolist()]
    else:
      gaps = [m.span() for m in _BLANK_LINES.finditer(data)]
    begins, ends = (
      [0, *(e for _, e in gaps)],
      [*(b for b, _ in gaps), len(data)],
    )
    spans = zip(begins, ends, strict=True)
    kept = [(b, e) for b, e in spans if data[b:e].strip()]
    return np.array(kept, np.int64).reshape(-1, 2)


def _open(path: str) -> data_files.DataFile:
  is_zstd = path.endswith(data_files.ZSTD)
  return data_files.DataFile(data_files.local(path) if is_zstd else path)
