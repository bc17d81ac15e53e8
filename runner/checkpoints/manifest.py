"""Sizes and checksums of all files below a folder.

CRC-32 finds what disks and networks do to files by accident: any changed bits
up to 32 in a row, and others but for one in four thousand millions. Files are
read in pieces, so that memory does not grow with them.
"""

from collections.abc import Iterable, Iterator, Mapping
import concurrent.futures
import dataclasses
import json
import os
from typing import Any
import zlib

from etils import epath

_PIECE_BYTES = 1 << 22
# zlib releases Python's lock; a remote store answers several at once.
_THREADS = 8


class UnreadableManifestError(ValueError):
  """The text of a manifest was changed or cut off."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One file.

  Attributes:
    size: In bytes.
    crc32: Of its content.
  """

  size: int
  crc32: int


def compute(folder: epath.Path, *, names: Iterable[str]) -> dict[str, Entry]:
  """Reads files and returns their entries by relative name, in order.

  Args:
    folder: The folder that relative names begin in.
    names: Files and folders in it; of a folder, all files below.
  """
  found = sorted(name for top in names for name in _below(folder, top))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    entries = list(pool.map(lambda name: _entry(folder / name), found))
  return dict(zip(found, entries, strict=True))


def problems(folder: epath.Path, entries: Mapping[str, Entry]) -> list[str]:
  """Returns what is wrong with files, a clause each; nothing if all are right.

  Args:
    folder: The folder that relative names begin in.
    entries: As they were when the files were written.
  """
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    found = pool.map(
      lambda item: _problem(folder / item[0], *item), sorted(entries.items())
    )
    return [problem for problem in found if problem]


def to_text(entries: Mapping[str, Entry]) -> str:
  """Returns entries as JSON, with a checksum of their own."""
  files = {n: [entry.size, entry.crc32] for n, entry in entries.items()}
  return json.dumps({"crc32": _own(files), "files": files})


def from_text(text: str) -> dict[str, Entry]:
  """Returns the entries that `to_text` wrote.

  Args:
    text: As read.

  Raises:
    UnreadableManifestError: It is not what was written.
  """
  try:
    parsed = json.loads(text)
    entries = {n: Entry(*map(int, f)) for n, f in parsed["files"].items()}
    is_whole = parsed["crc32"] == _own(parsed["files"])
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UnreadableManifestError(f"no manifest: {text[:80]!r}") from error
  if not is_whole:
    raise UnreadableManifestError("the manifest's own checksum differs")
  return entries


def _own(files: Any) -> int:
  return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def _below(folder: epath.Path, name: str) -> Iterator[str]:
  path = folder / name
  if not path.is_dir():
    yield name
    return
  for child in path.iterdir():
    yield from _below(folder, f"{name}/{child.name}")


def _entry(path: epath.Path) -> Entry:
  size, crc32 = 0, 0
  with path.open("rb") as file:
    while piece := file.read(_PIECE_BYTES):
      size += len(piece)
      crc32 = zlib.crc32(piece, crc32)
  return Entry(size, crc32)


def _problem(path: epath.Path, name: str, expected: Entry) -> str | None:
  try:
    # Before the content is read, which says the same later.
    size = path.stat().length
    if size == expected.size:
      actual = _entry(path)
      size = actual.size
    else:
      actual = None
  except FileNotFoundError:
    return f"{name} is missing"
  except OSError as error:
    return f"{name} cannot be read: {error.strerror or os.fspath(path)}"
  if actual is None or size != expected.size:
    return f"{name} has {size:,} bytes and should have {expected.size:,}"
  if actual.crc32 != expected.crc32:
    return f"{name}: checksum differs"
  return None
