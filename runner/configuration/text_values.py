"""Parsing of command-line values by type annotation.

| Annotation | Text |
| --- | --- |
| `bool` | `true`, `false`, `True`, `False` |
| `int`, `float` | a Python number; `float` also takes `inf` and `-inf` |
| `str` | as it is; quotes are allowed and needed for `'None'` |
| `Literal`, `Enum` | one of the words, or of the members' names |
| `tuple`, `list`, `dict` | Python's notation: `(1, 2)`, `['a']`, `{'a': 1}` |
| a dtype | its name: `bfloat16` |
| a callable | its import path: `layers.remat.save_nothing` |
| `x | None` | `None` |

A callable may also be a frozen dataclass with literal arguments, such as
`layers.remat.SaveOnly(('a', 'b'))`, as dumps show it. A protocol of a single
method `__call__` is a callable. Modules and classes
cannot be set from the command line.
"""

import ast
import collections.abc
from collections.abc import Callable, Collection
import dataclasses
import enum
import importlib
import os
import types
import typing
from typing import Any, Literal
import warnings

from paxon.runner import user_error
from paxon.runner.configuration import annotations, moved_modules, tree
from paxon.sharding import suggestions

_BOOLS = {"true": True, "false": False, "True": True, "False": False}
_INFINITIES = {"inf": float("inf"), "-inf": -float("inf")}
_CONTAINERS = (
  *(tuple, list, dict, set, frozenset),
  collections.abc.Sequence,
  collections.abc.Collection,
  collections.abc.Mapping,
  collections.abc.MutableMapping,
)
_NOT_LITERAL = object()
# Programs compute in float32, where more is infinite; `inf` says so in words.
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def parse(
  text: str,
  annotation: Any,
  *,
  current: object = None,
  packages: Collection[str] | None = None,
) -> Any:
  """Returns the value that `text` stands for.

  Args:
    text: From the command line.
    annotation: An evaluated annotation. One that says nothing is replaced by
      the type of `current`.
    current: The value that is about to be replaced, if any.
    packages: Top-level packages whose functions the text may name; None for
      any. Others are not imported.

  Raises:
    annotations.MismatchError: The text has another type, or the annotation
      admits nothing that can be written as text.
  """
  annotation = annotations.unwrap(annotation)
  if annotations.is_dtype(annotation):
    return _parse_dtype(text, annotation)
  parts = annotations.members(annotation)
  if any(annotations.is_unchecked(part) for part in parts):
    kind = type(current)
    simple = kind in (bool, int, float, str, tuple, list, dict)
    if not simple and not isinstance(current, enum.Enum):
      return _parse_unchecked(text)
    annotation, parts = kind, (kind,)
  literal = _literal(text)
  # Text last, because every text is a `str`: `8` is an int for `int | str`.
  for part in sorted(parts, key=lambda part: part is str):
    try:
      return _parse_one(text, literal, part, packages)
    except annotations.MismatchError as error:
      others = [other for other in parts if other is not types.NoneType]
      # For a function, or None, the function's reason is clearer.
      is_clear = others == [part] and annotations.is_function(part)
      if len(parts) == 1 or (is_clear and literal is not None):
        raise error
  settable = [part for part in parts if _has_text(part)]
  if settable in ([], [types.NoneType]):
    raise _without_text(annotation)
  raise _mismatch(text, literal, annotation)


def _parse_one(
  text: str,
  literal: Any,
  annotation: Any,
  packages: Collection[str] | None,
) -> Any:
  """`parse` for one member of a union."""
  if annotation is str:
    return literal if isinstance(literal, str) else text
  if annotation is bool and text in _BOOLS:
    return _BOOLS[text]
  if annotation is float and text in _INFINITIES:
    return _INFINITIES[text]
  if annotation is float and _exceeds_float32(literal):
    raise annotations.MismatchError(
      f"expected a float of at most {_MAX_FLOAT32:.2g}, got {_quote(text)}"
    )
  if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
    if text in annotation.__members__:
      return annotation[text]
    names = list(annotation.__members__)
    hint = suggestions.suggest(text, names)
    raise annotations.MismatchError(
      f"{annotation.__name__} has no member {_quote(text)}{hint.rstrip('.')}"
    )
  if typing.get_origin(annotation) is Literal:
    words = typing.get_args(annotation)
    if text in [word for word in words if isinstance(word, str)]:
      return text
    value = text if literal is _NOT_LITERAL else literal
    return annotations.coerce(value, annotation)
  if annotations.is_function(annotation):
    return parse_function(text, packages=packages)
  if not _has_text(annotation):
    raise _without_text(annotation)
  if literal is _NOT_LITERAL:
    raise _mismatch(text, literal, annotation)
  return annotations.coerce(literal, annotation)


