"""Atomic writes of whole files, on local disks and in object stores.

Local files are written under a temporary name and renamed. Object stores
(`gs://`, ...) can neither append nor rename, but make a file visible only when
it is complete. Nothing in a run appends to a file: a growing file is written
whole again, at the intervals of a `FlushPace`.
"""

from collections.abc import Callable, Iterable, Mapping
import json
import math
import os
import time
from typing import Any, TypeVar
import uuid

from etils import epath

from paxon.runner import user_error

_T = TypeVar("_T")
# Of the name of a file that is being written.
DRAFT_SUFFIX = ".part"


class DamagedFileError(user_error.UserError, ValueError):
  """A line cannot be parsed; the message names the file and the line."""


def write_text(path: epath.PathLike, text: str) -> None:
  """Writes a file as UTF-8 and creates its parent directories."""
  write_bytes(path, text.encode())


def write_bytes(path: epath.PathLike, data: bytes) -> None:
  """Writes a file and creates its parent directories."""
  target = epath.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  if not is_local(target):
    target.write_bytes(data)
    return
  # Unique, because several processes may write the same file.
  draft = f"{os.fspath(target)}.{uuid.uuid4().hex[:8]}{DRAFT_SUFFIX}"
  try:
    with open(draft, "xb") as file:
      file.write(data)
      file.flush()
      # Otherwise a power failure can leave an empty file.
      os.fsync(file.fileno())
    os.replace(draft, target)
  except BaseException:
    if os.path.exists(draft):
      os.remove(draft)
    raise


def read_json_lines(
  path: epath.PathLike, make: Callable[[Any], _T], *, kind: str
) -> list[_T]:
  """Returns `make(value)` for the JSON value of each line, in order.

  Raises:
    DamagedFileError: A line is not a record of this kind.
  """
  found = []
  lines = epath.Path(path).read_bytes().splitlines()
  for number, line in enumerate(lines, start=1):
    try:
      found.append(make(json.loads(line.decode())))
    except (
      ValueError,
      KeyError,
      TypeError,
      AttributeError,
      OverflowError,
      RecursionError,
    ) as error:
      raise DamagedFileError(
        f"{path}, line {number}, is not a valid {kind} record ({error!r}):"
        f" {line[:80].decode(errors='replace')!r}. Remove the line or the file."
      ) from error
  return found


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
  """Raises UserError if the library of an object store is missing."""
  if is_local(path):
    return
  try:
    path.exists()
  except ImportError as error:
    raise user_error.UserError(
      f"{os.fspath(path)} cannot be accessed: {error}."
    ) from error


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
