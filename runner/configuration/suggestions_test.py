"""Tests for the names closest to a wrong one, and for stable names."""

import sys

from flax import linen as nn
import jax
import optax
import pytest

from paxon.runner.configuration import stable_names, suggestions

_NAMES = ["seed", "mesh", "num_train_steps", "PythonStdlibLm"]


@pytest.mark.parametrize(
  ("word", "closest"),
  [
    ("sede", ["seed"]),
    ("SEED", ["seed"]),
    ("pythonstdliblm", ["PythonStdlibLm"]),
    ("num_trian_steps", ["num_train_steps"]),
    ("zzz", []),
    ("", []),
  ],
)
def test_closest_name_is_found_whatever_its_capitals(word, closest):
  assert suggestions.closest(word, _NAMES) == closest


def test_hint_names_the_closest_or_what_there_is():
  assert suggestions.hint("sede", _NAMES) == "; did you mean 'seed'?"
  assert suggestions.hint("ab", ["abc", "abd"], count=2).count("'") == 4
  assert suggestions.hint("zzz", ["b", "a"]) == "; there are: a, b."
  assert suggestions.hint("zzz", []) == "; there are none."
  many = suggestions.hint("zzz", [f"name{i:02}" for i in range(20)])
  assert many.endswith("name07, ....")


def _local():
  return lambda: None


@pytest.mark.parametrize(
  ("value", "name"),
  [
    (nn.silu, "jax.nn.silu"),
    (optax.adamw, "optax.adamw"),
    (jax.nn.initializers.ones, "jax.nn.initializers.ones"),
    (nn.Dense, "flax.linen.linear.Dense"),
    (suggestions.hint, "paxon.runner.configuration.suggestions.hint"),
    (len, "builtins.len"),
    (_local(), None),
    (nn.initializers.normal(1.0), None),
  ],
)
def test_functions_have_a_public_name_or_none(value, name):
  assert stable_names.name_of(value) == name


def test_nameless_default_is_named_by_the_variable_of_its_user():
  module = sys.modules[nn.Dense.__module__]
  init = vars(module)["default_kernel_init"]
  assert stable_names.name_of(init) is None
  named = stable_names.name_of(init, user=module.__name__)
  assert named == "flax.linen.linear.default_kernel_init"


def test_objects_with_fields_are_no_functions():
  assert stable_names.is_function_or_class(len)
  assert stable_names.is_function_or_class(nn.Dense)
  assert stable_names.is_function_or_class(jax.numpy.add)
  assert not stable_names.is_function_or_class(nn.Dense(3))
