"""Files: their size, their names, and the one target that each belongs to."""

import ast
from collections.abc import Iterator
import pathlib
import sys

from paxon.tools.dependencies import violation, workspace

MAX_LINES = 600
# Not BUILD files: they have one target a module and grow with the folder.
_LIMITED = (".py", ".bzl", ".sh")

# Run by pip, never by Bazel.
_WITHOUT_TARGET = frozenset({"setup.py"})

# Files that may be longer, and how long. It may only shrink.
_LONGER: dict[str, int] = {}


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each file that is out of place."""
  packages = set(tree.packages())
  for path in tree.files:
    messages = list(_size_problems(tree, path))
    if path.endswith(".py"):
      messages += _name_problems(tree, path)
      if pathlib.PurePath(path).name == "__init__.py":
        messages += _init_problems(tree, path)
      elif _folder(path) in packages:
        messages += _owner_problems(tree, path)
    for message in messages:
      yield violation.Violation(path, 0, path, message)
  yield from _missing_files(tree)


def _missing_files(
  tree: workspace.Workspace,
) -> Iterator[violation.Violation]:
  """Yields files that a folder with Python sources lacks."""
  sources = [
    path
    for path in tree.files
    if path.endswith(".py") and not path.endswith("__init__.py")
  ]
  for folder in sorted({_folder(path) for path in sources}):
    wanted = {"BUILD": "one with a target for each module"}
    if not folder.startswith("third_party"):  # No part of the wheel.
      wanted["__init__.py"] = "one that holds a docstring only"
    for name, what in wanted.items():
      path = f"{folder}/{name}".lstrip("/")
      if path not in tree.files:
        yield violation.Violation(path, 0, path, f"is missing; add {what}.")


def _size_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  if path.endswith(_LIMITED):
    lines = tree.text(path).count("\n")
    limit = _LONGER.get(path, MAX_LINES)
    if lines > limit:
      yield f"has {lines} lines, the limit is {limit}; split it by ideas."


def _name_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  """Yields names that hide a module of the same name from its importers."""
  parts = pathlib.PurePath(path).with_suffix("").parts
  for part in parts:
    if part in sys.stdlib_module_names:
      yield f"`{part}` is a module of the standard library; rename it."
    elif part in tree.distributions.top_levels:
      yield f"`{part}` is a third-party package; rename it."
    elif part in ("test", "tests"):
      yield f"tests stand beside what they test, not in {part}/; move it."


def _init_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  """Yields why an `__init__.py` is more, or less, than a docstring."""
  module = ast.parse(tree.text(path))
  if len(module.body) != 1 or ast.get_docstring(module) is None:
    yield "holds a docstring and nothing else; import modules directly."


def _owner_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  """Yields why a source belongs to no target, or to several."""
  owners = tree.owners(path)
  if not owners and path not in _WITHOUT_TARGET:
    yield f"is in no target; add one to {_folder(path)}/BUILD."
  elif len(owners) > 1:
    labels = " and ".join(owner.label for owner in owners)
    yield f"is in {labels}; keep one, and depend on it."


def _folder(path: str) -> str:
  return path.rpartition("/")[0]