def _parse_dtype(text: str, annotation: Any) -> Any:
  optional = types.NoneType in annotations.members(annotation)
  if optional and text == "None":
    return None
  import ml_dtypes  # noqa: F401  Makes "bfloat16" and others known to numpy.
  import numpy as np

  names = {"bfloat16", "float16", "float32", "float64", "bool"}
  names |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)}
  names |= {"float8_e4m3fn", "float8_e5m2", "int4", "int64"}
  # Only plain names: numpy would read "f" or "i4,i4" as dtypes as well.
  if text not in names:
    close = suggestions.find_closest(text, names)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise annotations.MismatchError(
      f"expected {annotations.describe(annotation)}, got {_quote(text)}{hint}"
    )
  return np.dtype(text)


def _parse_unchecked(text: str) -> Any:
  literal = _literal(text)
  if literal is not _NOT_LITERAL:
    return literal
  raise annotations.MismatchError(
    f"expected a Python value, got the word {_quote(text)}; its type is not"
    " annotated, so write text in quotes"
  )


def _has_text(annotation: Any) -> bool:
  """Whether values of this one type can be written on a command line."""
  if annotations.is_dtype(annotation) or annotations.is_unchecked(annotation):
    return True
  origin = typing.get_origin(annotation)
  if origin is Literal:
    return True
  if (origin or annotation) in _CONTAINERS:
    return all(
      _has_text(member)
      for arg in typing.get_args(annotation)
      if arg is not Ellipsis
      for member in annotations.members(arg)
    )
  simple = (bool, int, float, complex, str, bytes, types.NoneType)
  if annotation in simple:
    return True
  return isinstance(annotation, type) and issubclass(annotation, enum.Enum)


def _literal(text: str) -> Any:
  with warnings.catch_warnings():
    # Python warns of odd literals such as '\d', on stderr, beside our line.
    warnings.simplefilter("ignore")
    try:
      return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
      return _NOT_LITERAL


def _exceeds_float32(literal: Any) -> bool:
  is_number = isinstance(literal, int | float) and not isinstance(literal, bool)
  return is_number and abs(literal) > _MAX_FLOAT32


def _quote(text: str) -> str:
  return repr(text if len(text) <= 60 else text[:60] + "...")


def _without_text(annotation: Any) -> annotations.MismatchError:
  return annotations.MismatchError(
    f"expects {annotations.describe(annotation)}, which only an experiment can"
    " set; from the command line, set numbers, words and lists"
  )


def _mismatch(
  text: str, literal: Any, annotation: Any
) -> annotations.MismatchError:
  got = f"the word {_quote(text)}"
  if literal is not _NOT_LITERAL:
    got = "None" if literal is None else type(literal).__name__
  return annotations.MismatchError(
    f"expected {annotations.describe(annotation)}, got {got}"
  )


_PREFIXES = ("paxon.", "")
_EXAMPLE = "such as layers.remat.save_nothing or jax.nn.relu"
_MAX_SHOWN = 60
# No import path is longer.
_MAX_TEXT = 1000
# Packages that modules of ours import, by the extra of pyproject.toml.
_EXTRAS = {
  **dict.fromkeys(("array_record", "datasets", "grain", "pyarrow"), "data"),
  **dict.fromkeys(("clu", "seqio", "tensorflow", "tensorflow_text"), "tf"),
}


def parse_function(
  text: str, *, packages: Collection[str] | None = None
) -> Callable[..., Any]:
  """Returns the function that `text` names, or raises MismatchError.

  Args:
    text: An import path, or the call of a frozen dataclass.
    packages: Top-level packages that it may be of; None for any.
  """
  path, call = _read_path(moved_modules.update_names(text))
  value = _find_function(path, packages)
  if call is not None:
    value = _make_dataclass(value, path, call, packages)
  elif isinstance(value, type):
    value = _make_default(value, path)
  if not callable(value):
    raise annotations.MismatchError(
      f"expected a function, and {path} is a {type(value).__name__}"
    )
  return value


