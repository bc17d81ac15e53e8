"""Files and targets: sizes, names, one module per target, no fragments."""

import ast
from collections.abc import Iterator, Mapping
import pathlib
import sys

from paxon.tools.dependencies import build_file, violation, workspace

MAX_LINES = 600
# A module with fewer lines needs more than one importer.
MIN_LINES = 80
# Not BUILD files: they have a target for each module and grow with the folder.
_LIMITED = (".py", ".bzl", ".sh")
# Run by pip, never by Bazel.
_WITHOUT_TARGET = frozenset({"setup.py"})
_TEST_END = "_test.py"

# Named like a distribution, as the field names them. Nothing puts `inputs` on
# `sys.path`: programs and tests start with PYTHONSAFEPATH.
_HARMLESS_FOLDERS = frozenset({"tokenizers"})


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each misplaced file, target and fragment."""
  yield from check_files(tree)
  yield from check_targets(tree)
  yield from check_fragments(tree)


def check_files(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each file of a wrong size, name or target."""
  packages = set(tree.packages())
  for path in tree.files:
    messages = [*_size_problems(tree, path), *_data_problems(tree, path)]
    if path.endswith(".py"):
      messages += _name_problems(tree, path)
      if pathlib.PurePath(path).name == "__init__.py":
        messages += _init_problems(tree, path)
      elif _folder(path) in packages:
        messages += _owner_problems(tree, path)
    for message in messages:
      yield violation.make_for_file(path, message)
  yield from _missing_files(tree)


def check_targets(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each target that is not one tested module."""
  for target in tree.targets.values():
    if target.is_python:
      for message in _target_problems(tree, target):
        yield violation.Violation(
          target.build_path, target.line, target.label, message
        )


def check_fragments(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields small modules that a single module of their package imports."""
  for path, users in production_importers(tree).items():
    lines = tree.text(path).count("\n")
    if len(users) == 1 and lines < MIN_LINES:
      (user,) = users
      # One that serves another package is public.
      if user.partition("/")[0] == path.partition("/")[0]:
        yield violation.make_for_file(
          path,
          f"has {lines} lines, and only {user} imports it; move its code"
          " there.",
          f"fragment {path}",
        )


def production_importers(
  tree: workspace.Workspace,
) -> Mapping[str, frozenset[str]]:
  """Returns the modules that import each module; tests do not count."""
  found: dict[str, set[str]] = {}
  for target in tree.targets.values():
    if not target.is_python or target.testonly:
      continue
    for use in tree.uses(target):
      for label in use.labels if use.path.endswith(".py") else ():
        imported = tree.targets.get(label)
        if imported and not imported.testonly:
          for path in imported.source_paths():
            found.setdefault(path, set()).add(use.path)
  return {
    path: frozenset(users)
    for path, users in sorted(found.items())
    if not path.endswith("__init__.py")
  }


# --- Files -------------------------------------------------------------------


def _missing_files(
  tree: workspace.Workspace,
) -> Iterator[violation.Violation]:
  """Yields files that a folder with Python sources lacks."""
  folders = {
    _folder(path)
    for path in tree.files
    if path.endswith(".py") and not path.endswith("__init__.py")
  }
  for folder in sorted(folders):
    required = {"BUILD": "one with a target for each module"}
    if not folder.startswith("third_party"):  # Not in the wheel.
      required["__init__.py"] = "one that holds a docstring only"
    for name, what in required.items():
      path = f"{folder}/{name}".lstrip("/")
      if path not in tree.files:
        yield violation.make_for_file(path, f"is missing; add {what}.")


def _size_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  if path.endswith(_LIMITED):
    lines = tree.text(path).count("\n")
    if lines > MAX_LINES:
      yield f"has {lines} lines, the limit is {MAX_LINES}; split it by ideas."


def _data_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  """Yields data of tests that no target lists: Bazel leaves it out."""
  folders = [folder.as_posix() for folder in pathlib.PurePath(path).parents]
  if {"goldens", "testdata"}.isdisjoint(path.split("/")[:-1]):
    return
  for folder in folders:
    build = f"{folder}/BUILD"
    if build in tree.files:
      name = path.removeprefix(f"{folder}/")
      if f'"{name}"' not in tree.text(build):
        yield f"is in no target; list it in {build}."
      return


def _name_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  """Yields names that hide a module of the same name from its importers."""
  for name in pathlib.PurePath(path).with_suffix("").parts:
    if name in _HARMLESS_FOLDERS and f"/{name}/" in path:
      continue
    if name in sys.stdlib_module_names:
      yield f"`{name}` is a module of the standard library; rename it."
    elif name in tree.distributions.top_levels:
      yield f"`{name}` is a third-party package; rename it."
    elif name in ("test", "tests"):
      yield f"a test stands next to its module, not in {name}/; move it."


def _init_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  module = ast.parse(tree.text(path))
  # The root has the version, and names that are loaded on first use.
  rest = module.body[1:] if path != "__init__.py" else []
  if rest or ast.get_docstring(module) is None:
    yield "must hold a docstring and nothing else; import modules directly."


def _owner_problems(tree: workspace.Workspace, path: str) -> Iterator[str]:
  owners = tree.owners(path)
  if not owners and path not in _WITHOUT_TARGET:
    yield f"is in no target; add one to {_folder(path)}/BUILD."
  elif len(owners) > 1:
    labels = " and ".join(owner.label for owner in owners)
    yield f"is in {labels}; keep one, and depend on it."


# --- Targets -----------------------------------------------------------------


def _target_problems(
  tree: workspace.Workspace, target: build_file.Target
) -> Iterator[str]:
  for src in target.srcs:
    if "/" in src or src.startswith(":"):
      yield f'"{src}" is in another folder; add a BUILD file there.'
  if target.kind == "py_test":
    if not target.has_size:
      yield 'a test needs a size; add size = "small" or "medium".'
    for src in target.srcs:
      if not src.endswith((_TEST_END, "README.md")):
        yield f'"{src}" in a test is not called *{_TEST_END}; rename it.'
  elif target.kind == "py_library" and len(target.srcs) > 1:
    yield "a library is one module; make one target for each of its srcs."
  elif target.kind == "py_library" and target.srcs:
    yield from _library_problems(tree, target)


def _library_problems(
  tree: workspace.Workspace, target: build_file.Target
) -> Iterator[str]:
  (src,) = target.srcs
  stem = pathlib.PurePath(src).stem
  # A program named like its module leaves another name to the library.
  program = tree.targets.get(f"//{target.package}:{stem}")
  if src.endswith(_TEST_END):
    yield f'"{src}" is a test; put it in a py_test.'
  elif target.name != stem and (program is None or program is target):
    yield f'a library is named after its module; call it "{stem}".'
  elif not target.testonly and not _is_tested(tree, target):
    yield f"no py_test of this folder reaches it; add {stem}{_TEST_END}."


def _is_tested(tree: workspace.Workspace, target: build_file.Target) -> bool:
  """Returns whether a test in its folder depends on the target."""
  tests = [
    test.label
    for test in tree.targets.values()
    if test.kind == "py_test" and test.package == target.package
  ]
  return target.label in tree.closure(tests)


def _folder(path: str) -> str:
  return path.rpartition("/")[0]
