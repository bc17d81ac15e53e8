"""Functions from the text of a command line, by import path.

| Text | Value |
| --- | --- |
| `layers.remat.save_nothing` | the function, of `paxon.layers.remat` |
| `jax.nn.relu` | the same of any other module |
| `layers.remat.SaveOnly(('a', 'b'))` | a frozen dataclass that can be called |

What such a class is given are numbers, texts, functions, and tuples of them. It
is how a configuration is written down, so what `config.txt` shows can be given
back. Only such a class is called here: a function is named, not run.
"""

import ast
from collections.abc import Callable
import importlib
import types
import typing
from typing import Any

from paxon.runner.configuration import annotations
from paxon.sharding import suggestions

_PREFIXES = ("paxon.", "")
_EXAMPLE = "such as layers.remat.save_nothing or jax.nn.relu"
_MAX_SHOWN = 60
# No import path is longer.
_MAX_TEXT = 1000


def parse(text: str) -> Callable[..., Any]:
  """Returns the function that `text` names.

  Args:
    text: From the command line.

  Raises:
    annotations.MismatchError: It names none, or a class that is not finished.
  """
  path, call = _read(text)
  value = _find(path)
  if call is not None:
    value = _finished(value, path, call)
  elif isinstance(value, type):
    raise annotations.MismatchError(
      f"expected a function, got the class {path}"
    )
  if not callable(value):
    raise annotations.MismatchError(
      f"expected a function, and {path} is a {type(value).__name__}"
    )
  return value


def _read(text: str) -> tuple[str, ast.Call | None]:
  """Returns the dotted name, and the call if it is one."""
  try:
    tree = None if len(text) > _MAX_TEXT else ast.parse(text, mode="eval").body
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    tree = None
  call = tree if isinstance(tree, ast.Call) else None
  path = _dotted(tree if call is None else call.func)
  if "." not in path:
    shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    raise annotations.MismatchError(
      f"expected the import path of a function, {_EXAMPLE}, got {shown!r}"
    )
  return path, call


def _dotted(tree: ast.AST | None) -> str:
  if isinstance(tree, ast.Name):
    return tree.id
  if isinstance(tree, ast.Attribute):
    owner = _dotted(tree.value)
    return f"{owner}.{tree.attr}" if owner else ""
  return ""


def _find(path: str) -> Any:
  module_name, _, name = path.rpartition(".")
  modules = []
  for prefix in _PREFIXES:
    module = _import(prefix + module_name)
    if hasattr(module, name):
      return getattr(module, name)
    if module is not None:
      modules.append(module)
  if not modules:
    raise annotations.MismatchError(
      f"there is no module {module_name!r}; write the import path of a"
      f" function, {_EXAMPLE}"
    )
  public = [
    key
    for key, value in vars(modules[0]).items()
    if callable(value) and not key.startswith("_")
  ]
  hint = suggestions.suggest(name, public).rstrip(".")
  raise annotations.MismatchError(
    f"{modules[0].__name__} has no function {name!r}{hint}"
  )


def _import(name: str) -> types.ModuleType | None:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    # What the module itself misses is its own error.
    if error.name is None or not f"{name}.".startswith(f"{error.name}."):
      raise _broken(name, error) from error
    return None
  except Exception as error:
    raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> annotations.MismatchError:
  return annotations.MismatchError(
    f"the module {name} failed to import because of {type(error).__name__}:"
    f" {error}"
  )


def _finished(cls: Any, path: str, call: ast.Call) -> Any:
  """Makes a frozen dataclass from literal values."""
  parameters = getattr(cls, "__dataclass_params__", None)
  if not isinstance(cls, type) or parameters is None or not parameters.frozen:
    raise annotations.MismatchError(
      f"{path}(...) would run something; only a frozen dataclass can be made"
      " here"
    )
  try:
    args = [_argument(arg) for arg in call.args]
    options = {k.arg or "**": _argument(k.value) for k in call.keywords}
  except annotations.MismatchError:
    raise
  except ValueError:
    raise annotations.MismatchError(
      f"the arguments of {path} must be numbers, texts and functions, and"
      " tuples of them"
    ) from None
  try:
    value = cls(*args, **options)
  except (TypeError, ValueError) as error:
    raise annotations.MismatchError(str(error).rstrip(".")) from None
  for name, kind in typing.get_type_hints(cls).items():
    try:
      annotations.coerce(getattr(value, name), kind)
    except annotations.MismatchError as error:
      raise annotations.MismatchError(
        f"{cls.__name__}.{name}: {error}"
      ) from None
  return value


def _argument(tree: ast.expr) -> Any:
  """Returns a value that a finished class is given."""
  if isinstance(tree, ast.Tuple):
    return tuple(_argument(entry) for entry in tree.elts)
  if isinstance(tree, ast.Attribute | ast.Call):
    return parse(ast.unparse(tree))
  return ast.literal_eval(tree)
