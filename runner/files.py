"""Atomic writes of whole files, on local disks and in object stores.

Local files are written under a temporary name and renamed. Object stores
(`gs://`, ...) can neither append nor rename, but make a file visible only when
it is complete. Nothing in a run appends to a file: a growing file is written
whole again, at the intervals of a `FlushPace`.

Files of a run directory may be damaged, or made by someone else: they are read
only if they are regular files of limited size, so that no pipe or device blocks
a reader, and each error names the file.
"""

from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
)
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import stat
import time
import typing
from typing import Any, Final, TypeVar
import uuid

from etils import epath

from paxon.inputs import stores
from paxon.runner import exit_status, user_error
from paxon.runner.stores import access

_T = TypeVar("_T")
# Suffix of a file that is being written.
DRAFT_SUFFIX = ".part"
# Bytes of a file that is read whole, and of one with a line for each step.
MAX_BYTES: Final = 1 << 26
MAX_LINES_BYTES: Final = 1 << 30
# Errors of parsing JSON, and of fields that are missing or have other types.
PARSE_ERRORS: Final = (
  *(ValueError, KeyError, TypeError, AttributeError, IndexError),
  *(OverflowError, RecursionError),
)
_CHUNK = 1 << 20


class UnwritableFileError(user_error.UserError, OSError):
  """A file cannot be written, because its path is occupied."""


class DamagedFileError(user_error.UserError, ValueError):
  """A file cannot be read or parsed; the message names it, and the line."""

  # ExitStatus.DATA of `exit_status`, which few of those that read files need.
  status = 65


def write_text(path: epath.PathLike, text: str) -> None:
  """Writes a file as UTF-8 and creates its parent directories."""
  write_bytes(path, text.encode())


def write_bytes(path: epath.PathLike, data: bytes) -> None:
  """Writes a file and creates its parent directories.

  Raises:
    UnwritableFileError: A directory is where the file must be, or the reverse.
    UserError: A store cannot be written to.
  """
  target = epath.Path(path)
  if not is_local(target):
    # Stores have no directories; to make one may create a bucket.
    try:
      with stores.explain(os.fspath(path), action="written"):
        target.write_bytes(data)
    except stores.StoreError as error:
      status = exit_status.ExitStatus.STORE
      raise user_error.UserError(str(error)).with_status(status) from error
    return
  # Unique, because several processes may write the same file.
  draft = f"{os.fspath(target)}.{uuid.uuid4().hex[:8]}{DRAFT_SUFFIX}"
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(draft, "xb") as file:
      file.write(data)
      file.flush()
      # Otherwise a power failure can leave an empty file.
      os.fsync(file.fileno())
    os.replace(draft, target)
  except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
    raise UnwritableFileError(
      f"{os.fspath(target)} cannot be written: a directory is where a file must"
      " be, or a file where a directory must be."
    ) from error
  finally:
    if os.path.lexists(draft):
      os.remove(draft)


@contextlib.contextmanager
def open_bytes(path: epath.PathLike) -> Iterator[typing.IO[bytes]]:
  """Opens a regular file to read bytes, without blocking.

  Raises:
    FileNotFoundError: It does not exist.
    DamagedFileError: It is a directory, pipe, socket or device, or cannot be
      opened.
  """
  if not is_local(path):
    with epath.Path(path).open("rb") as remote:
      yield remote
    return
  try:
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  except FileNotFoundError:
    raise
  except (OSError, ValueError) as error:
    raise _unreadable(
      path, getattr(error, "strerror", None) or error
    ) from error
  mode = os.fstat(number).st_mode
  if not stat.S_ISREG(mode):
    os.close(number)
    raise _unreadable(path, f"it is a {_name_kind(mode)}, not a file")
  with open(number, "rb") as file:
    yield file


def _name_kind(mode: int) -> str:
  kinds = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
  }
  return kinds.get(stat.S_IFMT(mode), "device")


def _unreadable(path: epath.PathLike, reason: object) -> DamagedFileError:
  return DamagedFileError(f"{os.fspath(path)} cannot be read ({reason}).")


def read_bytes(path: epath.PathLike, *, max_bytes: int = MAX_BYTES) -> bytes:
  """Returns the content of a regular file; see `open_bytes`.

  Raises:
    FileNotFoundError: It does not exist.
    DamagedFileError: It cannot be read, or is larger than `max_bytes`.
  """
  chunks, size = [], 0
  with open_bytes(path) as file:
    try:
      # Files of /proc and of stores do not tell their size.
      known = os.fstat(file.fileno()).st_size if is_local(path) else 0
      while size + known <= max_bytes and (chunk := file.read(_CHUNK)):
        chunks.append(chunk)
        size, known = size + len(chunk), 0
      if size + known > max_bytes:
        raise _unreadable(path, f"it has more than {max_bytes:,} bytes")
    except OSError as error:
      raise _unreadable(path, error.strerror or error) from error
  return b"".join(chunks)


