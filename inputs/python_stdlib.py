"""The source text of the running interpreter's standard library.

Megabytes of real text that lie on every machine with Python. A document is one
`.py` file, as bytes: nothing is decoded, so a file in another encoding than
UTF-8 is a document like any other. Left out are tests, installed packages,
caches, empty files, and what the machine wrote instead of Python's authors
(`_sysconfigdata_*`, `config-*`, `sitecustomize`), so that two builds of
one version of Python give the same text. Python 3.11.7 has 714 files of 11.8 MB
to train on and 15 files of 0.25 MB held out.

A file belongs to the validation split when
`sha256(path) % 100 < validation_percent`, the path taken relative to
the library's folder with `/` between its parts. So the split depends on names
only: a file keeps its side on another machine and in another version of
Python, and a file that is added moves no other one.
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

  The folder is listed when a document, or the number of documents, is asked
  for the first time; files are read one at a time.

  Attributes:
    split: "train", what training sees, or "validation", what is held out.
    validation_percent: How many of 100 files are held out, on average.
    folder: The library's folder. `None` is that of the running interpreter.
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
      FileNotFoundError: The folder holds no source text at all.
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
    # A path may hold bytes that are no UTF-8; they come as surrogates.
    digest = hashlib.sha256(path.encode("utf-8", errors="surrogateescape"))
    return int(digest.hexdigest(), 16) % 100 < self.validation_percent


def _source_paths(root: pathlib.Path) -> list[str]:
  """Returns the paths of all documents under `root`, sorted, each text once."""
  found: dict[tuple[int, int], str] = {}
  for path in sorted(p.relative_to(root).as_posix() for p in _walk(root)):
    status = (root / path).stat()
    # Debian links one file under two names. The same text must not be on
    # both sides of the split, so a file counts under its first name only.
    if status.st_size:
      found.setdefault((status.st_dev, status.st_ino), path)
  return list(found.values())


def _walk(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the files to consider, following links but never in a circle."""
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
        and path.is_file()  # False for a link that leads nowhere.
      ):
        yield path
