"""Matmuls of quantized operands, without derivatives.

Used by `quantized_einsum` and by models with quantized stored weights.
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
  """Returns the matmul of two operands, quantized or not.

  Two fp8 or two integer operands are multiplied in low precision, with sums in
  float32 or int32, unless

  * scales vary along the contracted dimensions,
  * an operand has zero points, or
  * int32 sums could overflow (from 133,144 terms of int8).

  Otherwise quantized values are first cast to the dtype of the other operand,
  or to `layer_dtype` if both are quantized, and sums are float32.

  Scales multiply the result, except those that vary along the contracted
  dimensions or have zero points, which multiply the operand.

  Args:
    equation: Equation of the matmul.
    lhs: Left operand.
    rhs: Right operand.
    layer_dtype: Dtype of the matmul of two quantized operands that are not
      multiplied in low precision.
    out_dtype: Dtype of the result.
  """
  pairs = ((lhs, equation.lhs), (rhs, equation.rhs))
  dtypes = _dtypes(equation, lhs, rhs, layer_dtype)
  operands, scale = [], None
  for (operand, letters), dtype in zip(pairs, dtypes, strict=True):
    if not isinstance(operand, quantized_array.QuantizedArray):
      operands.append(operand.astype(dtype))
    elif _is_outside(equation, operand, letters):
      operands.append(operand.unpack().values.astype(dtype))
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
  """Returns the dtype of the matmul result before scaling.

  Scaling by powers of two is exact, so the result may be rounded to bfloat16,
  which has the exponent range of float32, before it. A GPU then writes half the
  bytes, and cuBLASLt applies scalar scales.
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
  """Returns the dtypes of both operands in the matmul."""
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
  """Returns whether two quantized operands are multiplied in low precision."""
  if not (
    lhs.format.is_integer == rhs.format.is_integer
    and _is_outside(equation, lhs, equation.lhs)
    and _is_outside(equation, rhs, equation.rhs)
  ):
    return False
  if not lhs.format.is_integer:
    return True
  # int32 sums wrap around silently.
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
  """Returns whether the scales of an operand can multiply the result."""
  if operand.zero is not None:
    return False
  scale = operand.scale
  contracted = equation.contracted_axes(letters)
  return all(
    size == 1 or (size == operand.shape[axis] and axis not in contracted)
    for axis, size in enumerate(scale.shape)
  )
