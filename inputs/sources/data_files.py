"""Files of data on disks and in object stores, compressed by zstd or not.

`DataFile` reads a file in order or by ranges: one on a disk directly, one of a
store (`gs://`, `s3://`, any URL of fsspec) through a bounded cache of chunks;
see `stored_file`. Some readers need a whole uncompressed file on a disk:
`local` copies a file of a store once, and decompresses a `.zst` file once.
Copies are shared by all processes and by later runs; a copy of a file that
changed is not used again. They are in `$PAXON_DATA_CACHE`, by default
`~/.cache/paxon/data`, which may be deleted at any time between runs.
"""

from collections.abc import Iterator, Sequence
import contextlib
import glob
import gzip
import hashlib
import io
import os
import re
import shutil
from typing import Any, BinaryIO
import uuid
import zlib

from paxon.inputs import optional_library, stores
from paxon.inputs.sources import stored_file

ZSTD = (".zst", ".zstd")
GZIP = (".gz", ".gzip")
# Alternatives without braces in them.
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
# Bytes per read.
_CHUNK = 1 << 24
_TEXT = 1 << 17


def expand_braces(pattern: str) -> list[str]:
  """Returns the patterns of alternatives: `a` and `b` of `{a,b}`, nested too.

  In order and without duplicates. A path that exists is used literally.
  """
  found = _BRACES.search(pattern)
  if found is None or exists(os.path.expanduser(pattern)):
    return [pattern]
  return list(
    dict.fromkeys(
      each
      for part in found[1].split(",")
      for each in expand_braces(
        f"{pattern[: found.start()]}{part}{pattern[found.end() :]}"
      )
    )
  )


def matches(pattern: str) -> list[str]:
  """Returns the regular files that match a path or pattern, sorted.

  A folder matches the files in it, without hidden ones.

  Raises:
    ValueError: The store is unknown, cannot be accessed, or its library is
      missing.
  """
  if stores.is_remote(pattern):
    scheme = pattern.partition("://")[0]
    found = stores.request(pattern, _list, action="listed")
    return sorted(
      name if stores.is_remote(name) else f"{scheme}://{name.lstrip('/')}"
      for name in found
    )
  pattern = os.path.expanduser(pattern)
  if os.path.isfile(pattern):
    return [pattern]
  if os.path.isdir(pattern):
    names = filter(_is_visible, os.listdir(pattern))
    inside = sorted(os.path.join(pattern, name) for name in names)
    return list(filter(os.path.isfile, inside))
  return sorted(filter(os.path.isfile, glob.iglob(pattern, recursive=True)))


def _list(store: Any, pattern: str) -> list[str]:
  """Returns the files of a store that match a path or pattern."""
  # Files may be new since the last listing.
  store.invalidate_cache()
  magic = re.search(r"[*?\[]", pattern)
  try:
    entry = store.info(pattern)
  except FileNotFoundError:
    entry = None
  if entry is not None and entry["type"] != "directory":
    return [pattern]
  if entry is None and magic:
    found = store.glob(pattern, detail=True)
    if not found:
      _check_listing(store, pattern[: magic.start()])
    return [name for name, each in found.items() if each["type"] == "file"]
  if entry is None:
    _check_listing(store, pattern)
    return []
  return [
    each["name"]
    for each in store.ls(pattern, detail=True)
    if each["type"] == "file" and _is_visible(each["name"].rpartition("/")[2])
  ]


def _check_listing(store: Any, pattern: str) -> None:
  """Raises an error if a bucket is missing or may not be listed.

  fsspec's `glob` finds nothing then.
  """
  folder = pattern.rpartition("/")[0]
  try:
    store.ls(folder)
  except FileNotFoundError:
    parts, count = pattern.lstrip("/").split("/"), 1
    if "hf" in store.protocol:
      # A repository: datasets/org/name, or org/name.
      count = 3 if parts[0] in ("datasets", "spaces") else 2
    store.ls("/".join(parts[:count]))


def _is_visible(name: str) -> bool:
  return bool(name) and not name.startswith((".", "_"))


