"""One TFRecord file with random access, every byte checked.

A record is its length (8 bytes), the length's checksum (4), the data, and the
data's checksum (4). The file has no index, so the places of its records are
found by one walk over the lengths, which are checked on the way. The walk
reads no data, about three million records a second and core, and can be kept
in a file, so that a run that goes on begins at once.
"""

import functools
import hashlib
import mmap
import os
import pathlib
import struct
import uuid

import numpy as np

from paxon.inputs.tf_records import crc32c

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
# Bytes around the data of a record.
_FRAME = _HEADER.size + _FOOTER.size


class TfRecordFile:
  """The records of a file, by number.

  It keeps no file open, so that it may be copied to other processes.
  """

  def __init__(
    self, path: str, *, index_folder: str | os.PathLike[str] | None = None
  ) -> None:
    """Names the file; it is read when something of it is asked for.

    Args:
      path: The file.
      index_folder: Where the places of its records are kept, in a file that is
        made where it is missing or older; None keeps them in memory only.
    """
    self.path = path
    self._index_folder = index_folder

  def __len__(self) -> int:
    return len(self._places) - 1

  def __getitem__(self, number: int, /) -> bytes:
    """Returns the data of a record.

    Raises:
      ValueError: It is damaged; names the file and the record.
    """
    begin, end = int(self._places[number]), int(self._places[number + 1])
    with open(self.path, "rb") as file:
      file.seek(begin + _HEADER.size)
      found = file.read(end - begin - _HEADER.size)
    data, stored = found[: -_FOOTER.size], found[-_FOOTER.size :]
    if len(found) != end - begin - _HEADER.size or crc32c.masked(
      crc32c.crc32c(data)
    ) != int.from_bytes(stored, "little"):
      raise ValueError(
        f"{self.path}, record {number}: the data does not have the checksum"
        " that stands behind it; the file is damaged."
      )
    return data

  @functools.cached_property
  def _places(self) -> np.ndarray:
    """Where records begin, and where the last one ends, [N + 1]."""
    if self._index_folder is None:
      return _find(self.path)
    status = os.stat(self.path)
    # Another content of the file has another name here.
    key = f"{os.path.abspath(self.path)}/{status.st_size}/{status.st_mtime_ns}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32] + ".npy"
    kept = pathlib.Path(self._index_folder, name)
    if not kept.exists():
      places = _find(self.path)
      kept.parent.mkdir(parents=True, exist_ok=True)
      # Whole or not at all: several processes, also of machines that share the
      # folder and may have the same numbers, come here at once.
      part = kept.with_suffix(f".{uuid.uuid4().hex}.part")
      with open(part, "wb") as file:
        np.save(file, places)
      part.replace(kept)
    return np.load(kept, mmap_mode="r")


def _find(path: str) -> np.ndarray:
  """Walks over a file; returns where records begin, and where the last ends."""
  size = os.path.getsize(path)
  dtype = np.uint32 if size < 2**32 else np.uint64
  if not size:
    return np.zeros(1, dtype)
  places, lengths, checksums = [], [], []
  position = 0
  with (
    open(path, "rb") as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
  ):
    # One check for all: a wrong length leads astray, but not for ever.
    while position + _HEADER.size <= size:
      length, checksum = _HEADER.unpack_from(data, position)
      places.append(position)
      lengths.append(length)
      checksums.append(checksum)
      position += length + _FRAME
  _check_lengths(path, lengths, checksums)
  if position != size:
    # Either the data of the last record found or the header of a next one.
    number = len(places) - 1 if position > size else len(places)
    raise ValueError(
      f"{path}, record {number}: the file ends in the middle of it, after"
      f" {size} bytes; it was cut off."
    )
  return np.array([*places, position], dtype)


def _check_lengths(path: str, lengths: list[int], checksums: list[int]) -> None:
  if not lengths:
    return
  rows = np.array(lengths, "<u8").view(np.uint8).reshape(-1, 8)
  plain = crc32c.crc32c_rows(rows).astype(np.uint64)
  rotated = (plain >> np.uint64(15)) | (plain << np.uint64(17))
  expected = (rotated + np.uint64(0xA282EAD8)) & np.uint64(0xFFFFFFFF)
  wrong = np.flatnonzero(expected != np.array(checksums, np.uint64))
  if len(wrong):
    raise ValueError(
      f"{path}, record {wrong[0]}: its length does not have the checksum that"
      " stands behind it; the file is damaged, or is no TFRecord file."
    )
