"""Tests for the maximum, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import maximum, testing


@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, -1), (2, 0), (0, 1, 2)])
def test_matches_numpy(axes):
  x = testing.normal(3, 4, 5)
  expected = np.max(np.asarray(x), axis=axes, keepdims=True)
  found = maximum.take_max(x, axes=axes, keepdims=True)
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(
    maximum.take_max(x, axes=axes), np.squeeze(expected, axes)
  )
  gradient = jax.grad(lambda x: jnp.sum(maximum.take_max(x, axes=axes)))(x)
  np.testing.assert_array_equal(gradient, np.asarray(x) == expected)
  testing.assert_gradients_match(
    lambda x: jnp.sum(jnp.sin(maximum.take_max(x, axes=axes))), x
  )


def test_the_first_of_equal_values_has_the_gradient():
  x = jnp.asarray([[1.0, 3.0], [3.0, -jnp.inf]])
  gradient = jax.grad(lambda x: maximum.take_max(x, axes=(0, 1)))(x)
  np.testing.assert_array_equal(gradient, [[0, 1], [0, 0]])
  hidden = jnp.full((2, 3), -jnp.inf)
  gradient = jax.grad(lambda x: jnp.sum(maximum.take_max(x, axes=(1,))))(hidden)
  np.testing.assert_array_equal(gradient, [[1, 0, 0]] * 2)


def test_a_nan_is_the_maximum():
  assert np.isnan(maximum.take_max(jnp.asarray([1.0, jnp.nan]), axes=(0,)))
