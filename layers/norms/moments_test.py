"""Tests for masked moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import moments

X = testing.normal(3, 4, 5)
MASK = np.asarray([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]], bool)


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (1,)])
def test_matches_numpys_moments_of_what_is_kept(axes):
  actual = moments.moments(X, jax.device_put(MASK)[:, :, None], axes=axes)
  kept = np.broadcast_to(MASK[:, :, None], X.shape)
  wide = np.ma.masked_array(np.asarray(X, np.float64), ~kept)
  mean, variance = (
    np.ma.filled(f(wide, axis=axes, keepdims=True), 0.0)
    for f in (np.ma.mean, np.ma.var)
  )
  np.testing.assert_allclose(actual.mean, mean, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(actual.variance, variance, rtol=1e-5, atol=1e-6)


def test_without_mask_everything_counts():
  actual = moments.moments(X, axes=(0, 1, 2))
  np.testing.assert_allclose(actual.mean, np.mean(X), rtol=1e-5)
  np.testing.assert_allclose(actual.variance, np.var(X), rtol=1e-5)


def test_cumulative_moments_match_a_loop():
  actual = moments.moments(
    X, jax.device_put(MASK)[:, :, None], axes=(2,), cumulative_axis=1
  )
  wide = np.asarray(X, np.float64)
  for b in range(3):
    values, squares = [], []
    for t in range(4):
      if MASK[b, t]:
        values += list(wide[b, t])
        squares += list((wide[b, t] - np.mean(values)) ** 2)
      mean = np.mean(values) if values else 0.0
      variance = np.mean(squares) if squares else 0.0
      np.testing.assert_allclose(actual.mean[b, t, 0], mean, atol=1e-6)
      np.testing.assert_allclose(actual.variance[b, t, 0], variance, atol=1e-6)


def test_what_is_left_out_may_be_anything():
  mask = jax.device_put(MASK)[:, :, None]
  bad = jnp.where(mask, X, jnp.nan)
  actual = moments.moments(bad, mask, axes=(0, 1))
  expected = moments.moments(X, mask, axes=(0, 1))
  np.testing.assert_array_equal(actual.mean, expected.mean)
  np.testing.assert_array_equal(actual.variance, expected.variance)


def test_a_large_mean_does_not_cancel():
  x = X + 1e4
  expected = np.var(np.asarray(x, np.float64))
  actual = moments.moments(x, axes=(0, 1, 2)).variance
  np.testing.assert_allclose(np.ravel(actual), expected, rtol=1e-3)


def test_gradients_match_finite_differences():
  mask = jax.device_put(MASK)[:, :, None]

  def loss(x):
    mean, variance = moments.moments(x, mask, axes=(2,), cumulative_axis=1)
    return jnp.sum(jnp.sin(mean) + jnp.cos(variance))

  testing.assert_gradients_match(loss, X)


def test_bfloat16_sums_are_in_float32():
  x = jnp.full((1, 4096), 3.0, jnp.bfloat16)
  result = moments.moments(x, axes=(1,))
  assert result.mean.dtype == jnp.float32
  np.testing.assert_array_equal(np.ravel(result), [3.0, 0.0])


def test_rejects_wrong_masks_and_axes():
  with pytest.raises(ValueError, match=r"must have rank 3 for.*shape \(3, 4"):
    moments.moments(X, jax.device_put(MASK), axes=(1,))
  with pytest.raises(ValueError, match=r"cumulative_axis \(1\) must not be"):
    moments.moments(X, axes=(1, 2), cumulative_axis=1)
