"""Documents and examples from named columns of tabular data.

Readers of ArrayRecord, Parquet, TFRecord and Hugging Face data return each row
as a mapping. `TextColumn` and `TokenColumn` select the column of text or token
ids.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import example_source

Row = Mapping[str, Any]


@runtime_checkable
class Rows(Protocol):
  """A random-access sequence of rows, in a fixed order."""

  def __len__(self) -> int:
    """Returns the number of rows."""
    ...

  def __getitem__(self, index: int, /) -> Row:
    """Returns one row.

    Raises:
      ValueError: The row cannot be read; names the file and the record.
    """
    ...


@runtime_checkable
class ShardedRows(Rows, Protocol):
  """Rows in files, each of which can be read from any row on."""

  def list_files(self) -> tuple[str, ...]:
    """Returns the files, in a fixed order."""
    ...

  def measure_files(self) -> list[int]:
    """Returns the number of bytes of each file, as stored."""
    ...

  def read_shard(self, number: int, offset: int) -> Iterator[Row]:
    """Yields the rows of a file from a number on."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextColumn:
  """One column of text as documents.

  Attributes:
    rows: The rows.
    column: The column of strings, or of lists of one string as in TFRecords.
  """

  rows: Rows
  column: str = "text"

  def __len__(self) -> int:
    return len(self.rows)

  def name(self, index: int) -> str:
    """Returns the name of a row for messages."""
    return name(self.rows, index)

  def __getitem__(self, index: int, /) -> bytes:
    """Returns a document as UTF-8."""
    return self._text(self.rows[index], name(self.rows, index))

  def list_files(self) -> tuple[str, ...]:
    """Returns the files of the rows.

    Raises:
      ValueError: The rows cannot be read file by file.
    """
    return self._sharded_rows().list_files()

  def measure_files(self) -> list[int]:
    """Returns the number of bytes of each file, as stored."""
    return self._sharded_rows().measure_files()

  def _sharded_rows(self) -> ShardedRows:
    if not isinstance(self.rows, ShardedRows):
      raise ValueError(
        f"TextColumn.rows ({type(self.rows).__name__}) cannot be read in order;"
        " leave out shuffle_window."
      )
    return self.rows

  def read_shard(
    self, number: int, offset: int
  ) -> Iterator[tuple[int, bytes, str]]:
    """Yields the documents of a file from a row on.

    Args:
      number: The number of the file.
      offset: The number of a row.

    Yields:
      The number of the next row, the document, and its name for messages.
    """
    rows = self._sharded_rows()
    path = rows.list_files()[number]
    for index, row in enumerate(rows.read_shard(number, offset), offset):
      where = f"{path}, row {index}"
      yield index + 1, self._text(row, where), where

  def _text(self, row: Row, where: str) -> bytes:
    value = _value(row, self.column, where)
    if isinstance(value, np.ndarray | list) and len(value) == 1:
      value = value[0]
    if isinstance(value, str):
      return value.encode()
    if isinstance(value, bytes):
      return value
    raise ValueError(
      f"{where}: the column {self.column!r} must be a string,"
      f" got {type(value).__name__}."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenColumn:
  """One column of token ids as examples of a language model.

  Attributes:
    rows: The rows.
    column: The column of lists of integers.
    begin_id: The input before the first target. With None, the first id is only
      an input.
    end_id: Appended to texts that do not end with it. None appends nothing.
    vocab_size: The exclusive upper bound of the ids. None disables the check.
  """

  rows: Rows
  column: str = "input_ids"
  begin_id: int | None = None
  end_id: int | None = None
  vocab_size: int | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, optional=["vocab_size"])
    checks.check_ids(self, "begin_id", "end_id", vocab_size=self.vocab_size)

  def __len__(self) -> int:
    return len(self.rows)

  def required_vocab_size(self) -> int | None:
    """Returns `vocab_size`."""
    return self.vocab_size

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns `inputs` and `targets`, int32 [n]."""
    where = name(self.rows, index)
    ids = np.asarray(_value(self.rows[index], self.column, where))
    where = f"{where}: the column {self.column!r}"
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
      raise ValueError(
        f"{where} must be a list of integers, got {ids.dtype}"
        f" {list(ids.shape)}."
      )
    limit = 2**31 if self.vocab_size is None else self.vocab_size
    if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
      raise ValueError(
        f"{where} has ids from {ids.min()} to {ids.max()}, and they must be at"
        f" least 0 and less than {limit}; is it of another vocabulary?"
      )
    more = [] if self.begin_id is None else [self.begin_id]
    last = [] if self.end_id is None else [self.end_id]
    if last and len(ids) and ids[-1] == self.end_id:
      last = []
    tokens = np.concatenate([more, ids, last]).astype(np.int32)
    return example_source.lm_features(tokens)


def _value(row: Row, column: str, where: str) -> Any:
  if column not in row:
    raise ValueError(f"{where} has no column {column!r}; it has {sorted(row)}.")
  return row[column]


def name(rows: Rows, index: int) -> str:
  """Returns the name of a row for messages."""
  found = getattr(rows, "name", None)
  return f"row {index}" if found is None else found(index)
