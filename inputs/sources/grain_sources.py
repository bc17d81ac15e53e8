"""Random-access readers of ArrayRecord, Parquet, Grain and Hugging Face data.

The libraries are imported on the first access; nothing is downloaded. Shuffling
within Grain is kept; epochs, packing and sharding by host are those of
`inputs`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import os
from typing import Any, ClassVar

from paxon.inputs import checks, optional_library, stores
from paxon.inputs.sources import data_files, record_files

_KEPT_GROUPS = 4
_BATCH_ROWS = 1024
_BUFFER = 1 << 20
_FORMATS = ("arrow", "csv", "json", "parquet", "text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecordFiles(record_files.RecordFiles):
  """ArrayRecord files; a source of documents if each record is a text."""

  _what: ClassVar[str] = "record"

  def __getitem__(self, index: int, /) -> bytes:
    """Returns the data of one record.

    Raises:
      ValueError: The record cannot be read.
    """
    self._locate(index)
    try:
      return self._parts[0][index]
    except (RuntimeError, ValueError) as error:
      raise ValueError(f"{self.name(index)} is damaged: {error}.") from error

  def name(self, index: int) -> str:
    """Returns the name of a record for messages."""
    return f"{self.files}, record {index} of all"

  @functools.cached_property
  def _parts(self) -> Sequence[Any]:
    # The library numbers the records of all files itself.
    library = optional_library.array_record()
    # It reads files of a disk only.
    paths = [data_files.local(path) for path in self.paths]
    return (library.ArrayRecordDataSource(paths),)


@dataclasses.dataclass(frozen=True)
class _RowGroup:
  file: data_files.DataFile
  number: int
  num_rows: int

  @property
  def path(self) -> str:
    return self.file.path

  def __len__(self) -> int:
    return self.num_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetRows(record_files.RecordFiles):
  """Rows of Parquet files.

  The unit of reading is a row group; the most recent groups are cached. A
  global shuffle reads a whole group for nearly every row: shuffle in windows
  (`windowed_stream`), or convert the files to a token file.

  Attributes:
    columns: The columns to read. None reads all.
  """

  columns: Sequence[str] | None = None

  _what: ClassVar[str] = "row"

  def __getitem__(self, index: int, /) -> dict[str, Any]:
    """Returns one row as a dictionary of Python values.

    Raises:
      ValueError: The row group cannot be read.
    """
    place, number = self._locate(index)
    group = self._group(place)
    if group.num_rows != self._parts[place].num_rows:
      raise ValueError(
        f"{self.name(index)} is damaged: the size of the group is"
        f" {group.num_rows}, not {self._parts[place].num_rows}."
      )
    try:
      return group.slice(number, 1).to_pylist()[0]
    except ValueError as error:
      raise ValueError(f"{self.name(index)} is damaged: {error}.") from error

  def name(self, index: int) -> str:
    """Returns the file, group and index of a row for messages."""
    place, number = self._locate(index)
    group = self._parts[place]
    return f"{group.path}, group {group.number}, row {number}"

  @functools.cached_property
  def _group(self) -> Callable[[int], Any]:
    """Returns a row group, cached; thread-safe."""
    return functools.lru_cache(_KEPT_GROUPS)(self._read_group)

  def _read_group(self, place: int) -> Any:
    group = self._parts[place]
    with (
      self._open(group.file) as file,
      _explain_damage(f"{group.path}, group {group.number}"),
    ):
      return file.read_row_group(group.number, columns=self._columns)

  def read_shard(self, number: int, offset: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file from a number on, group by group.

    Args:
      number: The number of the file.
      offset: The number of a row in the file.
    """
    path = self.paths[number]
    with _explain_damage(path), self._open(data_files.DataFile(path)) as file:
      for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if offset < num_rows:
          for batch in file.iter_batches(
            _BATCH_ROWS, row_groups=[group], columns=self._columns
          ):
            yield from batch.slice(min(offset, len(batch))).to_pylist()
            offset = max(offset - len(batch), 0)
        offset = max(offset - num_rows, 0)

  @property
  def _columns(self) -> list[str] | None:
    return None if self.columns is None else list(self.columns)

  @contextlib.contextmanager
  def _open(self, file: data_files.DataFile) -> Iterator[Any]:
    # Without a buffer, columns of a group are read whole, before its rows.
    with (
      file.open() as opened,
      optional_library.parquet().ParquetFile(
        opened, buffer_size=_BUFFER, pre_buffer=False
      ) as parquet,
    ):
      yield parquet

  @functools.cached_property
  def _parts(self) -> Sequence[_RowGroup]:
    data_files.check_fits(self.paths)
    found = []
    for path in self.paths:
      file = data_files.DataFile(path)
      try:
        with self._open(file) as parquet:
          metadata = parquet.metadata
      except stores.StoreError:
        raise
      except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no Parquet file: {error}.") from error
      found += [
        _RowGroup(file, group, metadata.row_group(group).num_rows)
        for group in range(metadata.num_row_groups)
      ]
    return found


