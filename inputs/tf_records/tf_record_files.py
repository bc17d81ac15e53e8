"""The records of many TFRecord files as one list."""

import bisect
from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from paxon.inputs import file_patterns
from paxon.inputs.tf_records import tf_record_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfRecordFiles:
  """Records by number, ordered by file name, then as in the file.

  It is a source of documents where a record is a document by itself.

  Attributes:
    files: A path, a pattern such as `c4/en/3.0.4/c4-train.tfrecord-*`, or
      several of them. Of several, the order given is kept, and a file that has
      two of them is there once.
    index_folder: Where the places of records are kept, so that the files are
      walked over once only; None walks over them at each start.
  """

  files: str | Sequence[str]
  index_folder: str | None = None

  def __post_init__(self) -> None:
    if not self.files:
      raise ValueError("TfRecordFiles.files must not be empty.")

  @functools.cached_property
  def paths(self) -> tuple[str, ...]:
    """The files.

    Raises:
      FileNotFoundError: A path or pattern has none.
    """
    return file_patterns.find(self.files, field="TfRecordFiles.files")

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int, /) -> bytes:
    """Returns the data of one record.

    Raises:
      ValueError: It is damaged; names the file and the record.
    """
    file, number = self._place(index)
    return file[number]

  def name(self, index: int) -> str:
    """Returns a record's file and number, for messages."""
    file, number = self._place(index)
    return f"{file.path}, record {number}"

  def _place(self, index: int) -> tuple[tf_record_file.TfRecordFile, int]:
    if not 0 <= index < len(self):
      raise IndexError(f"There is no record {index} of {len(self)}.")
    place = bisect.bisect_right(self._ends, index)
    return self._files[place], index - (self._ends[place - 1] if place else 0)

  @functools.cached_property
  def _files(self) -> tuple[tf_record_file.TfRecordFile, ...]:
    return tuple(
      tf_record_file.TfRecordFile(path, index_folder=self.index_folder)
      for path in self.paths
    )

  @functools.cached_property
  def _ends(self) -> list[int]:
    """By file: the number of records in it and those before it."""
    ends = np.cumsum([len(file) for file in self._files]).tolist()
    if not ends[-1]:
      raise ValueError(f"TfRecordFiles.files: {self.files!r} holds no records.")
    return ends
