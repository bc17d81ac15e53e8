"""Sizes that a reader has to hold in mind: functions, classes and folders."""

import ast
import collections
from collections.abc import Iterator
import pathlib

from paxon.tools.dependencies import violation, workspace

# Lines of a function, without its docstring.
MAX_FUNCTION_LINES = 60
# Fields of a class, as of a dataclass or a Linen module.
MAX_FIELDS = 20
# Modules of a folder, without tests and their support.
MAX_MODULES = 25

_NO_MODULE = frozenset({"__init__.py", "setup.py"})


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each function, class and folder over its limit."""
  modules: collections.Counter[str] = collections.Counter()
  for path in tree.files:
    if _is_production(tree, path):
      modules[path.rpartition("/")[0]] += 1
      yield from _check_source(path, tree.text(path))
  for folder, count in modules.items():
    if count > MAX_MODULES:
      yield violation.make_for_file(
        f"{folder}/BUILD",
        f"the folder has {count} modules, the limit is {MAX_MODULES}; divide it"
        " by topics.",
        f"folder {folder}",
      )


def _is_production(tree: workspace.Workspace, path: str) -> bool:
  name = pathlib.PurePath(path).name
  owners = tree.owners(path)
  return (
    path.endswith(".py")
    and name not in _NO_MODULE
    and bool(owners)
    and not any(owner.testonly for owner in owners)
  )


def _check_source(path: str, text: str) -> Iterator[violation.Violation]:
  try:
    module = ast.parse(text)
  except SyntaxError:
    return  # The workspace has it in its list of unreadable files.
  for node in ast.walk(module):
    match node:
      case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
        unit, size, limit = "lines", _count_lines(node), MAX_FUNCTION_LINES
        advice = "split it by steps"
      case ast.ClassDef(name=name):
        unit, size, limit = "fields", _count_fields(node), MAX_FIELDS
        advice = "group fields into objects"
      case _:
        continue
    if size > limit:
      message = f"has {size} {unit}, the limit is {limit}; {advice}."
      yield violation.Violation(
        path, node.lineno, name, message, f"size {path} {name}"
      )


def _count_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  assert node.end_lineno is not None
  lines = node.end_lineno - node.lineno + 1
  first = node.body[0]
  if ast.get_docstring(node, clean=False) is not None:
    assert first.end_lineno is not None
    lines -= first.end_lineno - first.lineno + 1
  return lines


def _count_fields(node: ast.ClassDef) -> int:
  return sum(
    isinstance(statement, ast.AnnAssign)
    and "ClassVar" not in ast.unparse(statement.annotation)
    for statement in node.body
  )