@contextlib.contextmanager
def _explain_damage(where: str) -> Iterator[None]:
  try:
    yield
  except stores.StoreError:
    raise
  except (OSError, ValueError) as error:
    raise ValueError(f"{where} is damaged: {error}.") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrainRows(record_files.PickledFields):
  """The elements of a Grain data source or `MapDataset`.

  Omit Grain's `repeat` and `batch`.

  Attributes:
    open: Returns the source, such as a `functools.partial` of
      `grain.sources.ArrayRecordDataSource`. Called once, on the first access.
  """

  open: Callable[[], Any]

  def __len__(self) -> int:
    return len(self._elements)

  def __getitem__(self, index: int, /) -> Any:
    """Returns one element.

    Raises:
      ValueError: A Grain filter removed the element.
    """
    record_files.locate([len(self)], index, what="element")
    element = self._elements[index]
    if element is None:
      raise ValueError(
        f"{self.name(index)} was filtered out within Grain, so its number has"
        " no element; filter with `inputs.streams.filtered` instead."
      )
    return element

  def name(self, index: int) -> str:
    """Returns the name of an element for messages."""
    return f"element {index} of Grain's source"

  @functools.cached_property
  def _elements(self) -> Any:
    elements = self.open()
    for member in ("__len__", "__getitem__"):
      if not hasattr(elements, member):
        raise ValueError(
          f"GrainRows.open must return a source of random access, got"
          f" {type(elements).__name__}, which has no {member}; read a data set"
          " without numbers as a sequential source."
        )
    if len(elements) >= 2**62:
      raise ValueError(
        "GrainRows.open returned a data set that repeats without end; leave out"
        " its repeat, epochs are counted here."
      )
    return elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceRows(record_files.PickledFields):
  """Rows of a Hugging Face data set on disk.

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
    checks.check_not_empty(self, "path")
    if self.files_format not in (None, *_FORMATS):
      raise ValueError(
        f"HuggingFaceRows.files_format must be one of {list(_FORMATS)}, or None"
        f" for the output of save_to_disk, got {self.files_format!r}."
      )

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int, /) -> Mapping[str, Any]:
    """Returns one row as a dictionary of Python values."""
    record_files.locate([len(self)], index, what="row")
    return self._rows[index]

  def name(self, index: int) -> str:
    """Returns the name of a row for messages."""
    return f"{self.path}, row {index}"

  @functools.cached_property
  def _rows(self) -> Any:
    library = optional_library.datasets()
    if self.files_format is None:
      path = os.path.expanduser(self.path)
      if not os.path.isdir(path):
        raise FileNotFoundError(
          f"HuggingFaceRows.path: there is no folder {self.path!r}; give the"
          " output folder of save_to_disk, or set files_format."
        )
      found = library.load_from_disk(path)
    else:
      files = record_files.find(self.path, field="HuggingFaceRows.path")
      found = library.load_dataset(
        self.files_format,
        data_files={self.split or "train": list(files)},
        cache_dir=self.cache_folder,
      )
    rows = self._select_split(found)
    if not len(rows):
      raise ValueError(f"HuggingFaceRows.path: {self.path!r} holds no records.")
    return rows

  def _select_split(self, found: Any) -> Any:
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
