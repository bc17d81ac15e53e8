"""The files of a workspace, found by walking its folders.

Git is not asked: a source archive has no `.git`, and a new file is to be
checked before it is added.
"""

import os
import pathlib

ROOT_MARK = "WORKSPACE"

# What building, testing and running leave behind at the root.
_PRODUCTS = frozenset({"build", "dist", "runs"})


def find_root(start: pathlib.Path) -> pathlib.Path:
  """Returns the workspace that holds the real file behind `start`.

  In Bazel's runfiles every source file is a link, so this leads back to the
  checkout.

  Raises:
    FileNotFoundError: No folder above `start` has a WORKSPACE file.
  """
  real = start.resolve()
  for folder in (real, *real.parents):
    if (folder / ROOT_MARK).is_file():
      return folder
  raise FileNotFoundError(
    f"no folder above {real} has a {ROOT_MARK} file; this check reads the"
    " checkout itself, so it must run on the machine that holds it."
  )


def files(root: pathlib.Path) -> list[str]:
  """Returns the paths of all source files below `root`, relative, sorted."""
  ignored = _ignored_folders(root)
  found = []
  for folder, subfolders, names in os.walk(root):
    here = pathlib.PurePath(folder).relative_to(root)
    subfolders[:] = sorted(
      name
      for name in subfolders
      if not _is_hidden(name)
      and str(here / name) not in ignored
      # The links that Bazel leaves at the root.
      and not os.path.islink(os.path.join(folder, name))
    )
    found += [str(here / name) for name in names if not name.startswith(".")]
  return sorted(found)


def _is_hidden(name: str) -> bool:
  return name.startswith(".") or name in ("__pycache__", "node_modules")


def _ignored_folders(root: pathlib.Path) -> frozenset[str]:
  """Returns the folders that are no part of this workspace."""
  bazelignore = root / ".bazelignore"
  if not bazelignore.is_file():
    return _PRODUCTS
  lines = bazelignore.read_text().splitlines()
  return _PRODUCTS | {
    line.strip().rstrip("/")
    for line in lines
    if line.strip() and not line.startswith("#")
  }
