"""A resolved configuration as text and as JSON, the same on every machine.

One line per value: `path = value` for values, including defaults, and
`path: import.path` for nodes, with `path = *other.path` for a shared node. The
text has no addresses, hash order or private modules: two configurations are
equal if their texts are, in any version of Python and the libraries. A value
without such a text is an error.
"""

import ast
from collections.abc import Iterator, Mapping
import dataclasses
import enum
import functools
import json
import re
import sys
from typing import Any

import fiddle as fdl

from paxon.runner import user_error
from paxon.runner.configuration import annotations, tree

_ROOT = "<root>"
_REQUIRED = "<required>"
_DEFAULT = "<default>"
# A field, or a key or index in brackets, in a path.
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")


class UnstableValueError(user_error.UserError):
  """A value without a stable text."""


def to_text(config: fdl.Buildable) -> str:
  """Returns the configuration, one value a line; raises UnstableValueError."""
  return "".join(f"{line}\n" for line in _lines(config, "", {}))


def to_json(config: fdl.Buildable) -> str:
  """Returns `to_nested` as JSON."""
  return json.dumps(to_nested(config), indent=1) + "\n"


def to_nested(config: fdl.Buildable) -> dict[str, Any]:
  """Returns the values of `to_text` as nested mappings, for other programs.

  Items of sequences have their index as key. The import path of a node is at
  `__class__`. Values that JSON has, such as numbers and lists, are themselves;
  others, such as `bfloat16` and `inf`, are text.
  """
  result: dict[str, Any] = {}
  for line in _lines(config, "", {}):
    path, equals, text = line.partition(" = ")
    if not equals:
      path, _, text = line.partition(": ")
    steps = [step.strip(".[]'") for step in _STEP.findall(path)]
    if path == _ROOT:
      steps = []
    if not equals:
      steps.append("__class__")
    *parents, last = steps
    inner = result
    for step in parents:
      inner = inner.setdefault(step, {})
    inner[last] = _literal(text)
  return result


def _literal(text: str) -> Any:
  """Returns the value that a text stands for if JSON has it, else the text."""
  try:
    value = ast.literal_eval(text)
    json.dumps(value)
  except (SyntaxError, TypeError, ValueError):
    return text
  return value


def _lines(value: Any, path: str, seen: dict[int, str]) -> Iterator[str]:
  """Yields the lines of `value`; `seen` has the first path of each node."""
  label = path or _ROOT
  if isinstance(value, functools.partial):
    value = _as_node(value, path)
  if isinstance(value, fdl.Buildable):
    if id(value) in seen:
      yield f"{label} = *{seen[id(value)]}"
      return
    seen[id(value)] = label
    kind = "partial " if isinstance(value, fdl.Partial) else ""
    yield f"{label}: {kind}{_node_name(value, path)}"
    for name in tree.field_names(value):
      child_path = tree.join(path, name)
      text = _unset_text(value, name, child_path)
      if text is not None:
        yield f"{child_path} = {text}"
      else:
        yield from _lines(tree.get_value(value, name), child_path, seen)
  elif _holds_nodes(value):
    for step, child in _sorted_children(value):
      yield from _lines(child, tree.join(path, step), seen)
  else:
    yield f"{label} = {_text(value, path)}"


def _holds_nodes(value: Any) -> bool:
  return any(
    isinstance(child, fdl.Buildable | functools.partial) or _holds_nodes(child)
    for _, child in _sorted_children(value)
  )


def _sorted_children(value: Any) -> list[tuple[str | int, Any]]:
  """Returns the children; a mapping's are in the order of their keys."""
  if isinstance(value, Mapping):
    return sorted(value.items(), key=lambda item: str(item[0]))
  return list(tree.children(value))


def _as_node(value: functools.partial, path: str) -> fdl.Buildable:
  try:
    return fdl.Partial(value.func, *value.args, **value.keywords)
  except (TypeError, ValueError) as error:
    raise UnstableValueError(
      f"{path or _ROOT}: cannot write a functools.partial of {value.func!r}"
      f" ({error}); use fdl.Partial."
    ) from error


def _node_name(node: fdl.Buildable, path: str) -> str:
  target = fdl.get_callable(node)
  name = stable_name(target)
  if name is None:
    raise _unstable(target, path)
  return name


def _unset_text(node: fdl.Buildable, name: str, path: str) -> str | None:
  """Returns the text of an unset field that cannot be written as a value."""
  if tree.is_set(node, name):
    return None
  value = tree.get_value(node, name)
  if value is fdl.NO_VALUE:
    return _REQUIRED
  target = fdl.get_callable(node)
  if _is_callable_value(value):
    module = getattr(target, "__module__", None)
    # A default without a name is still fixed by the class that has it.
    return stable_name(value, user=module) or _DEFAULT
  try:
    _text(value, path)
  except UnstableValueError:
    return _DEFAULT
  return None


def _is_callable_value(value: Any) -> bool:
  return (
    callable(value)
    and not isinstance(value, functools.partial)
    and _dtype_name(value) is None
    and is_function_or_class(value)
  )


