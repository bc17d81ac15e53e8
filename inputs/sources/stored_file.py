"""Files of object stores, read by ranges through a bounded cache on a disk.

A file is read in chunks of 16 MiB. While it is read in order, a thread gets the
next chunk. Chunks are files in `$PAXON_DATA_CACHE/chunks`, by default
`~/.cache/paxon/data/chunks`; the least recently used ones are deleted so that
they have at most `$PAXON_DATA_CACHE_BYTES`, by default 8 GiB. All processes of
a host share them: a chunk is written under another name and renamed, and its
name has a hash of the URL and of the file's version (entity tag or generation,
and size), so that chunks of a file that was replaced are never mixed.

fsspec's file caches (`blockcache`, `filecache`) have no bound, and processes
overwrite each other's lists of blocks; its `background` cache is in memory.
"""

from concurrent import futures
import contextlib
import hashlib
import io
import os
import threading
from typing import Any
import uuid

from paxon.inputs import stores

FOLDER = "PAXON_DATA_CACHE"
LIMIT = "PAXON_DATA_CACHE_BYTES"
_DEFAULT_LIMIT = 8 << 30
_CHUNK = 1 << 24
# Chunks of one file in memory.
_KEPT = 2
# Fields of fsspec's entries that change with the content, by preference.
_VERSIONS = ("etag", "generation", "blob_id", "md5hash", "created")
_TIMES = ("last_modified", "lastmodified", "updated", "mtime")


def find_folder() -> str:
  """Returns the folder of copies and chunks."""
  return os.environ.get(FOLDER) or os.path.expanduser("~/.cache/paxon/data")


def find_limit() -> int:
  """Returns the largest number of bytes of all chunks on the disk.

  Raises:
    ValueError: The environment has no positive number.
  """
  given = os.environ.get(LIMIT) or str(_DEFAULT_LIMIT)
  if not given.isdecimal() or not int(given):
    raise ValueError(f"{LIMIT} must be a positive number, got {given!r}.")
  return int(given)


def describe(path: str) -> tuple[int, str]:
  """Returns the size of a file, and a name of its content's version.

  Raises:
    ValueError: It does not exist, or cannot be accessed.
  """

  def find(store: Any, name: str) -> Any:
    # A listing of before may have another version.
    store.invalidate_cache()
    return store.info(name)

  found = {str(key).lower(): x for key, x in stores.request(path, find).items()}
  size = found.get("size")
  if not isinstance(size, int):
    raise stores.StoreError(
      f"{path} cannot be read: its store has no size for it."
    )
  known = (found.get(key) for key in (*_VERSIONS, *_TIMES))
  version = next((str(each) for each in known if each is not None), "")
  return size, f"{size}/{version}"


