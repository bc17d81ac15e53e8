"""TFRecord files with random access, every byte checked.

A record is its length (8 bytes), the length's checksum (4), the data, and the
data's checksum (4). A file has no index, so one pass over the lengths, which
are checked on the way, finds where its records begin. The pass reads no data,
about three million records a second and core; `index_folder` saves its result.
"""

from collections.abc import Iterable
import dataclasses
import functools
import hashlib
import mmap
import os
import pathlib
import struct
from typing import ClassVar
import uuid

import numpy as np

from paxon.inputs.sources import data_files, record_files
from paxon.inputs.tf_records import crc32c

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
# Bytes around the data of a record.
_FRAME = _HEADER.size + _FOOTER.size


class TfRecordFile:
  """The records of a file, by number.

  No file is kept open, so that other processes can have a copy.
  """

  def __init__(
    self, path: str, *, index_folder: str | os.PathLike[str] | None = None
  ) -> None:
    """Reads nothing yet.

    An index in `index_folder` that is missing or older than the file is
    written. None keeps the index in memory only.
    """
    self.path = path
    self._index_folder = index_folder

  def __len__(self) -> int:
    return len(self._offsets) - 1

  def __getitem__(self, number: int, /) -> bytes:
    """Returns the data of a record.

    Raises:
      ValueError: It is damaged; names the file and the record.
    """
    begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
    with open(self.path, "rb") as file:
      file.seek(begin + _HEADER.size)
      found = file.read(end - begin - _HEADER.size)
    data, stored = found[: -_FOOTER.size], found[-_FOOTER.size :]
    if len(found) != end - begin - _HEADER.size or _checksum(data) != stored:
      raise ValueError(
        f"{self.path}, record {number}: the data does not match its checksum;"
        " the file is damaged."
      )
    return data

  @functools.cached_property
  def _offsets(self) -> np.ndarray:
    """The bytes at which records begin, and the end of the last, [N + 1]."""
    if self._index_folder is None:
      return _find_offsets(self.path)
    status = os.stat(self.path)
    # A changed file has another name here.
    key = f"{os.path.abspath(self.path)}/{status.st_size}/{status.st_mtime_ns}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32] + ".npy"
    index = pathlib.Path(self._index_folder, name)
    if not index.exists():
      offsets = _find_offsets(self.path)
      index.parent.mkdir(parents=True, exist_ok=True)
      # Renamed when complete: several processes, possibly on machines that
      # share the folder, may write it at once.
      part = index.with_suffix(f".{uuid.uuid4().hex}.part")
      with open(part, "wb") as file:
        np.save(file, offsets)
      part.replace(index)
    return np.load(index, mmap_mode="r")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfRecordFiles(record_files.RecordFiles):
  """The records of many files, by number; also a source of documents.

  Attributes:
    index_folder: Folder of saved indices, so that the files are indexed once
      only; None indexes them at each start.
  """

  index_folder: str | None = None

  _what: ClassVar[str] = "record"

  def __getitem__(self, index: int, /) -> bytes:
    """Returns the data of one record.

    Raises:
      ValueError: It is damaged; names the file and the record.
    """
    file, number = self._locate(index)
    return self._parts[file][number]

  def name(self, index: int) -> str:
    """Returns a record's file and number, for messages."""
    file, number = self._locate(index)
    return f"{self._parts[file].path}, record {number}"

  @functools.cached_property
  def _parts(self) -> tuple[TfRecordFile, ...]:
    return tuple(
      TfRecordFile(data_files.local(path), index_folder=self.index_folder)
      for path in self.paths
    )


def write(path: str | os.PathLike[str], records: Iterable[bytes]) -> int:
  """Writes a file of records, replacing it; returns their number."""
  number = 0
  with open(path, "wb") as file:
    for data in records:
      length = struct.pack("<Q", len(data))
      file.write(length + _checksum(length) + data + _checksum(data))
      number += 1
  return number


def _checksum(data: bytes) -> bytes:
  return _FOOTER.pack(crc32c.mask(crc32c.crc32c(data)))


def _find_offsets(path: str) -> np.ndarray:
  size = os.path.getsize(path)
  dtype = np.uint32 if size < 2**32 else np.uint64
  if not size:
    return np.zeros(1, dtype)
  offsets, lengths, checksums = [], [], []
  position = 0
  with (
    open(path, "rb") as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
  ):
    # Lengths are checked together: a wrong one misleads, but the loop ends.
    while position + _HEADER.size <= size:
      length, checksum = _HEADER.unpack_from(data, position)
      offsets.append(position)
      lengths.append(length)
      checksums.append(checksum)
      position += length + _FRAME
  _check_lengths(path, lengths, checksums)
  if position != size:
    # Either the data of the last record or the header of the next.
    number = len(offsets) - 1 if position > size else len(offsets)
    raise ValueError(
      f"{path}, record {number}: the file is truncated; it ends within this"
      f" record, after {size} bytes."
    )
  return np.array([*offsets, position], dtype)


def _check_lengths(path: str, lengths: list[int], checksums: list[int]) -> None:
  if not lengths:
    return
  rows = np.array(lengths, "<u8").view(np.uint8).reshape(-1, 8)
  expected = crc32c.mask(crc32c.crc32c_rows(rows).astype(np.uint64))
  wrong = np.flatnonzero(expected != np.array(checksums, np.uint64))
  if len(wrong):
    raise ValueError(
      f"{path}, record {wrong[0]}: its length does not match its checksum; the"
      " file is damaged, or not a TFRecord file."
    )
