"""Tests for layer norm."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import layer_norm

WITH_AND_WITHOUT = pytest.mark.parametrize(
  "use_bias", [True, False], ids=["bias", "no bias"]
)


def _oracle(params, x, epsilon=1e-6):
  x = np.asarray(x, np.float64)
  y = np.zeros_like(x)
  for index in np.ndindex(x.shape[:-1]):
    row = x[index]
    y[index] = (row - row.mean()) / np.sqrt(row.var() + epsilon)
  bias = np.asarray(params.get("bias", 0.0), np.float64)
  return y * np.asarray(params["scale"], np.float64) + bias


@WITH_AND_WITHOUT
def test_matches_numpy(use_bias):
  layer = layer_norm.LayerNorm(epsilon=1e-3, use_bias=use_bias)
  x = 3 * testing.normal(2, 3, 8) + 1
  values = testing.random_values(layer, x)
  np.testing.assert_allclose(
    testing.apply(layer, values, x),
    _oracle(values["params"], x, 1e-3),
    rtol=1e-5,
    atol=1e-6,
  )


def test_a_large_mean_does_not_cancel():
  layer = layer_norm.LayerNorm()
  x = testing.normal(2, 3, 8) + 1000
  values = testing.random_values(layer, x)
  np.testing.assert_allclose(
    testing.apply(layer, values, x),
    _oracle(values["params"], x),
    rtol=1e-3,
    atol=1e-3,
  )


@WITH_AND_WITHOUT
def test_gradients_match_finite_differences(use_bias):
  layer, x = layer_norm.LayerNorm(use_bias=use_bias), testing.normal(2, 3, 4)

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(at[0], at[1])))

  testing.assert_gradients_match(loss, (testing.random_values(layer, x), x))


def test_starts_with_mean_zero_and_variance_one():
  layer, x = layer_norm.LayerNorm(), 5 * testing.normal(2, 3, 64) - 2
  y = testing.apply(layer, testing.initial_values(layer, x), x)
  np.testing.assert_allclose(np.mean(y, axis=-1), 0, atol=1e-5)
  np.testing.assert_allclose(np.var(y, axis=-1), 1, rtol=1e-5)


def test_bfloat16_statistics_are_in_float32():
  layer = layer_norm.LayerNorm(dtype=jnp.bfloat16)
  x = testing.normal(2, 3, 512, dtype=jnp.bfloat16) + jnp.bfloat16(4)
  values = testing.random_values(layer, x)
  y = testing.apply(layer, values, x)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(y, np.float32),
    _oracle(values["params"], x),
    rtol=1e-2,
    atol=1e-2,
  )


def test_logical_axes():
  assert testing.axes(layer_norm.LayerNorm(), testing.normal(1, 2, 4)) == {
    "params/scale": ("embed",),
    "params/bias": ("embed",),
  }


@pytest.mark.parametrize("epsilon", [0.0, 1.0, float("nan")])
def test_rejects_an_epsilon_outside_of_its_range(epsilon):
  with pytest.raises(ValueError, match=r"LayerNorm.epsilon must be in"):
    layer_norm.LayerNorm(epsilon=epsilon)


def test_an_offset_and_no_scale():
  """Pax stores the factor less one; GPT-like ablations have none."""
  x = testing.normal(2, 3, 8) + 1
  plain = layer_norm.LayerNorm()
  values = testing.random_values(plain, x)
  expected = testing.apply(plain, values, x)
  shifted = {**values["params"], "scale": values["params"]["scale"] - 1.0}
  layer = layer_norm.LayerNorm(scale_offset=1.0)
  actual = testing.apply(layer, {"params": shifted}, x)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
  first = testing.initial_values(layer, x)["params"]
  assert not np.any(first["scale"])
  bare = layer_norm.LayerNorm(use_scale=False, use_bias=False)
  assert testing.axes(bare, x) == {}
  wide = np.asarray(x, np.float64)
  centred = wide - wide.mean(-1, keepdims=True)
  deviation = np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6)
  np.testing.assert_allclose(
    testing.apply(bare, {}, x), centred / deviation, rtol=1e-5, atol=1e-6
  )