def _text(value: Any, path: str) -> str:
  """Returns one value, which holds no node, as text."""
  dtype = _dtype_name(value)
  if dtype is not None:
    return dtype
  if isinstance(value, enum.Enum):
    return f"{stable_name(type(value))}.{value.name}"
  if value is None or isinstance(value, bool | int | float | bytes):
    return repr(value)
  if isinstance(value, str):
    # JSON's escapes: what repr() escapes depends on Python's Unicode tables.
    return json.dumps(value)
  if isinstance(value, tuple):
    items = [_text(item, path) for item in value]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
  if isinstance(value, list):
    return f"[{', '.join(_text(item, path) for item in value)}]"
  if isinstance(value, set | frozenset):
    return f"{{{', '.join(sorted(_text(item, path) for item in value))}}}"
  if isinstance(value, Mapping):
    items = [
      f"{_text(key, path)}: {_text(item, path)}"
      for key, item in _sorted_children(value)
    ]
    return f"{{{', '.join(items)}}}"
  if _is_finished_part(value):
    items = [
      f"{field.name}={_field_text(value, field.name, path)}"
      for field in dataclasses.fields(value)
      if not (tree.is_linen(type(value)) and field.name in ("parent", "name"))
    ]
    return f"{stable_name(type(value))}({', '.join(items)})"
  name = None
  if _is_callable_value(value):
    name = stable_name(value)
  if name is None:
    raise _unstable(value, path)
  return name


def _is_finished_part(value: Any) -> bool:
  """Whether an object is the same as its fields, and does not change."""
  if isinstance(value, type):
    return False
  if tree.is_linen(type(value)):
    return value.name is None and value.scope is None
  return tree.is_frozen_dataclass(type(value))


def _field_text(owner: Any, name: str, path: str) -> str:
  value = getattr(owner, name)
  if _is_callable_value(value):
    # The value may be a default that only the owner's module has a name for.
    known = stable_name(value, user=type(owner).__module__)
    if known is not None:
      return known
  return _text(value, tree.join(path, name))


def _dtype_name(value: Any) -> str | None:
  """Returns the name of a dtype or scalar type (`jnp.bfloat16`), or None."""
  kind = type(value)
  is_dtype = any(
    (base.__module__, base.__name__) == ("numpy", "dtype")
    for base in kind.__mro__
  )
  is_scalar_type = isinstance(value, type) and any(
    (base.__module__, base.__name__) == ("numpy", "generic")
    for base in value.__mro__
  )
  # jax's scalar types (jnp.float32) are instances of a metaclass of its own.
  is_jax_scalar_type = kind.__name__ == "_ScalarMeta"
  if not (is_dtype or is_scalar_type or is_jax_scalar_type):
    return None
  return annotations.to_dtype(value).name


def _unstable(value: Any, path: str) -> UnstableValueError:
  what = type(value).__name__
  name = getattr(value, "__qualname__", None)
  return UnstableValueError(
    f"{path or _ROOT} holds {name or 'a'} ({what}), which has no stable"
    " text; use fdl.Config or fdl.Partial of a class or function with an import"
    " path, instead of a lambda, an inner function, an array or an instance."
  )


# Only those that are loaded are searched: whoever uses jax.nn.silu has it.
_PUBLIC = (
  *("jax.nn", "jax.nn.initializers", "jax.numpy", "jax.lax", "jax.random"),
  *("jax", "flax.linen", "flax.linen.initializers", "optax"),
)


def stable_name(target: Any, *, user: str | None = None) -> str | None:
  """Returns the import path of a function or class, or None without one.

  Args:
    target: Something callable.
    user: The module of the class or function that has `target` as a default:
      searched for a variable that holds it.
  """
  module = getattr(target, "__module__", None)
  name = getattr(target, "__qualname__", None) or getattr(
    target, "__name__", None
  )
  is_defined = (
    isinstance(module, str)
    and isinstance(name, str)
    and _lookup(module, name) is target
  )
  if is_defined and not _is_private(module):
    return f"{module}.{name}"
  for public in _PUBLIC:
    alias = _variable(public, target, preferred=name)
    if alias:
      return f"{public}.{alias}"
  if is_defined:
    return f"{module}.{name}"
  if user:
    alias = _variable(user, target, preferred=None)
    return f"{user}.{alias}" if alias else None
  return None


def _is_private(module: str) -> bool:
  return any(part.startswith("_") for part in module.split("."))


def _lookup(module: str, qualname: str) -> Any:
  """Returns the object of the dotted name, or None."""
  value: Any = sys.modules.get(module)
  for part in qualname.split("."):
    value = getattr(value, part, None)
  return value


def _variable(module: str, target: Any, *, preferred: str | None) -> str | None:
  """Returns the name of a module's variable that holds `target`, if any."""
  variables = vars(sys.modules[module]) if module in sys.modules else {}
  if preferred and variables.get(preferred) is target:
    return preferred
  # Sorted, so that the choice does not depend on the order of definition.
  found = sorted(name for name, value in variables.items() if value is target)
  return found[0] if found else None


def is_function_or_class(value: Any) -> bool:
  """Whether something callable is named by where it is defined.

  Not so an object with `__call__`, whose fields matter.
  """
  if isinstance(value, type):
    return True
  return hasattr(value, "__qualname__") or (
    # numpy's and jax's ufuncs have a name and no fields.
    type(value).__name__ == "ufunc" and hasattr(value, "__name__")
  )
