"""Checks of types and shapes at run time, in all of Paxon while tests run.

A finder of modules adds a decorator to each function and class that it loads.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import pathlib
import sys
import types
import typing
from typing import Any
import zlib

import beartype
import jaxtyping

# A folder of the machine for what tests compile, set by tools/bazel.
COMPILATIONS = "PAXON_COMPILATIONS"

# Names of `check_types` and `inner` in the modules of Paxon.
_CHECKED = "__checked__"
_INNER = "__checked_inner__"

# Type violations raise TypeError, whoever finds them.
_CONFIGURATION = beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError)


# Whether nested functions have shapes in their annotations, by their code.
_have_shapes: dict[types.CodeType, bool] = {}


def _has_shapes(hint: Any) -> bool:
  """Returns whether a hint has an array shape, or is not evaluated yet."""
  if isinstance(hint, str | typing.ForwardRef):
    return True
  if isinstance(hint, list):  # Of a Callable's parameters.
    return any(map(_has_shapes, hint))
  if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
    return True
  return any(map(_has_shapes, typing.get_args(hint)))


def _with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `function` with its types and shapes checked at each call."""
  hints = inspect.get_annotations(function).values()
  check = beartype.beartype(conf=_CONFIGURATION)
  if (
    any(map(_has_shapes, hints))
    # beartype alone checks less of generators, and of the `__init__` of Flax,
    # which takes `*args, **kwargs`.
    or inspect.isgeneratorfunction(function)
    or hasattr(function, "__wrapped__")
  ):
    return jaxtyping.jaxtyped(function, typechecker=check)
  # Without shapes that several arguments share: a tenth of the time.
  return check(function)


def check_types(made: Any) -> Any:
  """Checks the types of a function, or of a dataclass's fields.

  The checking code is generated at the first call. A test calls few of the
  functions that it imports, and generating it for all takes a second.

  Args:
    made: A function or a class, decorated or not.

  Returns:
    The function, wrapped, or the class.
  """
  if inspect.isclass(made):
    if dataclasses.is_dataclass(made) and not hasattr(made.__init__, _CHECKED):
      made.__init__ = check_types(made.__init__)
    return made
  with_checks = None

  @functools.wraps(made)
  def call(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    nonlocal with_checks
    if with_checks is None:
      with_checks = _with_checks(made)
    return with_checks(*args, **kwargs)

  setattr(call, _CHECKED, True)
  return call


def inner(made: Any) -> Any:
  """As `check_types`, for nested functions and classes.

  Their checks are generated again at each call of the outer function, which
  takes longer than most calls. So only functions with shapes are checked.

  Args:
    made: A function or a class, decorated or not.

  Returns:
    The function, wrapped if it has shapes, or the class.
  """
  if inspect.isclass(made):
    return check_types(made)
  code = made.__code__
  if code not in _have_shapes:
    hints = inspect.get_annotations(made).values()
    _have_shapes[code] = any(map(_has_shapes, hints))
  return check_types(made) if _have_shapes[code] else made


# Fields of statements that hold statements. No expression holds a named
# function, and most of a tree is expressions.
_WITH_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")


def decorate(source: str | bytes, path: str) -> ast.Module:
  """Returns the tree of a module with all functions decorated by checks.

  Args:
    source: The text of the module.
    path: Its file.
  """
  tree = ast.parse(source, path)
  waiting: list[tuple[ast.AST, str]] = [(tree, _CHECKED)]
  while waiting:
    node, found = waiting.pop()
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    below = _INNER if is_function else found
    for part in _WITH_STATEMENTS:
      waiting += [(child, below) for child in getattr(node, part, ())]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      name = ast.copy_location(ast.Name(found, ast.Load()), node)
      # Functions before any other decorator, which may lose the hints; classes
      # after them, when dataclasses have their `__init__`.
      is_class = isinstance(node, ast.ClassDef)
      decorators = node.decorator_list
      decorators.insert(0 if is_class else len(decorators), name)
  return tree


@functools.cache
def _own_source() -> bytes:
  return pathlib.Path(__file__).read_bytes()


class _CheckedLoader(importlib.machinery.SourceFileLoader):
  """Loads a module with `check_types` on each of its functions and classes.

  jaxtyping's own hook does the same, and takes as long as the tests. It also
  hides the bytecode of all that is imported meanwhile, such as Orbax.
  """

  def path_stats(self, path: Any) -> Mapping[str, Any]:
    # Sandboxes, whose files have other times, share bytecode by its contents.
    source = super().get_data(path)
    return {
      "mtime": zlib.crc32(_own_source(), zlib.crc32(source)),
      "size": len(source),
    }

  def get_data(self, path: Any) -> bytes:
    # There may be bytecode without checks next to the source.
    is_bytecode = str(path).endswith(".pyc")
    return super().get_data(self._find_kept() if is_bytecode else path)

  def set_data(self, path: Any, data: Any, *, _mode: int = 0o666) -> None:
    kept = self._find_kept()
    if not kept:
      return
    new = f"{kept}.{os.getpid()}"
    try:
      os.makedirs(os.path.dirname(kept), exist_ok=True)
      pathlib.Path(new).write_bytes(data)
      os.replace(new, kept)
    except OSError:
      return

  def _find_kept(self) -> str:
    """Returns the path of the kept bytecode, empty if none is kept."""
    folder = os.environ.get(COMPILATIONS)
    name = f"{self.name}.{sys.implementation.cache_tag}.pyc"
    return os.path.join(folder, "bytecode", name) if folder else ""

  def source_to_code(
    self, data: Any, path: Any, *, _optimize: int = -1
  ) -> types.CodeType:
    tree = decorate(data, path)
    return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

  def exec_module(self, module: types.ModuleType) -> None:
    setattr(module, _CHECKED, check_types)
    setattr(module, _INNER, inner)
    super().exec_module(module)


class _CheckedFinder(importlib.abc.MetaPathFinder):
  """Finds the modules of Paxon except tests, which pytest loads."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    if fullname.partition(".")[0] != "paxon" or fullname.endswith("_test"):
      return None
    specification = importlib.machinery.PathFinder.find_spec(
      fullname, path, target
    )
    if specification is not None and isinstance(
      specification.loader, importlib.machinery.SourceFileLoader
    ):
      loader = specification.loader
      specification.loader = _CheckedLoader(loader.name, loader.path)
    return specification


def install() -> None:
  """Checks all modules of Paxon that are imported from now on."""
  if os.environ.get(COMPILATIONS):
    sys.dont_write_bytecode = False
  sys.meta_path.insert(0, _CheckedFinder())
