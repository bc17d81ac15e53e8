"""Hugging Face data sets in local files."""

from collections.abc import Mapping
import dataclasses
import functools
import os
from typing import Any

from paxon.inputs import file_patterns
from paxon.inputs.grain_sources import optional_library

_FORMATS = ("arrow", "csv", "json", "parquet", "text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceRows:
  """Rows of a data set on disk; nothing is downloaded.

  Attributes:
    path: A folder written by `save_to_disk`, or with `files_format` a path or
      pattern of files.
    split: The split. None is the only one.
    files_format: The format of the files: `arrow`, `csv`, `json`, `parquet` or
      `text`. They are converted to Arrow once.
    cache_folder: The folder of converted files. None is the library's default.
  """

  path: str
  split: str | None = None
  files_format: str | None = None
  cache_folder: str | None = None

  def __post_init__(self) -> None:
    if not self.path:
      raise ValueError("HuggingFaceRows.path must not be empty.")
    if self.files_format not in (None, *_FORMATS):
      raise ValueError(
        f"HuggingFaceRows.files_format must be one of {list(_FORMATS)}, or None"
        f" for what save_to_disk has written, got {self.files_format!r}."
      )

  def __getstate__(self) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(self)]
    return {name: getattr(self, name) for name in names}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int, /) -> Mapping[str, Any]:
    """Returns one row as a dictionary of Python values."""
    if not 0 <= index < len(self):
      raise IndexError(f"There is no row {index} of {len(self)}.")
    return self._rows[index]

  def name(self, index: int) -> str:
    """Returns the name of a row for messages."""
    return f"{self.path}, row {index}"

  @functools.cached_property
  def _rows(self) -> Any:
    datasets = optional_library.datasets()
    if self.files_format is None:
      path = os.path.expanduser(self.path)
      if not os.path.isdir(path):
        raise FileNotFoundError(
          f"HuggingFaceRows.path: there is no folder {self.path!r}; give one"
          " that save_to_disk has written, or set files_format."
        )
      found = datasets.load_from_disk(path)
    else:
      files = file_patterns.find(self.path, field="HuggingFaceRows.path")
      found = datasets.load_dataset(
        self.files_format,
        data_files={self.split or "train": list(files)},
        cache_dir=self.cache_folder,
      )
    rows = self._split_of(found)
    if not len(rows):
      raise ValueError(f"HuggingFaceRows.path: {self.path!r} holds no rows.")
    return rows

  def _split_of(self, found: Any) -> Any:
    """Returns the data set of `split`."""
    if not isinstance(found, Mapping):
      if self.split is not None:
        raise ValueError(
          f"HuggingFaceRows.split: {self.path!r} has no splits; leave it None."
        )
      return found
    if self.split is None and len(found) == 1:
      return next(iter(found.values()))
    if self.split not in found:
      raise ValueError(
        f"HuggingFaceRows.split must be one of {sorted(found)}, got"
        f" {self.split!r}."
      )
    return found[self.split]
