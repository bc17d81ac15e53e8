"""Random access to Parquet files.

The unit of reading is a row group; the most recent groups are cached. A global
shuffle reads a whole group for nearly every row: shuffle the data when writing
the files, or convert them to ArrayRecord.
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
  """Rows by index, ordered by file name, then by position in the file.

  Attributes:
    files: A path or a pattern such as `data/*.parquet`.
    columns: The columns to read. None reads all.
  """

  files: str
  columns: Sequence[str] | None = None

  def __post_init__(self) -> None:
    if not self.files:
      raise ValueError("ParquetRows.files must not be empty.")

  def __getstate__(self) -> dict[str, Any]:
    # Open files cannot be pickled.
    return {"files": self.files, "columns": self.columns}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int, /) -> dict[str, Any]:
    """Returns one row as a dictionary of Python values.

    Raises:
      ValueError: The row group cannot be read.
    """
    place, number = self._place(index)
    return self._group(place).slice(number, 1).to_pylist()[0]

  def name(self, index: int) -> str:
    """Returns the file, group and index of a row for messages."""
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
    """Returns a row group, cached; thread-safe."""
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
    """The file of each row group, and its index in the file."""
    return [(path, group) for path, group, _ in self._sizes]

  @functools.cached_property
  def _ends(self) -> list[int]:
    """The cumulative number of rows after each row group."""
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
