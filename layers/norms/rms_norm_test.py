"""Tests for the root-mean-square norm."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import layer_norm, rms_norm

BATCH, LENGTH, EMBED = 2, 3, 8


def _x(dtype=jnp.float32):
  return testing.normal(BATCH, LENGTH, EMBED, dtype=dtype)


def _oracle(x, scale, epsilon):
  x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
  y = np.zeros_like(x)
  for b, t in np.ndindex(x.shape[:2]):
    mean_square = sum(v * v for v in x[b, t]) / x.shape[-1]
    y[b, t] = x[b, t] / np.sqrt(mean_square + epsilon) * scale
  return y


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_matches_numpy(epsilon):
  layer = rms_norm.RmsNorm(epsilon=epsilon)
  values = testing.random_values(layer, _x())
  expected = _oracle(_x(), values["params"]["scale"], epsilon)
  np.testing.assert_allclose(
    testing.apply(layer, values, _x()), expected, rtol=1e-5, atol=1e-6
  )


def test_gradients_match_finite_differences():
  layer = rms_norm.RmsNorm()

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(*at)))

  at = (testing.random_values(layer, _x()), _x())
  testing.assert_gradients_match(loss, at)


def test_result_does_not_depend_on_the_scale_of_the_input():
  layer = rms_norm.RmsNorm(epsilon=1e-12)
  values = testing.random_values(layer, _x())
  np.testing.assert_allclose(
    testing.apply(layer, values, 1000 * _x()),
    testing.apply(layer, values, _x()),
    rtol=1e-5,
  )


def test_zeros_stay_zero():
  layer = rms_norm.RmsNorm()
  values = testing.random_values(layer, _x())
  assert not np.any(testing.apply(layer, values, jnp.zeros_like(_x())))


def test_bfloat16_statistics_are_in_float32():
  layer = rms_norm.RmsNorm(dtype=jnp.bfloat16)
  # A sum of 4096 equal squares stalls at 256 of them in bfloat16.
  x = jnp.full((1, 1, 4096), 3.0, jnp.bfloat16)
  values = testing.initial_values(layer, x)
  y = testing.apply(layer, values, x)
  assert y.dtype == jnp.bfloat16
  assert values["params"]["scale"].dtype == jnp.float32
  np.testing.assert_array_equal(np.asarray(y, np.float32), 1.0)


def test_logical_axes():
  assert testing.axes(rms_norm.RmsNorm(), _x()) == {"params/scale": ("embed",)}


def test_scale_is_not_regularized():
  specs = testing.specs(rms_norm.RmsNorm(), _x())
  assert specs["params"]["scale"].regularized is False


def test_rejects_nonpositive_epsilon():
  with pytest.raises(ValueError, match=r"RmsNorm.epsilon must be in \(0, 1\)"):
    rms_norm.RmsNorm(epsilon=0.0)


def test_an_offset_changes_what_is_stored_and_not_the_first_result():
  """Gemma's `1 + weight`, with a first weight of zero."""
  layer = rms_norm.RmsNorm(scale_offset=1.0)
  first = testing.initial_values(layer, _x())
  assert not np.any(first["params"]["scale"])
  plain = testing.initial_values(rms_norm.RmsNorm(), _x())
  np.testing.assert_array_equal(
    testing.apply(layer, first, _x()),
    testing.apply(rms_norm.RmsNorm(), plain, _x()),
  )
  values = testing.random_values(layer, _x())
  factor = 1 + np.asarray(values["params"]["scale"], np.float64)
  np.testing.assert_allclose(
    testing.apply(layer, values, _x()),
    _oracle(_x(), factor, 1e-6),
    rtol=1e-5,
    atol=1e-6,
  )


def test_a_small_stored_scale_survives_bfloat16():
  """One plus a thousandth is one in bfloat16."""
  layer = rms_norm.RmsNorm(scale_offset=1.0, param_dtype=jnp.bfloat16)
  x = jnp.ones((1, 1, 4))
  values = {"params": {"scale": jnp.full((4,), 1e-3, jnp.bfloat16)}}
  y = testing.apply(layer.clone(dtype=jnp.float32), values, x)
  np.testing.assert_allclose(y, 1.001, rtol=1e-5)


def test_without_scale_there_is_no_parameter():
  layer = rms_norm.RmsNorm(use_scale=False)
  assert testing.axes(layer, _x()) == {}
  np.testing.assert_allclose(
    testing.apply(layer, {}, _x()),
    _oracle(_x(), 1.0, 1e-6),
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4, 5)])
def test_any_rank_is_a_batch_of_vectors(shape):
  layer = rms_norm.RmsNorm(axis="head_dim")
  x = testing.normal(*shape)
  values = testing.random_values(layer, x)
  rows = testing.apply(layer, values, x.reshape(1, -1, 5))
  # Programs of two shapes may round a sum in two orders.
  np.testing.assert_allclose(
    testing.apply(layer, values, x), rows.reshape(shape), rtol=1e-6
  )
  assert testing.axes(layer, x) == {"params/scale": ("head_dim",)}


NORMS = pytest.mark.parametrize(
  "layer", [rms_norm.RmsNorm(), layer_norm.LayerNorm()]
)


@NORMS
@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (1, 6, 8), (1, 1, 6, 8)])
def test_axes_of_size_one_change_nothing(layer, shape):
  x = testing.normal(*shape)
  rows = x.reshape(-1, 8)
  values = testing.random_values(layer, rows)
  y = testing.apply(layer, values, x)
  assert y.shape == shape
  expected = testing.apply(layer, values, rows).reshape(shape)
  np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


@NORMS
def test_gradients_of_one_sequence_sum_over_matrices(layer):
  # Otherwise XLA:CPU of jax 0.10 takes ten times as long for them.
  x = testing.normal(1, 16, EMBED)
  values = testing.random_values(layer, x)

  def loss(values, x):
    return jnp.sum(jnp.sin(layer.apply(values, x)))

  compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(values, x).compile()
  text = compiled.as_text()
  products = re.findall(r"%(\S+) = f32\[1,16,[^ ]* multiply\(", text)
  summed = re.findall(r" reduce\(%([^,]+),", text)
  assert summed
  assert not set(products).intersection(summed)
