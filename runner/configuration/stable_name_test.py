"""Tests for stable names of functions and classes."""

import sys

from flax import linen as nn
import jax
import optax
import pytest

from paxon.runner.configuration import dump


def _local():
  return lambda: None


@pytest.mark.parametrize(
  ("value", "name"),
  [
    (nn.silu, "jax.nn.silu"),
    (optax.adamw, "optax.adamw"),
    (jax.nn.initializers.ones, "jax.nn.initializers.ones"),
    (nn.Dense, "flax.linen.linear.Dense"),
    (
      dump.stable_name,
      "paxon.runner.configuration.dump.stable_name",
    ),
    (len, "builtins.len"),
    (_local(), None),
    (nn.initializers.normal(1.0), None),
  ],
)
def test_functions_have_a_public_name_or_none(value, name):
  assert dump.stable_name(value) == name


def test_nameless_default_is_named_by_the_variable_of_its_user():
  module = sys.modules[nn.Dense.__module__]
  init = vars(module)["default_kernel_init"]
  assert dump.stable_name(init) is None
  named = dump.stable_name(init, user=module.__name__)
  assert named == "flax.linen.linear.default_kernel_init"


def test_objects_with_fields_are_no_functions():
  assert dump.is_function_or_class(len)
  assert dump.is_function_or_class(nn.Dense)
  assert dump.is_function_or_class(jax.numpy.add)
  assert not dump.is_function_or_class(nn.Dense(3))
