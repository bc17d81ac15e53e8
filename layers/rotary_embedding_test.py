"""Tests for the rotary embedding."""

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import rotary_embedding, testing

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 4, 3, 6
POSITIONS = jnp.asarray([[0, 1, 2, 3], [0, 1, 0, 500]], jnp.int32)


def _x(dtype=jnp.float32):
  return testing.normal(BATCH, LENGTH, HEADS, HEAD_DIM, dtype=dtype)


def _oracle(x, positions, wavelength):
  """Each pair as a complex number, turned by its angle."""
  x = np.asarray(x, np.float64)
  half = x.shape[-1] // 2
  y = np.zeros_like(x)
  for b, t, n, i in np.ndindex((*x.shape[:3], half)):
    angle = int(positions[b, t]) * wavelength ** (-2 * i / x.shape[-1])
    turned = complex(x[b, t, n, i], x[b, t, n, i + half]) * np.exp(1j * angle)
    y[b, t, n, i], y[b, t, n, i + half] = turned.real, turned.imag
  return y


@pytest.mark.parametrize("wavelength", [10_000.0, 100.0])
def test_matches_complex_rotation(wavelength):
  rotary = rotary_embedding.Rotary(max_wavelength=wavelength)
  np.testing.assert_allclose(
    rotary(_x(), POSITIONS),
    _oracle(_x(), POSITIONS, wavelength),
    rtol=1e-5,
    # float32 holds an angle of 500 to 3e-5.
    atol=1e-4,
  )


def test_products_depend_on_distance_only():
  rotary = rotary_embedding.Rotary()
  q, k = (testing.normal(1, 1, 1, HEAD_DIM, seed=s) for s in (1, 2))

  def product(i, j):
    def at(x, p):
      return rotary(x, jnp.asarray([[p]], jnp.int32))

    return float(jnp.sum(at(q, i) * at(k, j)))

  np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
  assert abs(product(7, 3) - product(7, 2)) > 1e-3


def test_position_zero_changes_nothing():
  zero = jnp.zeros((BATCH, LENGTH), jnp.int32)
  np.testing.assert_array_equal(rotary_embedding.Rotary()(_x(), zero), _x())


def test_gradients_match_finite_differences():
  rotary = rotary_embedding.Rotary()

  def loss(x):
    return jnp.sum(jnp.sin(rotary(x, POSITIONS)))

  testing.assert_gradients_match(loss, _x())


def test_bfloat16_angles_are_in_float32():
  rotary = rotary_embedding.Rotary()
  # 1001 is no bfloat16 number: a narrow angle would be off by one radian.
  positions = jnp.full((BATCH, LENGTH), 1001, jnp.int32)
  y = rotary(_x(jnp.bfloat16), positions)
  assert y.dtype == jnp.bfloat16
  expected = _oracle(_x(jnp.bfloat16), positions, 10_000.0)
  np.testing.assert_allclose(
    np.asarray(y, np.float32), expected, rtol=1e-2, atol=1e-2
  )


def test_equal_settings_are_equal():
  assert rotary_embedding.Rotary() == rotary_embedding.Rotary()


def test_rejects_odd_head_dim():
  with pytest.raises(ValueError, match=r"even head_dim, got 5"):
    rotary_embedding.Rotary()(testing.normal(1, 4, 1, 5), POSITIONS[:1])


def test_rejects_short_wavelength():
  with pytest.raises(ValueError, match=r"max_wavelength must exceed 1, got 1"):
    rotary_embedding.Rotary(max_wavelength=1.0)
