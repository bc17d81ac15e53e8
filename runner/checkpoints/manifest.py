"""The manifest of a checkpoint: size and checksum of every file.

CRC-32 detects accidental changes: all bursts of up to 32 bits, and all but one
in 2^32 of the others. Files are read in chunks, so that memory does not grow.

Orbax finalizes the items of a checkpoint in the order of their handlers, after
all processes have written all files and before the checkpoint gets its final
name. The manifest is the last item, so every complete checkpoint has one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import json
import os
import pathlib
from typing import Any
import zlib

from etils import epath
import orbax.checkpoint as ocp

from paxon.runner import files

FILE_NAME = "files.json"

_CHUNK_BYTES = 1 << 22
# zlib releases the GIL; a remote store serves several requests at once.
_THREADS = 8


class UnreadableManifestError(ValueError):
  """The text of a manifest was changed or truncated."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One file.

  Attributes:
    size: Its size in bytes.
    crc32: The checksum of its content.
  """

  size: int
  crc32: int


class ManifestHandler(ocp.AsyncCheckpointHandler):
  """Writes the manifest of other items, which must be finalized before it."""

  def __init__(self, items: Sequence[str]) -> None:
    self._items = tuple(items)

  async def async_save(self, directory: epath.Path, args: Any) -> None:
    """Does nothing; `finalize` writes the file."""
    del directory, args

  def save(self, directory: epath.Path, args: Any) -> None:
    """Does nothing; `finalize` writes the file."""
    del directory, args

  def restore(self, directory: epath.Path, args: Any = None) -> str:
    """Returns the text of the manifest."""
    del args
    return files.read_text(directory / FILE_NAME)

  def finalize(self, directory: epath.Path) -> None:
    """Writes the manifest; called on one process."""
    parent = directory.parent
    missing = [name for name in self._items if not (parent / name).is_dir()]
    if missing:
      raise ValueError(
        f"The items {missing} of {parent} must be finalized before the"
        " manifest."
      )
    entries = compute(parent, names=self._items)
    (directory / FILE_NAME).write_text(to_text(entries))


@ocp.args.register_with_handler(
  ManifestHandler, for_save=True, for_restore=True
)
class ManifestArgs(ocp.args.CheckpointArgs):
  """The arguments of `ManifestHandler`, which has none."""


def compute(folder: epath.Path, *, names: Iterable[str]) -> dict[str, Entry]:
  """Reads files and whole directories; returns sorted entries by name.

  Names are relative to `folder`.
  """
  found = sorted(name for top in names for name in _walk(folder, top))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    entries = list(pool.map(lambda name: _read_entry(folder / name), found))
  return dict(zip(found, entries, strict=True))


def find_problems(
  folder: epath.Path, entries: Mapping[str, Entry]
) -> list[str]:
  """Returns one clause for each missing or changed file."""
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    found = pool.map(
      lambda item: _find_problem(folder / item[0], *item),
      sorted(entries.items()),
    )
    return [problem for problem in found if problem]


def to_text(entries: Mapping[str, Entry]) -> str:
  """Returns entries as JSON that includes its own checksum."""
  content = {n: [entry.size, entry.crc32] for n, entry in entries.items()}
  return json.dumps({"crc32": _checksum(content), "files": content})


def from_text(text: str) -> dict[str, Entry]:
  """Returns the entries of `to_text`; raises UnreadableManifestError."""
  try:
    parsed = json.loads(text)
    entries = {n: Entry(*map(int, f)) for n, f in parsed["files"].items()}
    is_intact = parsed["crc32"] == _checksum(parsed["files"])
    for name in entries:
      _check_name(name)
  except files.PARSE_ERRORS as error:
    raise UnreadableManifestError(f"invalid manifest: {text[:80]!r}") from error
  if not is_intact:
    raise UnreadableManifestError("the manifest's own checksum differs")
  return entries


def _check_name(name: str) -> None:
  """Raises ValueError for a file elsewhere."""
  path = pathlib.PurePosixPath(name)
  if path.is_absolute() or ".." in path.parts:
    raise ValueError(f"{name!r} is not in the checkpoint")


def _checksum(content: Any) -> int:
  return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _walk(folder: epath.Path, name: str) -> Iterator[str]:
  path = folder / name
  if not path.is_dir():
    yield name
    return
  for child in path.iterdir():
    yield from _walk(folder, f"{name}/{child.name}")


def _read_entry(path: epath.Path) -> Entry:
  size, crc32 = 0, 0
  with files.open_bytes(path) as file:
    while chunk := file.read(_CHUNK_BYTES):
      size += len(chunk)
      crc32 = zlib.crc32(chunk, crc32)
  return Entry(size, crc32)


def _find_problem(path: epath.Path, name: str, expected: Entry) -> str | None:
  try:
    # Cheaper than reading the content.
    actual = Entry(path.stat().length, expected.crc32)
    if actual.size == expected.size:
      actual = _read_entry(path)
  except FileNotFoundError:
    return f"{name} is missing"
  except files.DamagedFileError as error:
    return str(error).removesuffix(".")
  except OSError as error:
    return f"{name} cannot be read: {error.strerror or os.fspath(path)}"
  if actual.size != expected.size:
    return f"{name} has {actual.size:,} bytes instead of {expected.size:,}"
  return None if actual == expected else f"{name}: checksum mismatch"
