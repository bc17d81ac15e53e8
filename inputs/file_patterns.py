"""Expansion of glob patterns to files.

In a pattern `*` and `?` match any characters of a name, `[ab]` one of a set,
and `**` any folders. `~` is the home folder. An existing path is used
literally, even if it contains such characters. Object stores must be mounted.
"""

from collections.abc import Sequence
import glob
import os


def find(files: str | Sequence[str], *, field: str) -> tuple[str, ...]:
  """Returns the files that match one or several paths or patterns.

  Args:
    files: The paths or patterns. The matches of each are sorted; their order is
      kept, and duplicates are dropped.
    field: The configuration field, for messages, such as `JsonLines.files`.

  Raises:
    FileNotFoundError: A path or pattern matches no regular file, or is a URL of
      an object store.
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
