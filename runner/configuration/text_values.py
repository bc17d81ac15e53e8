"""Values from the text of a command line, led by a type annotation.

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

Parts and classes have no text: experiments set those. Of functions see
`text_functions`.
"""

import ast
import collections.abc
import enum
import types
import typing
from typing import Any, Literal
import warnings

from paxon.runner.configuration import annotations, text_functions
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


def parse(text: str, annotation: Any, *, current: object = None) -> Any:
  """Returns the value that `text` stands for.

  Args:
    text: From the command line.
    annotation: An evaluated annotation. One that says nothing is replaced by
      the type of `current`.
    current: The value that is about to be replaced, if any.

  Raises:
    annotations.MismatchError: The text has another type, or the annotation
      admits nothing that can be written as text.
  """
  annotation = annotations.unwrapped(annotation)
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
      return _parse_one(text, literal, part)
    except annotations.MismatchError as error:
      others = [other for other in parts if other is not types.NoneType]
      # Of a function, or None, the function's reason says more.
      is_clear = others == [part] and annotations.is_function(part)
      if len(parts) == 1 or (is_clear and literal is not None):
        raise error
  settable = [part for part in parts if _has_text(part)]
  if settable in ([], [types.NoneType]):
    raise _without_text(annotation)
  raise _mismatch(text, literal, annotation)


def _parse_one(text: str, literal: Any, annotation: Any) -> Any:
  """`parse` for one member of a union."""
  if annotation is str:
    return literal if isinstance(literal, str) else text
  if annotation is bool and text in _BOOLS:
    return _BOOLS[text]
  if annotation is float and text in _INFINITIES:
    return _INFINITIES[text]
  if annotation is float and _exceeds_float32(literal):
    raise annotations.MismatchError(
      f"expected a float of at most {_MAX_FLOAT32:.2g}, got {_shown(text)}"
    )
  if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
    if text in annotation.__members__:
      return annotation[text]
    names = list(annotation.__members__)
    hint = suggestions.suggest(text, names)
    raise annotations.MismatchError(
      f"{annotation.__name__} has no member {_shown(text)}{hint.rstrip('.')}"
    )
  if typing.get_origin(annotation) is Literal:
    words = typing.get_args(annotation)
    if text in [word for word in words if isinstance(word, str)]:
      return text
    value = text if literal is _NOT_LITERAL else literal
    return annotations.coerce(value, annotation)
  if annotations.is_function(annotation):
    return text_functions.parse(text)
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
      f"expected {annotations.describe(annotation)}, got {_shown(text)}{hint}"
    )
  return np.dtype(text)


def _parse_unchecked(text: str) -> Any:
  literal = _literal(text)
  if literal is not _NOT_LITERAL:
    return literal
  raise annotations.MismatchError(
    f"expected a Python value, got the word {_shown(text)}; its type is not"
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


def _shown(text: str) -> str:
  return repr(text if len(text) <= 60 else text[:60] + "...")


def _without_text(annotation: Any) -> annotations.MismatchError:
  return annotations.MismatchError(
    f"expects {annotations.describe(annotation)}, which only an experiment can"
    " set; from the command line, set numbers, words and lists"
  )


def _mismatch(
  text: str, literal: Any, annotation: Any
) -> annotations.MismatchError:
  got = f"the word {_shown(text)}"
  if literal is not _NOT_LITERAL:
    got = "None" if literal is None else type(literal).__name__
  return annotations.MismatchError(
    f"expected {annotations.describe(annotation)}, got {got}"
  )
