"""Tests for the soft cap."""

import jax.numpy as jnp
import numpy as np

from paxon.layers import soft_cap, testing

X = testing.array([-1e30, -40.0, -0.5, 0.0, 1e-3, 29.0, 1e30])


def test_matches_the_definition():
  expected = 30 * np.tanh(np.asarray(X, np.float64) / 30)
  np.testing.assert_allclose(soft_cap.soft_cap(X, 30.0), expected, rtol=1e-6)


def test_keeps_the_dtype():
  y = soft_cap.soft_cap(X.astype(jnp.bfloat16), 30.0)
  assert y.dtype == jnp.bfloat16


def test_gradient_matches_finite_differences():
  testing.assert_gradients_match(
    lambda x: jnp.sum(soft_cap.soft_cap(x, 3.0)), testing.normal(5)
  )
