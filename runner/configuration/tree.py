"""Walks through Fiddle configurations: fields, annotations, paths.

A path is written as on the command line: `task.model.blocks[0].dropout`, with
dictionary keys like fields, `eval_inputs.validation.length`, or in brackets
otherwise, `table['a-b']`. The root's path is empty.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import inspect
import sys
import typing
from typing import Any

import fiddle as fdl
from fiddle import signatures

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def is_linen(target: object) -> bool:
  """Whether a callable is a class of flax linen modules."""
  # By name, so that asking does not import flax.
  return isinstance(target, type) and any(
    (base.__module__, base.__name__) == ("flax.linen.module", "Module")
    for base in target.__mro__
  )


def is_frozen_dataclass(cls: type) -> bool:
  """Whether the fields of a class's instances cannot be set."""
  # The only place where a dataclass has this fact.
  parameters = getattr(cls, "__dataclass_params__", None)
  return parameters is not None and parameters.frozen


def field_names(node: fdl.Buildable) -> list[str]:
  """Returns the fields of a node, in the order of its signature.

  The fields `parent` and `name` of linen modules are omitted, because modules
  get them from their owners.
  """
  target = fdl.get_callable(node)
  parameters = signatures.get_signature(target).parameters
  hidden = ("parent", "name") if is_linen(target) else ()
  names = [
    name
    for name, parameter in parameters.items()
    if parameter.kind not in _VARIADIC and name not in hidden
  ]
  extra = [key for key in node.__arguments__ if isinstance(key, str)]
  return names + [key for key in extra if key not in (*names, *hidden)]


def is_set(node: fdl.Buildable, name: str) -> bool:
  """Whether the field was set, even to its default."""
  return name in node.__arguments__


def get_value(node: fdl.Buildable, name: str) -> Any:
  """Returns a field's value or default, or `fdl.NO_VALUE` without one."""
  if name in node.__arguments__:
    return node.__arguments__[name]
  return get_default(node, name)


def find_value(node: Any, name: str) -> Any:
  """Returns a field of a node or an object, None without such a field."""
  return getattr(node, name, None)


def get_default(node: fdl.Buildable, name: str) -> Any:
  """Returns a field's default, or `fdl.NO_VALUE` without one."""
  target = fdl.get_callable(node)
  factory = _default_factories(target).get(name)
  if factory is not None:
    return factory()
  parameter = signatures.get_signature(target).parameters.get(name)
  if parameter is None or parameter.default is inspect.Parameter.empty:
    return fdl.NO_VALUE
  return parameter.default


def to_config(default: Any, *, omit: Collection[str] = ()) -> fdl.Config:
  """Returns a dataclass instance as a configuration.

  Fields that have their class's default stay unset.

  Args:
    default: The instance.
    omit: Names of other fields that stay unset.
  """
  config = fdl.Config(type(default))
  for name in field_names(config):
    value = getattr(default, name)
    if name not in omit and value != get_value(config, name):
      setattr(config, name, value)
  return config


def _default_factories(target: Any) -> dict[str, Callable[[], Any]]:
  if not dataclasses.is_dataclass(target):
    return {}
  return {
    field.name: field.default_factory
    for field in dataclasses.fields(target)
    if field.default_factory is not dataclasses.MISSING
  }


def get_annotations(node: fdl.Buildable) -> dict[str, Any]:
  """Returns the evaluated annotations of the fields that have one.

  Annotations that cannot be evaluated, because of imports for type checkers
  only, are omitted.
  """
  target: Any = fdl.get_callable(node)
  if isinstance(target, type) and not dataclasses.is_dataclass(target):
    target = target.__init__
  try:
    return typing.get_type_hints(target)
  except Exception:
    # Fields of one class may fail for the sake of one of them: one by one.
    sources = reversed(target.__mro__) if isinstance(target, type) else [target]
    return {
      name: value
      for source in sources
      for name, value in _evaluate(source).items()
    }


def _evaluate(source: Any) -> dict[str, Any]:
  module = sys.modules.get(getattr(source, "__module__", ""), None)
  scope = dict(vars(module)) if module else {}
  result = {}
  for name, annotation in inspect.get_annotations(source).items():
    try:
      # The text is an annotation of the program's own source.
      result[name] = (
        eval(annotation, scope) if isinstance(annotation, str) else annotation
      )
    except Exception:
      continue
  return result


def join(path: str, step: str | int) -> str:
  """Returns the path of a field, key or index; the root's is empty."""
  if isinstance(step, str) and step.isidentifier():
    return f"{path}.{step}" if path else step
  return f"{path}[{step!r}]"


def children(value: Any) -> Iterator[tuple[str | int, Any]]:
  """Yields the items of a mapping or sequence, or the set fields of a node."""
  if isinstance(value, fdl.Buildable):
    for name in field_names(value):
      if is_set(value, name):
        yield name, value.__arguments__[name]
  elif isinstance(value, Mapping):
    yield from value.items()
  elif isinstance(value, list | tuple):
    yield from enumerate(value)


def nodes(value: Any, path: str = "") -> Iterator[tuple[str, fdl.Buildable]]:
  """Yields every path of every node, parents first, shared nodes repeatedly."""
  if isinstance(value, fdl.Buildable):
    yield path, value
  for step, child in children(value):
    yield from nodes(child, join(path, step))


def places(root: Any, node: fdl.Buildable) -> list[str]:
  """Returns all paths of a node, in the order of the walk."""
  return [path for path, other in nodes(root) if other is node]
