"""Tests for fractions of clipped and flushed values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import monitor, number_formats, quantized_array, recipe


def test_shares_are_counted():
  tensor = recipe.TensorRecipe(
    number_formats.FP8_E4M3, scaling=recipe.Delayed(history_length=1)
  )
  # A scale of one: from 2^-10 up to 448.
  x = jax.device_put(
    np.float32([0.0, 1.0, 500.0, -449.0, 448.0, 2.0**-11, jnp.inf, jnp.nan])
  )
  got = jax.jit(
    lambda x, history: monitor.measure(
      x, quantized_array.quantize(x, tensor, history=history)
    )
  )(x, jax.device_put(np.float32([448.0])))
  assert (got.clipped, got.flushed, got.not_finite) == (2 / 8, 1 / 8, 2 / 8)


@pytest.mark.parametrize("number_format", [*number_formats.FORMATS.values()])
def test_the_largest_value_is_not_clipped(number_format):
  tensor = recipe.TensorRecipe(
    number_format,
    recipe.Granularity.CHANNEL,
    scaling=recipe.Current(power_of_two=False),
  )
  x = jax.device_put(np.float32(np.random.default_rng(0).normal(size=(64, 4))))
  got = jax.jit(
    lambda x: monitor.measure(
      x, quantized_array.quantize(x, tensor, contracted=(1,))
    )
  )(x)
  assert got.clipped == 0


def test_tiles_use_their_own_scales():
  tensor = recipe.TensorRecipe(
    number_formats.INT4, recipe.Granularity.BLOCK, block=(2, 1)
  )
  x = jax.device_put(np.float32([[1.0, 0.01, 0.01, 0.01]]))
  got = jax.jit(
    lambda x: monitor.measure(
      x, quantized_array.quantize(x, tensor, contracted=(1,))
    )
  )(x)
  assert (got.clipped, got.flushed) == (0.0, 1 / 4)


def test_operands_are_quantized_as_in_the_matmul():
  delayed = recipe.TensorRecipe(
    number_formats.FP8_E4M3, scaling=recipe.Delayed(history_length=2)
  )
  channel = recipe.TensorRecipe(
    number_formats.INT8,
    granularity=recipe.Granularity.CHANNEL,
    rounding=recipe.Rounding.STOCHASTIC,
  )
  kernel = jax.device_put(np.float32([[1.0, 1e-4], [1e-4, 1e-4]]))
  got = jax.jit(
    lambda state: monitor.measure_operands(
      "BD,DF->BF",
      jax.device_put(np.float32([[1.0, 3.0]])),
      kernel,
      recipe=recipe.Recipe(delayed, channel, None),
      state=state,
    )
  )({"lhs_amax_history": jax.device_put(np.float32([1.0, 0.0]))})
  assert float(got["lhs"].clipped) == 1 / 2
  # One of the first column; the second has a scale of its own.
  assert float(got["rhs"].flushed) == 1 / 4


def test_operands_that_are_not_quantized_have_no_shares():
  int8 = recipe.TensorRecipe(number_formats.INT8)
  got = jax.jit(
    lambda lhs, rhs: monitor.measure_operands(
      "BD,DF->BF", lhs, rhs, recipe=recipe.Recipe(None, int8, None)
    )
  )(*np.ones((2, 2, 2), np.float32))
  assert list(got) == ["rhs"]
  assert np.asarray(got["rhs"].clipped) == pytest.approx(0.0)