class DataFile:
  """A file to read in order, or by ranges from any thread.

  A `.zst` file is read in order only.
  """

  def __init__(self, path: str) -> None:
    self.path = path
    self._stored: stored_file.StoredFile | None = None
    if stores.is_remote(path):
      self._stored = stored_file.StoredFile(path)

  @property
  def size(self) -> int:
    """The number of bytes, as stored."""
    if self._stored is not None:
      return self._stored.size
    return os.path.getsize(self.path)

  def read(self, begin: int, end: int) -> bytes:
    """Returns the stored bytes [begin, end), fewer at the end of the file."""
    if self._stored is not None:
      return self._stored.read(begin, end)
    with open(self.path, "rb") as file:
      file.seek(begin)
      return file.read(end - begin)

  def open(self) -> io.BufferedReader:
    """Opens the file as stored."""
    if self._stored is not None:
      return self._stored.open()
    return open(self.path, "rb")

  @contextlib.contextmanager
  def open_text(self, offset: int = 0) -> Iterator[Any]:
    """Opens the text of a file at an offset, decompressed if gzip or zstd.

    The text before the offset of a compressed file is read.

    Errors of decompression are ValueError and name the file.
    """
    with self.open() as file:
      try:
        if self.path.endswith(GZIP):
          text = gzip.GzipFile(fileobj=file)
          text.seek(offset)
          yield text
        elif self.path.endswith(ZSTD):
          if not file.peek(1):
            raise EOFError("it is empty, which zstd never is")
          codec = optional_library.arrow()
          with codec.CompressedInputStream(file, "zstd") as stream:
            # Arrow reads no lines, and cannot seek.
            text = io.BufferedReader(stream, _TEXT)
            while offset:
              offset -= len(text.read(min(offset, _CHUNK))) or offset
            yield text
        else:
          file.seek(offset)
          yield file
      except (OSError, EOFError, zlib.error) as error:
        if getattr(error, "errno", None) is not None:  # Of the disk.
          raise
        raise ValueError(
          f"{self.path} is damaged or cut off: {error}."
        ) from error


def exists(path: str) -> bool:
  """Whether a regular file has this path."""
  if not stores.is_remote(path):
    return os.path.isfile(path)
  return bool(stores.request(path, _is_file))


def _is_file(store: Any, name: str) -> bool:
  store.invalidate_cache()
  try:
    return store.info(name)["type"] == "file"
  except FileNotFoundError:
    return False


def size(path: str) -> int:
  """Returns the number of bytes of a file, as stored."""
  if not stores.is_remote(path):
    return os.path.getsize(path)
  return stored_file.describe(path)[0]


def check_fits(paths: Sequence[str]) -> None:
  """Checks that the cache has room for all files in stores.

  Raises:
    ValueError: It has not, so that random access would read chunks of them
      again and again, and counting examples all of them at every start.
  """
  remote = [path for path in paths if stores.is_remote(path)]
  total, limit = sum(map(size, remote)), stored_file.find_limit()
  if total > limit:
    raise ValueError(
      f"{remote[0]} and {len(remote) - 1} other files of a store have"
      f" {total:,} bytes, and a shuffle of all examples reads them before the"
      f" first batch and keeps them on the disk, where {stored_file.LIMIT} is"
      f" {limit:,}: shuffle in windows (shuffle_window=10000), or convert them"
      " to a token file."
    )


def local(path: str) -> str:
  """Returns the path of the uncompressed file on a disk; see the module.

  A name ending in `.zst` loses it. Any other compression remains.

  Raises:
    ValueError: The file cannot be read, is damaged, or has no room.
  """
  if not stores.is_remote(path) and not path.endswith(ZSTD):
    return path
  base = path.rpartition("/")[2]
  for ending in ZSTD:
    base = base.removesuffix(ending)
  copy = os.path.join(stored_file.find_folder(), f"{_hash(path)}-{base}")
  if os.path.exists(copy):
    return copy
  # Unique, because several processes may make the same copy.
  draft = f"{copy}.{uuid.uuid4().hex[:8]}.part"
  try:
    os.makedirs(stored_file.find_folder(), exist_ok=True)
    with open(draft, "xb") as target:
      _copy(path, target)
    os.replace(draft, copy)
  except OSError as error:
    raise ValueError(
      f"{path} cannot be copied to {stored_file.find_folder()} ({error});"
      f" {stored_file.FOLDER} in the environment names another folder."
    ) from error
  finally:
    if os.path.exists(draft):
      os.remove(draft)
  return copy


def _copy(path: str, target: BinaryIO) -> None:
  if path.endswith(ZSTD):
    with DataFile(path).open_text() as text:
      shutil.copyfileobj(text, target, _CHUNK)
    return
  # Chunks on the disk would be a second copy.
  with stored_file.StoredFile(path, keep=False).open() as source:
    shutil.copyfileobj(source, target, _CHUNK)


def find_version(path: str) -> str:
  """Returns a name of the present content of a file, without its path."""
  if stores.is_remote(path):
    return stored_file.describe(path)[1]
  status = os.stat(path)
  return f"{status.st_size}/{status.st_mtime_ns}"


def _hash(path: str) -> str:
  """Returns a name for the present content of a file at a path."""
  where = path if stores.is_remote(path) else os.path.abspath(path)
  text = f"{where}\0{find_version(path)}"
  return hashlib.sha256(text.encode()).hexdigest()[:16]
