"""Tests for values from text."""

from collections.abc import Callable
import enum
import math
from typing import Any, Literal

from flax import linen as nn
import hypothesis
from hypothesis import strategies as st
from jax.typing import DTypeLike
import numpy as np
import pytest

from paxon.layers.moe import dispatch
from paxon.runner.configuration import annotations, text_values


class _Color(enum.Enum):
  RED = 1
  BLUE = 2


@pytest.mark.parametrize(
  ("text", "annotation", "expected"),
  [
    ("8", int, 8),
    ("-8", int, -8),
    ("1_000", int, 1000),
    ("8", float, 8.0),
    ("1e-3", float, 1e-3),
    ("inf", float, float("inf")),
    ("-inf", float | None, -float("inf")),
    ("true", bool, True),
    ("False", bool, False),
    ("None", int | None, None),
    ("8", int | None, 8),
    ("8", str, "8"),
    ("8", int | str, 8),
    ("a b", str, "a b"),
    ("'None'", str | None, "None"),
    ("None", str | None, None),
    ("None", str, "None"),
    ("", str, ""),
    ("fsdp=4,tensor=2", str, "fsdp=4,tensor=2"),
    ("a", Literal["a", "b"], "a"),
    ("'a'", Literal["a", "b"], "a"),
    ("1", Literal["a", 1], 1),
    ("None", Literal["a"] | None, None),
    ("RED", _Color, _Color.RED),
    ("(1, 2)", tuple[int, ...], (1, 2)),
    ("1, 2", tuple[int, ...], (1, 2)),
    ("[1, 2]", tuple[float, ...], (1.0, 2.0)),
    ("()", tuple[int, ...], ()),
    ("['a']", list[str], ["a"]),
    ("{'a': 1}", dict[str, int], {"a": 1}),
    ("('a', 'b')", tuple[str, ...], ("a", "b")),
    ("bfloat16", DTypeLike | None, np.dtype("bfloat16")),
    ("int8", DTypeLike, np.dtype("int8")),
    ("None", DTypeLike | None, None),
    ("None", nn.Module | None, None),
    ("None", Callable | None, None),
    ("math.sqrt", Callable | None, math.sqrt),
    ("[1]", Any, [1]),
  ],
)
def test_text_becomes_the_annotated_type(text, annotation, expected):
  result = text_values.parse(text, annotation)
  assert result == expected
  assert type(result) is type(expected)


def test_a_callable_protocol_takes_a_frozen_dataclass():
  text = "layers.moe.dispatch.Dropless(bound=1.5)"
  found = text_values.parse(text, dispatch.Dispatch)
  assert found == dispatch.Dropless(bound=1.5)
  with pytest.raises(annotations.MismatchError, match=r"bound must be posi"):
    text_values.parse(text.replace("1.5", "-1.0"), dispatch.Dispatch)


@pytest.mark.parametrize(
  ("text", "annotation", "message"),
  [
    ("8.0", int, r"^expected int, got float$"),
    ("1e3", int, r"^expected int, got float$"),
    ("eight", int, r"^expected int, got the word 'eight'$"),
    ("True", int, r"^expected int, got bool$"),
    ("1", bool, r"^expected bool, got int$"),
    ("yes", bool, r"^expected bool, got the word 'yes'$"),
    ("True", float, r"^expected float, got bool$"),
    ("nan", float, r"got the word 'nan'"),
    ("1e39", float, r"^expected a float of at most 3.4e\+38, got '1e39'$"),
    ("-1" + 39 * "0", float | None, r"expected float \| None, got int"),
    ("None", int, r"^expected int, got None$"),
    ("", int, r"^expected int, got the word ''$"),
    ("a", tuple[str, ...], r"^expected tuple\[str, ...\], got the word 'a'$"),
    ("'ab'", tuple[str, ...], r"^expected tuple\[str, ...\], got 'ab'$"),
    ("(1, 'a')", tuple[int, ...], "for element 1 expected int, got 'a'"),
    ("c", Literal["a", "b"], r"^expected 'a' \| 'b', got 'c'"),
    ("QQ", _Color, r"_Color has no member 'QQ'; known: BLUE, RED$"),
    ("REDD", _Color, r"did you mean 'RED'"),
    ("bfloat61", DTypeLike, r"expected a dtype.*did you mean 'bfloat16'"),
    ("i4,i4", DTypeLike, r"expected a dtype, got 'i4,i4'"),
    ("nn.relu", Callable[..., Any], r"^there is no module .nn.; write the imp"),
    ("3", Callable | None, r"^expected the import path of a function, such as"),
    ("3", nn.Module, r"expects Module, which only an experiment can set"),
    ("3", nn.Module | None, r"expects Module \| None, which only"),
    ("relu", Any, r"got the word 'relu'; its type is not annotated"),
    ("__import__('os')", int, r"got the word"),
    ("(" * 5000, int, r"got the word"),
    ("9" * 5000, int, r"got the word"),
    ("'\\d' + 1", int, r"got the word"),
  ],
)
def test_other_text_is_refused(text, annotation, message):
  with pytest.raises(annotations.MismatchError, match=message):
    text_values.parse(text, annotation)


@pytest.mark.parametrize(
  ("text", "current", "expected"),
  [
    ("3", 1.0, 3.0),
    ("word", "text", "word"),
    ("BLUE", _Color.RED, _Color.BLUE),
  ],
)
def test_current_value_stands_in_for_a_missing_annotation(
  text, current, expected
):
  assert text_values.parse(text, Any, current=current) == expected
  with pytest.raises(annotations.MismatchError, match="expected int, got"):
    text_values.parse("1.5", Any, current=3)


# As `st.text` has them, without encoding each one first to find that out.
_CHARACTERS = st.characters(exclude_categories=("Cs",))


@hypothesis.given(st.integers())
def test_every_int_round_trips(value):
  assert text_values.parse(str(value), int | None) == value


@hypothesis.given(
  st.floats(min_value=-3.4e38, max_value=3.4e38)
  | st.sampled_from([float("inf"), -float("inf")])
)
def test_every_float_round_trips(value):
  assert text_values.parse(repr(value), float) == value


@hypothesis.given(st.text(_CHARACTERS))
def test_every_quoted_text_round_trips(value):
  assert text_values.parse(repr(value), str) == value


@hypothesis.given(st.lists(st.tuples(st.text(_CHARACTERS), st.integers())))
def test_every_list_round_trips(value):
  annotation = list[tuple[str, int]]
  assert text_values.parse(repr(value), annotation) == value


@hypothesis.given(
  st.text(_CHARACTERS),
  st.sampled_from(
    [
      *(int, float, bool, str, int | None, Any, _Color, DTypeLike),
      *(Literal["a"], tuple[int, ...], dict[str, int], Callable, nn.Module),
    ]
  ),
)
def test_any_text_gives_a_value_of_the_type_or_the_one_error(text, annotation):
  refused = None
  try:
    annotations.coerce(text_values.parse(text, annotation), annotation)
  except annotations.MismatchError as error:
    refused = str(error)
  assert refused is None or refused.startswith(("expect", "_Color has no"))


@hypothesis.given(
  st.one_of(st.integers(), st.booleans(), st.none(), st.text(_CHARACTERS))
)
def test_repr_of_a_simple_value_parses_to_it_where_the_type_allows(value):
  annotation = bool | int | str | None
  assert text_values.parse(repr(value), annotation) == value