def read_text(path: epath.PathLike, *, max_bytes: int = MAX_BYTES) -> str:
  """Returns the text of a regular file in UTF-8; raises like `read_bytes`."""
  data = read_bytes(path, max_bytes=max_bytes)
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    reason = f"it is not UTF-8 text, byte {error.start}"
    raise _unreadable(path, reason) from error


def read_json(
  path: epath.PathLike,
  make: Callable[[Any], _T],
  *,
  kind: str,
  advice: str = "Remove the file.",
) -> _T:
  """Returns `make(value)` for the JSON value of a file.

  Args:
    path: The file.
    make: Raises one of `PARSE_ERRORS` if the value is not of this kind.
    kind: Kind of the content, for errors.
    advice: Remedy for a damaged file, for errors.

  Raises:
    FileNotFoundError: It does not exist.
    DamagedFileError: It cannot be read, or is not of this kind.
  """
  text = read_text(path)
  try:
    return make(json.loads(text))
  except PARSE_ERRORS as error:
    raise DamagedFileError(
      f"{os.fspath(path)} does not hold {kind} ({describe(error)}). {advice}"
    ) from error


def describe(error: Exception) -> str:
  """Returns one of `PARSE_ERRORS` in words, of limited length."""
  if isinstance(error, RecursionError):
    return "it is nested too deeply"
  if isinstance(error, KeyError):
    return f"it has no {error.args[0]!r}"
  text = str(error)
  return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 200


def to_object(value: Any) -> dict[str, Any]:
  """Returns a JSON object; raises TypeError for another value."""
  if not isinstance(value, dict):
    raise TypeError(f"it is {_show(value)}, not a JSON object")
  return value


def to_record(
  cls: type[_T], value: Any, *, not_finite: Collection[str] = ()
) -> _T:
  """Returns a dataclass from a JSON object of its fields.

  Fields that are numbers, texts, truth values or dictionaries are checked.

  Args:
    cls: The dataclass.
    value: The JSON value.
    not_finite: Fields that may also be infinite, not a number or, as `to_json`
      writes both, null.

  Raises:
    TypeError: A field is missing, unknown or has another type.
    ValueError: The dataclass rejects a value.
  """
  fields = dict(to_object(value))
  for name in not_finite:
    if name in fields and fields[name] is None:
      fields[name] = math.nan
  kinds = typing.get_type_hints(cls)
  known = {
    each.name: each for each in dataclasses.fields(typing.cast(Any, cls))
  }
  if unknown := sorted(fields.keys() - known.keys()):
    raise TypeError(f"there is no field {unknown[0]!r}")
  missing = dataclasses.MISSING
  for name, field in known.items():
    if name in fields:
      check_type(name, fields[name], kinds[name])
      is_free = kinds[name] is not float or name in not_finite
      if not is_free and not math.isfinite(fields[name]):
        raise ValueError(f"its {name} is {fields[name]}, which is not finite")
    elif field.default is missing and field.default_factory is missing:
      raise TypeError(f"it has no {name!r}")
  return cls(**fields)


_KINDS = {
  bool: "true or false",
  int: "an integer",
  float: "a number",
  str: "a text",
  dict: "an object",
  list: "a list",
}


def check_type(name: str, value: Any, kind: Any) -> None:
  """Raises TypeError if a JSON value is not of a kind, such as `int`.

  An integer is a `float`, and true is no integer. Other kinds than those of
  JSON are not checked.
  """
  kind = typing.get_origin(kind) or kind
  allowed = (int, float) if kind is float else (kind,)
  if kind in _KINDS and type(value) not in allowed:
    raise TypeError(f"its {name} must be {_KINDS[kind]}, got {_show(value)}")


def _show(value: Any) -> str:
  try:
    text = json.dumps(value)
  except (RecursionError, ValueError):
    text = type(value).__name__
  return text if len(text) <= 60 else f"{text[:60]}..."


def read_json_lines(
  path: epath.PathLike, make: Callable[[Any], _T], *, kind: str
) -> list[_T]:
  """Returns `make(value)` for the JSON value of each line, in order.

  Raises:
    FileNotFoundError: The file does not exist.
    DamagedFileError: It cannot be read, or a line is not a record of this kind.
  """
  found = []
  lines = read_bytes(path, max_bytes=MAX_LINES_BYTES).splitlines()
  for number, line in enumerate(lines, start=1):
    try:
      found.append(make(json.loads(line.decode())))
    except PARSE_ERRORS as error:
      raise DamagedFileError(
        f"{path}, line {number}, is not a valid {kind} record"
        f" ({describe(error)}): {line[:80].decode(errors='replace')!r}. Remove"
        " the line or the file."
      ) from error
  return found