class StoredFile:
  """The content of one file; methods are thread-safe.

  Attributes:
    path: Its URL.
    size: Its number of bytes.
    version: A name of its content's version.
  """

  def __init__(self, path: str, *, keep: bool = True) -> None:
    """Asks the store for the file's size and version.

    Args:
      path: The URL.
      keep: Whether chunks are kept on the disk.
    """
    self.path = path
    self.size, self.version = describe(path)
    identity = f"{path}\0{self.version}\0{_CHUNK}"
    self._name = hashlib.sha256(identity.encode()).hexdigest()[:24]
    self._keep = keep
    self._lock = threading.Lock()
    self._kept: dict[int, bytes] = {}
    self._ahead: dict[int, futures.Future[bytes]] = {}
    self._last = -1

  def read(self, begin: int, end: int) -> bytes:
    """Returns the bytes [begin, end), fewer at the end of the file.

    Single ranges of a file that is larger than the cache are not kept, because
    their chunks would replace each other.

    Raises:
      ValueError: The store fails, or the file was replaced.
    """
    begin, end = max(begin, 0), min(end, self.size)
    if begin >= end:
      return b""
    first, last = begin // _CHUNK, (end - 1) // _CHUNK
    is_single = first not in self._kept and not self._is_next(first)
    if is_single and self._keep and self.size > find_limit():
      return self._get(begin, end)
    whole = b"".join(map(self._chunk, range(first, last + 1)))
    return whole[begin - first * _CHUNK : end - first * _CHUNK]

  def open(self) -> io.BufferedReader:
    """Returns a file object that is read in order, or by seeking."""
    return io.BufferedReader(_Reader(self), 1 << 20)

  def _is_next(self, number: int) -> bool:
    return number in (0, self._last, self._last + 1)

  def _chunk(self, number: int) -> bytes:
    with self._lock:
      found = self._kept.get(number)
      waiting = self._ahead.pop(number, None)
      is_in_order = self._last in (number - 1, number) and number > 0
      self._last = number
    if found is None:
      found = self._load(number) if waiting is None else waiting.result()
    with self._lock:
      self._kept[number] = found
      while len(self._kept) > _KEPT:
        self._kept.pop(next(iter(self._kept)))
      after = number + 1
      if (
        is_in_order
        and after * _CHUNK < self.size
        and after not in self._kept
        and not self._ahead
      ):
        self._ahead[after] = _start(self._load, after)
    return found

  def _load(self, number: int) -> bytes:
    """Returns a chunk from the disk or the store."""
    begin = number * _CHUNK
    end = min(begin + _CHUNK, self.size)
    if not self._keep:
      return self._get(begin, end)
    folder = os.path.join(find_folder(), "chunks")
    path = os.path.join(folder, f"{self._name}-{number:08}")
    try:
      with open(path, "rb") as file:
        data = file.read()
      if len(data) == end - begin:
        os.utime(path)
        return data
    except OSError:
      pass  # It was never kept, or is deleted.
    data = self._get(begin, end)
    _write(path, data)
    return data

  def _get(self, begin: int, end: int) -> bytes:
    """Returns bytes from the store; each request must be of this version."""

    def get(store: Any, name: str) -> bytes:
      data = store.cat_file(name, start=begin, end=end)
      if len(data) != end - begin:
        raise OSError(f"got {len(data)} of {end - begin} bytes")
      return data

    try:
      data = stores.request(self.path, get)
    except stores.StoreError:
      self._check_version()  # It has a better explanation.
      raise
    self._check_version()
    return data

  def _check_version(self) -> None:
    _, version = describe(self.path)
    if version != self.version:
      raise stores.StoreError(
        f"{self.path} was replaced while it was read; start the run again with"
        " the new file, or restore the old one."
      )


class _Reader(io.RawIOBase):
  """A file object over a `StoredFile`."""

  def __init__(self, file: StoredFile) -> None:
    self._file = file
    self._at = 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._at

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}
    self._at = base[whence] + offset
    return self._at

  def readinto(self, buffer: Any) -> int:
    # No more than a chunk: a buffer must not read the next one early.
    end = self._at - self._at % _CHUNK + _CHUNK
    data = self._file.read(self._at, min(self._at + len(buffer), end))
    buffer[: len(data)] = data
    self._at += len(data)
    return len(data)


def _start(call: Any, number: int) -> futures.Future[bytes]:
  """Returns the future result of a call in a daemon thread."""
  found: futures.Future[bytes] = futures.Future()

  def run() -> None:
    try:
      found.set_result(call(number))
    except BaseException as error:
      found.set_exception(error)

  threading.Thread(target=run, daemon=True).start()
  return found


def _write(path: str, data: bytes) -> None:
  """Writes a chunk, and deletes the least recently used ones for its room."""
  folder = os.path.dirname(path)
  limit = find_limit()
  if len(data) > limit:
    return
  draft = f"{path}.{uuid.uuid4().hex[:8]}.part"
  try:
    os.makedirs(folder, exist_ok=True)
    _delete_oldest(folder, limit - len(data))
    with open(draft, "xb") as file:
      file.write(data)
    os.replace(draft, path)
  except FileNotFoundError:
    return  # Another process needed the room.
  except OSError as error:
    raise ValueError(
      f"No chunk of data can be written to {folder} ({error}); {FOLDER} in the"
      f" environment names another folder, and {LIMIT} its largest size."
    ) from error
  finally:
    if os.path.exists(draft):
      os.remove(draft)


def _delete_oldest(folder: str, limit: int) -> None:
  """Deletes the least recently used files until they have `limit` bytes."""
  found = []
  with os.scandir(folder) as entries:
    for entry in entries:
      try:
        status = entry.stat()
      except FileNotFoundError:  # Another process deleted it.
        continue
      found.append((status.st_mtime_ns, status.st_size, entry.path))
  total = sum(size for _, size, _ in found)
  for _, size, path in sorted(found):
    if total <= limit:
      return
    with contextlib.suppress(FileNotFoundError):
      os.remove(path)
    total -= size
