"""Checks of values against type annotations, for knobs and overrides.

Stricter than Python where Python surprises: `bool` is no `int`, and an `int`
is accepted for a `float` and becomes one. Sequences become the type that the
annotation names, and their elements are checked too. What an annotation cannot
say (`Any`, type variables) is not checked.
"""

import collections.abc
from collections.abc import Callable
import dataclasses
import inspect
import types
import typing
from typing import Any, Literal

from paxon.sharding import suggestions

_SEQUENCES: dict[object, Callable[..., object]] = {
  tuple: tuple,
  list: list,
  set: set,
  frozenset: frozenset,
}
_ANY_SEQUENCE = (collections.abc.Sequence, collections.abc.Collection)
_MAPPINGS = (
  dict,
  collections.abc.Mapping,
  collections.abc.MutableMapping,
)


class MismatchError(ValueError):
  """A value that does not fit; the message reads `expected x, got y`."""


def unwrap(annotation: Any) -> Any:
  """Returns the annotation without `Annotated`, `Final`, aliases and such."""
  while True:
    if typing.get_origin(annotation) in (typing.Annotated, typing.Final):
      annotation = typing.get_args(annotation)[0]
    elif isinstance(annotation, dataclasses.InitVar):
      annotation = annotation.type
    elif isinstance(annotation, typing.NewType):
      annotation = annotation.__supertype__
    elif type(annotation).__name__ == "TypeAliasType":  # Python 3.12's `type`.
      annotation = annotation.__value__
    elif annotation is None:
      return types.NoneType
    else:
      return annotation


def members(annotation: Any) -> tuple[Any, ...]:
  """Returns the parts of a union, or the annotation alone."""
  annotation = unwrap(annotation)
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    parts = typing.get_args(annotation)
    return tuple(m for part in parts for m in members(part))
  return (annotation,)


def is_unchecked(annotation: Any) -> bool:
  """Whether the annotation says nothing about values."""
  return annotation in (
    Any,
    object,
    inspect.Parameter.empty,
  ) or isinstance(annotation, typing.TypeVar)


def is_dtype(annotation: Any) -> bool:
  """Whether the annotation is a dtype's, such as jax's `DTypeLike`."""
  # By name, so that values can be checked without importing numpy.
  return any(
    isinstance(m, type) and (m.__module__, m.__name__) == ("numpy", "dtype")
    for m in (typing.get_origin(part) or part for part in members(annotation))
  )


def is_function(annotation: Any) -> bool:
  """Whether this one annotation, no union, is that of a callable.

  A protocol of a single method `__call__` is one.
  """
  origin = typing.get_origin(annotation) or annotation
  if origin is collections.abc.Callable:
    return True
  # Python 3.11 has no typing.is_protocol.
  if not getattr(origin, "_is_protocol", False):
    return False
  public = [name for cls in origin.__mro__ for name in vars(cls)]
  return "__call__" in vars(origin) and all(n[0] == "_" for n in public)


def to_dtype(value: object) -> Any:
  """Returns the dtype of a name or scalar type, or raises MismatchError."""
  import ml_dtypes  # noqa: F401  Makes "bfloat16" and others known to numpy.
  import numpy as np

  try:
    if value is None:
      raise TypeError
    return np.dtype(typing.cast(Any, value))
  except TypeError:
    raise MismatchError(f"expected a dtype, got {value!r}") from None


def describe(annotation: Any) -> str:
  """Returns the annotation as a user would write it."""
  annotation = unwrap(annotation)
  if is_dtype(annotation):
    optional = types.NoneType in members(annotation)
    return "a dtype | None" if optional else "a dtype"
  parts = members(annotation)
  if len(parts) > 1:
    return " | ".join(describe(part) for part in parts)
  if annotation is types.NoneType:
    return "None"
  if annotation is Ellipsis:
    return "..."
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Literal:
    return " | ".join(repr(arg) for arg in args)
  if (origin or annotation) is collections.abc.Callable:
    return "a callable"
  if origin is not None and args:
    name = getattr(origin, "__name__", str(origin))
    return f"{name}[{', '.join(describe(arg) for arg in args)}]"
  return getattr(annotation, "__name__", str(annotation))


