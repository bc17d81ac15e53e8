"""Documents in text files: one a file, one a line, or paragraphs.

Documents are bytes, as they lie in the files: nothing is decoded, so a file in
any encoding is a document like any other. Each file is read once from end to
end before its first document is returned, to learn where documents begin.
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
  """What a document is."""

  FILE = "file"
  LINE = "line"
  PARAGRAPH = "paragraph"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
  """A source of documents: the text of some files.

  Documents without any character but white space are left out: empty files and
  blank lines. They are ordered by the name of the file, then as in the file.

  Attributes:
    files: A path, or a pattern such as `texts/**/*.txt`.
    documents: What is one: a file, a line, or what stands between two blank
      lines.
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
      FileNotFoundError: There is none.
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
    """Leaves out what was opened: another process opens it again."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  @functools.cached_property
  def _spans(self) -> tuple[np.ndarray, ...]:
    """By file: where its documents begin and end, int64 [n, 2]."""
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
    # What stands between two documents.
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
    """By file: the number of documents in it and those before it."""
    return np.cumsum([len(span) for span in self._spans]).tolist()
