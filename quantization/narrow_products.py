"""Matmuls of quantized operands, without derivatives.

Used by the training product `quantized_einsum`, and by models whose weights
are stored quantized.
"""

from collections.abc import Sequence
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import equations, quantized_array

Operand = jax.Array | quantized_array.QuantizedArray


def multiply(
  equation: equations.Equation,
  lhs: Operand,
  rhs: Operand,
  *,
  layer_dtype: DTypeLike,
  out_dtype: DTypeLike,
) -> jax.Array:
  """Returns the product of two operands, quantized or not.

  Two operands of fp8, or two of integers, are multiplied as they are, and sums
  are float32 or int32. Otherwise quantized values first become numbers of the
  dtype of the other operand, which holds them exactly, or of the layer, if both
  are quantized; sums are float32. That is so where

  * one operand is not quantized, or one is fp8 and one an integer,
  * scales change along the contracted dimensions,
  * so many integers are added (133,144 products of int8) that int32 could
    overflow.

  Scales multiply the result; only those that change along the contracted
  dimensions multiply the operand instead.

  Args:
    equation: The product.
    lhs: Left operand.
    rhs: Right operand.
    layer_dtype: In which two quantized operands are multiplied that are not
      multiplied as they are.
    out_dtype: Dtype of the result.
  """
  pairs = ((lhs, equation.lhs), (rhs, equation.rhs))
  dtypes = _dtypes(equation, lhs, rhs, layer_dtype)
  operands, scale = [], None
  for (operand, letters), dtype in zip(pairs, dtypes, strict=True):
    if not isinstance(operand, quantized_array.QuantizedArray):
      operands.append(operand.astype(dtype))
    elif _is_outside(equation, operand, letters):
      operands.append(operand.unpacked().values.astype(dtype))
      outer = equations.like_output(operand.scale, letters, equation.out)
      scale = outer if scale is None else scale * outer
    else:
      operands.append(operand.dequantize(dtype))
  sums = _sums_dtype(operands, (lhs, rhs), out_dtype)
  out = equations.dot(equation, *operands, preferred_element_type=sums)
  if scale is None:
    return out.astype(out_dtype)
  if sums == jnp.int32:
    out = out.astype(jnp.float32)
  return (out * scale.astype(out.dtype)).astype(out_dtype)


def _sums_dtype(
  multiplied: Sequence[jax.Array],
  operands: Sequence[Operand],
  out_dtype: DTypeLike,
) -> jnp.dtype:
  """Returns the dtype in which a product gives its result, before scales.

  Scales that are powers of two do not round: sums may be rounded to bfloat16,
  which has the exponents of float32, before them. A GPU then writes half of the
  bytes, and cuBLASLt applies a scalar scale itself.
  """
  if all(jnp.issubdtype(x.dtype, jnp.integer) for x in multiplied):
    return jnp.dtype(jnp.int32)
  exact = all(
    x.power_of_two
    for x in operands
    if isinstance(x, quantized_array.QuantizedArray)
  )
  if exact and jnp.dtype(out_dtype) == jnp.bfloat16:
    return jnp.dtype(jnp.bfloat16)
  return jnp.dtype(jnp.float32)


def _dtypes(
  equation: equations.Equation,
  lhs: Operand,
  rhs: Operand,
  layer_dtype: DTypeLike,
) -> tuple[jnp.dtype, jnp.dtype]:
  """Returns the dtypes that the operands are multiplied in."""
  quantized = quantized_array.QuantizedArray
  layer_dtype = jnp.dtype(layer_dtype)
  if isinstance(lhs, quantized) and isinstance(rhs, quantized):
    if _have_product(equation, lhs, rhs):
      return lhs.format.dtype, rhs.format.dtype
    return layer_dtype, layer_dtype
  plain = [x.dtype for x in (lhs, rhs) if not isinstance(x, quantized)]
  return plain[0], plain[-1]


def _have_product(
  equation: equations.Equation,
  lhs: quantized_array.QuantizedArray,
  rhs: quantized_array.QuantizedArray,
) -> bool:
  """Whether two quantized operands are multiplied as they are."""
  if not (
    lhs.format.is_integer == rhs.format.is_integer
    and _is_outside(equation, lhs, equation.lhs)
    and _is_outside(equation, rhs, equation.rhs)
  ):
    return False
  if not lhs.format.is_integer:
    return True
  # A sum that wraps around would be an ordinary number.
  terms = math.prod(
    lhs.shape[i] for i in equation.contracted_axes(equation.lhs)
  )
  largest = terms * lhs.format.largest * rhs.format.largest
  return largest <= jnp.iinfo(jnp.int32).max


def _is_outside(
  equation: equations.Equation,
  operand: quantized_array.QuantizedArray,
  letters: str,
) -> bool:
  """Whether the scales of an operand can multiply the result instead."""
  scale = operand.scale
  contracted = equation.contracted_axes(letters)
  return all(
    size == 1 or (size == operand.shape[axis] and axis not in contracted)
    for axis, size in enumerate(scale.shape)
  )
