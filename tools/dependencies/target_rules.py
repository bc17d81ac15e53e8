"""How targets are cut: one module each, named for it, and tested."""

from collections.abc import Iterator
import pathlib

from paxon.tools.dependencies import build_file, violation, workspace

_TEST_END = "_test.py"


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each target that is cut otherwise."""
  for target in tree.targets.values():
    if target.is_python:
      for message in _problems(tree, target):
        yield violation.Violation(
          target.build_path, target.line, target.label, message
        )


def _problems(
  tree: workspace.Workspace, target: build_file.Target
) -> Iterator[str]:
  """Yields what is wrong with one target."""
  for src in target.srcs:
    if "/" in src or src.startswith(":"):
      yield f'"{src}" is of another folder; a BUILD file stands beside it.'
  if target.kind == "py_test":
    if not target.has_size:
      yield 'a test says how long it takes; add size = "small" or "medium".'
    for src in target.srcs:
      if not src.endswith(_TEST_END):
        yield f'"{src}" in a test is not called *{_TEST_END}; rename it.'
  elif target.kind == "py_library" and len(target.srcs) > 1:
    yield "a library is one module; make one target for each of its srcs."
  elif target.kind == "py_library" and target.srcs:
    yield from _library_problems(tree, target)


def _library_problems(
  tree: workspace.Workspace, target: build_file.Target
) -> Iterator[str]:
  """Yields what is wrong with a library of one module."""
  (src,) = target.srcs
  stem = pathlib.PurePath(src).stem
  # A program that has its module's name leaves another one to the library.
  program = tree.targets.get(f"//{target.package}:{stem}")
  if src.endswith(_TEST_END):
    yield f'"{src}" is a test; put it in a py_test.'
  elif target.name != stem and (program is None or program is target):
    yield f'a library is named for its module; call it "{stem}".'
  elif not target.testonly and not _is_tested(tree, target):
    yield f"no py_test of this folder reaches it; add {stem}{_TEST_END}."


def _is_tested(tree: workspace.Workspace, target: build_file.Target) -> bool:
  """Returns whether a test beside the target runs it, if through others."""
  tests = [
    test.label
    for test in tree.targets.values()
    if test.kind == "py_test" and test.package == target.package
  ]
  return target.label in tree.closure(tests)
