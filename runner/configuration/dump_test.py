"""Tests for the text and JSON of configurations."""

import dataclasses
import enum
import functools
import json
from typing import Any

import fiddle as fdl
from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.runner import toy_experiment
from paxon.runner.configuration import dump


class _Mode(enum.Enum):
  FAST = 1


@dataclasses.dataclass(frozen=True)
class _Value:
  x: int
  dtype: Any = jnp.bfloat16


@dataclasses.dataclass
class _Node:
  a: Any
  b: Any = None
  c: dict = dataclasses.field(default_factory=dict)


_HERE = __name__


# The same bytes are expected of every supported Python, jax and flax.
_GOLDEN = f"""\
<root>: {_HERE}._Node
a[0]: flax.linen.linear.Dense
a[0].features = 8
a[0].use_bias = True
a[0].dtype = bfloat16
a[0].param_dtype = float32
a[0].precision = None
a[0].kernel_init = flax.linen.linear.default_kernel_init
a[0].bias_init = jax.nn.initializers.zeros
a[0].promote_dtype = flax.linen.dtypes.promote_dtype
a[0].dot_general = None
a[0].dot_general_cls = None
a[1] = *a[0]
a[2]: partial optax.adam
a[2].learning_rate = 0.001
a[2].b1 = 0.9
a[2].b2 = 0.999
a[2].eps = 1e-08
a[2].eps_root = 0.0
a[2].mu_dtype = None
a[2].nesterov = False
b = {{"caf\\u00e9": [1, 2.5, True, None], "x": (1,)}}
c = {{}}
"""


def _golden_config():
  dense = fdl.Config(nn.Dense, features=8, dtype=jnp.bfloat16)
  adam = fdl.Partial(optax.adam, learning_rate=1e-3)
  table = {"x": (1,), "caf\u00e9": [1, 2.5, True, None]}
  return fdl.Config(_Node, a=(dense, dense, adam), b=table)


def test_text_is_the_golden_one():
  assert dump.to_text(_golden_config()) == _GOLDEN


def test_json_is_nested_and_has_numbers():
  tree = json.loads(dump.to_json(_golden_config()))
  assert tree["__class__"] == f"{_HERE}._Node"
  dense, shared, adam = (tree["a"][index] for index in "012")
  assert dense["__class__"] == "flax.linen.linear.Dense"
  assert dense["features"] == 8
  assert dense["use_bias"] is True
  assert dense["dtype"] == "bfloat16"
  assert dense["precision"] is None
  assert shared == "*a[0]"
  assert adam["__class__"] == "partial optax.adam"
  assert adam["learning_rate"] == 1e-3
  assert tree["b"] == {"x": [1], "caf\u00e9": [1, 2.5, True, None]}
  assert tree["c"] == {}


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    (float("inf"), "inf"),
    (b"\x00", r"b'\x00'"),
    ({3, 1}, "{1, 3}"),
    ("a = 1: \n", "a = 1: \n"),
    ({"gs://a.b/c": fdl.Config(_Node, a=-0.5)}, None),
  ],
)
def test_json_of_other_values(value, expected):
  tree = dump.to_nested(fdl.Config(_Node, a=value))
  if expected is None:
    assert tree["a"]["gs://a.b/c"]["a"] == -0.5
  else:
    assert tree["a"] == expected
  json.dumps(tree, allow_nan=False)


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (0, "0"),
    (False, "False"),
    (1e-7, "1e-07"),
    (float("inf"), "inf"),
    ("a\n", '"a\\n"'),
    (b"\x00", "b'\\x00'"),
    ((), "()"),
    ({3, 1}, "{1, 3}"),
    (np.dtype("int8"), "int8"),
    (jnp.float32, "float32"),
    (np.float16, "float16"),
    (_Mode.FAST, f"{_HERE}._Mode.FAST"),
    (nn.silu, "jax.nn.silu"),
    (jnp.add, "jax.numpy.add"),
    (dict, "builtins.dict"),
    (_Value(3), f"{_HERE}._Value(x=3, dtype=bfloat16)"),
  ],
)
def test_values_have_one_text(value, text):
  config = fdl.Config(_Node, a=value)
  assert dump.to_text(config).splitlines()[1] == f"a = {text}"


def test_required_and_nameless_defaults_are_marked():
  config = fdl.Config(toy_experiment.Layer)
  lines = dump.to_text(config).splitlines()
  assert "width = <required>" in lines
  assert "kernel_init = <default>" in lines


def test_functools_partial_is_expanded():
  config = fdl.Config(_Node, a=functools.partial(_Value, x=3))
  assert dump.to_text(config).splitlines()[1:3] == [
    f"a: partial {_HERE}._Value",
    "a.x = 3",
  ]


def test_order_of_keys_does_not_matter():
  first = fdl.Config(_Node, a={"x": fdl.Config(_Node, a=1), "b": 2})
  second = fdl.Config(_Node, a={"b": 2, "x": fdl.Config(_Node, a=1)})
  assert dump.to_text(first) == dump.to_text(second)


class _Callable:
  def __call__(self) -> int:
    return 3


@pytest.mark.parametrize(
  "value",
  [
    pytest.param(lambda x: x, id="lambda"),
    pytest.param(nn.initializers.normal(1.0), id="closure"),
    pytest.param(_Callable(), id="callable-object"),
    pytest.param(functools.partial(lambda x: x, 1), id="partial-lambda"),
    pytest.param(np.zeros(3), id="array"),
    pytest.param(object(), id="object"),
    pytest.param(nn.Dense(3, name="x"), id="named-module"),
    pytest.param(
      nn.Dense(3, kernel_init=nn.initializers.normal(1.0)),
      id="module-of-closure",
    ),
  ],
)
def test_value_without_stable_text_is_refused(value):
  config = fdl.Config(_Node, a={"k": [value]})
  message = "which has no stable text; use fdl.Config or fdl.Partial"
  with pytest.raises(dump.UnstableValueError, match=message):
    dump.to_text(config)


def test_finished_module_is_written_with_its_fields():
  config = fdl.Config(_Node, a=nn.LayerNorm(epsilon=0.5))
  line = dump.to_text(config).splitlines()[1]
  assert line.startswith(
    "a = flax.linen.normalization.LayerNorm(epsilon=0.5, dtype=None,"
    " param_dtype=float32, use_bias=True"
  )
  assert "parent" not in line
  assert " name=" not in line