def check_regular(folder: epath.PathLike) -> None:
  """Raises DamagedFileError for a pipe, socket or device below a folder.

  For folders that a library reads, which would wait for a pipe. Folders of a
  store have none.
  """
  if not is_local(folder):
    return
  waiting, seen = [pathlib.Path(folder)], set()
  while waiting:
    try:
      here = waiting.pop()
      status = here.stat()
      # A link may lead back.
      if (status.st_dev, status.st_ino) in seen:
        continue
      seen.add((status.st_dev, status.st_ino))
      with os.scandir(here) as listed:
        entries = list(listed)
    except OSError:
      continue  # Removed meanwhile; the library reports what it lacks.
    for entry in entries:
      # The kind of most entries is known without another call.
      if entry.is_file(follow_symlinks=False):
        continue
      if os.path.isdir(entry.path):
        waiting.append(pathlib.Path(entry.path))
      else:
        with contextlib.suppress(FileNotFoundError), open_bytes(entry.path):
          pass


def check_link(path: epath.PathLike, *, folder: epath.PathLike) -> None:
  """Raises DamagedFileError for a link to a file outside of a folder.

  In a snapshot of Hugging Face's cache, links may lead to the blobs of the same
  repository: `models--a--b/snapshots/c/x.json` to `models--a--b/blobs/d`.
  """
  if not is_local(path) or not os.path.islink(path):
    return
  home = pathlib.Path(folder).resolve()
  allowed = [home]
  if home.parent.name == "snapshots":
    allowed.append(home.parent.parent / "blobs")
  try:
    target = pathlib.Path(path).resolve()
  except (OSError, RuntimeError) as error:  # A link that leads to itself.
    raise _unreadable(path, "it is a link that leads nowhere") from error
  if not any(target.is_relative_to(each) for each in allowed):
    raise _unreadable(
      path,
      f"it is a link to {os.fspath(target)}, outside of the folder; copy the"
      " file if you trust it",
    )


def check_links(folder: epath.PathLike, endings: tuple[str, ...]) -> None:
  """Raises DamagedFileError unless the files of a folder are files in it.

  Args:
    folder: A folder of a model or tokenizer.
    endings: Only files whose names end so are checked.
  """
  if not is_local(folder):
    return
  for name in sorted(os.listdir(folder)):
    path = os.path.join(folder, name)
    if name.endswith(endings) and not os.path.isdir(path):
      check_link(path, folder=folder)
      with contextlib.suppress(FileNotFoundError), open_bytes(path):
        pass


def read_input(path: epath.Path, *, flag: str) -> bytes:
  """Returns the file that a flag names; raises UserError if there is none."""
  check_store(path)
  try:
    return path.read_bytes()
  except OSError as error:
    raise user_error.UserError(
      f"{flag}={os.fspath(path)} cannot be read"
      f" ({error.strerror or type(error).__name__})."
    ) from error


def to_json(value: Any, **options: Any) -> str:
  """Returns the JSON of a value, null for NaN and infinite numbers.

  `options` are those of `json.dumps`, which writes these numbers in a way that
  no other program reads.
  """
  try:
    return json.dumps(value, allow_nan=False, **options)
  except ValueError:
    return json.dumps(_to_finite(value), allow_nan=False, **options)


def _to_finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _to_finite(each) for key, each in value.items()}
  if isinstance(value, list | tuple):
    return [_to_finite(each) for each in value]
  is_wrong = isinstance(value, float) and not math.isfinite(value)
  return None if is_wrong else value


def to_json_lines(values: Iterable[Any]) -> str:
  """Returns a file's text of one JSON value per line."""
  return "".join(f"{to_json(value)}\n" for value in values)


def is_local(path: epath.PathLike) -> bool:
  """Whether the path is on a disk of this machine."""
  return "://" not in os.fspath(path)


def check_store(path: epath.Path) -> None:
  """Raises UserError if an object store cannot be accessed."""
  if is_local(path):
    return
  try:
    stores.prepare(os.fspath(path))
    with stores.explain(os.fspath(path), action="accessed"):
      path.exists()
  except (ImportError, stores.StoreError) as error:
    raise user_error.UserError(str(error)) from error


def check_writable_store(path: epath.Path) -> None:
  """Raises UserError if a store cannot hold a run; tries it."""
  check_store(path)
  try:
    access.try_out(path)
  except access.UnusableStoreError as error:
    raise user_error.UserError(str(error)) from error


_MIN_SECONDS = 2.0
_MAX_SHARE = 0.02


class FlushPace:
  """Spaces writes out, further where one takes longer.

  Args:
    clock: Gives seconds; another one in tests.
    max_share: Writing takes at most about this share of the time.
  """

  def __init__(
    self,
    clock: Callable[[], float] = time.monotonic,
    *,
    max_share: float = _MAX_SHARE,
  ):
    self._clock, self._max_share = clock, max_share
    self._next = clock() + _MIN_SECONDS

  def is_due(self) -> bool:
    """Whether enough time went by since the last write."""
    return self._clock() >= self._next

  def run(self, write: Callable[[], None]) -> None:
    """Writes, and sets the time of the next write by how long this one took."""
    start = self._clock()
    write()
    end = self._clock()
    self._next = end + max(_MIN_SECONDS, (end - start) / self._max_share)
