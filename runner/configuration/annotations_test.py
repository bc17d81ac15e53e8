"""Tests for checks of values against annotations."""

from collections.abc import Callable, Mapping, Sequence
import enum
import typing
from typing import Annotated, Any, Literal, NewType

import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import pytest

from paxon.runner.configuration import annotations

_Count = NewType("_Count", int)


class _Color(enum.Enum):
  RED = 1


class _Protocol(typing.Protocol):
  def go(self) -> None: ...


@pytest.mark.parametrize(
  ("value", "annotation", "expected"),
  [
    (0, int, 0),
    (False, bool, False),
    (1, float, 1.0),
    (1, float | int, 1),
    (1, int | float, 1),
    (None, int | None, None),
    (None, None, None),
    ("a", Literal["a", 1], "a"),
    (1, Literal["a", 1], 1),
    ([1, 2], tuple[int, ...], (1, 2)),
    ((1, 2), list[float], [1.0, 2.0]),
    ((1, "a"), tuple[int, str], (1, "a")),
    ((), tuple[int, ...], ()),
    ({1}, set[int], {1}),
    ([1, "x"], list, [1, "x"]),
    ((1, 2), Sequence[int], (1, 2)),
    ({"a": 1}, dict[str, float], {"a": 1.0}),
    ({"a": 1}, Mapping[str, int], {"a": 1}),
    ({"a": 1}, dict, {"a": 1}),
    (_Color.RED, _Color, _Color.RED),
    (len, Callable[..., int], len),
    (int, type[int], int),
    (3, Annotated[int, "words"], 3),
    (3, _Count, 3),
    ("anything", Any, "anything"),
    (object, object, object),
    (3, _Protocol, 3),
    ("bfloat16", DTypeLike, "bfloat16"),
    (None, DTypeLike | None, None),
    (jnp.bfloat16, DTypeLike | None, jnp.bfloat16),
  ],
)
def test_fitting_values_become_the_annotated_type(value, annotation, expected):
  result = annotations.coerce(value, annotation)
  assert result == expected
  assert type(result) is type(expected)


@pytest.mark.parametrize(
  ("value", "annotation", "message"),
  [
    (True, int, r"^expected int, got bool$"),
    (True, float, r"^expected float, got bool$"),
    (1, bool, r"^expected bool, got int$"),
    (1.0, int, r"^expected int, got float$"),
    ("1", int | None, r"^expected int \| None, got '1'$"),
    (None, int, r"^expected int, got None$"),
    (10**400, float, "too large"),
    ("tran", Literal["train", "eval"], r"'train' \| 'eval'.*mean 'train'"),
    (True, Literal[1], r"^expected 1, got bool$"),
    ("ab", tuple[str, ...], r"^expected tuple\[str, ...\], got 'ab'$"),
    ("ab", Sequence[str], r"^expected Sequence\[str\], got 'ab'$"),
    ((1, "a"), tuple[int, ...], r"for element 1 expected int, got 'a'$"),
    ((1,), tuple[int, int], r"^expected tuple\[int, int\], got 1 element$"),
    ({"a": "b"}, dict[str, int], r"at 'a' expected int, got 'b'$"),
    ([1], dict[str, int], r"^expected dict\[str, int\], got list$"),
    (3, Callable[..., int], r"^expected a callable, got int$"),
    (3, type[int], r"^expected type\[int\], got int$"),
    (3, _Color, r"^expected _Color, got int$"),
    ("bfloat61", DTypeLike, r"^expected a dtype, got 'bfloat61'$"),
    (None, DTypeLike, r"^expected a dtype, got None$"),
  ],
)
def test_other_values_are_refused(value, annotation, message):
  with pytest.raises(annotations.MismatchError, match=message):
    annotations.coerce(value, annotation)


@pytest.mark.parametrize(
  ("annotation", "text"),
  [
    (int | None, "int | None"),
    (dict[str, tuple[int, ...]], "dict[str, tuple[int, ...]]"),
    (DTypeLike | None, "a dtype | None"),
    (Callable[[int], str] | None, "a callable | None"),
    (Literal["a", 2], "'a' | 2"),
    (np.ndarray, "ndarray"),
    (Any, "Any"),
  ],
)
def test_describe_reads_like_source(annotation, text):
  assert annotations.describe(annotation) == text
