"""Rows of Parquet files.

The files say where their groups of rows are, and a group is read as a whole,
so the last groups are kept. A shuffle of single rows reads a group for nearly
every one: shuffle them when the files are written, or make ArrayRecords.
"""

import bisect
from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from paxon.inputs import file_patterns
from paxon.inputs.grain_sources import optional_library

_KEPT_GROUPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetRows:
  """Rows by number, ordered by file name, then as in the file.

  Attributes:
    files: A path or a pattern such as `data/*.parquet`.
    columns: What is read; None reads all columns.
  """

  files: str
  columns: Sequence[str] | None = None

  def __post_init__(self) -> None:
    if not self.files:
      raise ValueError("ParquetRows.files must not be empty.")

  def __getstate__(self) -> dict[str, Any]:
    # Open files do not travel to other processes.
    return {"files": self.files, "columns": self.columns}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int, /) -> dict[str, Any]:
    """Returns one row: Python's values by column.

    Raises:
      ValueError: Its group cannot be read; names the file.
    """
    place, number = self._place(index)
    return self._group(place).slice(number, 1).to_pylist()[0]

  def name(self, index: int) -> str:
    """Returns a row's file and number, for messages."""
    place, number = self._place(index)
    path, group = self._groups[place]
    return f"{path}, group {group}, row {number}"

  def _place(self, index: int) -> tuple[int, int]:
    if not 0 <= index < len(self):
      raise IndexError(f"There is no row {index} of {len(self)}.")
    place = bisect.bisect_right(self._ends, index)
    return place, index - (self._ends[place - 1] if place else 0)

  @functools.cached_property
  def _group(self) -> Callable[[int], Any]:
    """Reads a group, or has it still; several threads may ask."""
    return functools.lru_cache(_KEPT_GROUPS)(self._read_group)

  def _read_group(self, place: int) -> Any:
    path, group = self._groups[place]
    parquet = optional_library.parquet()
    try:
      with parquet.ParquetFile(path) as file:
        columns = None if self.columns is None else list(self.columns)
        return file.read_row_group(group, columns=columns)
    except (OSError, ValueError) as error:
      raise ValueError(f"{path}, group {group} is damaged: {error}.") from error

  @functools.cached_property
  def _groups(self) -> list[tuple[str, int]]:
    """By group: its file and its number there."""
    return [(path, group) for path, group, _ in self._sizes]

  @functools.cached_property
  def _ends(self) -> list[int]:
    """By group: the number of rows in it and those before it."""
    ends = np.cumsum([rows for _, _, rows in self._sizes]).tolist()
    if not ends or not ends[-1]:
      raise ValueError(f"ParquetRows.files: {self.files!r} holds no rows.")
    return ends

  @functools.cached_property
  def _sizes(self) -> list[tuple[str, int, int]]:
    parquet = optional_library.parquet()
    found = []
    for path in file_patterns.find(self.files, field="ParquetRows.files"):
      try:
        metadata = parquet.read_metadata(path)
      except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no Parquet file: {error}.") from error
      for group in range(metadata.num_row_groups):
        found.append((path, group, metadata.row_group(group).num_rows))
    return found