def coerce(value: Any, annotation: Any) -> Any:
  """Returns `value` as the type of an annotation, or raises MismatchError."""
  annotation = unwrap(annotation)
  if is_dtype(annotation):
    if value is None and types.NoneType in members(annotation):
      return None
    to_dtype(value)
    return value
  parts = members(annotation)
  if any(is_unchecked(part) for part in parts):
    return value
  fits = []
  detail = ""
  for part in parts:
    try:
      fits.append(_coerce_one(value, part))
    except MismatchError as error:
      detail = str(error)
  # Unchanged wins: 1 stays an int for `float | int`.
  for result in sorted(fits, key=lambda r: r is not value):
    return result
  if len(parts) == 1:
    raise MismatchError(detail)
  raise _mismatch(value, annotation)


def _coerce_one(value: Any, annotation: Any) -> Any:
  """`coerce` for annotations other than unions and dtypes."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Literal:
    for arg in args:
      if type(value) is type(arg) and value == arg:
        return value
    raise _mismatch(value, annotation)
  if annotation is float and type(value) is int:
    return _to_float(value)
  if annotation in (int, float, complex) and isinstance(value, bool):
    raise _mismatch(value, annotation)
  container = origin or annotation
  if container in _SEQUENCES or container in _ANY_SEQUENCE:
    return _coerce_elements(value, annotation, container, args)
  if container in _MAPPINGS:
    return _coerce_mapping(value, annotation, args)
  if container is collections.abc.Callable:
    fits = callable(value)
  elif container is type:
    fits = isinstance(value, type)
  else:
    try:
      fits = isinstance(value, container)
    except TypeError:  # A protocol that cannot be checked, or the like.
      fits = True
  if not fits:
    raise _mismatch(value, annotation)
  return value


def _to_float(value: int) -> float:
  try:
    return float(value)
  except OverflowError:
    raise MismatchError("expected float, got an int too large for it") from None


def _coerce_elements(
  value: Any, annotation: Any, container: Any, args: tuple[Any, ...]
) -> Any:
  unordered = container in (set, frozenset)
  accepted = (set, frozenset) if unordered else (tuple, list)
  if not isinstance(value, accepted):
    raise _mismatch(value, annotation)
  if container is tuple and args and args[-1] is not Ellipsis:
    if len(value) != len(args):
      count = f"{len(value)} element{'s' if len(value) != 1 else ''}"
      raise MismatchError(f"expected {describe(annotation)}, got {count}")
    wanted = list(args)
  else:
    wanted = [args[0] if args else Any] * len(value)
  items = []
  for i, (item, part) in enumerate(zip(value, wanted, strict=True)):
    try:
      items.append(coerce(item, part))
    except MismatchError as error:
      raise MismatchError(
        f"expected {describe(annotation)}, but for element {i} {error}"
      ) from None
  if hasattr(value, "_fields"):  # A named tuple keeps its class.
    return value
  return _SEQUENCES.get(container, type(value))(items)


def _coerce_mapping(value: Any, annotation: Any, args: tuple[Any, ...]) -> Any:
  if not isinstance(value, collections.abc.Mapping):
    raise _mismatch(value, annotation)
  if not args:
    return value
  result = {}
  for key, item in value.items():
    try:
      result[coerce(key, args[0])] = coerce(item, args[1])
    except MismatchError as error:
      raise MismatchError(
        f"expected {describe(annotation)}, but at {key!r} {error}"
      ) from None
  return result


def _mismatch(value: Any, annotation: Any) -> MismatchError:
  got = type(value).__name__
  hint = ""
  if value is None:
    got = "None"
  elif isinstance(value, str):
    text = value if len(value) <= 60 else value[:60] + "..."
    got = f"{text!r}"
    words = [
      arg
      for part in members(annotation)
      if typing.get_origin(part) is Literal
      for arg in typing.get_args(part)
      if isinstance(arg, str)
    ]
    close = suggestions.find_closest(value, words)
    hint = f"; did you mean {close[0]!r}?" if close else ""
  return MismatchError(f"expected {describe(annotation)}, got {got}{hint}")
