"""Documents in text files: one per file, line or paragraph.

Documents are raw bytes in any encoding. Each file is read once before the first
document to index the offsets. Files of a store are copied for that.
"""

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
    with open(self._local[number], "rb") as file:
      file.seek(int(begin))
      document = file.read(int(end - begin))
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
    return tuple(map(self._find_spans, self._local))

  @functools.cached_property
  def _local(self) -> tuple[str, ...]:
    """The files on a disk; a store is asked for each once."""
    return tuple(map(data_files.local, self.paths))

  def _find_spans(self, path: str) -> np.ndarray:
    with open(path, "rb") as file:
      data = file.read()
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
