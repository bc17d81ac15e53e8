"""Writing TFRecord files."""

from collections.abc import Iterable
import os
import struct

from paxon.inputs.tf_records import crc32c


def write(path: str | os.PathLike[str], records: Iterable[bytes]) -> int:
  """Writes a file of records.

  Args:
    path: The file; one that exists is replaced.
    records: The data of each record.

  Returns:
    How many there were.
  """
  number = 0
  with open(path, "wb") as file:
    for data in records:
      length = struct.pack("<Q", len(data))
      file.write(length + _checksum(length) + data + _checksum(data))
      number += 1
  return number


def _checksum(data: bytes) -> bytes:
  return struct.pack("<I", crc32c.masked(crc32c.crc32c(data)))