def _read_path(text: str) -> tuple[str, ast.Call | None]:
  """Returns the dotted name, and the call if it is one."""
  try:
    tree = None if len(text) > _MAX_TEXT else ast.parse(text, mode="eval").body
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    tree = None
  call = tree if isinstance(tree, ast.Call) else None
  path = _join_names(tree if call is None else call.func)
  if "." not in path:
    shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    raise annotations.MismatchError(
      f"expected the import path of a function, {_EXAMPLE}, got {shown!r}"
    )
  return path, call


def _join_names(tree: ast.AST | None) -> str:
  if isinstance(tree, ast.Name):
    return tree.id
  if isinstance(tree, ast.Attribute):
    owner = _join_names(tree.value)
    return f"{owner}.{tree.attr}" if owner else ""
  return ""


def _find_function(path: str, packages: Collection[str] | None) -> Any:
  module_name, _, name = path.rpartition(".")
  modules = []
  for prefix in _PREFIXES:
    full = prefix + module_name
    if not _is_allowed(full, packages):
      raise _foreign_package_error(path, packages)
    module = _import_module(full)
    if hasattr(module, name):
      found = getattr(module, name)
      # A module may bind functions of another one.
      is_own = isinstance(found, types.FunctionType | type(print) | type)
      owner = getattr(found, "__module__", None) if is_own else None
      if isinstance(owner, str) and not _is_allowed(owner, packages):
        raise _foreign_package_error(f"{owner}.{name}", packages)
      return found
    if module is not None:
      modules.append(module)
  if not modules:
    raise annotations.MismatchError(
      f"there is no module {module_name!r}{_suggest_target(module_name)}; write"
      f" the import path of a function, {_EXAMPLE}"
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


def _is_allowed(module: str, packages: Collection[str] | None) -> bool:
  return packages is None or module.partition(".")[0] in packages


def _foreign_package_error(
  path: str, packages: Collection[str] | None
) -> annotations.MismatchError:
  return annotations.MismatchError(
    f"a run directory may name functions of {', '.join(sorted(packages or ()))}"
    f" only, not {path}; to use it, give this flag on the command line"
  )


def _suggest_target(module: str) -> str:
  """Returns the target that holds a module which `bazel run` left out."""
  workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY", "")
  path = module.removeprefix("paxon.").replace(".", "/")
  if not workspace or not os.path.isfile(f"{workspace}/{path}.py"):
    return ""
  package, _, name = path.rpartition("/")
  return (
    f" in this program; add //{package}:{name} to the deps of its BUILD target"
  )


def _import_module(name: str) -> types.ModuleType | None:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    # An import that the module itself misses is its own error.
    if error.name is None or not f"{name}.".startswith(f"{error.name}."):
      raise _describe_broken(name, error) from error
    return None
  except user_error.UserError:
    raise
  except Exception as error:
    raise _describe_broken(name, error) from error


def _describe_broken(name: str, error: Exception) -> annotations.MismatchError:
  extra = _EXTRAS.get((getattr(error, "name", None) or "").partition(".")[0])
  hint = f"; pip install 'paxon[{extra}]' brings it" if extra else ""
  return annotations.MismatchError(
    f"the module {name} failed to import because of {type(error).__name__}:"
    f" {error}{hint}"
  )


def _make_default(cls: type, path: str) -> Any:
  """Makes `a.B()` of `a.B`, if instances are functions and no field is set."""
  fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
  missing = dataclasses.MISSING
  is_complete = all(
    field.default is not missing or field.default_factory is not missing
    for field in fields
  )
  if not (is_complete and tree.is_frozen_dataclass(cls)):
    raise annotations.MismatchError(
      f"expected a function, got the class {path}"
    )
  return cls()


def _make_dataclass(
  cls: Any, path: str, call: ast.Call, packages: Collection[str] | None
) -> Any:
  """Makes a frozen dataclass from literal values."""
  if not isinstance(cls, type) or not tree.is_frozen_dataclass(cls):
    raise annotations.MismatchError(
      f"{path}(...) would run something; only a frozen dataclass can be made"
      " here"
    )
  try:
    args = [_parse_argument(arg, packages) for arg in call.args]
    options = {
      k.arg or "**": _parse_argument(k.value, packages) for k in call.keywords
    }
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


def _parse_argument(tree: ast.expr, packages: Collection[str] | None) -> Any:
  """Returns a value that a finished class is given."""
  if isinstance(tree, ast.Tuple):
    return tuple(_parse_argument(entry, packages) for entry in tree.elts)
  if isinstance(tree, ast.Attribute | ast.Call):
    return parse_function(ast.unparse(tree), packages=packages)
  return ast.literal_eval(tree)
