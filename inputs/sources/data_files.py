"""Files of data on disks and in object stores, compressed by zstd or not.

Readers open a file where `local` says that it lies. That is the file itself if
it is on a disk. A file of a store (`gs://`, `s3://`, any URL of fsspec) is
copied once, and a `.zst` file is decompressed once, because neither has random
access at the speed of a disk. Copies are shared by all processes and by later
runs; a copy of a file that changed is not used again. They are in
`$PAXON_DATA_CACHE`, by default `~/.cache/paxon/data`, which may be deleted at
any time between runs.
"""

from collections.abc import Callable, Iterator
import contextlib
import glob
import hashlib
import os
import re
import shutil
from typing import Any, BinaryIO
import uuid

import fsspec

from paxon.inputs import optional_library

ZSTD = (".zst", ".zstd")
_CACHE = "PAXON_DATA_CACHE"
# Alternatives without braces in them.
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
# Bytes per read.
_CHUNK = 1 << 24


def is_remote(path: str) -> bool:
  """Whether a path is a URL."""
  return "://" in path


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

  Raises:
    ValueError: The store is unknown, cannot be accessed, or its library is
      missing.
  """
  if not is_remote(pattern):
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
      return [pattern]
    return sorted(filter(os.path.isfile, glob.iglob(pattern, recursive=True)))
  scheme = pattern.partition("://")[0]
  with _store_errors(pattern):
    store, path = _open_store(pattern)
    if store.isfile(path):
      return [pattern]
    found: Any = store.glob(path)
    return sorted(
      name if is_remote(name) else f"{scheme}://{name.lstrip('/')}"
      for name in found
      if store.isfile(name)
    )


def exists(path: str) -> bool:
  """Whether a regular file has this path."""
  if not is_remote(path):
    return os.path.isfile(path)
  with _store_errors(path):
    store, name = _open_store(path)
    return bool(store.isfile(name))


def size(path: str) -> int:
  """Returns the number of bytes of a file, as stored."""
  if not is_remote(path):
    return os.path.getsize(path)
  with _store_errors(path):
    store, name = _open_store(path)
    return int(store.size(name))


def read_range(path: str, begin: int, end: int) -> bytes:
  """Returns the bytes [begin, end) of a file in a store, by one request."""
  with _store_errors(path):
    store, name = _open_store(path)
    return store.cat_file(name, begin, end)


def local(path: str) -> str:
  """Returns the path of the uncompressed file on a disk; see the module.

  A name ending in `.zst` loses it. Any other compression remains.

  Raises:
    ValueError: The file cannot be read, is damaged, or has no room.
  """
  if not is_remote(path) and not path.endswith(ZSTD):
    return path
  base = path.rpartition("/")[2]
  for ending in ZSTD:
    base = base.removesuffix(ending)
  copy = os.path.join(_folder(), f"{_version(path)}-{base}")
  if os.path.exists(copy):
    return copy
  # Unique, because several processes may make the same copy.
  draft = f"{copy}.{uuid.uuid4().hex[:8]}.part"
  try:
    os.makedirs(_folder(), exist_ok=True)
    with open(draft, "xb") as target:
      _copy(path, target)
    os.replace(draft, copy)
  except OSError as error:
    raise ValueError(
      f"{path} cannot be copied to {_folder()} ({error}); {_CACHE} in the"
      " environment names another folder."
    ) from error
  finally:
    if os.path.exists(draft):
      os.remove(draft)
  return copy


def _copy(path: str, target: BinaryIO) -> None:
  if not path.endswith(ZSTD):
    with _open(path) as source:
      shutil.copyfileobj(source, target, _CHUNK)
    return
  codec = optional_library.arrow()
  with _open(path) as source:
    if not source.read(1):
      raise ValueError(f"{path} is damaged: it is empty, which zstd never is.")
    source.seek(0)
    try:
      with codec.CompressedInputStream(source, "zstd") as text:
        while data := text.read(_CHUNK):
          target.write(data)
    except OSError as error:
      if error.errno is not None:  # Of the disk.
        raise
      raise ValueError(f"{path} is damaged or cut off: {error}.") from error


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
  if not is_remote(path):
    with open(path, "rb") as file:
      yield file
    return
  with _store_errors(path):
    store, name = _open_store(path)
    opened: Callable[..., Any] = store.open
    file = opened(name, "rb", block_size=_CHUNK)
  with file:
    yield file


def _version(path: str) -> str:
  """Returns a name for the present content of a file."""
  if is_remote(path):
    with _store_errors(path):
      store, name = _open_store(path)
      version = str(store.ukey(name))
  else:
    path = os.path.abspath(path)
    status = os.stat(path)
    version = f"{status.st_size}/{status.st_mtime_ns}"
  return hashlib.sha256(f"{path}\0{version}".encode()).hexdigest()[:16]


def _folder() -> str:
  given = os.environ.get(_CACHE)
  return given or os.path.expanduser("~/.cache/paxon/data")


def _open_store(path: str) -> tuple[Any, str]:
  """Returns the file system of a URL, and the path in it."""
  store, name = fsspec.core.url_to_fs(path)
  return store, name


@contextlib.contextmanager
def _store_errors(path: str) -> Iterator[None]:
  """Turns an error of a store into one that names the file."""
  try:
    yield
  except ImportError as error:
    raise ValueError(
      f"{path} cannot be read without the library of its store: {error}."
    ) from error
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} cannot be read: {error}.") from error
