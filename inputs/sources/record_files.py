"""Random access to the records of several files, by one index.

In a pattern of files `*` and `?` match any characters of a name, `[ab]` one of
a set, and `**` any folders; `{a,b}` stands for two patterns, each of which must
match. `~` is the home folder. A folder stands for the files in it, without
hidden ones (`.`, `_`). An existing path is used literally, even if it contains
such characters. Files may be in object stores and compressed by zstd; see
`data_files`.
"""

import abc
import bisect
from collections.abc import Sequence, Sized
from concurrent import futures
import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import data_files

# Requests to a store at a time.
_NUM_THREADS = 16


def find(files: str | Sequence[str], *, field: str) -> tuple[str, ...]:
  """Returns the files that match one or several paths or patterns.

  Args:
    files: The paths or patterns. The matches of each are sorted; their order is
      kept, and duplicates are dropped.
    field: The configuration field, for messages, such as `JsonLines.files`.

  Raises:
    FileNotFoundError: A path or pattern matches no regular file.
    ValueError: An object store cannot be accessed.
  """
  found: list[str] = []
  for pattern in split_patterns(files):
    some = data_files.matches(pattern)
    if not some:
      raise FileNotFoundError(
        f"{field}: no file has the name {pattern!r}; give a path, a folder, a"
        " pattern with *, **, ? and {a,b}, or a list of them."
      )
    found += some
  return tuple(dict.fromkeys(found))


def split_patterns(files: str | Sequence[str]) -> list[str]:
  """Returns one or several paths or patterns, without braces."""
  given = [files] if isinstance(files, str) else files
  return [each for one in given for each in data_files.expand_braces(one)]


class PickledFields:
  """A dataclass that is pickled by its fields; each process opens its files."""

  def __getstate__(self) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(self)}  # pyrefly: ignore
    return {k: v for k, v in self.__dict__.items() if k in names}


def locate(
  ends: Sequence[int], index: int, *, what: str = "record"
) -> tuple[int, int]:
  """Returns the part that holds an element, and its index in the part.

  Args:
    ends: The cumulative number of elements after each part.
    index: The index over all parts.
    what: The element's name, for messages.

  Raises:
    IndexError: The index is out of range.
  """
  if not 0 <= index < ends[-1]:
    raise IndexError(f"There is no {what} {index} of {ends[-1]}.")
  part = bisect.bisect_right(ends, index)
  return part, index - (ends[part - 1] if part else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordFiles(PickledFields, abc.ABC):
  """Records of several files, by file, then by position in the file.

  Attributes:
    files: A path, a pattern such as `c4/en/*.json.gz`, or several of them. A
      file that matches two of them is read once.
  """

  files: str | Sequence[str]

  # The name of an element, for messages.
  _what: ClassVar[str] = "document"
  # What the files hold instead, for the message if there are no elements.
  _hint: ClassVar[str] = ""

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "files")

  @functools.cached_property
  def paths(self) -> tuple[str, ...]:
    """The files, in order.

    Raises:
      FileNotFoundError: No file matches.
    """
    return find(self.files, field=f"{type(self).__name__}.files")

  def list_files(self) -> tuple[str, ...]:
    """Returns `paths`."""
    return self.paths

  def measure_files(self) -> list[int]:
    """Returns the number of bytes of each file, as stored."""
    with futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
      return list(pool.map(data_files.size, self.paths))

  def __len__(self) -> int:
    return self._ends[-1]

  @property
  @abc.abstractmethod
  def _parts(self) -> Sequence[Sized]:
    """The files, or their parts, with numbers of elements."""

  def _locate(self, index: int) -> tuple[int, int]:
    return locate(self._ends, index, what=self._what)

  @functools.cached_property
  def _ends(self) -> list[int]:
    ends = np.cumsum([len(part) for part in self._parts]).tolist()
    if not ends or not ends[-1]:
      raise ValueError(
        f"{type(self).__name__}.files: {self.files!r} holds no {self._what}s"
        f"{self._hint}."
      )
    return ends
