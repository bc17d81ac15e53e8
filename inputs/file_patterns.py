"""The files that paths and patterns mean.

In a pattern `*` and `?` stand for any characters of a name, `[ab]` for one of
some, and `**` for any folders. `~` is the user's folder. A path that is there
is itself, whatever characters it has. Files are read from disks: a bucket of a
store has to be mounted.
"""

from collections.abc import Sequence
import glob
import os


def find(files: str | Sequence[str], *, field: str) -> tuple[str, ...]:
  """Returns the files of a path or a pattern, sorted, or of several.

  Args:
    files: Of several the order given is kept, and a file that has two of them
      is there once.
    field: Who names them, for messages: `JsonLines.files`.

  Raises:
    FileNotFoundError: A path or pattern has no file; folders are none. Or it
      is in a store.
  """
  found: list[str] = []
  for pattern in [files] if isinstance(files, str) else files:
    if "://" in pattern:
      raise FileNotFoundError(
        f"{field}: {pattern!r} is in a store, and data is read from disks;"
        " mount the store (gcsfuse does for gs://), or copy the files."
      )
    some = _matches(os.path.expanduser(pattern))
    if not some:
      raise FileNotFoundError(
        f"{field}: no file has the name {pattern!r}; give a path, or a pattern"
        " with *, ** and ?."
      )
    found += some
  return tuple(dict.fromkeys(found))


def _matches(pattern: str) -> list[str]:
  if os.path.isfile(pattern):
    return [pattern]
  return sorted(filter(os.path.isfile, glob.iglob(pattern, recursive=True)))
