"""ArrayRecord files with random access to their records."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from paxon.inputs import file_patterns
from paxon.inputs.grain_sources import optional_library


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecordFiles:
  """Records by index, ordered by file name, then by position in the file.

  A source of documents if each record is the text of a document.

  Attributes:
    files: A path, a pattern such as `data/*.array_record*`, or several.
  """

  files: str | Sequence[str]

  def __post_init__(self) -> None:
    if not self.files:
      raise ValueError("ArrayRecordFiles.files must not be empty.")

  def __getstate__(self) -> dict[str, Any]:
    # Open files cannot be pickled.
    return {"files": self.files}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int, /) -> bytes:
    """Returns the data of one record.

    Raises:
      ValueError: The record cannot be read.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"There is no record {index} of {len(self)}.")
    try:
      return self._records[index]
    except (RuntimeError, ValueError) as error:
      raise ValueError(f"{self.name(index)} is damaged: {error}.") from error

  def name(self, index: int) -> str:
    """Returns the name of a record for messages."""
    return f"{self.files}, record {index} of all"

  @functools.cached_property
  def _records(self) -> Any:
    paths = file_patterns.find(self.files, field="ArrayRecordFiles.files")
    records = optional_library.array_record().ArrayRecordDataSource(list(paths))
    if not len(records):
      raise ValueError(
        f"ArrayRecordFiles.files: {self.files!r} holds no records."
      )
    return records
