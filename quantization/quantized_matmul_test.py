"""Tests for matmuls of quantized operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import (
  equations,
  number_formats,
  quantized_array,
  quantized_matmul,
  recipe,
)

CHANNEL = {"granularity": recipe.Granularity.CHANNEL}
ROWS = {"granularity": recipe.Granularity.BLOCK, "block": (4, 1)}
EQUATION = equations.parse("BD,DF->BF", 2, 2)


@functools.partial(jax.jit, static_argnames=("dtype",))
def _multiply(lhs, rhs, dtype="float32"):
  return quantized_matmul.multiply(
    EQUATION, lhs, rhs, layer_dtype=jnp.float32, out_dtype=dtype
  )


_quantize = jax.jit(
  quantized_array.quantize, static_argnames=("tensor_recipe", "contracted")
)
_dequantize = jax.jit(lambda quantized: quantized.dequantize())


def _quantized(x, number_format, contracted, **kwargs):
  return _quantize(
    jax.device_put(x),
    tensor_recipe=recipe.TensorRecipe(number_format, **kwargs),
    contracted=contracted,
  )


@pytest.fixture(scope="module")
def operands() -> tuple[jax.Array, jax.Array]:
  rng = np.random.default_rng(0)
  shapes = ((4, 8), (8, 6))
  lhs, rhs = (rng.standard_normal(shape) for shape in shapes)
  return jax.device_put(np.float32(lhs)), jax.device_put(np.float32(rhs))


@pytest.mark.parametrize("kwargs", [{}, CHANNEL, ROWS], ids=repr)
@pytest.mark.parametrize(
  "number_format",
  [number_formats.FP8_E4M3, number_formats.INT8, number_formats.INT4],
  ids=lambda f: f.name,
)
def test_stored_weights_are_multiplied_with_activations(
  operands, number_format, kwargs
):
  x, weights = operands
  stored = _quantized(weights, number_format, (0,), **kwargs)
  expected = np.asarray(x, np.float64) @ np.asarray(_dequantize(stored))
  np.testing.assert_allclose(_multiply(x, stored), expected, atol=1e-5)
  if number_format.bits == 4:
    packed = jax.jit(lambda stored: stored.pack(0))(stored)
    np.testing.assert_array_equal(_multiply(x, packed), _multiply(x, stored))


def test_integers_are_multiplied_as_integers_unless_sums_may_overflow():
  """127 * 127 * 133,144 is the last that int32 holds."""

  def program(terms: int) -> str:
    def quantized(*shape: int) -> quantized_array.QuantizedArray:
      return quantized_array.QuantizedArray(
        jax.ShapeDtypeStruct(shape, jnp.int8),
        jax.ShapeDtypeStruct((), jnp.float32),
        format=number_formats.INT8,
      )

    return _multiply.lower(quantized(2, terms), quantized(terms, 2)).as_text()

  assert "tensor<133144x2xi8>) -> tensor<2x2xi32>" in program(133_144)
  assert "tensor<133145x2xf32>) -> tensor<2x2xf32>" in program(133_145)


def test_large_fp8_matmuls_do_not_overflow_in_bfloat16():
  largest = np.full((2, 4096), 448.0, np.float32)
  lhs = _quantized(largest, number_formats.FP8_E4M3, (1,))
  rhs = _quantized(largest.T, number_formats.FP8_E4M3, (0,))
  out = _multiply(lhs, rhs, "bfloat16")
  assert out.dtype == jnp.bfloat16
  assert float(np.asarray(out)[0, 0]) == 448.0 * 448.0 * 4096


def test_a_float16_result_is_scaled_before_it_is_rounded():
  """Sums before scales would be infinite in float16."""
  ones = np.ones((2, 64), np.float32)
  lhs = _quantized(ones, number_formats.FP8_E4M3, (1,))
  rhs = _quantized(ones.T, number_formats.FP8_E4M3, (0,))
  out = _multiply(lhs, rhs, "float16")
  assert float(np.asarray(out)[0, 0]) == 64.0
