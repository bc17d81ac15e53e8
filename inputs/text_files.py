"""Documents in text files: one per file, line or paragraph.

Documents are raw bytes in any encoding. Each file is read once before the first
document to index the offsets.
"""

import bisect
import dataclasses
import enum
import functools
import re
from typing import Any

import numpy as np

from paxon.inputs import file_patterns

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


class Documents(enum.Enum):
  """The unit of text that makes one document."""

  FILE = "file"
  LINE = "line"
  PARAGRAPH = "paragraph"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
  """Documents from text files.

  Documents that contain only white space are skipped. They are ordered by file
  name, then by position in the file.

  Attributes:
    files: A path, or a pattern such as `texts/**/*.txt`.
    documents: One per file, line or paragraph (separated by blank lines).
  """

  files: str
  documents: Documents = Documents.FILE

  def __post_init__(self) -> None:
    if not self.files:
      raise ValueError("TextFiles.files must not be empty.")

  @functools.cached_property
  def paths(self) -> tuple[str, ...]:
    """The files, sorted.

    Raises:
      FileNotFoundError: No file matches.
    """
    return file_patterns.find(self.files, field="TextFiles.files")

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int, /) -> bytes:
    if not 0 <= index < len(self):
      raise IndexError(f"There is no document {index} of {len(self)}.")
    number = bisect.bisect_right(self._ends, index)
    first = self._ends[number - 1] if number else 0
    begin, end = self._spans[number][index - first]
    with open(self.paths[number], "rb") as file:
      file.seek(int(begin))
      return file.read(int(end - begin))

  def __getstate__(self) -> dict[str, Any]:
    """Returns the fields only: each process opens the files itself."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  @functools.cached_property
  def _spans(self) -> tuple[np.ndarray, ...]:
    """The begin and end offsets of each file's documents, int64 [n, 2]."""
    spans = tuple(self._spans_of(path) for path in self.paths)
    if not any(len(span) for span in spans):
      raise ValueError(
        f"TextFiles.files: {self.files!r} holds no documents, only files that"
        " are empty or blank."
      )
    return spans

  def _spans_of(self, path: str) -> np.ndarray:
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

  @functools.cached_property
  def _ends(self) -> list[int]:
    """The cumulative number of documents after each file."""
    return np.cumsum([len(span) for span in self._spans]).tolist()
