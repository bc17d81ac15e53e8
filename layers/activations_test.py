"""Tests for activations, against their definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import activations, testing

X = np.asarray([-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 7.0])


def _sigmoid(v):
  return 1 / (1 + math.exp(-v))


def _tanh_gelu(v):
  return v / 2 * (1 + math.tanh((2 / math.pi) ** 0.5 * (v + 0.044715 * v**3)))


DEFINITIONS = {
  "cubed_relu": lambda v: max(v, 0) ** 3,
  "elu": lambda v: v if v > 0 else math.exp(v) - 1,
  "exp": math.exp,
  "gelu_exact": lambda v: v / 2 * (1 + math.erf(v / 2**0.5)),
  "gelu_sigmoid": lambda v: v * _sigmoid(1.702 * v),
  "gelu_tanh": _tanh_gelu,
  "identity": lambda v: v,
  "leaky_relu": lambda v: v if v > 0 else 0.01 * v,
  "relu": lambda v: max(v, 0),
  "relu6": lambda v: min(max(v, 0), 6),
  "sigmoid": _sigmoid,
  "silu": lambda v: v * _sigmoid(v),
  "sine_relu": lambda v: math.sin(max(v, 0)),
  "softplus": lambda v: math.log(1 + math.exp(v)),
  "squared_relu": lambda v: max(v, 0) ** 2,
  "swish": lambda v: v * _sigmoid(v),
  "tanh": math.tanh,
}


def test_every_name_has_a_definition():
  assert set(activations.NAMED) == set(DEFINITIONS)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_matches_its_definition(name):
  y = jax.jit(activations.find(name))(np.float32(X))
  expected = [DEFINITIONS[name](float(v)) for v in X]
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["SquaredReLU", "squared_relu", "squaredrelu"])
def test_case_and_underscores_do_not_matter(text):
  assert activations.find(text) is activations.squared_relu


def test_a_name_gives_one_object():
  assert activations.find("gelu_exact") is activations.find("GeluExact")


def test_an_ambiguous_name_is_an_error():
  with pytest.raises(ValueError, match=r"'gelu' is ambiguous: 'gelu_exact'"):
    activations.find("gelu")


def test_a_wrong_name_gives_the_closest_ones():
  with pytest.raises(
    ValueError, match=r"Unknown activation 'squard_relu'; use sq"
  ):
    activations.find("squard_relu")
  with pytest.raises(ValueError, match=r"Unknown activation 'xyz'; use cubed_"):
    activations.find("xyz")


CAPPED = testing.array([-1e30, -40.0, -0.5, 0.0, 1e-3, 29.0, 1e30])


def test_soft_cap_matches_the_definition():
  expected = 30 * np.tanh(np.asarray(CAPPED, np.float64) / 30)
  np.testing.assert_allclose(
    activations.soft_cap(CAPPED, 30.0), expected, rtol=1e-6
  )


def test_soft_cap_keeps_the_dtype():
  y = activations.soft_cap(CAPPED.astype(jnp.bfloat16), 30.0)
  assert y.dtype == jnp.bfloat16


def test_gradient_of_soft_cap_matches_finite_differences():
  testing.assert_gradients_match(
    lambda x: jnp.sum(activations.soft_cap(x, 3.0)), testing.normal(5)
  )
