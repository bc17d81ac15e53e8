"""The source text of the running interpreter's standard library.

Megabytes of text that are available on every machine with Python. A document is
one `.py` file as bytes, in any encoding. Tests, installed packages, caches,
empty files and machine-generated files (`_sysconfigdata_*`, `config-*`,
`sitecustomize`) are excluded, so builds of the same Python version have the
same text. Python 3.11.7 has 714 training files (11.8 MB) and 15 held-out files
(0.25 MB).

A file belongs to the validation split if
`sha256(path) % 100 < validation_percent`, for the path relative to the
library's folder with `/` separators. A file is therefore in the same split on
every machine and in every version of Python.
"""

from collections.abc import Iterator
import dataclasses
import functools
import hashlib
import os
import pathlib
import sysconfig

_SKIPPED_FOLDERS = frozenset(
  (
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
  )
)
_SKIPPED_FILES = frozenset(("sitecustomize.py", "usercustomize.py"))
_SKIPPED_PREFIXES = ("_sysconfigdata_", "config-")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonStdlib:
  """The standard library's files of one split, ordered by path.

  The folder is listed on the first access; files are read one at a time.

  Attributes:
    split: "train" or "validation".
    validation_percent: The approximate percentage of held-out files.
    folder: The library's folder. `None` is the running interpreter's.
  """

  split: str
  validation_percent: int = 2
  folder: str | os.PathLike[str] | None = None

  def __post_init__(self) -> None:
    if self.split not in ("train", "validation"):
      raise ValueError(
        f"PythonStdlib.split must be 'train' or 'validation', got"
        f" {self.split!r}."
      )
    if not 0 < self.validation_percent < 100:
      raise ValueError(
        "PythonStdlib.validation_percent must be between 1 and 99, got"
        f" {self.validation_percent}."
      )

  @functools.cached_property
  def root(self) -> pathlib.Path:
    """The library's folder."""
    folder = self.folder
    return pathlib.Path(
      sysconfig.get_path("stdlib") if folder is None else folder
    )

  @functools.cached_property
  def paths(self) -> tuple[str, ...]:
    """The paths of the documents, relative to `root`, with `/`, sorted.

    Raises:
      FileNotFoundError: The folder has no source files.
    """
    every = _source_paths(self.root)
    if not every:
      raise FileNotFoundError(
        f"No Python source text (.py files) was found in {self.root}. This"
        " interpreter's standard library is in a zip file, compiled only, or"
        " not installed; use an interpreter that has it as files, or set"
        " PythonStdlib.folder to the lib/python3.x folder of one."
      )
    held_out = self.split == "validation"
    return tuple(p for p in every if self._is_held_out(p) == held_out)

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int, /) -> bytes:
    return (self.root / self.paths[index]).read_bytes()

  def _is_held_out(self, path: str) -> bool:
    # Paths may contain bytes that are not UTF-8, decoded as surrogates.
    digest = hashlib.sha256(path.encode("utf-8", errors="surrogateescape"))
    return int(digest.hexdigest(), 16) % 100 < self.validation_percent


def _source_paths(root: pathlib.Path) -> list[str]:
  """Returns the sorted paths of all distinct documents under `root`."""
  found: dict[tuple[int, int], str] = {}
  for path in sorted(p.relative_to(root).as_posix() for p in _walk(root)):
    status = (root / path).stat()
    # Debian links one file under two names. Only the first is used, so that
    # the same text is not in both splits.
    if status.st_size:
      found.setdefault((status.st_dev, status.st_ino), path)
  return list(found.values())


def _walk(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields candidate files, following links without cycles."""
  visited = set()
  for folder, subfolders, files in os.walk(root, followlinks=True):
    status = pathlib.Path(folder).stat()
    if (status.st_dev, status.st_ino) in visited:
      subfolders.clear()
      continue
    visited.add((status.st_dev, status.st_ino))
    subfolders[:] = sorted(
      name
      for name in subfolders
      if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
    )
    for name in files:
      path = pathlib.Path(folder, name)
      if (
        name.endswith(".py")
        and name not in _SKIPPED_FILES
        and not name.startswith(_SKIPPED_PREFIXES)
        and path.is_file()  # False for a broken link.
      ):
        yield path
