"""Tests of scales and histories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import number_formats, recipe, scaling

E4M3 = number_formats.FP8_E4M3


def _recipe(**kwargs) -> recipe.TensorRecipe:
  return recipe.TensorRecipe(E4M3, scaling=recipe.Current(**kwargs))


def test_the_largest_magnitude_becomes_the_largest_value():
  scale = scaling.make_scale(jnp.float32(7.0), _recipe(power_of_two=False))
  assert float(scale) == pytest.approx(7 / 448)


def test_a_margin_leaves_binary_digits_free():
  scale = scaling.make_scale(
    jnp.float32(7.0), _recipe(margin=3, power_of_two=False)
  )
  assert float(scale) == pytest.approx(8 * 7 / 448)


def test_scales_of_fp8_are_rounded_up_to_powers_of_two():
  amax = jax.device_put(np.float32([448.0, 448.1, 447.9, 1.75, 1e-6, 3e38]))
  scale_of = jax.jit(lambda amax: scaling.make_scale(amax, _recipe()))
  scale = np.asarray(scale_of(amax), np.float64)
  exponents = np.log2(scale)
  np.testing.assert_array_equal(exponents, np.round(exponents))
  ratio = scale * 448 / np.asarray(amax, np.float64)
  assert ((ratio >= 1) & (ratio < 2)).all()
  assert scale[:4].tolist() == [1.0, 2.0, 1.0, 2.0**-8]


def test_scales_of_integers_are_as_they_are():
  int8 = recipe.TensorRecipe(number_formats.INT8)
  assert float(scaling.make_scale(jnp.float32(1.0), int8)) == pytest.approx(
    1 / 127
  )


def test_zeros_have_the_scale_one_or_the_initial_one():
  assert float(scaling.make_scale(jnp.float32(0.0), _recipe())) == 1.0
  delayed = recipe.TensorRecipe(
    E4M3, scaling=recipe.Delayed(initial_scale=0.25)
  )
  assert float(scaling.make_scale(jnp.float32(0.0), delayed)) == 0.25


def test_the_inverse_of_a_scale_is_finite():
  scale_of = jax.jit(lambda amax: scaling.make_scale(amax, _recipe()))
  scale = scale_of(np.float32([1e-37, 3e38]))
  assert np.isfinite(1 / np.asarray(scale)).all()
  assert (np.asarray(scale) > 0).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_the_scale_of_non_finite_values_is_nan(bad):
  x = jax.device_put(np.float32([1.0, bad, -3.0]))
  assert np.isnan(scaling.make_scale(scaling.find_amax(x), _recipe()))


def test_largest_magnitudes_are_float32():
  x = jax.device_put(np.asarray([[1.0, -5.0], [2.0, 3.0]], jnp.bfloat16))
  assert scaling.find_amax(x).shape == ()
  assert scaling.find_amax(x).dtype == jnp.float32
  np.testing.assert_array_equal(scaling.find_amax(x, (1,)), [5.0, 3.0])
  assert scaling.find_amax(x, (1,), keepdims=True).shape == (2, 1)
  assert float(scaling.find_amax(jnp.zeros((0, 3)))) == 0.0


def test_a_history_has_the_newest_first():
  history = jax.device_put(np.float32([3.0, 2.0, 1.0]))
  np.testing.assert_array_equal(
    scaling.next_history(history, jnp.float32(4.0)), [4.0, 3.0, 2.0]
  )


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_history_omits_non_finite_values(bad):
  history = jax.device_put(np.float32([3.0, 2.0, 1.0]))
  np.testing.assert_array_equal(
    scaling.next_history(history, jnp.float32(bad)), [0.0, 3.0, 2.0]
  )
